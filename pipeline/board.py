"""The one small Ray actor that a job's processes report to: what is done (progress), what is in hand (ledger) and
what no shard holds yet (lag).

It runs on the driver's node, whose end is the job's end anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.lag import Lag, RowKey
from pipeline.ledger import Claim, Ledger, Process
from pipeline.nodes import alive_nodes
from pipeline.progress import Tally


def on_this_node(kind: Callable[..., Any], *arguments: Any) -> Any:
    """A handle of a new actor beside the caller, who loses it to no other node's end."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=here)(kind).remote(*arguments)


class Board:
    """The Ray actor's class. A late or lost report of an end costs a late number, or a row decoded alone in vain.

    unwritten: how many rows may be taken and in no shard (None: nobody tells what is written).
    """

    def __init__(self, unwritten: int | None = None) -> None:
        self._total = Tally()
        self._lag = Lag(unwritten)
        self._ledger = Ledger(alive_nodes)

    def started(self, process: Process) -> int:
        return self._ledger.started(process)

    def claim(self, process: Process, batch: Collection[RowKey], decoded: Iterable[RowKey]) -> Claim | None:
        """Take a batch, of which only the rows `decoded` are decoded; None: not yet, ask again."""
        return self._ledger.claim(process, decoded) if self._lag.take(batch) else None

    def written(self, rows: Collection[RowKey]) -> None:
        """A shard holds these."""
        self._lag.written(rows)

    def alone(self, process: Process, row: RowKey) -> None:
        self._ledger.alone(process, row)

    def ended(self, process: Process, rows: Iterable[RowKey], tally: Tally) -> None:
        """Rows that were decoded; tally: what they and those that were not add."""
        for row in rows:
            self._ledger.ended(process, row)
        self._total.add(tally)

    def total(self) -> Tally:
        return self._total
