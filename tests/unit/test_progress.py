"""What people see while a run goes on: sums, the line for logs, and a display that never harms the run."""

from __future__ import annotations

import io
import logging
import re
import threading
import time
from collections.abc import Callable

import pytest
from rich.console import Console

from pipeline import progress
from pipeline.progress import Moment, Tally, show_progress


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.01)
    monkeypatch.setattr(progress, "POLL_S", 0.01)
    caplog.set_level(logging.INFO, logger="pipeline.progress")


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# ---------------------------------------------------------------------------------------------------------- numbers


def test_tallies_add_up() -> None:
    tally = Tally(1, 2, 3, 4, 5)
    tally.add(Tally(rows=10, failed=20, tokens=30, committed=40, decode_calls=50))
    assert tally == Tally(11, 22, 33, 44, 55)
    tally.add(Tally())
    assert tally == Tally(11, 22, 33, 44, 55)


def test_moment() -> None:
    moment = Moment(Tally(rows=4, failed=1, tokens=90, committed=87, decode_calls=60), elapsed=10.0, expected=10)
    assert moment.tokens_per_s == 9.0
    assert moment.tau == pytest.approx(1.45)
    assert moment.seconds_left == pytest.approx(15.0)
    assert moment.line() == "rows 4/10  tokens/s 9.0  tau 1.45  failed 1  left 15 s"


def test_moment_before_anything_is_known() -> None:
    moment = Moment(Tally(), elapsed=0.0, expected=10)
    assert (moment.tokens_per_s, moment.tau, moment.seconds_left) == (0.0, None, None)
    assert moment.line() == "rows 0/10  tokens/s 0.0  tau -  failed 0  left ?"


def test_moment_of_failures_alone_has_no_tau() -> None:
    assert Moment(Tally(rows=2, failed=2), elapsed=1.0, expected=4).line().endswith("tau -  failed 2  left 1 s")


def test_nothing_is_left_at_the_end_or_after_a_retry() -> None:
    assert Moment(Tally(rows=10), elapsed=5.0, expected=10).seconds_left == 0
    assert Moment(Tally(rows=12), elapsed=5.0, expected=10).seconds_left == 0, "a task that Ray ran twice counts twice"


# ---------------------------------------------------------------------------------------------------------- display


def test_lines_elsewhere_than_on_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    tally, out = Tally(), io.StringIO()
    with show_progress(lambda: tally, 4, Console(file=out)):
        wait_for(lambda: len(caplog.messages) >= 2)
        tally.add(Tally(rows=4, tokens=40, committed=36, decode_calls=18))
    assert out.getvalue() == "", "the log only"
    assert all(re.fullmatch(r"rows \d/4  tokens/s [\d.]+  tau \S+  failed 0  left .+", m) for m in caplog.messages)
    assert not any("\r" in m or "\n" in m or "\x1b" in m for m in caplog.messages)
    assert caplog.messages[0].startswith("rows 0/4")
    assert "rows 4/4" in caplog.messages[-1], "the last reading is the end's"
    assert "tau 2.00" in caplog.messages[-1]


def test_a_short_run_has_its_last_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 1000.0)
    with show_progress(lambda: Tally(rows=1), 1, Console(file=io.StringIO())):
        pass
    assert [message[:8] for message in caplog.messages] == ["rows 1/1"]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_failing_reader_never_breaks_the_run(caplog: pytest.LogCaptureFixture, terminal: bool) -> None:
    calls = []

    def read() -> Tally:
        calls.append(1)
        if len(calls) < 4:
            raise RuntimeError("the board is gone")
        return Tally(rows=3)

    with show_progress(read, 3, Console(file=io.StringIO(), force_terminal=terminal)):
        wait_for(lambda: len(calls) > 5)
    assert caplog.messages == [] if terminal else caplog.messages, "it goes on once the reader does"

    def never() -> Tally:
        raise TimeoutError

    done = False
    with show_progress(never, 3, Console(file=io.StringIO(), force_terminal=terminal)):
        done = True
    assert done


@pytest.mark.parametrize("terminal", [False, True])
def test_the_bodys_error_comes_through_and_the_thread_ends(terminal: bool) -> None:
    before = set(threading.enumerate())
    console = Console(file=io.StringIO(), force_terminal=terminal)
    with pytest.raises(KeyError, match="mine"), show_progress(Tally, 1, console):
        raise KeyError("mine")
    wait_for(lambda: set(threading.enumerate()) <= before)


def test_a_bar_on_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    tally, out = Tally(), io.StringIO()
    with show_progress(lambda: tally, 8, Console(file=out, force_terminal=True, width=120)):
        wait_for(lambda: "rows 0/8" in out.getvalue())
        tally.add(Tally(rows=8, failed=1, tokens=70, committed=60, decode_calls=40))
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", out.getvalue())
    assert "rows 0/8" in shown
    assert "rows 8/8" in shown
    assert "tau 1.50  failed 1" in shown
    assert caplog.messages == []
