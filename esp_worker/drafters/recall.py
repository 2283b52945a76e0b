"""What the model answered behind the last tokens that a row stood at: a table that all sequences of an engine share.

R rows, K tokens of an answer, best first. A context is a row's last 1, 2 or 3 tokens, its own among them. The newest
answer behind a context replaces the one before, and contexts that meet in one of the table's places replace each other:
its memory is fixed. What is remembered decides what is drafted, never a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ORDERS = (1, 2, 3)  # tokens of a context
Context = tuple[int, ...]  # a row's newest tokens, its own last; max(ORDERS) of them, where there are so many

_MASK = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15


# The most probable next tokens, best first, and their log-probabilities.
Answer = tuple[list[int], list[float]]


class Recall:
    """2^bits places for each order of context, K answers in each: 12 K + 8 bytes a place."""

    def __init__(self, best: int = 8, bits: int = 16) -> None:
        self.best = best
        self._shift = 64 - bits
        self._keys = [np.zeros(1 << bits, np.uint64) for _ in ORDERS]
        self._tokens = [np.zeros((1 << bits, best), np.int64) for _ in ORDERS]
        self._logprobs = [np.zeros((1 << bits, best), np.float32) for _ in ORDERS]

    def learn(self, contexts: Sequence[Context], tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """tokens, logprobs [R, K]: the answers behind `contexts` [R]; of equal contexts the last one's stays."""
        for order, size in enumerate(ORDERS):
            known = [row for row, context in enumerate(contexts) if len(context) >= size]
            keys = np.array([_key(contexts[row][-size:]) for row in known], np.uint64)
            places = keys >> np.uint64(self._shift)
            self._keys[order][places] = keys
            self._tokens[order][places] = tokens[known]
            self._logprobs[order][places] = logprobs[known]

    def answers(self, context: Context) -> list[Answer | None]:
        """By ORDERS, the answer behind the end of `context`; None where it is not known."""
        return [self._answer(order, context[-size:]) for order, size in enumerate(ORDERS)]

    def _answer(self, order: int, context: Context) -> Answer | None:
        if len(context) < ORDERS[order]:
            return None
        key = _key(context)
        place = key >> self._shift
        if int(self._keys[order][place]) != key:
            return None
        return self._tokens[order][place].tolist(), self._logprobs[order][place].tolist()


def _key(context: Context) -> int:
    """64 bits of a context, never 0: an empty place's."""
    key = 1
    for token in context:
        key = ((key ^ token + 1) * _MULTIPLIER) & _MASK
        key ^= key >> 29
    return key * _MULTIPLIER & _MASK or 1
