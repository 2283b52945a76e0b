"""Nodes that go: who is there, and what becomes of actors whose node has gone.

Ray starts such an actor on another node. Where none has room it waits, and the rows in its hands with it, for ever; or
it takes the CPUs that reading and writing need, and all wait. So when the nodes that are left cannot hold what was
planned, and no new one comes for a while, these actors are ended: the job breaks off there, and goes on from its shards
with as many actors as fit.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from pipeline.plan import Node, Plan, room

logger = logging.getLogger(__name__)

POLL_S = 5.0
PATIENCE_S = 30.0  # for a new node


def alive_nodes() -> set[str]:
    """Ids of the cluster's nodes."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def cluster_nodes() -> list[Node]:
    """Logical resources of the running cluster's nodes."""
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Node(float(each.get("CPU", 0)), float(each.get("GPU", 0))) for each in alive]


@contextmanager
def end_displaced(board: Any, plan: Plan) -> Iterator[None]:
    """While the body runs, end actors that have lost their node if the others cannot hold the plan."""
    stop = threading.Event()
    thread = threading.Thread(target=_watch, args=(board, plan, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _watch(board: Any, plan: Plan, stop: threading.Event) -> None:
    waited = 0.0
    while not stop.wait(POLL_S):
        waited = waited + POLL_S if room(plan, cluster_nodes()) < plan.config.cluster.least else 0.0
        if waited >= PATIENCE_S:
            _end(ray.get(board.displaced.remote()))
            return


def _end(names: list[str]) -> None:
    logger.warning("the nodes that are left cannot hold this job's actors; ending %d that lost their node", len(names))
    for name in names:
        try:
            ray.kill(ray.get_actor(name), no_restart=True)
        except ValueError:  # it has ended by itself
            logger.debug("%s has gone", name)
