"""What the model answered behind the last tokens that a row stood at: a table that all sequences of an engine share.

R rows, K tokens of an answer, best first. A context is a row's last 1, 2 or 3 tokens, its own among them. The newest
answer behind a context replaces the one before, and contexts that meet in one of the table's places replace each other:
its memory is fixed. What is remembered decides what is drafted, never a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from esp_worker.odds import Answer, named_codes

ORDERS = (1, 2, 3)  # tokens of a context
Context = tuple[int, ...]  # a row's newest tokens, its own last; max(ORDERS) of them, where there are so many

_MASK = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15


class Recall:
    """2^bits places for each order of context, K answers in each: 13 K + 8 bytes a place."""

    def __init__(self, best: int = 8, bits: int = 16) -> None:
        self.best = best
        self._shift = 64 - bits
        self._keys = [np.zeros(1 << bits, np.uint64) for _ in ORDERS]
        self._tokens = [np.zeros((1 << bits, best), np.int64) for _ in ORDERS]
        self._codes = [np.zeros((1 << bits, best), np.int8) for _ in ORDERS]
        self._logprobs = [np.zeros((1 << bits, best), np.float32) for _ in ORDERS]

    def learn(self, contexts: Sequence[Context], tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """tokens, logprobs [R, K]: the answers behind `contexts` [R]; of equal contexts the last one's stays."""
        codes, all_keys = named_codes(np.exp(logprobs)), [_keys(context) for context in contexts]
        for order, size in enumerate(ORDERS):
            known = [row for row, keys in enumerate(all_keys) if len(keys) >= size]
            keys = np.array([all_keys[row][order] for row in known], np.uint64)
            places = keys >> np.uint64(self._shift)
            self._keys[order][places] = keys
            for table, answers in ((self._tokens, tokens), (self._codes, codes), (self._logprobs, logprobs)):
                table[order][places] = answers[known]

    def answers(self, context: Context) -> list[Answer | None]:
        """By ORDERS, the answer behind the end of `context`; None where it is not known."""
        found: list[Answer | None] = [None] * len(ORDERS)
        for order, key in enumerate(_keys(context)):
            place = key >> self._shift
            if int(self._keys[order][place]) == key:
                tables = self._tokens[order], self._codes[order], self._logprobs[order]
                found[order] = Answer(tables[0][place].tolist(), tables[1][place].tolist(), tables[2][place])
        return found


def _keys(context: Context) -> list[int]:
    """By ORDERS, as many as `context` is long enough for: 64 bits of its end, never 0, an empty place's."""
    state, keys = 1, []
    for token in context[: -1 - len(ORDERS) : -1]:
        state = ((state ^ token + 1) * _MULTIPLIER) & _MASK
        state ^= state >> 29
        keys.append(state * _MULTIPLIER & _MASK or 1)
    return keys
