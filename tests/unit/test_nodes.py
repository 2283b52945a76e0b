"""A job whose actors have no room any more is stopped, after a while, wherever it waits."""

from __future__ import annotations

import itertools
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline import nodes
from pipeline.nodes import NoRoomError, room_for

PLAN: Any = SimpleNamespace(config=SimpleNamespace(cluster=SimpleNamespace(least=2)))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "POLL_S", 0.01)
    monkeypatch.setattr(nodes, "cluster_nodes", list)


def test_no_room_for_a_while_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    monkeypatch.setattr(nodes, "room", lambda plan, nodes: 1)
    with pytest.raises(NoRoomError, match=r"no room for 2 actor\(s\)"), room_for(PLAN):
        time.sleep(20)
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_new_node_in_time_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = itertools.cycle([1, 1, 1, 2])
    asked: list[int] = []
    monkeypatch.setattr(nodes, "room", lambda plan, nodes: asked.append(next(rooms)) or asked[-1])
    with room_for(PLAN):
        deadline = time.monotonic() + 20
        while len(asked) < 20:
            assert time.monotonic() < deadline
            time.sleep(0.01)
