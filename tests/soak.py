"""Long runs that measure what grows with the rows: `make soak` (ARGS='job 1000000' or ARGS='resume 20000000').

job ROWS      ROWS lines of JSONL through the whole job, with a decoder that costs nothing (tests/fake_decoder.py)
resume ROWS   starts a job whose folder holds ROWS finished rows and whose input holds a few more

Both print rows a second and the peak memory of each kind of process (private, and shared: the object store's pages
that it touched), and as the last line one JSON document. `job` also opens the output with pyarrow, pandas, DuckDB and
datasets and counts the rows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from common import ROOT
from tiny_checkpoint import save_tiny_checkpoint

from jobs.generate import DONE
from jobs.runtime import machine, versions
from pipeline.schema import output_schema

SAMPLE_S = 0.5
SHARD_ROWS = 512
SLOTS = 256  # as many as a GPU would have
FINISHED_SHARD_ROWS = 4096  # of the rows that are there already: so many files alone take minutes to write
OWED_ROWS = 100  # of a resumed job


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["job", "resume"])
    parser.add_argument("rows", type=int)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="work there and leave it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work = options.keep or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        result = {"job": soak_job, "resume": soak_resume}[options.what](options.rows, work)
    print(json.dumps({"what": options.what, "rows": options.rows, **result, "machine": machine(), **versions()}))
    return 0


def soak_job(rows: int, work: Path) -> dict[str, Any]:
    """A whole job from an empty folder."""
    write_prompts(work / "in.jsonl", rows)
    wall_s, peaks = measured_job(work)
    counts = {name: count(work / "out" / "data") for name, count in READERS.items()}
    assert set(counts.values()) == {rows}, f"{rows} rows went in, and out came {counts}"
    print(f"{rows:,} rows in {wall_s:.1f} s: {rows / wall_s:,.0f} rows/s; read back by {', '.join(counts)}")
    return {"wall_s": wall_s, "rows_per_s": rows / wall_s, "peak_mib": peaks}


def soak_resume(rows: int, work: Path) -> dict[str, Any]:
    """A job of OWED_ROWS rows, in a folder where `rows` others are done already."""
    write_prompts(work / "in.jsonl", OWED_ROWS)
    none_wall_s, none_peaks = measured_job(work)
    began = time.monotonic()
    write_finished(work / "out" / "data", rows)
    print(f"wrote {rows:,} finished rows in {time.monotonic() - began:.1f} s")
    write_prompts(work / "in.jsonl", OWED_ROWS, first=OWED_ROWS)
    wall_s, peaks = measured_job(work)
    print(f"a start on {rows:,} finished rows: {wall_s:.1f} s, and {none_wall_s:.1f} s on none")
    return {"wall_s": wall_s, "peak_mib": peaks, "wall_s_on_none": none_wall_s, "peak_mib_on_none": none_peaks}


def write_prompts(file: Path, rows: int, first: int = 0) -> None:
    with file.open("w", encoding="utf-8") as stream:
        for index in range(first, first + rows):
            stream.write(json.dumps({"id": f"row-{index}", "prompt": f"Prompt {index}: tell me more."}) + "\n")


def write_finished(data: Path, rows: int) -> None:
    """Shards with random keys and nothing else of weight."""
    schema = output_schema({})
    draw = np.random.default_rng(0)
    for start in range(0, rows, FINISHED_SHARD_ROWS):
        count = min(FINISHED_SHARD_ROWS, rows - start)
        keys = draw.integers(0, 2**64, count, dtype=np.uint64)
        columns = {
            "row_id": pa.repeat("", count),
            "row_key": pa.array(keys),
            "source_file": pa.repeat("in.jsonl", count),
            "row_index": pa.array(np.arange(start, start + count)),
            "sample_index": pa.repeat(pa.scalar(0, pa.int32()), count),
            "finish_reason": pa.repeat("length", count),
        }
        arrays = [columns[field.name] if field.name in columns else pa.nulls(count, field.type) for field in schema]
        pq.write_table(pa.Table.from_arrays(arrays, schema=schema), data / f"part-{start:032x}.parquet")


def measured_job(work: Path) -> tuple[float, dict[str, Any]]:
    """Run the job in a process of its own; wall seconds, and the peak memory of each kind of process in MiB."""
    if not (work / "model").exists():
        save_tiny_checkpoint(work / "model")
    config = {
        "input": {"path": str(work / "in.jsonl"), "prompt_column": "prompt", "id_column": "id"},
        "output": {"path": str(work / "out"), "rows_per_file": SHARD_ROWS},
        "model": {"path": str(work / "model"), "device": "cpu"},
        "sampling": {"max_new_tokens": 16},
        "engine": {"slots": SLOTS, "threads": 1},
        "compare": {"fraction": 0.0},
    }
    file = work / "config.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [sys.executable, str(ROOT / "tests" / "fake_job.py"), "instant", "0", "--config", str(file)]
    began = time.monotonic()
    with (work / "job.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment())
        peaks = watch(process)
    wall_s = time.monotonic() - began
    if process.returncode != DONE:
        raise SystemExit(f"the job ended with {process.returncode}:\n{(work / 'job.log').read_text()[-4000:]}")
    for kind, peak in sorted(peaks.items()):
        memory = f"{peak['private']:>5,} MiB private, {peak['shared']:>5,} MiB shared"
        print(f"  {kind:<40} {peak['processes']:>3} at most, each up to {memory}; {peak['cpu_s']:>6.0f} CPU s together")
    return wall_s, peaks


def environment() -> dict[str, str]:
    """The job's own Ray, whichever runs here, and this source tree for its workers."""
    mine = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "RAY_AUTH_MODE": "disabled"}
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | mine


