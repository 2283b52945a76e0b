"""`python -m jobs.bench decode`: methods and settings side by side on one model, one machine, one run.
`python -m jobs.bench ablation`: the paper's ablation tables (jobs.bench_ablation).
`python -m jobs.bench alignment`: its figure 2, layer by layer (jobs.bench_alignment).
`python -m jobs.bench step`: what a decode step costs (jobs.bench_step).
`python -m jobs.bench specbench`: the paper's benchmark, by category (jobs.specbench).

A side is one setting of the decoder and a number of slots; plain decoding is one for each number of slots. The sides
alternate within each repeat, figures are medians, the hardware's ceiling stands beside them, and the last
line of stdout is one JSON document. `decode` gives the time while all slots are taken and the tail apart, and where a
decode step's time goes (jobs.watch) beside what it takes at least, from a run that is not timed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from esp_worker.accel import accelerate
from esp_worker.calibrate import cost_key, step_cost
from esp_worker.checkpoint import Checkpoint, ModelError, resolve
from esp_worker.model import CausalModel, load_model
from esp_worker.prime import successors
from esp_worker.types import Request, SamplingParams
from jobs import bench_ablation, bench_alignment, bench_step, specbench
from jobs.ablation_tables import TABLES
from jobs.ceiling import ceiling_line, floor_ms, machine_line, measure_ceiling, workload_line
from jobs.runtime import machine, versions
from jobs.side_runs import Profile, SideRuns, Timing
from jobs.sides import Side, add_decoder_arguments, make_sides, numbers, positive
from jobs.watch import PARTS, shares
from pipeline.config import parse_decoder
from pipeline.errors import ConfigError
from pipeline.prepare import load_tokenizer

LONGEST_PROMPT_CHARS = 900  # longer prompts are left out unless --max-chars says otherwise


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    try:
        about, results = options.run(options)
    except (ConfigError, ModelError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    options.print(about, results)
    print(json.dumps({**about, "results": results}))
    return 0


def _decode(options: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    sides = make_sides(options)
    runs, about, results = _measure(options, sides)
    profiles = [_profile(runs.profile(side), about["ceiling"]) for side in sides]
    return about, [result | profile for result, profile in zip(results, profiles, strict=True)]


def _profile(found: Profile | None, ceiling: Mapping[str, float]) -> dict[str, Any]:
    """profile: the parts' shares of a decode step; step: how long it took while it was watched, and what it takes at
    least."""
    if found is None:
        return {"profile": None, "step": None}
    ms, floor = sum(found.parts.values()) * 1e3, floor_ms(ceiling, found.rows)
    step = {"rows": found.rows, "ms": ms, "floor_ms": floor, "ratio": ms / floor}
    return {"profile": shares(found.parts), "step": {name: round(figure, 4) for name, figure in step.items()}}


def _ablation(options: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    table = TABLES[options.table]
    bench_ablation.check_prompts(table, [category for _, category in read_rows(options)])
    configs = [parse_decoder({"method": "ar"}), *bench_ablation.side_configs(table)]
    sides = [Side(config, slots, varied=bench_ablation.varied(config)) for slots in options.slots for config in configs]
    _, about, results = _measure(options, sides)
    return about | {"table": bench_ablation.table_document(table, results)}, results


def _measure(
    options: argparse.Namespace, sides: Sequence[Side]
) -> tuple[SideRuns, dict[str, Any], list[dict[str, Any]]]:
    """The sides on the prompts that the options name."""
    checkpoint = resolve(options.model)
    model, about = _load(options, checkpoint)
    rows = read_rows(options)
    requests = make_requests(options, checkpoint, [text for text, _ in rows])
    categories = {request.request_id: category for request, (_, category) in zip(requests, rows, strict=True)}
    about |= {
        "repeat": options.repeat,
        "prompts": len(requests),
        "new_tokens": options.new,
        "decoder": dict(options.decoder),
        "temperature": options.temperature,
        "ceiling": measure_ceiling(model),
    }
    key = cost_key(model, checkpoint.identity, about["kernels"])
    cost = lru_cache(maxsize=1)(lambda: step_cost(model, key, max(options.slots), model.context_length))
    known = lru_cache(maxsize=1)(lambda: successors(model, checkpoint.identity))
    runs = SideRuns(model, requests, cost, known)
    paired = list(zip(sides, runs.time(sides, options.repeat), strict=True))
    plain = {(side.slots, side.prefix_reuse): timing for side, timing in paired if side.config.method == "ar"}
    truth = next((timing.outputs for side, timing in paired if side.config.method == "ar"), None)
    results = [
        _result(side, timing, plain.get((side.slots, side.prefix_reuse)), truth)
        | {"by_category": _by_category(timing, categories)}
        for side, timing in paired
    ]
    return runs, about, results


def _alignment(options: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    checkpoint = resolve(options.model)
    model, about = _load(options, checkpoint)
    requests = make_requests(options, checkpoint, [text for text, _ in read_rows(options)])
    about |= {"prompts": len(requests), "new_tokens": options.new, "masks": options.masks, "top": options.top}
    alignment = bench_alignment.measure_alignment(model, requests, options.masks, options.top)
    results = bench_alignment.alignment_results(alignment)
    if options.out is not None:
        bench_alignment.save_alignment(options.out, about | {"results": results})
    return about, results


def _step(options: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    model, about = _load(options, resolve(options.model))
    ceiling = measure_ceiling(model)
    timings = bench_step.measure_steps(model, options.rows, options.slots, options.context, options.repeat)
    about |= {"repeat": options.repeat, "slots": options.slots, "context": options.context, "ceiling": ceiling}
    return about, bench_step.step_results(model, timings, options.slots, ceiling)


def _load(options: argparse.Namespace, checkpoint: Checkpoint) -> tuple[CausalModel, dict[str, Any]]:
    """The model under the kernels asked for, and what a reader of the figures must know."""
    model = load_model(checkpoint.folder, dtype=options.dtype, device=options.device)
    kernels = accelerate(model) if options.kernels == "auto" else "stock kernels"
    return model, {
        "machine": machine(),
        "versions": versions(),
        "model": options.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "threads": options.threads,
        "kernels": kernels,
    }


def _result(
    side: Side, timing: Timing, plain: Timing | None, truth: Mapping[str, tuple[int, ...]] | None
) -> dict[str, Any]:
    """One entry of `results`. Speed-up: against plain decoding with the same slots; exact match: against `truth`, the
    outputs of the first plain side, whatever its slots."""
    same = None if truth is None else [truth[name] == tokens for name, tokens in timing.outputs.items()]
    after_first = timing.tokens - len(timing.outputs)
    return {
        "method": side.config.method,
        "bc": side.bc,
        "slots": side.slots,
        "prefix_reuse": side.prefix_reuse,
        "varied": dict(side.varied),
        "decoder": side.config.model_dump(),
        "tokens": timing.tokens,
        "seconds": round(median(timing.seconds), 3),
        "tokens_per_s": round(timing.tokens_per_s, 2),
        "steady_tokens_per_s": _rounded(timing.steady_tokens_per_s, 2),
        "tail_seconds": _rounded(timing.tail_seconds, 3),
        "tau": round(after_first / timing.decode_calls, 4) if timing.decode_calls else None,
        "rows_per_call": round(timing.rows / timing.decode_calls, 2) if timing.decode_calls else None,
        "plain_call_share": round(timing.plain_steps / timing.decode_calls, 3) if timing.decode_calls else None,
        "decode_calls": timing.decode_calls,
        "prefill_tokens": timing.prefill_tokens,
        "cached_tokens": timing.cached_tokens,
        "exact_match_rate": None if same is None else sum(same) / len(same),
        "speedup_vs_ar": None if plain is None else round(timing.tokens_per_s / plain.tokens_per_s, 3),
    }


def _rounded(figure: float | None, digits: int) -> float | None:
    return None if figure is None else round(figure, digits)


def _by_category(timing: Timing, categories: Mapping[str, str | None]) -> dict[str, dict[str, int]]:
    """Of the prompts of each category, tokens that decode calls gave (all but each one's first), and those calls."""
    counts: dict[str, dict[str, int]] = {}
    for name, tokens in timing.outputs.items():
        if (category := categories[name]) is not None:
            count = counts.setdefault(category, {"decoded": 0, "decode_calls": 0})
            count["decoded"] += len(tokens) - 1
            count["decode_calls"] += timing.calls[name]
    return counts


def read_rows(options: argparse.Namespace) -> list[tuple[str, str | None]]:
    """Text and category of prompts of a JSONL file (`prompt`, or Spec-Bench's first turn), as many as are asked for.

    Raises ValueError naming the line of a row that has neither.
    """
    rows = [row for row in _rows(Path(options.prompts)) if len(row[0]) <= options.max_chars]
    if options.count is not None and options.count < len(rows):
        rows = random.Random(options.seed).sample(rows, options.count)
    return rows


def make_requests(options: argparse.Namespace, checkpoint: Checkpoint, texts: Sequence[str]) -> list[Request]:
    """The texts under the model's chat template."""
    tokenizer = load_tokenizer(checkpoint.folder)
    eos = frozenset([tokenizer.eos_token_id]) if tokenizer.eos_token_id is not None else frozenset()
    if options.system and not tokenizer.chat_template:
        raise ValueError("--system needs a chat template, and this model's tokenizer has none")
    requests = []
    for number, text in enumerate(texts):
        if tokenizer.chat_template:
            system = [{"role": "system", "content": options.system}] if options.system else []
            chat = [*system, {"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"]
        sampling = SamplingParams(
            max_new_tokens=options.new, temperature=options.temperature, seed=number, eos_token_ids=eos
        )
        requests.append(Request(str(number), tuple(ids), sampling))
    return requests


def _rows(path: Path) -> Iterable[tuple[str, str | None]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        row = json.loads(line)
        text = row.get("prompt") or next(iter(row.get("turns") or []), None)
        if not text:
            raise ValueError(f"{path}, line {number}: expected a `prompt` or Spec-Bench's `turns`")
        yield text, row.get("category")


def _print_decode(about: dict[str, Any], results: Sequence[dict[str, Any]]) -> None:
    _print_table(about, results)
    varied = _varied(results)
    table = Table("method", "bc", *varied, "slots", "rows a step", "ms", "floor", "ratio", *PARTS)
    for result in results:
        if (step := result["step"]) is not None:
            figures = (f"{step[name]:.2f}" for name in ("rows", "ms", "floor_ms", "ratio"))
            parts = (f"{step['ms'] * share:.2f}" for share in result["profile"].values())
            table.add_row(*_side_cells(result, varied), *figures, *parts)
    console = Console(width=160)
    console.print("a decode step, in ms (the mean of a run apart, which is watched), and its parts:", highlight=False)
    console.print(table)


def _print_table(about: dict[str, Any], results: Sequence[dict[str, Any]]) -> None:
    console = Console(width=160)
    console.print(f"{machine_line(about)}; {workload_line(about)}", highlight=False)
    console.print(ceiling_line(about["ceiling"]), highlight=False)
    varied = _varied(results)
    figures = {
        "tokens/s": "tokens_per_s",
        "steady": "steady_tokens_per_s",
        "tail s": "tail_seconds",
        "vs ar": "speedup_vs_ar",
        "tau": "tau",
        "rows/call": "rows_per_call",
        "plain calls": "plain_call_share",
        "decode calls": "decode_calls",
        "prefill": "prefill_tokens",
        "cached": "cached_tokens",
    }
    table = Table("method", "bc", *varied, "slots", *figures, "exact match")
    for result in results:
        rate = result["exact_match_rate"]
        cells = [_cell(result[key]) for key in figures.values()]
        table.add_row(*_side_cells(result, varied), *cells, _cell(None if rate is None else f"{rate:.1%}"))
    console.print(table)


def _varied(results: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for result in results for key in result["varied"]))


def _side_cells(result: dict[str, Any], varied: Sequence[str]) -> list[str]:
    """What tells a side from the others."""
    settings = [result["varied"].get(key) for key in varied]
    return [_cell(each) for each in (result["method"], result["bc"], *settings, result["slots"])]


def _cell(figure: Any) -> str:
    return "-" if figure is None else str(figure)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--model", required=True, help="hub id, folder, .gguf file or package:NAME/FILE")
    common.add_argument("--threads", type=int, default=2)
    common.add_argument("--dtype", default="auto")
    common.add_argument("--device", default="auto")
    common.add_argument("--kernels", choices=("auto", "stock"), default="auto")
    step = commands.add_parser("step", parents=[common], help="a decode step beside what the hardware allows")
    step.set_defaults(run=_step, print=bench_step.print_steps)
    step.add_argument("--rows", type=numbers, default=[1, 8, 16, 30], metavar="1,8,16,30", help="rows a sequence")
    step.add_argument("--slots", type=positive, default=1, help="sequences in a step")
    step.add_argument("--context", type=positive, default=256, help="tokens in the cache of each")
    step.add_argument("--repeat", type=positive, default=25, help="steps of each, in turn; figures are medians")
    prompted, timed = _prompt_arguments(), _timing_arguments()
    decode = commands.add_parser(
        "decode", parents=[common, prompted, timed], help="methods on the same prompts and engine"
    )
    decode.set_defaults(run=_decode, print=_print_decode)
    add_decoder_arguments(decode, ["ar", "hybrid"])
    decode.add_argument(
        "--prefix-reuse",
        type=_switches,
        default=[True],
        metavar="on,off",
        help="take over the KV of prompts that begin alike",
    )
    ablation = commands.add_parser(
        "ablation", parents=[common, prompted, timed], help="a table of the paper, on this model"
    )
    ablation.set_defaults(run=_ablation, print=bench_ablation.print_ablation, decoder=[])
    ablation.add_argument("--table", type=int, required=True, choices=sorted(TABLES), help="its number in the paper")
    alignment = commands.add_parser(
        "alignment", parents=[common, prompted], help="how like the true token a mask becomes, layer by layer"
    )
    alignment.set_defaults(run=_alignment, print=bench_alignment.print_alignment, temperature=0.0)
    alignment.add_argument("--masks", type=positive, default=1, help="masks behind each token")
    alignment.add_argument("--top", type=positive, default=1, help="how many of a mask's best tokens count as drafted")
    alignment.add_argument("--out", type=Path, metavar="FOLDER", help="write alignment.json and alignment.svg here")
    specbench.add_command(commands, common)
    return parser.parse_args(arguments)


def _prompt_arguments() -> argparse.ArgumentParser:
    """What is decoded."""
    prompted = argparse.ArgumentParser(add_help=False)
    prompted.add_argument(
        "--prompts", required=True, metavar="FILE", help="JSONL with `prompt`, or Spec-Bench's `turns`"
    )
    prompted.add_argument("--system", metavar="TEXT", help="a system prompt in front of every prompt")
    prompted.add_argument("--new", type=int, default=64, help="max_new_tokens")
    prompted.add_argument("--count", type=int, help="how many of the prompts (a fixed random sample)")
    prompted.add_argument("--seed", type=int, default=1, help="of that sample")
    prompted.add_argument("--max-chars", type=int, default=LONGEST_PROMPT_CHARS, help="leave longer prompts out")
    return prompted


def _timing_arguments() -> argparse.ArgumentParser:
    """How it is decoded and timed."""
    timed = argparse.ArgumentParser(add_help=False)
    timed.add_argument("--slots", type=numbers, default=[1], metavar="1,16")
    timed.add_argument("--temperature", type=float, default=0.0)
    timed.add_argument("--repeat", type=int, default=3)
    return timed


def _switches(text: str) -> list[bool]:
    values = text.split(",")
    if not set(values) <= {"on", "off"}:
        raise argparse.ArgumentTypeError(f"{text}: expected on, off or on,off")
    return [value == "on" for value in values]


if __name__ == "__main__":
    sys.exit(main())
