"""The fake job as a process of its own: to send signals to, and to see that nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from common import ROOT

MARK = "ESPSTREAM_TEST_MARK"


class FakeJob:
    """tests/fake_job.py. Every process that it starts, Ray's too, carries its mark."""

    def __init__(
        self, config: Path, log: Path, output: Path, takes: float | str, environment: Mapping[str, str] | None = None
    ) -> None:
        """log: the decoder's folder. output: a file for what the command prints. takes: seconds a row, or `real`."""
        self.mark = f"{os.getpid()}-{time.time_ns()}"
        paths = [str(ROOT), str(ROOT / "tests")]
        given = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        given |= {"PYTHONPATH": os.pathsep.join(paths), MARK: self.mark, **(environment or {})}
        arguments = [
            sys.executable,
            str(ROOT / "tests" / "fake_job.py"),
            str(log),
            str(takes),
            "--config",
            str(config),
        ]
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                arguments, cwd=ROOT, env=given, stdout=file, stderr=file, start_new_session=True
            )

    def signal(self, number: signal.Signals) -> None:
        """To the driver alone."""
        self.process.send_signal(number)

    def wait(self, timeout: float) -> int:
        return self.process.wait(timeout)

    def wait_for_shards(self, data: Path, count: int) -> None:
        """Until the folder has so many, or the job has ended."""
        wait_for(lambda: len(list(data.glob("part-*"))) >= count or self.process.poll() is not None, 300)

    def wait_for_the_end_of_all(self) -> None:
        """Until no process carries the mark."""
        wait_for(lambda: not list(marked(self.mark)), 60)


def marked(mark: str) -> Iterator[int]:
    """Processes whose environment has the mark; zombies have none."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)
        except OSError:  # it has ended, or is another user's
            continue


def wait_for(condition: Callable[[], object], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout} s")
        time.sleep(0.05)
