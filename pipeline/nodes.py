"""Nodes that go: who is there, and when the rest cannot hold a job any more.

Ray starts an actor that has lost its node on another. Where none has room it waits, and the rows in its hands with it,
for ever; or it takes the CPUs that reading and writing need, and all wait. So when the nodes that are left cannot hold
what was planned, and no new one comes for a while, the job breaks off, and goes on from its shards with as many actors
as fit.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

import ray

from pipeline.beside import beside
from pipeline.plan import Node, Plan, room

POLL_S = 5.0
PATIENCE_POLLS = 6  # for a new node
_SIGNAL = signal.SIGUSR1


class NoRoomError(RuntimeError):
    """The nodes that are left cannot hold the plan's actors."""


def alive_nodes() -> set[str]:
    """Ids of the cluster's nodes."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def cluster_nodes() -> list[Node]:
    """Logical resources of the running cluster's nodes."""
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Node(float(each.get("CPU", 0)), float(each.get("GPU", 0))) for each in alive]


@contextmanager
def room_for(plan: Plan) -> Iterator[None]:
    """Raises NoRoomError in the body, which the main thread runs, once the plan has had no room for PATIENCE_POLLS.

    By a signal, as Ctrl-C does: a Dataset that is being iterated over has no other way to be stopped from outside.
    """

    def give_up(*_: object) -> NoReturn:
        raise NoRoomError(f"no room for {plan.config.cluster.least} actor(s) on the nodes that are left")

    before = signal.signal(_SIGNAL, give_up)
    try:
        with beside(partial(_watch, plan)):
            yield
    finally:
        signal.signal(_SIGNAL, before)


def _watch(plan: Plan, stop: threading.Event) -> None:
    waited = 0
    while not stop.wait(POLL_S):
        waited = waited + 1 if room(plan, cluster_nodes()) < plan.config.cluster.least else 0
        if waited == PATIENCE_POLLS:
            os.kill(os.getpid(), _SIGNAL)
