"""Sides and units of `jobs.bench specbench`, for tests of what is made of them."""

from __future__ import annotations

import argparse
from typing import Any

from jobs.sides import Side, add_decoder_arguments, make_sides


def sides_of(*arguments: str) -> list[Side]:
    parser = argparse.ArgumentParser()
    add_decoder_arguments(parser, ["ar"])
    parser.set_defaults(slots=[4], prefix_reuse=[True])
    return make_sides(parser.parse_args(arguments))


def turn(lengths: list[int], seconds: float, rows: int = 1, tokens: list[int] | None = None) -> dict[str, Any]:
    """A turn of these decode calls: 4 drafts each, the first of them plain."""
    return {
        "tokens": list(range(1 + sum(lengths))) if tokens is None else tokens,
        "finish_reason": "length",
        "accept_lengths": lengths,
        "decode_calls": len(lengths),
        "plain_steps": 1,
        "rows": rows * len(lengths),
        "drafted": 4 * len(lengths),
        "accepted": sum(lengths) - len(lengths),
        "prefill_tokens": 9,
        "cached_tokens": 1,
        "engine_s": seconds,
    }


def record(name: str, category: str, *turns: dict[str, Any]) -> dict[str, Any]:
    return {"id": name, "category": category, "turns": list(turns)}


def unit(*records: dict[str, Any]) -> dict[str, Any]:
    return {"questions": list(records)}
