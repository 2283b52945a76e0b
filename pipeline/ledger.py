"""Which rows are in the hands of which process, so that a row that ends its process is found and its neighbours are not
blamed.

A process claims rows before it decodes them and reports each one's end. Ray restarts a process that died, and hands it
the same rows again: those that were in its hands are suspects, and a suspect is decoded with nothing beside it. A row
whose process dies while it is decoded alone has done it: after DEATHS_ALONE of these it is condemned. Only memory: a
restarted driver learns again. What is kept is bounded by the rows in hand, and those condemned: Ray may bring these
again with their batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from pipeline.lag import RowKey

DEATHS_ALONE = 2  # one could be an outside kill (OOM killer, operator) that hit an innocent row
DEATHS_IN_A_ROW = 5  # of one actor, without any row ended; a row that kills explains two, and is condemned by the third


@dataclass(frozen=True)
class Process:
    """One start of a Ray actor. actor: its id, the same after a restart; start: this process's own."""

    actor: str
    start: str
    node: str


@dataclass(frozen=True)
class Claim:
    """The answer to a claim: rows to be decoded alone, and rows not to be decoded any more. The others are free."""

    suspects: frozenset[RowKey] = frozenset()
    condemned: frozenset[RowKey] = frozenset()


@dataclass
class _Actor:
    process: Process
    rows: set[RowKey] = field(default_factory=set)  # in hand
    alone: RowKey | None = None
    deaths: int = 0  # in a row, without any row ended or condemned in between


class Ledger:
    """alive_nodes: ids of the nodes that are there now. A process that dies with its node blames no row."""

    def __init__(self, alive_nodes: Callable[[], Collection[str]]) -> None:
        self._alive_nodes = alive_nodes
        self._actors: dict[str, _Actor] = {}
        self._deaths: dict[RowKey, int] = {}  # suspects: how often their process died while they were decoded alone

    def started(self, process: Process) -> int:
        """A process of a Ray actor starts, so its last one is dead. Returns the actor's deaths in a row."""
        last = self._actors.get(process.actor)
        actor = self._actors[process.actor] = _Actor(process)
        if last is None:
            return 0
        if last.process.node not in self._alive_nodes():
            actor.deaths = last.deaths
        elif not self._condemns(last):
            actor.deaths = last.deaths + 1
        return actor.deaths

    def _condemns(self, dead: _Actor) -> bool:
        """Blame rows for a death; whether one of them is condemned by it."""
        if dead.alone is None:
            for row in dead.rows:
                self._deaths.setdefault(row, 0)
            return False
        self._deaths[dead.alone] += 1  # the others only waited for their turn
        return self._deaths[dead.alone] == DEATHS_ALONE

    def claim(self, process: Process, rows: Iterable[RowKey]) -> Claim:
        """Take rows in hand."""
        rows = frozenset(rows)
        self._actors[process.actor].rows |= rows
        condemned = frozenset(row for row in rows if self._deaths.get(row, 0) >= DEATHS_ALONE)
        return Claim(frozenset(row for row in rows if row in self._deaths) - condemned, condemned)

    def alone(self, process: Process, row: RowKey) -> None:
        """A suspect is decoded from now on, and nothing else is."""
        self._actors[process.actor].alone = row

    def ended(self, process: Process, row: RowKey) -> None:
        """A row that was decoded has its output, be it an error row."""
        self._deaths.pop(row, None)
        actor = self._actors[process.actor]
        if actor.process == process:  # else a late word of a dead one
            actor.rows.discard(row)
            actor.deaths = 0
            actor.alone = None if actor.alone == row else actor.alone
