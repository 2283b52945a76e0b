"""One whole job: plan, scan, decode what is owed, write shards, account for every row, report.

Steps are separate so that a dry run is the same code without the last ones.
"""

from __future__ import annotations

import logging
import re
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
from pipeline.decoder import Decoder, EngineDecoder
from pipeline.errors import ConfigError, RowErrorType
from pipeline.graph import LIGHT_CPUS, cluster_nodes, decode, read, write
from pipeline.plan import Plan, make_plan
from pipeline.progress import ProgressBoard, show_progress
from pipeline.redact import scrub
from pipeline.report import REPORT_COLUMNS, build_report, summarize
from pipeline.resume import RunFolder
from pipeline.scan import Scan, count_owed, merge_scans, scan_file
from pipeline.schema import output_schema
from pipeline.sink import LostFolderError, read_attempt, read_columns, remove_doubles, shards, write_shard
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

    @property
    def config(self) -> JobConfig:
        return self.plan.config

    @property
    def total(self) -> int:
        """Output rows of the whole job: sampling.n of each input row."""
        return self.scan.total * self.config.sampling.n


@dataclass(frozen=True)
class Work:
    """What is left of a job: `done`, the sorted keys of rows in the folder, and how many output rows are not there."""

    done: np.ndarray
    owed: int


def check_job(config: JobConfig) -> Job:
    """Settle the plan, count the input and look at the output place. Raises ConfigError. Needs a running Ray."""
    files = list_source(config.input, exclude=config.output.path)
    plan = make_plan(config, cluster_nodes())
    folder = RunFolder(config.output.path)
    folder.check(config.output, plan.fingerprint())
    scans = _on_cluster(scan_file, [(file, config.input) for file in files])
    return Job(plan, merge_scans(files, scans, config.input), folder)


def count_work(job: Job) -> Work:
    """Compare the input with the rows that the folder holds."""
    done = np.empty(0, np.uint64) if job.config.output.overwrite else job.folder.finished_keys()
    if not len(done):
        return Work(done, job.total)
    known = ray.put(done)
    n = job.config.sampling.n
    calls = [(file, job.config.input, job.scan.duplicates, known, n) for file in job.scan.files]
    return Work(done, sum(_on_cluster(count_owed, calls)))


def _on_cluster(function: Callable[..., _T], calls: Sequence[tuple[Any, ...]]) -> list[_T]:
    """One light task a call, results in order; a ConfigError of a task is raised as itself."""
    task = ray.remote(num_cpus=LIGHT_CPUS)(function)
    try:
        return ray.get([task.remote(*arguments) for arguments in calls])
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ConfigError):
            raise error.cause from None
        raise


def run_job(
    job: Job, about: Mapping[str, Any], console: Console, decoder: Callable[[Plan], Decoder] = EngineDecoder
) -> dict[str, Any]:
    """Decode, write, account, report; returns the report's summary. about: machine and versions, for run.json.
    decoder: makes what each actor process decodes with.

    Raises RunError when rows are missing at the end, or when another start of the run has taken the folder.
    """
    began = time.time()
    run = job.folder.claim(
        {
            "status": "running",
            "fingerprint": job.plan.fingerprint(),
            "config": scrub(job.plan.resolved()),
            **about,
            "started_at": began,
        }
    )
    if job.config.output.overwrite:
        job.folder.clear()
    work = count_work(job)  # after the claim: from here on nobody else adds rows
    if not job.scan.total:
        logger.warning("input.path: no rows in %s", ", ".join(job.config.input.path))
    already_done = job.total - work.owed
    stale = len(work.done) - already_done
    if stale:
        logger.warning(
            "%d rows in %s are not of this input (edited, removed, beyond input.limit or sampling.n); they stay",
            stale,
            job.folder.place.uri,
        )
    try:
        written = _decode_owed(job, work, run["attempt"], console, decoder) if work.owed else 0
        table = _settle(job, work, written)
    except RunError:
        if read_attempt(job.folder.place) == run["attempt"]:
            job.folder.write_run(run | {"status": "broken"})
        raise
    failed = table.num_rows - table["error_type"].null_count
    run["counts"] = {
        "input_rows": job.scan.total,
        "samples": job.config.sampling.n,
        "already_done": already_done,
        "rows": table.num_rows,
        "not_in_input": stale,
        "failed": failed,
        "shards": len(shards(job.folder.data)),
    }
    run |= {"status": "finished", "wall_s": time.time() - began}
    summary = summarize(table, run=run)
    job.folder.write_report(*build_report(table, run))
    job.folder.write_run(run)
    return summary


def _decode_owed(job: Job, work: Work, attempt: str, console: Console, decoder: Callable[[Plan], Decoder]) -> int:
    """Decode and write what the folder lacks; how many rows were written."""
    board = ray.remote(num_cpus=0)(ProgressBoard).remote()
    rows = decode(read(job.scan, job.plan, work.done), job.plan, board, decoder)
    shards_written = write(rows, job.folder.place.uri, attempt, job.config)
    written = 0
    with show_progress(lambda: ray.get(board.total.remote(), timeout=5), work.owed, console):
        try:
            for shard in shards_written.iter_rows():
                logger.debug("wrote %s: %d rows, %d failed", shard["shard"], shard["rows"], shard["failed"])
                written += shard["rows"]
        except ray.exceptions.RayError as error:
            raise RunError(_why(error)) from error
    return written


def _why(error: Exception) -> str:
    """One line for a job that Ray ended: the first exception of the remote traceback, and what to do."""
    raised = re.findall(r"^(?:[\w.]+\.)?(\w+(?:Error|Exception|Interrupt)): (.+)$", str(error), flags=re.MULTILINE)
    kind, message = raised[0] if raised else (type(error).__name__, str(error).strip().partition("\n")[0])
    if kind == LostFolderError.__name__:
        return message
    return f"the job broke off: {kind}: {message}; when that is mended, the same command continues it"


def _settle(job: Job, work: Work, written: int) -> pa.Table:
    """All rows of the output, each once. Raises RunError when rows are missing."""
    schema = output_schema(job.config.input.keep_columns)
    if not shards(job.folder.data):
        write_shard(job.folder.data, schema.empty_table())  # readers find the schema also where there are no rows
    table = read_columns(job.folder.data, ["row_key", *REPORT_COLUMNS], schema)
    if len(np.unique(table["row_key"].to_numpy())) < table.num_rows:
        logger.warning("an earlier, killed start wrote to its last; %d rows taken out", remove_doubles(job.folder.data))
        table = read_columns(job.folder.data, ["row_key", *REPORT_COLUMNS], schema)
    missing = max(work.owed - written, 0)  # more than owed: the input grew meanwhile
    if missing and _breaks_off(job.scan, table):
        logger.warning("%d rows of a Parquet file could not be read; see its error row", missing)
    elif missing:
        raise RunError(f"{missing} of {work.owed} rows are missing; run the same command again")
    return table


def _breaks_off(scan: Scan, table: pa.Table) -> bool:
    """Whether a Parquet file of the input ends in an error row: its footer promised more rows than it has."""
    malformed = table.filter(pc.equal(table["error_type"], RowErrorType.MALFORMED))["source_file"].to_pylist()
    return not {file.name for file in scan.files if file.format == "parquet"}.isdisjoint(malformed)
