"""The sides that a benchmark sets against each other, and how the command line says them.

A side is one setting of the decoder and a number of slots; plain decoding is one for each number of slots.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import yaml

from pipeline.config import parse_decoder
from pipeline.decoder_config import AUTO, SETTINGS_OF, DecoderConfig
from pipeline.errors import ConfigError

METHODS = get_args(DecoderConfig.model_fields["method"].annotation)

# Settings that have a flag of their own.
FLAG_OF = {"method": "--methods", "block_complexity": "--bc", "branches": "tree=7x2 (the widths of a static tree)"}


@dataclass(frozen=True)
class Side:
    """What is timed. varied: the settings that --vary gave this side, as they were written."""

    config: DecoderConfig
    slots: int
    prefix_reuse: bool = True
    varied: Mapping[str, str] = field(default_factory=dict)

    @property
    def bc(self) -> int | str | None:
        """Block complexity; plain decoding has none."""
        return None if self.config.method == "ar" else self.config.block_complexity

    @property
    def label(self) -> str:
        rows = [] if self.bc is None else [f"bc {self.bc}"]
        settings = [f"{key} {value}" for key, value in self.varied.items()]
        reuse = [] if self.prefix_reuse else ["no prefix reuse"]
        return ", ".join([" ".join([self.config.method, *rows]), *settings, f"{self.slots} slots", *reuse])


def make_sides(options: argparse.Namespace) -> list[Side]:
    """--slots x --methods x --bc x every --vary; a method that these do not concern once for each of --slots.

    Raises ConfigError naming the setting that is wrong.
    """
    keys = [key for key, _ in (*options.decoder, *options.vary)]
    twice = [key for key in keys if keys.count(key) > 1]
    if twice:
        raise ConfigError(f"decoder.{twice[0]}: given twice; give its values in one --decoder or --vary")
    drafting = [method for method in options.methods if method != "ar"]
    for key in keys if drafting else []:
        if all(_belongs_elsewhere(key, method) for method in drafting):
            raise ConfigError(f"decoder.{key}: none of the methods {', '.join(drafting)} has this setting")
    variants = {method: _variants(options, method) for method in options.methods}
    return [
        Side(config, slots, reuse, varied)
        for slots in options.slots
        for reuse in options.prefix_reuse
        for method in options.methods
        for config, varied in variants[method]
    ]


def _belongs_elsewhere(key: str, method: str) -> bool:
    """Whether it is a setting of other methods alone; what is nobody's setting is refused with the side's others."""
    return key not in SETTINGS_OF[method] and any(key in names for names in SETTINGS_OF.values())


def _variants(options: argparse.Namespace, method: str) -> list[tuple[DecoderConfig, dict[str, str]]]:
    """The configurations of one method, with what --vary gave each: of --bc and the settings, those that it has."""
    fixed = [(key, text) for key, text in options.decoder if not _belongs_elsewhere(key, method)]
    varied = [(key, texts) for key, texts in options.vary if not _belongs_elsewhere(key, method)]
    sized = method in ("ar", "pld") or "lookahead" in dict([*fixed, *varied])
    ways = list(itertools.product(*([(key, value) for value in _values(texts)] for key, texts in varied)))
    return [
        (_config(method, [*fixed, *way], bc), dict(way)) for bc in ([None] if sized else options.bc) for way in ways
    ]


def _values(texts: str) -> list[str]:
    """The values of --vary: split at commas, but for those in brackets."""
    return re.split(r",(?![^\[]*\])", texts)


def _config(method: str, texts: Iterable[tuple[str, str]], bc: int | str | None) -> DecoderConfig:
    settings: dict[str, Any] = {"method": method, "block_complexity": bc}
    for key, text in texts:
        settings |= _setting(key, text)
    if "branches" in settings:
        settings.setdefault("masks", len(settings["branches"]))
    return parse_decoder(settings)


def _setting(key: str, text: str) -> dict[str, Any]:
    """One setting from its text, which is YAML; tree=7x2 is the static tree of these widths."""
    if key == "tree" and re.fullmatch(r"\d+(x\d+)*", text):
        return {"tree": "static", "branches": [int(width) for width in text.split("x")]}
    try:
        return {key: yaml.safe_load(text)}
    except yaml.YAMLError as error:
        raise ConfigError(f"decoder.{key}: {text} is not valid YAML: {error}") from error


# Arguments


def add_decoder_arguments(parser: argparse.ArgumentParser, methods: list[str]) -> None:
    """--methods (by default `methods`), --bc, --decoder and --vary, as make_sides reads them."""
    parser.add_argument("--methods", type=_methods, default=methods, metavar=",".join(METHODS))
    parser.add_argument(
        "--bc",
        type=_complexities,
        default=[None],
        metavar="auto,10,30",
        help="block complexities of the methods that have rows to choose (default: the job's)",
    )
    parser.add_argument(
        "--decoder",
        type=_key_and_text,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a decoder setting, such as masks=2, of every side whose method has it; repeatable",
    )
    parser.add_argument(
        "--vary",
        type=_key_and_text,
        action="append",
        default=[],
        metavar="KEY=V1,V2",
        help="a decoder setting with several values, a side each, such as impl=naive,efficient or\n"
        "tree=dynamic,best_first,7x2 (7x2: a static tree of these widths); repeatable",
    )


def _methods(text: str) -> list[str]:
    methods = text.split(",")
    if not set(methods) <= set(METHODS):
        raise argparse.ArgumentTypeError(f"{text}: methods are {', '.join(METHODS)}")
    return methods


def _key_and_text(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not (key and separator and value):
        raise argparse.ArgumentTypeError(f"{text}: expected a decoder setting and its value, such as masks=2")
    if key in FLAG_OF:
        raise argparse.ArgumentTypeError(f"{text}: use {FLAG_OF[key]} for {key}")
    return key, value


def positive(text: str) -> int:
    (number,) = numbers(text)
    return number


def _complexities(text: str) -> list[int | str]:
    return [part if part == AUTO else numbers(part)[0] for part in text.split(",")]


def numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: expected whole numbers, separated by commas") from None
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text}: numbers must be positive")
    return numbers
