"""What the model answered behind the last tokens that a row stood at: a table that all sequences of an engine share.

R rows, K tokens of an answer, best first. A context is a row's last 1, 2 or 3 tokens, its own among them. The newest
answer behind a context replaces the one before, and contexts that meet in one of the table's places replace each other:
its memory is fixed. What is remembered decides what is drafted, never a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from esp_worker.odds import Answer, named_codes

BEST = 8  # K
ORDERS = (1, 2, 3)  # tokens of a context
# Places for each order's contexts, as a power of two: 144 MiB in all, taken as rows are learned. At 30 rows a step, 52
# questions of 64 tokens had a mean acceptance length of 2.55 without, 2.61 behind 51 others; with 16 bits each 2.57.
BITS = (18, 20, 20)
Context = tuple[int, ...]  # a row's newest tokens, its own last; max(ORDERS) of them, where there are so many

# A place: 64 bytes, a cache line. key 0: nothing was learned there.
_PLACE = np.dtype(
    [("key", np.uint64), ("tokens", np.int32, BEST), ("logprobs", np.float16, BEST), ("codes", np.int8, BEST)]
)
_MASK = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15


class Recall:
    """The newest answers. bits: of each order's number of places."""

    def __init__(self, bits: Sequence[int] = BITS) -> None:
        self._shifts = [64 - each for each in bits]
        self._places = [np.zeros(1 << each, _PLACE) for each in bits]
        self._fields = [[each[name] for name in ("key", "tokens", "logprobs", "codes")] for each in self._places]

    def learn(self, contexts: Sequence[Context], tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """tokens, logprobs [R, K]: the answers behind `contexts` [R]; of equal contexts the last one's stays."""
        learned = np.empty(len(contexts), _PLACE)
        learned["tokens"], learned["logprobs"], learned["codes"] = tokens, logprobs, named_codes(np.exp(logprobs))
        all_keys = [_keys(context) for context in contexts]
        for order, (size, shift) in enumerate(zip(ORDERS, self._shifts, strict=True)):
            known = [row for row, keys in enumerate(all_keys) if len(keys) >= size]
            keys = np.array([all_keys[row][order] for row in known], np.uint64)
            learned["key"][known] = keys
            _words(self._places[order])[keys >> np.uint64(shift)] = _words(learned)[known]

    def answers(self, context: Context) -> list[Answer | None]:
        """By ORDERS, the answer behind the end of `context`; None where it is not known."""
        found: list[Answer | None] = [None] * len(ORDERS)
        for order, key in enumerate(_keys(context)):
            place, (keys, tokens, logprobs, codes) = key >> self._shifts[order], self._fields[order]
            if int(keys[place]) == key:
                found[order] = Answer(tokens[place].tolist(), codes[place].tolist(), logprobs[place])
        return found
def _keys(context: Context) -> list[int]:
    """By ORDERS, as many as `context` is long enough for: 64 bits of its end, never 0, an empty place's."""
    state, keys = 1, []
    for token in context[: -1 - len(ORDERS) : -1]:
        state = ((state ^ token + 1) * _MULTIPLIER) & _MASK
        state ^= state >> 29
        keys.append(state * _MULTIPLIER & _MASK or 1)
    return keys


def _words(places: np.ndarray) -> np.ndarray:
    """[n, 8] of [n]. As structures, numpy copies them field by field."""
    return places.view(np.uint64).reshape(-1, _PLACE.itemsize // 8)
