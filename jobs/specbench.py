"""`python -m jobs.bench specbench`: the paper's benchmark on a model of yours, every method beside plain decoding.

Work is cut into units, one side on one shard of the questions. An actor takes a whole shard and decodes it with every
side in turn, so that what else the machine does falls on all of them; each unit is kept as it ends, and the same
command does what is missing. Results are of the shards that every side has decoded.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError

from esp_worker.checkpoint import eos_token_ids, resolve
from esp_worker.model import read_config, resolve_dtype
from jobs.questions import Chat, Question, by_category, choose, digest, read_questions, shards
from jobs.runtime import ray_cluster
from jobs.sides import Side, add_decoder_arguments, make_sides, positive
from jobs.specbench_folder import Folder, unit_name
from jobs.specbench_page import render_page
from jobs.specbench_results import print_results, side_results, to_csv
from jobs.specbench_worker import Setup, Worker
from pipeline.errors import ConfigError
from pipeline.nodes import cluster_nodes
from pipeline.prepare import load_tokenizer


@dataclass(frozen=True)
class Unit:
    side: Side
    shard: int
    questions: Sequence[Question]

    @property
    def name(self) -> str:
        return unit_name(self.side, self.shard)


def add_command(commands: Any, common: argparse.ArgumentParser) -> None:
    """The subcommand's arguments. common: those of every benchmark (model, threads, dtype, device, kernels)."""
    parser = commands.add_parser("specbench", parents=[common], help="Spec-Bench, by category, beside the paper")
    parser.set_defaults(run=run, print=print_results, prefix_reuse=[True])
    parser.add_argument("--questions", required=True, metavar="FILE", help="Spec-Bench's question.jsonl")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where units, results and the page go")
    add_decoder_arguments(parser, ["ar", "esp", "pld", "lade", "stand", "recycle", "hybrid"])
    parser.add_argument("--per-category", type=positive, metavar="N", help="a fixed random sample (default: all)")
    parser.add_argument("--new", type=positive, default=256, help="max_new_tokens of a turn")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1, help="of the sample of questions, and of draws")
    parser.add_argument("--slots", type=lambda text: [positive(text)], default=[4], metavar="N", help="1: one by one")
    parser.add_argument("--actors", type=positive, default=1, help="each with its own model")
    parser.add_argument("--shard", type=positive, default=16, metavar="N", help="questions of a unit")
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="begin no further unit after this time; run it again to go on"
    )


def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Do what is missing, and write results.json, results.csv and report.html. Raises ConfigError, ModelError, OSError,
    and ValueError where --seconds ended the run before all sides had decoded a shard."""
    sides = make_sides(options)
    with ray_cluster():
        setup, context_length = _settle(options)
        chat = Chat(load_tokenizer(resolve(setup.model).folder))
        read = read_questions(Path(options.questions))

        def fits(question: Question) -> bool:
            return chat.length(question, setup.new) <= context_length

        chosen, too_long = choose(read, options.per_category, options.seed, fits)
        if not chosen:
            raise ConfigError(f"--new {setup.new}: no question fits into the model's context of {context_length}")
        setup.sampling(chosen[0], 0)  # a temperature that cannot be is an error before anything is loaded
        folder = Folder(options.out, _fingerprint(options, setup, chosen))
        parts = shards(chosen, options.shard)
        _decode_missing(options, setup, folder, sides, parts)
    names = folder.done()
    whole = [shard for shard in range(len(parts)) if all(unit_name(side, shard) in names for side in sides)]
    if not whole:
        raise ValueError("no shard has been decoded by every side yet; run the same command again to go on")
    units = [(side, [folder.read_unit(side, shard) for shard in whole]) for side in sides]
    decoded = [question for shard in whole for question in parts[shard]]
    about = _about(options, folder, setup, decoded, too_long) | {
        "shards": {"whole": len(whole), "of": len(parts)},
        "machines": sorted({_machine(unit) for _, of_side in units for unit in of_side}),
    }
    results = side_results(units, [category for category in by_category(read) if category in about["categories"]])
    _write(folder, about, results)
    return about, results


def _settle(options: argparse.Namespace) -> tuple[Setup, int]:
    """What the actors decode with, from the model's files and the cluster; and the model's context length."""
    checkpoint = resolve(options.model)
    config = read_config(checkpoint.folder)
    on_gpu = options.device.startswith("cuda") or (options.device == "auto" and any(n.gpus for n in cluster_nodes()))
    device = "cuda" if on_gpu else "cpu"
    tokenizer_eos = load_tokenizer(checkpoint.folder).eos_token_id
    dtype = resolve_dtype(options.dtype, torch.device(device), getattr(config, "dtype", None))
    setup = Setup(
        model=options.model,
        identity=checkpoint.identity,
        dtype=str(dtype).removeprefix("torch."),
        device=device,
        threads=options.threads,
        kernels=options.kernels,
        slots=options.slots[0],
        new=options.new,
        temperature=options.temperature,
        seed=options.seed,
        eos=tuple(sorted(eos_token_ids(checkpoint.folder) | {tokenizer_eos} - {None})),
    )
    return setup, config.max_position_embeddings


def _fingerprint(options: argparse.Namespace, setup: Setup, chosen: Sequence[Question]) -> dict[str, Any]:
    """What changes tokens, the cut into shards, or what a unit's times mean."""
    names = ("dtype", "device", "threads", "kernels", "slots", "new", "temperature", "seed")
    return {
        "model": setup.identity,
        "questions": digest(chosen),
        "per_category": options.per_category,
        "shard": options.shard,
        "eos": list(setup.eos),
        "decoder": dict(options.decoder),
        **{name: getattr(setup, name) for name in names},
    }


