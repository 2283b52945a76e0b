"""What the model answered behind the last tokens that a row stood at: tables that all sequences of an engine share.

R rows, K tokens of an answer, best first. A context is a row's last 1, 2 or 3 tokens, its own among them. The newest
answer behind a context replaces the one before, and some others, so that memory is bounded (_Table). What is remembered
decides what is drafted, never a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from esp_worker.odds import Answer

BEST = 8  # K
ORDERS = (1, 2, 3)  # tokens of a context
# A table's places, as a power of two: at first, and at most, which is 64 MiB. At 30 rows a step, 52 questions of 64
# tokens had a mean acceptance length of 2.55 by themselves, and behind 51 others 2.61 with tables of 2^18, 2^20 and
# 2^20 places from the start, 2.57 with 2^16 (one run each; tables that grow were not measured so).
FIRST_BITS, MOST_BITS = 12, 20
Context = tuple[int, ...]  # a row's newest tokens, its own last; max(ORDERS) of them, where there are so many

# What a place holds: 64 bytes. key 0: nothing yet.
_PLACE = np.dtype(
    [("key", np.uint64), ("tokens", np.int32, BEST), ("logprobs", np.float16, BEST), ("codes", np.int8, BEST)]
)
_MASK = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15


class Recall:
    """A table for each order, of 2^bits places at most."""

    def __init__(self, bits: int = MOST_BITS) -> None:
        self._tables = [_Table(bits) for _ in ORDERS]

    def learn(self, contexts: Sequence[Context], tokens: np.ndarray, logprobs: np.ndarray, codes: np.ndarray) -> None:
        """tokens, logprobs, codes [R, K]: the answers behind `contexts` [R]; of equal contexts the last one's stays."""
        learned = np.empty(len(contexts), _PLACE)
        learned["tokens"], learned["logprobs"], learned["codes"] = tokens, logprobs, codes
        all_keys = [_keys(context) for context in contexts]
        for order, (size, table) in enumerate(zip(ORDERS, self._tables, strict=True)):
            known = [row for row, keys in enumerate(all_keys) if len(keys) >= size]
            learned["key"][known] = [all_keys[row][order] for row in known]
            table.put(learned[known])

    def answers(self, context: Context) -> list[Answer | None]:
        """By ORDERS, the answer behind the end of `context`; None where it is not known."""
        found = [table.get(key) for key, table in zip(_keys(context), self._tables, strict=False)]
        return found + [None] * (len(ORDERS) - len(found))


class _Table:
    """Answers by key. Those whose keys meet in one place replace each other, so there are twice as many places once an
    eighth are taken, up to 2^most of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._make(min(FIRST_BITS, most))

    def put(self, answers: np.ndarray) -> None:
        """Of equal keys, the last one's stays."""
        coming = len(np.unique(answers["key"]))
        while self._bits < self._most and 8 * (self._taken + coming) > len(self._places):
            kept = self._places[self._keys != 0]
            self._make(self._bits + 1)
            self._write(kept)
        self._write(answers)

    def _write(self, answers: np.ndarray) -> None:
        places = answers["key"] >> np.uint64(64 - self._bits)
        self._taken += len(np.unique(places[self._keys[places] == 0]))
        _words(self._places)[places] = _words(answers)

    def get(self, key: int) -> Answer | None:
        place = key >> 64 - self._bits
        if int(self._keys[place]) != key:
            return None
        logprobs = self._logprobs[place].astype(np.float32)  # half precision would overflow at low temperatures
        return Answer(self._tokens[place].tolist(), self._codes[place].tolist(), logprobs)

    def _make(self, bits: int) -> None:
        self._bits, self._taken = bits, 0
        self._places = places = np.zeros(1 << bits, _PLACE)
        self._keys, self._tokens = places["key"], places["tokens"]
        self._logprobs, self._codes = places["logprobs"], places["codes"]


def _words(places: np.ndarray) -> np.ndarray:
    """[n, 8] of [n]. As structures, numpy copies them field by field."""
    return places.view(np.uint64).reshape(-1, _PLACE.itemsize // 8)


def _keys(context: Context) -> list[int]:
    """By ORDERS, as many as `context` is long enough for: 64 bits of its end, never 0, an empty place's."""
    state, keys = 1, []
    for token in context[: -1 - len(ORDERS) : -1]:
        state = ((state ^ token + 1) * _MULTIPLIER) & _MASK
        state ^= state >> 29
        keys.append(state * _MULTIPLIER & _MASK or 1)
    return keys
