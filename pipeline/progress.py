"""What the run has done so far: actors report to pipeline.board, the driver polls it.

Counts here are for people watching; the report's figures come from the output's rows. A lost message costs nothing
but a late number.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pipeline.beside import beside

logger = logging.getLogger(__name__)

POLL_S = 1.0
LINE_EVERY_S = 10.0


@dataclass(slots=True)
class Tally:
    """Sums over finished rows; tokens are the main method's output tokens, committed those of its decode calls."""

    rows: int = 0
    failed: int = 0
    tokens: int = 0
    committed: int = 0
    decode_calls: int = 0

    def add(self, other: Tally) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


@dataclass(frozen=True)
class Moment:
    """A reading of the board, `elapsed` seconds into the run."""

    tally: Tally
    elapsed: float
    expected: int  # rows this run owes

    @property
    def tokens_per_s(self) -> float:
        return self.tally.tokens / self.elapsed if self.elapsed else 0.0

    @property
    def tau(self) -> float | None:
        return self.tally.committed / self.tally.decode_calls if self.tally.decode_calls else None

    @property
    def seconds_left(self) -> float | None:
        left = max(self.expected - self.tally.rows, 0)  # rows of a task that Ray ran again count twice
        return left * self.elapsed / self.tally.rows if self.tally.rows else None

    def line(self) -> str:
        """One plain line for logs."""
        left = "?" if self.seconds_left is None else f"{self.seconds_left:.0f} s"
        tau = "-" if self.tau is None else f"{self.tau:.2f}"
        return (
            f"rows {self.tally.rows}/{self.expected}  tokens/s {self.tokens_per_s:.1f}  tau {tau}  "
            f"failed {self.tally.failed}  left {left}"
        )


@contextmanager
def show_progress(read: Callable[[], Tally], expected: int, console: Console) -> Iterator[None]:
    """Show progress while the body runs: a live bar on a terminal, a plain log line every 10 s elsewhere."""
    with beside(partial(_live if console.is_terminal else _lines, read, expected, console)):
        yield


def _moments(read: Callable[[], Tally], expected: int, every: float, stop: threading.Event) -> Iterator[Moment]:
    """A reading every `every` seconds, and a last one at the end."""
    began = time.monotonic()
    ended = False
    while not ended:
        ended = stop.wait(every)
        try:
            tally = read()
        except Exception as error:  # watching must never end the run
            logger.debug("no progress reading: %s", error)
            continue
        yield Moment(tally, time.monotonic() - began, expected)


def _lines(read: Callable[[], Tally], expected: int, console: Console, stop: threading.Event) -> None:
    for moment in _moments(read, expected, LINE_EVERY_S, stop):
        logger.info(moment.line())


def _live(read: Callable[[], Tally], expected: int, console: Console, stop: threading.Event) -> None:
    columns: list[Any] = [
        TextColumn("rows {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=console, transient=False) as bar:
        task = bar.add_task("rows", total=expected, detail="loading the model")
        for moment in _moments(read, expected, POLL_S, stop):
            tau = "" if moment.tau is None else f"  tau {moment.tau:.2f}"
            detail = f"{moment.tokens_per_s:.1f} tokens/s{tau}  failed {moment.tally.failed}"
            bar.update(task, completed=moment.tally.rows, detail=detail)
