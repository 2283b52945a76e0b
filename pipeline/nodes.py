"""Nodes that go: who is there, and what becomes of actors whose node has gone.

Ray starts such an actor on another node, and where none has room it waits, and the rows in its hands wait with it, for
ever. As long as others get on that is no harm, and a new node may come. When nothing else is left to do, it is ended:
the job breaks off there and goes on, from its shards, with as many actors as the remaining nodes hold.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from pipeline.progress import Tally

logger = logging.getLogger(__name__)

POLL_S = 5.0
PATIENCE_S = 60.0  # without a row done anywhere, while an actor has no node


def alive_nodes() -> set[str]:
    """Ids of the cluster's nodes."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


@contextmanager
def end_homeless(board: Any) -> Iterator[None]:
    """While the body runs, end actors that have lost their node once all waits for them."""
    stop = threading.Event()
    thread = threading.Thread(target=_watch, args=(board, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _watch(board: Any, stop: threading.Event) -> None:
    waited, last = 0.0, Tally()
    while not stop.wait(POLL_S):
        try:
            tally, homeless = ray.get([board.total.remote(), board.homeless.remote()], timeout=POLL_S)
        except ray.exceptions.RayError as error:  # the board is busy, or gone with its job
            logger.debug("no reading of the board: %s", error)
            continue
        waited = waited + POLL_S if homeless and tally == last else 0.0
        last = tally
        if waited >= PATIENCE_S:
            _end(homeless)
            return


def _end(names: list[str]) -> None:
    for name in names:
        logger.warning("an actor has lost its node, and no other has room for it: its rows are given to others")
        try:
            ray.kill(ray.get_actor(name), no_restart=True)
        except ValueError:  # it has ended by itself
            logger.debug("%s has gone", name)