def _decode_missing(
    options: argparse.Namespace,
    setup: Setup,
    folder: Folder,
    sides: Sequence[Side],
    parts: Sequence[Sequence[Question]],
) -> None:
    done = folder.done()
    owed = [
        [unit for unit in (Unit(side, shard, part) for side in sides) if unit.name not in done]
        for shard, part in enumerate(parts)
    ]
    owed = [units for units in owed if units]
    if not owed:
        return
    workers = _start(setup, min(options.actors, len(owed)))
    try:
        if folder.about is None:
            folder.begin(ray.get(workers[0].about.remote()))
        if folder.step_cost() is None:
            folder.write_step_cost(ray.get(workers[0].step_cost.remote()))
        total, began = sum(map(len, owed)), time.monotonic()
        until = None if options.seconds is None else began + options.seconds
        for number, (unit, record) in enumerate(_decoded(workers, owed, until), start=1):
            folder.write_unit(unit.side, unit.shard, record)
            spent = time.monotonic() - began
            print(
                f"unit {number}/{total}: {unit.side.label}, shard {unit.shard + 1}/{len(parts)}: "
                f"{record['seconds']:.1f} s (about {spent / number * (total - number) / 60:.0f} min left)",
                file=sys.stderr,
            )
    except RayActorError as error:
        raise ChildProcessError(
            f"an actor ended: {str(error).strip()}\nunits that were decoded stay, and the same command goes on"
        ) from error
    finally:
        for worker in workers:
            ray.kill(worker)


def _start(setup: Setup, actors: int) -> list[Any]:
    """Raises ConfigError where the cluster would never hold so many."""
    nodes = cluster_nodes()
    if setup.device == "cuda":
        needs, room, what = {"num_cpus": 1, "num_gpus": 1}, sum(int(node.gpus) for node in nodes), "a GPU"
    else:
        needs, room = {"num_cpus": setup.threads}, sum(int(node.cpus) // setup.threads for node in nodes)
        what = f"{setup.threads} CPUs (--threads)"
    if room < actors:
        raise ConfigError(f"--actors {actors}: each takes {what}, and the cluster has room for {room}")
    actor = ray.remote(Worker).options(**needs)
    return [actor.remote(setup) for _ in range(actors)]


def _decoded(
    workers: Sequence[Any], owed: Sequence[Sequence[Unit]], until: float | None
) -> Iterator[tuple[Unit, dict[str, Any]]]:
    """Units as they end. A worker does a whole shard before it takes the next; none begins a unit after `until`."""
    waiting = iter(owed)
    left: dict[Any, list[Unit]] = {worker: [] for worker in workers}
    running: dict[Any, tuple[Any, Unit]] = {}

    def feed(worker: Any) -> None:
        if not left[worker]:
            left[worker] = list(next(waiting, ()))
        if left[worker] and (until is None or time.monotonic() < until):
            unit = left[worker].pop(0)
            running[worker.decode.remote(unit.side.label, unit.side.config, unit.questions)] = worker, unit

    for worker in workers:
        feed(worker)
    while running:
        (ended,), _ = ray.wait(list(running))
        worker, unit = running.pop(ended)
        feed(worker)  # before the driver writes: a worker need not wait for it
        yield unit, ray.get(ended)


def _about(
    options: argparse.Namespace, folder: Folder, setup: Setup, decoded: Sequence[Question], too_long: int
) -> dict[str, Any]:
    """What was run, where, and with what: above every table."""
    assert folder.about is not None
    return {
        **folder.about,
        "model": setup.model,
        "dtype": setup.dtype,
        "slots": setup.slots,
        "actors": options.actors,
        "new_tokens": setup.new,
        "temperature": setup.temperature,
        "decoder": dict(options.decoder),
        "questions": len(decoded),
        "too_long": too_long,
        "categories": {category: len(members) for category, members in by_category(decoded).items()},
        "folder": folder.place.uri,
    }


def _machine(unit: Mapping[str, Any]) -> str:
    return str(unit["machine"]["gpu"] or unit["machine"]["cpu"])


def _write(folder: Folder, about: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> None:
    folder.write("results.json", json.dumps({**about, "results": results}, indent=1))
    folder.write("results.csv", to_csv(results))
    page = folder.write("report.html", render_page(about, results, folder.step_cost()))
    print(f"report: {page}", file=sys.stderr)
