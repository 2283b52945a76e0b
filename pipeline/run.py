"""One whole job: plan, scan, decode what is owed, write shards, account for every row, report.

Steps are separate so that a dry run is the same code without the last ones.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray
from rich.console import Console

from pipeline.config import JobConfig
from pipeline.errors import ConfigError, RowErrorType
from pipeline.graph import LIGHT_CPUS, cluster_nodes, decode, read, write
from pipeline.plan import Plan, make_plan
from pipeline.progress import ProgressBoard, show_progress
from pipeline.redact import scrub
from pipeline.report import REPORT_COLUMNS, build_report, summarize
from pipeline.resume import RunFolder
from pipeline.scan import Scan, count_owed, merge_scans, scan_file
from pipeline.schema import output_schema
from pipeline.sink import read_columns, shards, write_shard
from pipeline.source import list_source

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class RunError(RuntimeError):
    """The job ended without all of its rows (exit code 1); resuming it continues."""


@dataclass(frozen=True)
class Job:
    """A checked job: nothing has been written yet."""

    plan: Plan
    scan: Scan
    folder: RunFolder
    done: np.ndarray  # sorted keys of rows that the folder already holds
    owed: int  # input rows whose keys are not among them

    @property
    def config(self) -> JobConfig:
        return self.plan.config


def check_job(config: JobConfig) -> Job:
    """Settle the plan, count the input and look at the output place. Raises ConfigError. Needs a running Ray."""
    files = list_source(config.input)
    plan = make_plan(config, cluster_nodes())
    folder = RunFolder(config.output.path)
    folder.check(config.output, plan.fingerprint())
    done = np.empty(0, np.uint64) if config.output.overwrite else folder.finished_keys()
    scan = merge_scans(files, _on_cluster(scan_file, [(file, config.input) for file in files]), config.input)
    owed = scan.total
    if len(done):
        known = ray.put(done)
        owed = sum(_on_cluster(count_owed, [(file, config.input, scan.duplicates, known) for file in scan.files]))
    return Job(plan, scan, folder, done, owed)


def _on_cluster(function: Callable[..., _T], calls: Sequence[tuple[Any, ...]]) -> list[_T]:
    """One light task a call, results in order; a ConfigError of a task is raised as itself."""
    task = ray.remote(num_cpus=LIGHT_CPUS)(function)
    try:
        return ray.get([task.remote(*arguments) for arguments in calls])
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ConfigError):
            raise error.cause from None
        raise


def run_job(job: Job, about: Mapping[str, Any], console: Console) -> dict[str, Any]:
    """Decode, write, account, report; returns the report's summary. about: machine and versions, for run.json.

    Raises RunError when rows are missing or doubled at the end.
    """
    began = time.time()
    if job.config.output.overwrite:
        job.folder.clear()
    run = {
        "status": "running",
        "fingerprint": job.plan.fingerprint(),
        "config": scrub(job.plan.resolved()),
        **about,
        "started_at": began,
        "counts": {"input_rows": job.scan.total, "already_done": job.scan.total - job.owed},
    }
    job.folder.write_run(run)
    if not job.scan.total:
        logger.warning("input.path: no rows in %s", ", ".join(job.config.input.path))
    written = _decode_owed(job, console) if job.owed else 0
    schema = output_schema(job.config.input.keep_columns)
    if not shards(job.folder.data):
        write_shard(job.folder.data, schema.empty_table())  # readers find the schema also where there are no rows
    table = read_columns(job.folder.data, ["row_key", *REPORT_COLUMNS], schema)
    _account(job, written, table)
    failed = table.num_rows - table["error_type"].null_count
    counts = {"rows": table.num_rows, "failed": failed, "shards": len(shards(job.folder.data))}
    run |= {"status": "finished", "wall_s": time.time() - began, "counts": run["counts"] | counts}
    summary = summarize(table, run=run)
    job.folder.write_report(*build_report(table, run))
    job.folder.write_run(run)
    return summary


def _decode_owed(job: Job, console: Console) -> int:
    """Decode and write what the folder lacks; how many rows were written."""
    board = ray.remote(num_cpus=0)(ProgressBoard).remote()
    rows = decode(read(job.scan, job.plan, job.done), job.plan, board)
    written = 0
    with show_progress(lambda: ray.get(board.total.remote(), timeout=5), job.owed, console):
        for shard in write(rows, job.folder.data.uri, job.config).iter_rows():
            logger.debug("wrote %s: %d rows, %d failed", shard["shard"], shard["rows"], shard["failed"])
            written += shard["rows"]
    return written


def _account(job: Job, written: int, table: pa.Table) -> None:
    """Every row once. table: all rows of the output. Raises RunError when rows are doubled or missing."""
    twice = table.num_rows - len(np.unique(table["row_key"].to_numpy()))
    if twice:
        raise RunError(f"{twice} rows are in the output twice; this is a bug, please report it")
    missing = job.owed - written
    if missing and _breaks_off(job.scan, table):
        logger.warning("%d rows of a Parquet file could not be read; see its error row", missing)
    elif missing:
        raise RunError(f"{missing} of {job.owed} rows are missing; run the same command again to continue")


def _breaks_off(scan: Scan, table: pa.Table) -> bool:
    """Whether a Parquet file of the input ends in an error row: its footer promised more rows than it has."""
    malformed = table.filter(pc.equal(table["error_type"], RowErrorType.MALFORMED))["source_file"].to_pylist()
    return not {file.name for file in scan.files if file.format == "parquet"}.isdisjoint(malformed)