def watch(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Peak memory and CPU time of the process and its descendants, by kind, until it ends."""
    nothing = {"processes": 0, "private": 0, "shared": 0, "cpu_s": 0.0}
    peaks: dict[str, dict[str, float]] = defaultdict(nothing.copy)
    last_cpu_s: dict[int, float] = {}
    while process.poll() is None:
        running: Counter[str] = Counter()
        for pid in descendants(process.pid):
            if (found := look_at(pid)) is None:
                continue
            kind = "driver" if pid == process.pid else found.kind
            running[kind] += 1
            peak = peaks[kind]
            peak["processes"] = max(peak["processes"], running[kind])
            peak["private"] = max(peak["private"], found.private)
            peak["shared"] = max(peak["shared"], found.shared)
            peak["cpu_s"] += found.cpu_s - last_cpu_s.get(pid, 0.0)  # a worker's kind changes with its task
            last_cpu_s[pid] = found.cpu_s
        time.sleep(SAMPLE_S)
    return dict(peaks)


def descendants(root: int) -> Iterator[int]:
    parents: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):  # ended meanwhile
            continue
    found = [root]
    for pid in found:
        yield pid
        found += [child for child, parent in parents.items() if parent == pid]


@dataclass(frozen=True)
class Process:
    """What a running process takes; memory in MiB."""

    kind: str
    private: int
    shared: int
    cpu_s: float


def look_at(pid: int) -> Process | None:
    """None when it has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        status, stat = (folder / "status").read_text(), (folder / "stat").read_text()
        title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return None
    sizes = {name: int(kib) // 1024 for name, kib in re.findall(r"^(Rss\w+):\s+(\d+) kB", status, re.MULTILINE)}
    if not sizes:  # a zombie
        return None
    kind = re.split(r"[ (\[.]", title)[0] if title.startswith("ray::") else Path(title.split(" ")[0]).name
    if kind.startswith("python") and (script := re.search(r"(\w+)\.py", title)):
        kind = script[1]
    user, system = stat.rpartition(")")[2].split()[11:13]
    cpu_s = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return Process(kind, sizes.get("RssAnon", 0), sizes.get("RssShmem", 0), cpu_s)


def _duckdb_rows(data: Path) -> int:
    import duckdb

    return int(duckdb.sql(f"SELECT count(*) FROM read_parquet('{data}/*.parquet')").fetchall()[0][0])


def _datasets_rows(data: Path) -> int:
    import datasets

    with tempfile.TemporaryDirectory() as cache:
        return len(datasets.load_dataset("parquet", data_dir=str(data), split="train", cache_dir=cache))


def _pandas_rows(data: Path) -> int:
    import pandas as pd

    return len(pd.read_parquet(data, columns=["row_id", "text"]))


READERS: dict[str, Callable[[Path], int]] = {
    "pyarrow": lambda data: pq.read_table(data, columns=["row_id", "text"]).num_rows,
    "pandas": _pandas_rows,
    "DuckDB": _duckdb_rows,
    "datasets": _datasets_rows,
}


if __name__ == "__main__":
    sys.exit(main())
