"""One whole job: plan, scan, decode what is owed, write shards, account for every row, report.

Steps are separate so that a dry run is the same code without the last ones.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import ray
from ray.data import Dataset
from rich.console import Console

from pipeline.actor import ActorStartError
from pipeline.board import Board, on_this_node
from pipeline.census import Census
from pipeline.config import JobConfig
from pipeline.decoder import Decoder, EngineDecoder
from pipeline.errors import ConfigError
from pipeline.graph import LIGHT_CPUS, decode, read, unwritten_rows, write
from pipeline.nodes import NoRoomError, alive_nodes, cluster_nodes, room_for
from pipeline.plan import Plan, continued, make_plan
from pipeline.progress import show_progress
from pipeline.redact import scrub
from pipeline.report import build_report, summarize
from pipeline.resume import RunFolder
from pipeline.scan import Found, Scan, count_owed, merge_scans, scan_file
from pipeline.schema import output_schema
from pipeline.sink import Keys, LostFolderError, doubled, read_attempt, read_shards, remove_doubles, shards, write_shard
from pipeline.source import list_source
from pipeline.storage import Place
from pipeline.totals import REPORT_COLUMNS, Totals

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class RunError(RuntimeError):
    """The job ended without all of its rows (exit code 1); resuming it continues."""


class LostNodesError(RunError):
    """It ended so because nodes went away; the remaining ones may do the rest."""


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
    """What is left of a job. `done`, `retried`: sorted uint64 keys in Ray's object store, one copy a node: of rows that
    stay, and of error rows that are decoded again. owed: output rows that are still to come, for people to see."""

    done: ray.ObjectRef
    retried: ray.ObjectRef
    finished: int  # len(done)
    owed: int


def check_job(config: JobConfig) -> Job:
    """Settle the plan, count the input and look at the output place. Raises ConfigError. Needs a running Ray."""
    files = list_source(config.input, exclude=config.output.path)
    plan = make_plan(config, cluster_nodes())
    folder = RunFolder(config.output.path)
    folder.check(config.output, plan.fingerprint())
    scans = _on_cluster(scan_file, [(file, config.input, config.ids) for file in files])
    return Job(plan, merge_scans(files, scans, config.input, config.ids), folder)


def count_work(job: Job, exactly: bool = False) -> Work:
    """Compare the input with the rows that the folder holds.

    owed is the difference of two counts, which rows in the folder that are not of this input make too small. Where that
    leaves nothing, or exactly is set, the whole input is read for it.
    """
    done, retried = _known_keys(job)
    known, finished = ray.put(done), len(done)
    owed = job.total - finished
    if finished and (exactly or owed <= 0):
        n = job.config.sampling.n
        calls = [(file, job.config.input, job.scan.duplicates, known, n) for file in job.scan.files]
        owed = sum(_on_cluster(count_owed, calls))
    return Work(known, ray.put(retried), finished, owed)


def _known_keys(job: Job) -> tuple[np.ndarray, np.ndarray]:
    """Keys of the rows that stay, and of those that are decoded again."""
    none = np.empty(0, np.uint64)
    if job.config.output.overwrite:
        return none, none
    done = job.folder.finished_keys()
    if not job.config.resume.retry_errors:
        return done, none
    failed = job.folder.failed_keys()
    return np.delete(done, np.searchsorted(done, failed)), failed


def _on_cluster(function: Callable[..., _T], calls: Sequence[tuple[Any, ...]]) -> list[_T]:
    """One light task a call, results in order; a ConfigError of a task is raised as itself."""
    task = ray.remote(num_cpus=LIGHT_CPUS)(function)
    try:
        return ray.get([task.remote(*arguments) for arguments in calls])
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ConfigError):
            raise error.cause from None
        raise


def finish_job(
    job: Job, about: Mapping[str, Any], console: Console, decoder: Callable[[Plan], Decoder] = EngineDecoder
) -> dict[str, Any]:
    """run_job, and again on the nodes that are left whenever some went away. Raises RunError, and ConfigError where
    they cannot hold an actor."""
    while True:
        try:
            return run_job(job, about, console, decoder)
        except LostNodesError as error:
            logger.warning("%s; going on with the nodes that are left", error)
        job = check_job(continued(job.plan, cluster_nodes()))


def run_job(
    job: Job, about: Mapping[str, Any], console: Console, decoder: Callable[[Plan], Decoder] = EngineDecoder
) -> dict[str, Any]:
    """Decode, write, account, report; returns the report's summary. about: machine and versions, for run.json.
    decoder: makes what each actor process decodes with.

    Raises RunError when rows are missing at the end, when the output place fails, or when another start of the run has
    taken the folder.
    """
    began = time.time()
    try:
        run = job.folder.claim(
            {
                "status": "running",
                "fingerprint": job.plan.fingerprint(),
                "config": scrub(job.plan.resolved()),
                **about,
                "started_at": began,
            }
        )
        try:
            return _run_claimed(job, run, console, decoder)
        except (RunError, OSError, KeyboardInterrupt) as error:
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "broken"
            with contextlib.suppress(OSError):  # where the place is what broke, the first error says more
                if read_attempt(job.folder.place) == run["attempt"]:
                    job.folder.write_run(run | {"status": status})
            raise
    except OSError as error:
        reason = f"{job.folder.place.uri} failed: {error}"
        raise RunError(f"{reason}; when that is mended, the same command continues it") from error


def _run_claimed(job: Job, run: dict[str, Any], console: Console, decoder: Callable[[Plan], Decoder]) -> dict[str, Any]:
    if job.config.output.overwrite:
        job.folder.clear()
    job.folder.tidy()
    work = count_work(job)  # after the claim: from here on nobody else adds rows
    if not job.scan.total:
        logger.warning("input.path: no rows in %s", ", ".join(job.config.input.path))
    found, written = Found(asked=job.total), 0
    if work.owed:
        census = on_this_node(Census)
        written = _decode_owed(job, work, census, run["attempt"], console, decoder)
        found = ray.get(census.total.remote())
    totals = _settle(job, found, written)
    stale = totals.rows - found.asked
    if stale:
        logger.warning(
            "%d rows in %s are not of this input (edited, removed, beyond input.limit or sampling.n); they stay",
            stale,
            job.folder.place.uri,
        )
    run["counts"] = {
        "input_rows": job.scan.total,
        "samples": job.config.sampling.n,
        "already_done": found.asked - found.owed,
        "rows": totals.rows,
        "not_in_input": stale,
        "failed": totals.failed,
        "shards": len(shards(job.folder.data)),
    }
    run |= {"status": "finished", "wall_s": time.time() - run["started_at"]}
    summary = summarize(totals, run=run)
    job.folder.write_report(*build_report(summary))
    job.folder.write_run(run)
    return summary


def _decode_owed(
    job: Job, work: Work, census: Any, attempt: str, console: Console, decoder: Callable[[Plan], Decoder]
) -> int:
    """Decode and write what the folder lacks; how many rows were written."""
    board = on_this_node(Board, unwritten_rows(job.config))
    try:
        rows = decode(read(job.scan, job.plan, work.done, census), job.plan, board, decoder)
        shards_written = write(rows, job.folder.place.uri, attempt, job.config, work.retried, board)
        with show_progress(lambda: ray.get(board.total.remote(), timeout=5), work.owed, console):
            return _rows_written(shards_written, job.plan)
    finally:
        ray.kill(board)  # actors that still wait for its word would keep their CPUs from what follows


def _rows_written(shards_written: Dataset, plan: Plan) -> int:
    """Run the Dataset to its end. Raises RunError."""
    nodes, written = alive_nodes(), 0
    try:
        with room_for(plan):
            for shard in shards_written.iter_rows():
                logger.debug("wrote %s: %d rows, %d failed", shard["shard"], shard["rows"], shard["failed"])
                written += shard["rows"]
    except (ray.exceptions.RayError, NoRoomError) as error:
        lost = nodes - alive_nodes()
        if lost and LostFolderError.__name__ not in str(error):
            raise LostNodesError(f"{len(lost)} node(s) went away: {_why(error)}") from error
        raise RunError(_why(error)) from error
    return written


def _why(error: Exception) -> str:
    """One line for a job that Ray ended: this project's own words or the first exception of the remote traceback, and
    what to do."""
    raised = re.findall(r"^(?:[\w.]+\.)?(\w+(?:Error|Exception|Interrupt)): (.+)$", str(error), flags=re.MULTILINE)
    own = dict(raised)
    if LostFolderError.__name__ in own:
        return own[LostFolderError.__name__]
    kind, message = raised[0] if raised else (type(error).__name__, str(error).strip().partition("\n")[0])
    reason = own.get(ActorStartError.__name__, f"{kind}: {message}")
    return f"the job broke off: {reason}; when that is mended, the same command continues it"


def _settle(job: Job, found: Found, written: int) -> Totals:
    """Totals of all rows of the output, each once. Raises RunError when rows are missing."""
    job.folder.put_in_retried()
    data, schema = job.folder.data, output_schema(job.config.input.keep_columns)
    if not shards(data):
        write_shard(data, schema.empty_table())  # readers find the schema also where there are no rows
    totals, twice = count_output(data)
    if len(twice):
        logger.warning("an earlier, killed start wrote to its last; %d rows taken out", remove_doubles(data, twice))
        totals, _ = count_output(data)
    unread = job.total - found.asked  # below 0: the input grew meanwhile
    missing = max(unread, 0) + max(found.owed - written, 0)
    if missing:
        raise RunError(f"{missing} of {job.total} rows are missing; run the same command again")
    return totals


def count_output(data: Place) -> tuple[Totals, np.ndarray]:
    """Totals of all shards, one shard in memory at a time, and the keys that stand twice."""
    totals, keys = Totals(), Keys()
    for _, table in read_shards(data, ["row_key", *REPORT_COLUMNS]):
        totals.add(table)
        keys.add(table["row_key"])
    return totals, doubled(keys.sorted())
