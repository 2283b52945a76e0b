"""Which sequence stands in which slot of the cache, and which tokens' KV the slots still hold.

Running sequences fill slots 0..B-1; the one that is being prefilled, if any, has slot B. A slot remembers its prompt's
tokens also when its sequence has gone, until another overwrites them: a prompt that begins like one of these (a system
prompt, few-shot examples, another sample of the same prompt) takes that KV over and prefills only the rest.
"""

from __future__ import annotations

import numpy as np

from esp_worker.cache import SlotCache
from esp_worker.sequence import ActiveSequence

_NOTHING = np.empty(0, np.int64)


class SlotTable:
    """The slots of one cache. Holds no policy: the engine decides who comes and goes."""

    def __init__(self, cache: SlotCache) -> None:
        self.cache = cache
        self.running: list[ActiveSequence] = []
        self.filling: ActiveSequence | None = None
        self.context = _NOTHING  # tokens of the filling sequence's
        self._held = [_NOTHING] * cache.slots  # tokens of the columns [0, n) of each slot

    @property
    def sequences(self) -> list[ActiveSequence]:
        """All that occupy a slot, by slot."""
        return self.running if self.filling is None else [*self.running, self.filling]

    @property
    def free(self) -> int:
        return self.cache.slots - len(self.sequences)

    def place(self, sequence: ActiveSequence, reuse: bool) -> None:
        """Give `sequence` the next slot; with `reuse`, with as much of its context's KV as another slot holds.

        At least one token is left to prefill: its row gives the next token.
        """
        assert self.filling is None
        assert self.free
        slot, tokens = len(self.running), np.array(sequence.context, np.int64)
        source, shared = slot, 0
        for each, held in enumerate(self._held if reuse else []):
            common = min(_common_prefix(held, tokens), len(tokens) - 1)
            if common > shared or (common == shared and each == slot):
                source, shared = each, common
        if shared and source != slot:
            self._copy(source, slot, shared)
        self._held[slot] = tokens[:shared]
        self.context = tokens
        sequence.filled = shared
        sequence.stats.cached_tokens += shared
        self.filling = sequence

    def fill(self, tokens: int) -> None:
        """The next `tokens` of the filling sequence's context have been computed."""
        assert self.filling is not None
        self.filling.filled += tokens
        self._held[len(self.running)] = self.context[: self.filling.filled]

    def start(self) -> None:
        """The filling sequence's context is whole: it runs."""
        assert self.filling is not None
        self.running.append(self.filling)
        self.filling = None

    def remove(self, sequence: ActiveSequence) -> None:
        """Free a sequence's slot. The last running one moves into the gap, the filling one behind it.

        When a copy fails, no sequence has gone.
        """
        if sequence is self.filling:
            self.filling = None
            return
        slot, last = self.running.index(sequence), len(self.running) - 1
        if slot != last:
            self._copy(last, slot, self.running[last].length)
        if self.filling is not None:
            self._copy(last + 1, last, self.filling.filled)
        self.running[slot] = self.running[last]
        self.running.pop()

    def _copy(self, source: int, target: int, length: int) -> None:
        self._held[target] = _NOTHING  # should the copy fail half-way
        self.cache.copy(source, target, length)
        self._held[target] = self._held[source][:length]

    def resize(self, slots: int, columns: int) -> None:
        """Another number of slots, enough for all that occupy one, and of columns."""
        assert len(self.sequences) <= slots
        self.cache.resize(slots, columns)
        self._held = [held[:columns] for held in self._held[:slots]] + [_NOTHING] * (slots - len(self._held))

    def clear(self) -> list[ActiveSequence]:
        """Take every sequence out; returns them by slot."""
        sequences, self.running, self.filling = self.sequences, [], None
        return sequences


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading tokens two sequences share."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length
