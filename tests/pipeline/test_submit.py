"""The documented way onto a cluster, for real: a head, `ray job submit --working-dir .`, Parquet out."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from common import ROOT
from helpers import prompts, write_jsonl

RAY = str(Path(sys.executable).with_name("ray"))
START_TIMEOUT_S = 90


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def environment() -> dict[str, str]:
    """A user's shell with the virtual environment active; not the session's own Ray."""
    kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return {**kept, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"}


@pytest.fixture
def head(environment: dict[str, str]) -> Iterator[str]:
    """`ray start --head` with ports of its own; yields the address for job submission."""
    temporary = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: Ray puts sockets below it
    port, dashboard, agent, client = (free_port() for _ in range(4))
    arguments = [RAY, "start", "--head", "--block", "--num-cpus=4", "--disable-usage-stats", f"--port={port}"]
    arguments += ["--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", f"--temp-dir={temporary}"]
    arguments += [f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}"]
    with Path(temporary, "head.log").open("wb") as log:
        process = subprocess.Popen(arguments, env=environment, stdout=log, stderr=log, start_new_session=True)
    address = f"http://127.0.0.1:{dashboard}"
    try:
        wait_for(address, process, Path(temporary, "head.log"))
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(temporary, ignore_errors=True)


def wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"{address}/api/jobs/", timeout=2):
                return
        except OSError:
            time.sleep(0.3)
    pytest.fail(f"no job server at {address}: {log.read_text()}")


@pytest.mark.timeout(400)
def test_submitted_job(head: str, environment: dict[str, str], tiny_checkpoint: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", prompts(10))
    settings = {
        "input.path": tmp_path / "in.jsonl",
        "output.path": tmp_path / "out",
        "model.path": tiny_checkpoint,
        "model.dtype": "float64",
        "sampling.max_new_tokens": 8,
    }
    overrides = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    submit = [RAY, "job", "submit", "--address", head, "--working-dir", ".", "--submission-id", "first", "--"]
    command = ["python", "-m", "jobs.generate", "--config", "configs/demo.yaml", *overrides]
    done = subprocess.run([*submit, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = pq.read_table(tmp_path / "out" / "data").to_pylist()
    assert sorted(row["row_id"] for row in rows) == sorted(row["id"] for row in prompts(10))
    assert all(row["exact_match"] for row in rows)
    assert "10/10" in done.stdout
    assert json.loads((tmp_path / "out" / "run.json").read_text())["config"]["engine"]["threads"] == 2

    refused = [*submit[:-2], "second", "--", *command, "--set", "sampling.seed=1"]
    again = subprocess.run(refused, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert again.returncode == 1
    assert "sampling.seed: 0 -> 1" in again.stdout + again.stderr
    with urllib.request.urlopen(f"{head}/api/jobs/second", timeout=10) as answer:
        assert json.load(answer)["driver_exit_code"] == 2
