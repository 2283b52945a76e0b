"""One whole job: plan, scan, decode what is owed, write shards, account for every row, report.

Steps are separate so that a dry run is the same code without the last ones.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray
from rich.console import Console

from pipeline.config import JobConfig
from pipeline.errors import ConfigError, RowErrorType
from pipeline.graph import cluster_nodes, decode, read, write
from pipeline.plan import Plan, make_plan
from pipeline.progress import ProgressBoard, show_progress
from pipeline.redact import scrub
from pipeline.report import REPORT_COLUMNS, build_report, summarize
from pipeline.resume import RunFolder
from pipeline.schema import output_schema
from pipeline.sink import read_columns, shards, write_shard
from pipeline.source import Scan, list_source, merge_scans, scan_file

logger = logging.getLogger(__name__)


class RunError(RuntimeError):
    """The job ended without all of its rows (exit code 1); resuming it continues."""


@dataclass(frozen=True)
class Job:
    """A checked job: nothing has been written yet."""

    plan: Plan
    scan: Scan
    folder: RunFolder
    done: np.ndarray  # sorted keys of rows that the folder already holds

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
    scanner = ray.remote(num_cpus=0.5)(scan_file)
    try:
        scans = ray.get([scanner.remote(file, config.input) for file in files])
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ConfigError):
            raise error.cause from None
        raise
    return Job(plan, merge_scans(files, scans, config.input), folder, done)


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
        "counts": {"expected": job.scan.total, "already_done": len(job.done)},
    }
    job.folder.write_run(run)
    if not job.scan.total:
        logger.warning("input.path: no rows in %s", ", ".join(job.config.input.path))
    _decode_owed(job, console)
    schema = output_schema(job.config.input.keep_columns)
    if not shards(job.folder.data):
        write_shard(job.folder.data, schema.empty_table())  # readers find the schema also where there are no rows
    counts = _account(job, read_columns(job.folder.data, ["row_key", "source_file", "error_type"], schema))
    run |= {"status": "finished", "wall_s": time.time() - began, "counts": run["counts"] | counts}
    table = read_columns(job.folder.data, REPORT_COLUMNS, schema)
    summary = summarize(table, run=run)
    job.folder.write_report(*build_report(table, run))
    job.folder.write_run(run)
    return summary


def _decode_owed(job: Job, console: Console) -> None:
    owed = max(job.scan.total - len(job.done), 0)
    if not owed:
        return
    board = ray.remote(num_cpus=0)(ProgressBoard).remote()
    rows = decode(read(job.scan, job.plan, job.done), job.plan, board)
    written = write(rows, job.folder.data.uri, job.config)
    with show_progress(lambda: ray.get(board.total.remote(), timeout=5), owed, console):
        for shard in written.iter_rows():
            logger.debug("wrote %s: %d rows, %d failed", shard["shard"], shard["rows"], shard["failed"])


def _account(job: Job, table: pa.Table) -> dict[str, int]:
    """Every row once. table: row_key, source_file, error_type. Raises RunError when rows are doubled or missing."""
    twice = table.num_rows - len(np.unique(table["row_key"].to_numpy()))
    if twice:
        raise RunError(f"{twice} rows are in the output twice; this is a bug, please report it")
    written = Counter(table["source_file"].to_pylist())
    # A file that breaks off in its middle ends in one error row, whatever its footer promised.
    broken = set(table.filter(pc.equal(table["error_type"], RowErrorType.MALFORMED))["source_file"].to_pylist())
    missing = {
        file.name: rows - written[file.name]
        for file, rows in zip(job.scan.files, job.scan.rows, strict=True)
        if written[file.name] < rows and not (file.format == "parquet" and file.name in broken)
    }
    if missing:
        named = ", ".join(f"{count} of {name}" for name, count in list(missing.items())[:5])
        raise RunError(f"{sum(missing.values())} rows are missing ({named}); run the same command again to continue")
    failed = table.num_rows - table["error_type"].null_count
    return {"rows": table.num_rows, "failed": failed, "shards": len(shards(job.folder.data))}
