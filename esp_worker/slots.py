"""Which sequence stands in which slot of the cache, and which tokens' KV the slots still hold.

Running sequences fill slots 0..B-1, those that are being prefilled the ones behind. A slot remembers its prompt's
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
        self.filling: list[ActiveSequence] = []
        self._held = [_NOTHING] * cache.slots  # tokens of the columns [0, n) of each slot

    @property
    def sequences(self) -> list[ActiveSequence]:
        """All that occupy a slot, by slot."""
        return [*self.running, *self.filling]

    @property
    def free(self) -> int:
        return self.cache.slots - len(self.running) - len(self.filling)

    def coming(self, sequence: ActiveSequence) -> int:
        """How many more tokens `sequence` could take over once those that are being filled are whole."""
        tokens = _tokens(sequence)
        whole = max((_reusable(_tokens(each), tokens) for each in self.filling), default=0)
        return whole - self._source(tokens, len(self.sequences))[1]

    def place(self, sequence: ActiveSequence, reuse: bool) -> None:
        """Give `sequence` the next slot; with `reuse`, with as much of its context's KV as another slot holds.

        At least one token is left to prefill: its row gives the next token.
        """
        assert self.free
        slot, tokens = len(self.sequences), _tokens(sequence)
        source, shared = self._source(tokens, slot) if reuse else (slot, 0)
        if shared and source != slot:
            self._copy(source, slot, shared)
        self._held[slot] = tokens[:shared]
        sequence.filled = shared
        sequence.stats.cached_tokens += shared
        self.filling.append(sequence)

    def _source(self, tokens: np.ndarray, slot: int) -> tuple[int, int]:
        """The slot that holds most of a context's beginning, `slot` itself where no other holds more; how much."""
        source, shared = slot, 0
        for each, held in enumerate(self._held):
            common = _reusable(held, tokens)
            if common > shared or (common == shared and each == slot):
                source, shared = each, common
        return source, shared

    def fill(self, sequence: ActiveSequence, tokens: int) -> None:
        """The next `tokens` of a filling sequence's context have been computed."""
        sequence.filled += tokens
        self._held[len(self.running) + self.filling.index(sequence)] = _tokens(sequence)[: sequence.filled]

    def start(self) -> None:
        """The first of the filling sequences run, as many as have a whole context."""
        while self.filling and self.filling[0].filled == self.filling[0].length:
            self.running.append(self.filling.pop(0))

    def remove(self, sequence: ActiveSequence) -> None:
        """Free a sequence's slot. The last running one moves into the gap, the last filling one behind it.

        When a copy fails, no sequence has gone.
        """
        gap = len(self.running) - 1
        if sequence in self.running:
            slot = self.running.index(sequence)
            if slot != gap:
                self._copy(gap, slot, self.running[gap].length)
            if self.filling:
                self._copy(gap + len(self.filling), gap, self.filling[-1].filled)
                self.filling.insert(0, self.filling.pop())
            self.running[slot] = self.running[gap]
            self.running.pop()
            return
        slot, last = self.filling.index(sequence), len(self.filling) - 1
        if slot != last:
            self._copy(gap + 1 + last, gap + 1 + slot, self.filling[last].filled)
        self.filling[slot] = self.filling[last]
        self.filling.pop()

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
        sequences, self.running, self.filling = self.sequences, [], []
        return sequences


def _tokens(sequence: ActiveSequence) -> np.ndarray:
    return np.array(sequence.context, np.int64)


def _reusable(held: np.ndarray, tokens: np.ndarray) -> int:
    """How many leading tokens both share, but for the last of `tokens`."""
    length = min(len(held), len(tokens) - 1)
    differ = np.flatnonzero(held[:length] != tokens[:length])
    return int(differ[0]) if len(differ) else length
