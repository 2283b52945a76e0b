"""The Dataset's way: read -> prepare -> decode -> shards, each stage a function from Dataset to Dataset.

`generate` is the composable call for a user's own Dataset; `decode` is the stage that it and the job share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from typing import Any

import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy, Dataset

from pipeline.actor import DecodeActor
from pipeline.board import Board, on_this_node
from pipeline.config import JobConfig
from pipeline.decoder import Decoder, EngineDecoder
from pipeline.nodes import cluster_nodes
from pipeline.parse import RowParser
from pipeline.plan import Plan, find_checkpoint, make_plan
from pipeline.prepare import Preparer, load_tokenizer, rows_from_mappings
from pipeline.scan import Found, Scan, owed_rows
from pipeline.sink import write_batch
from pipeline.source import Position, Repeat, SourceFile

CALLS_PER_ACTOR = 8  # Ray batches in one actor at a time, each of half the slots: four rows in hand for each slot
LIGHT_CPUS = 0.5  # of a reading or writing task, so that one spare logical CPU serves both
PREPARE_ROWS = 64
BLOCK_BYTES = 1 << 20


def generate(rows: Dataset, config: JobConfig) -> Dataset:
    """Decode a user's own Dataset: any schema that has the columns `config.input` names; returns output rows.

    The result has pipeline.schema.output_schema; source_file is empty and row_index -1. `config.output` is not used.
    Raises ConfigError when the model, the template or the cluster does not allow it; bad rows become error rows.
    """
    plan = make_plan(config, cluster_nodes())
    prepared = rows.map_batches(
        _prepare_table,
        fn_kwargs={"plan": plan},
        batch_format="pyarrow",
        batch_size=PREPARE_ROWS,
        num_cpus=LIGHT_CPUS,
    )
    return decode(prepared, plan, on_this_node(Board))


def read(scan: Scan, plan: Plan, done: ray.ObjectRef, census: Any) -> Dataset:
    """Rows of prepared_schema from the scanned files, a prompt's samples side by side, without those whose keys are in
    `done` (sorted uint64: one copy a node, which its readers share). census: handle of a Census, told of each file."""
    files = ray.data.from_items([asdict(file) for file in scan.files], override_num_blocks=len(scan.files))
    # A reader hands on blocks of this size. Ray's own 128 MiB would let the decoders wait until a long file's first
    # hundred thousand prompts are read, and every reader hold as much.
    files.context.target_max_block_size = BLOCK_BYTES
    known = {"plan": plan, "duplicates": scan.duplicates, "done": done, "census": census}
    return files.map_batches(_read_files, fn_kwargs=known, batch_format="pyarrow", batch_size=1, num_cpus=LIGHT_CPUS)


def decode(prepared: Dataset, plan: Plan, board: Any, decoder: Callable[[Plan], Decoder] = EngineDecoder) -> Dataset:
    """Rows of prepared_schema in, rows of output_schema out, over a pool of `cluster.min_actors` to `cluster.actors`
    decoders."""
    rows_per_call = _rows_per_call(plan.config)
    # Beside the calls that Ray Data has in flight, those that Ray makes again for blocks that were lost with a node:
    # they must not queue behind calls that wait for a shard, which waits for these blocks.
    again = -(-unwritten_rows(plan.config) // rows_per_call)
    pool = ActorPoolStrategy(
        min_size=plan.config.cluster.least,
        max_size=plan.config.cluster.actors,
        max_tasks_in_flight_per_actor=CALLS_PER_ACTOR,
        max_concurrent_calls_per_actor=CALLS_PER_ACTOR + again,
    )
    # Small blocks: the block is Ray's unit of loss, and one big block would keep one actor busy and the others idle.
    return _regrouped(prepared, rows_per_call, strict=False).map_batches(
        DecodeActor,
        fn_constructor_args=(plan, board, decoder),
        compute=pool,
        batch_format="pyarrow",
        batch_size=rows_per_call,
        num_cpus=plan.num_cpus,
        num_gpus=plan.num_gpus or None,
    )


def _rows_per_call(config: JobConfig) -> int:
    return -(-config.engine.slots // 2)


def unwritten_rows(config: JobConfig) -> int:
    """How many rows may be taken by decoders and in no shard: a shard's, and what keeps the decoders busy meanwhile."""
    in_hand = config.cluster.actors * CALLS_PER_ACTOR * _rows_per_call(config)
    return config.output.rows_per_file + in_hand


def write(
    rows: Dataset, folder_uri: str, attempt: str, config: JobConfig, retried: ray.ObjectRef, board: Any
) -> Dataset:
    """Output rows to shards of `output.rows_per_file` rows; one small row per shard comes out. retried: as in
    sink.write_batch. board: handle of a Board, told of each shard."""
    where = {"folder_uri": folder_uri, "attempt": attempt, "keep_columns": config.input.keep_columns}
    receipts = rows.map_batches(
        _write_batch,
        fn_kwargs={"retried": retried, "board": board, **where},
        batch_format="pyarrow",
        batch_size=config.output.rows_per_file,
        num_cpus=LIGHT_CPUS,
    )
    return _regrouped(receipts, config.output.rows_per_file, strict=True)


def _regrouped(rows: Dataset, size: int, strict: bool) -> Dataset:
    """Ray Data's streaming repartition, made one stage with the map_batches before it: this yields blocks of `size`
    rows, and with strict it also gets just so many in each call (but the last).

    `repartition` has no num_cpus, and a stage of its own would want a whole CPU, more than is left where reading and
    writing share one: then Ray Data regroups nothing until all decoding is over, so that nothing is written either.
    """
    regrouped = rows.repartition(target_num_rows_per_block=size, strict=strict)
    regrouped._logical_plan.dag.ray_remote_args["num_cpus"] = LIGHT_CPUS
    return regrouped


def _write_batch(table: pa.Table, retried: ray.ObjectRef, board: Any, **where: Any) -> pa.Table:
    written = write_batch(table, retried=ray.get(retried), **where)
    keys = zip(table["row_key"].to_pylist(), table["sample_index"].to_pylist(), strict=True)
    ray.get(board.written.remote(list(keys)))  # a lost word would hold back the decoders
    return written


def _read_files(
    files: pa.Table, plan: Plan, duplicates: Mapping[Position, Repeat], done: ray.ObjectRef, census: Any
) -> Iterator[pa.Table]:
    keys = ray.get(done)
    preparer = _preparer(plan)
    for fields in files.to_pylist():
        found = Found()
        owed = owed_rows(SourceFile(**fields), plan.config.input, duplicates, keys, plan.config.sampling.n, found)
        while batch := list(islice(owed, PREPARE_ROWS)):
            yield preparer.prepare(batch)
        ray.get(census.note.remote(fields["name"], found))


def _prepare_table(table: pa.Table, plan: Plan) -> pa.Table:
    rows = rows_from_mappings(table, RowParser(plan.config.input), plan.config.sampling.n)
    return _preparer(plan).prepare(rows)


def _preparer(plan: Plan) -> Preparer:
    model = plan.config.model
    tokenizer = load_tokenizer(find_checkpoint(plan.config).folder, model.trust_remote_code)
    return Preparer(tokenizer, plan.config.input, plan.config.sampling, plan.max_length - 1)
