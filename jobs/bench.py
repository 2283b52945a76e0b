"""`python -m jobs.bench decode`: methods side by side on one engine, one machine, one run.

The sides alternate within each repeat, figures are medians, the hardware's ceiling stands beside them, and the last
line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from esp_worker.accel import accelerate
from esp_worker.checkpoint import Checkpoint, ModelError, resolve
from esp_worker.drafters.base import Drafter
from esp_worker.drafters.none import NoDrafter
from esp_worker.drafters.probe import ProbeDrafter
from esp_worker.engine import Engine
from esp_worker.model import CausalModel, load_model
from esp_worker.types import Completion, Request, SamplingParams
from jobs.runtime import machine, versions
from pipeline.prepare import load_tokenizer

METHODS = ("ar", "esp")
LONGEST_PROMPT_CHARS = 900  # longer prompts are left out unless --max-chars says otherwise


@dataclass(frozen=True)
class Side:
    """One setting that is timed. bc: block complexity, None for plain decoding."""

    method: str
    bc: int | None
    slots: int

    @property
    def label(self) -> str:
        return self.method if self.bc is None else f"{self.method} bc {self.bc}"


@dataclass
class Timing:
    """What the repeats of one side gave; counts are of one repeat (they do not vary)."""

    seconds: list[float] = field(default_factory=list)
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    decode_calls: int = 0
    rows: int = 0

    def add(self, seconds: float, done: Sequence[Completion]) -> None:
        self.seconds.append(seconds)
        self.outputs = {completion.request_id: completion.token_ids for completion in done}
        self.decode_calls = sum(completion.stats.decode_calls for completion in done)
        self.rows = sum(completion.stats.rows_computed for completion in done)

    @property
    def tokens(self) -> int:
        return sum(len(tokens) for tokens in self.outputs.values())

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / median(self.seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    try:
        checkpoint = resolve(options.model)
        model = load_model(checkpoint.folder, dtype=options.dtype, device=options.device)
        kernels = accelerate(model) if options.kernels == "auto" else "stock kernels"
        requests = read_requests(options, checkpoint)
    except (ModelError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    ceiling = measure_ceiling(model)
    sides = [
        Side(method, bc, slots)
        for slots in options.slots
        for method in options.methods
        for bc in (options.bc if method == "esp" else [None])
    ]
    timings = run_sides(model, sides, requests, options)
    results = [_result(side, timings) for side in sides]
    about = {
        "machine": machine(),
        "versions": versions(),
        "model": options.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "threads": options.threads,
        "kernels": kernels,
        "prompts": len(requests),
        "new_tokens": options.new,
        "masks": options.masks,
        "temperature": options.temperature,
        "repeat": options.repeat,
        "ceiling": ceiling,
    }
    _print_table(about, results)
    print(json.dumps({**about, "results": results}))
    return 0


def run_sides(
    model: CausalModel, sides: Sequence[Side], requests: Sequence[Request], options: argparse.Namespace
) -> dict[Side, Timing]:
    """Every side once per repeat, in turn; a short run of each first, which is not counted."""
    engines = {side: Engine(model, [_drafter(side, model, options)], slots=side.slots) for side in sides}
    for engine in engines.values():
        list(engine.generate(requests[:1]))
    timings = {side: Timing() for side in sides}
    for repeat, side in itertools.product(range(options.repeat), sides):
        began = time.perf_counter()
        done = list(engines[side].generate(requests))
        timings[side].add(time.perf_counter() - began, done)
        print(f"repeat {repeat + 1}: {side.label}, {side.slots} slots", file=sys.stderr)
    return timings


def _drafter(side: Side, model: CausalModel, options: argparse.Namespace) -> Drafter:
    if side.bc is None:
        return NoDrafter()
    return ProbeDrafter(model.embed, masks=options.masks, block_complexity=side.bc, prune=options.prune)


def _result(side: Side, timings: dict[Side, Timing]) -> dict[str, Any]:
    """One entry of `results`; speed-up and exact match are against plain decoding with the same slots."""
    timing = timings[side]
    plain = timings.get(Side("ar", None, side.slots))
    same = None if plain is None else [plain.outputs[name] == tokens for name, tokens in timing.outputs.items()]
    after_first = timing.tokens - len(timing.outputs)
    return {
        "method": side.method,
        "bc": side.bc,
        "slots": side.slots,
        "tokens": timing.tokens,
        "seconds": round(median(timing.seconds), 3),
        "tokens_per_s": round(timing.tokens_per_s, 2),
        "tau": round(after_first / timing.decode_calls, 4) if timing.decode_calls else None,
        "rows_per_call": round(timing.rows / timing.decode_calls, 2) if timing.decode_calls else None,
        "decode_calls": timing.decode_calls,
        "exact_match_rate": None if same is None else sum(same) / len(same),
        "speedup_vs_ar": None if plain is None else round(timing.tokens_per_s / plain.tokens_per_s, 3),
    }


def read_requests(options: argparse.Namespace, checkpoint: Checkpoint) -> list[Request]:
    """Prompts of a JSONL file (`prompt`, or Spec-Bench's first turn) under the model's chat template.

    Raises ValueError naming the line of a row that has neither.
    """
    tokenizer = load_tokenizer(checkpoint.folder)
    eos = frozenset([tokenizer.eos_token_id]) if tokenizer.eos_token_id is not None else frozenset()
    texts = [text for text in _texts(Path(options.prompts)) if len(text) <= options.max_chars]
    if options.count is not None and options.count < len(texts):
        texts = random.Random(options.seed).sample(texts, options.count)
    requests = []
    for number, text in enumerate(texts):
        if tokenizer.chat_template:
            chat = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"]
        sampling = SamplingParams(
            max_new_tokens=options.new, temperature=options.temperature, seed=number, eos_token_ids=eos
        )
        requests.append(Request(str(number), tuple(ids), sampling))
    return requests


def _texts(path: Path) -> Iterable[str]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        row = json.loads(line)
        text = row.get("prompt") or next(iter(row.get("turns") or []), None)
        if not text:
            raise ValueError(f"{path}, line {number}: expected a `prompt` or Spec-Bench's `turns`")
        yield text


def measure_ceiling(model: CausalModel) -> dict[str, float]:
    """What this machine can do, in this run: read the weights once, and multiply matrices.

    one_row_floor_ms: no one-row step can be faster than reading the weights; rows_at_ridge: rows at which the
    arithmetic of a step takes as long as that reading, after which each further row costs its full time.
    """
    weight_bytes = model.num_parameters * model.dtype.itemsize
    buffer = torch.zeros(64 << 20, dtype=torch.float32, device=model.device)
    square = torch.ones(1024, 1024, dtype=model.dtype, device=model.device)
    read_s = _best(lambda: buffer.sum())
    product_s = _best(lambda: square @ square)
    gb_per_s = buffer.nbytes / read_s / 1e9
    gflop_per_s = 2 * 1024**3 / product_s / 1e9
    floor_s = weight_bytes / (gb_per_s * 1e9)
    return {
        "memory_read_gb_per_s": round(gb_per_s, 1),
        "matrix_product_gflop_per_s": round(gflop_per_s, 1),
        "one_row_floor_ms": round(floor_s * 1e3, 2),
        "rows_at_ridge": round(floor_s * gflop_per_s * 1e9 / (2 * model.num_parameters), 1),
    }


def _best(work: Callable[[], torch.Tensor], times: int = 7) -> float:
    """Seconds of the fastest of several runs: a ceiling is what the machine can do, not what it did on average."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        work().flatten()[:1].tolist()  # to the host, so that a GPU has finished
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _print_table(about: dict[str, Any], results: Sequence[dict[str, Any]]) -> None:
    ceiling = about["ceiling"]
    console = Console(width=120)
    console.print(
        f"{about['machine']['cpu']}, {about['device']}, {about['threads']} threads, {about['kernels']}; "
        f"{about['model']}, {about['dtype']}; {about['prompts']} prompts x {about['new_tokens']} tokens, "
        f"{about['masks']} masks, temperature {about['temperature']}, median of {about['repeat']}",
        highlight=False,
    )
    console.print(
        f"ceiling: memory read {ceiling['memory_read_gb_per_s']} GB/s, matrix product "
        f"{ceiling['matrix_product_gflop_per_s']} GFLOP/s; a one-row step takes at least {ceiling['one_row_floor_ms']} "
        f"ms, rows are nearly free up to about {ceiling['rows_at_ridge']}",
        highlight=False,
    )
    columns = ("method", "bc", "slots", "tokens/s", "vs ar", "tau", "rows/call", "decode calls", "exact match")
    table = Table(*columns)
    for result in results:
        keys = ("method", "bc", "slots", "tokens_per_s", "speedup_vs_ar", "tau", "rows_per_call", "decode_calls")
        cells = ["-" if result[key] is None else str(result[key]) for key in keys]
        rate = result["exact_match_rate"]
        table.add_row(*cells, "-" if rate is None else f"{rate:.1%}")
    console.print(table)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    decode = commands.add_parser("decode", help="plain decoding and ESP on the same prompts and engine")
    decode.add_argument("--model", required=True, help="hub id, folder, .gguf file or package:NAME/FILE")
    decode.add_argument("--prompts", required=True, metavar="FILE", help="JSONL with `prompt`, or Spec-Bench's `turns`")
    decode.add_argument("--methods", type=_methods, default=list(METHODS), metavar="ar,esp")
    decode.add_argument("--bc", type=_numbers, default=[30], metavar="10,30,60", help="block complexities of esp")
    decode.add_argument("--slots", type=_numbers, default=[1], metavar="1,16")
    decode.add_argument("--masks", type=int, default=1)
    decode.add_argument("--prune", choices=("all", "deep", "none"), default="all")
    decode.add_argument("--new", type=int, default=64, help="max_new_tokens")
    decode.add_argument("--count", type=int, help="how many of the prompts (a fixed random sample)")
    decode.add_argument("--seed", type=int, default=1, help="of that sample")
    decode.add_argument("--max-chars", type=int, default=LONGEST_PROMPT_CHARS, help="leave longer prompts out")
    decode.add_argument("--temperature", type=float, default=0.0)
    decode.add_argument("--repeat", type=int, default=3)
    decode.add_argument("--threads", type=int, default=2)
    decode.add_argument("--dtype", default="auto")
    decode.add_argument("--device", default="auto")
    decode.add_argument("--kernels", choices=("auto", "stock"), default="auto")
    return parser.parse_args(arguments)


def _methods(text: str) -> list[str]:
    methods = text.split(",")
    if not set(methods) <= set(METHODS):
        raise argparse.ArgumentTypeError(f"{text}: methods are {', '.join(METHODS)}")
    return methods


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: expected whole numbers, separated by commas") from None
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text}: numbers must be positive")
    return numbers


if __name__ == "__main__":
    sys.exit(main())
