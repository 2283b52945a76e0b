"""The one small Ray actor that a job's processes report to: what is done (progress) and what is in hand (ledger).

It runs on the driver's node, whose end is the job's end anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.ledger import Claim, Ledger, Process, RowKey
from pipeline.nodes import alive_nodes
from pipeline.progress import Tally


def on_this_node(kind: Callable[[], Any]) -> Any:
    """A handle of a new actor beside the caller, who loses it to no other node's end."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=here)(kind).remote()


class Board:
    """The Ray actor's class. A late or lost report of an end costs a late number, or a row decoded alone in vain."""

    def __init__(self) -> None:
        self._total = Tally()
        self._ledger = Ledger(alive_nodes)

    def started(self, process: Process) -> int:
        return self._ledger.started(process)

    def claim(self, process: Process, rows: Iterable[RowKey]) -> Claim:
        return self._ledger.claim(process, rows)

    def alone(self, process: Process, row: RowKey) -> None:
        self._ledger.alone(process, row)

    def ended(self, process: Process, rows: Iterable[RowKey], tally: Tally) -> None:
        """Rows that were decoded; others are only added."""
        for row in rows:
            self._ledger.ended(process, row)
        self.add(tally)

    def add(self, tally: Tally) -> None:
        self._total.add(tally)

    def total(self) -> Tally:
        return self._total
