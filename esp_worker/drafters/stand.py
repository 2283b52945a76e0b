"""STAND (arXiv 2506.04708): n-grams of the sequence that remember distributions, not only what followed.

From the paper: a table from n-gram to the K most probable next tokens with their probabilities, taken from the logits
that verification computes anyway; a tree of candidates drawn without replacement by Gumbel top-k from the distribution
of the longest n-gram that is known.

Choices here. The paper cuts its trees by a template that is fitted to data beforehand; here each tree holds the most
probable paths for the rows there are. An n-gram keeps the distribution that it had last. A shorter n-gram is trusted
less: its probabilities are scaled by TRUST. The table is the sequence's own, of its prompt's rows (those that are
computed) and of the rows that it keeps. The noise is the very noise that the row's own draw of that output position
will use (esp_worker.sampling), so that where the table is right, the candidate ranked first is the token that will be
drawn; a greedy row has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import torch

from esp_worker.drafters.base import Prompt, Room, Seen, Unprobed, Watch
from esp_worker.sampling import gumbel_noise
from esp_worker.tree import TokenTree, grow_best_first
from esp_worker.types import SamplingParams

BEST = 10
TRUST = (0.45, 0.85, 0.9)  # of n-grams of 1, 2, 3.. tokens (the last: of all longer ones); measured on SmolLM2-135M


class LogitTable:
    """N-grams of 1..`longest` tokens and what followed each: (tokens, log-probabilities), best first."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._after: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}

    def learn(self, text: Sequence[int], tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """`text` was followed by this distribution."""
        for size in range(1, min(self._longest, len(text)) + 1):
            self._after[tuple(text[-size:])] = (tokens, logprobs)

    def after(self, text: Sequence[int]) -> tuple[int, np.ndarray, np.ndarray] | None:
        """Of the longest known n-gram that `text` ends with: its size, and what followed it."""
        for size in range(min(self._longest, len(text)), 0, -1):
            found = self._after.get(tuple(text[-size:]))
            if found is not None:
                return size, *found
        return None


class Text:
    """A sequence: its table, its newest tokens in front of the root, how many tokens are output, and how the next will
    be chosen."""

    def __init__(self, sampling: SamplingParams, longest: int) -> None:
        self._table = LogitTable(longest)
        self._tail: list[int] = []  # as many as an n-gram has
        self._longest, self._sampling = longest, sampling
        self.output = 0

    def learn(self, seen: Seen) -> None:
        assert seen.logprobs is not None
        for row in seen.path:
            self._tail = [*self._tail, seen.tokens[row]][-self._longest :]
            self._table.learn(self._tail, seen.best[row], seen.logprobs[row])

    def children(self, root_token: int, path: tuple[int, ...]) -> Iterable[tuple[int, float]]:
        """(token, probability) of what may follow the root and `path`, best first."""
        found = self._table.after([*self._tail, root_token, *path])
        if found is None:
            return ()
        size, tokens, logprobs = found
        probs = TRUST[min(size, len(TRUST)) - 1] * self._chances(tokens, logprobs, self.output + len(path))
        order = np.argsort(-probs, kind="stable")
        return zip(tokens[order].tolist(), probs[order].tolist(), strict=True)

    def _chances(self, tokens: np.ndarray, logprobs: np.ndarray, position: int) -> np.ndarray:
        """How likely each of `tokens` is the row's own choice at that output position."""
        params = self._sampling
        if params.temperature == 0:
            return np.exp(logprobs)
        noise = gumbel_noise(params.seed, params.sample_index, position, torch.from_numpy(tokens)).numpy()
        scores = logprobs / params.temperature + noise
        chances = np.exp(scores - scores.max())
        return chances / chances.sum()


class Stand(Unprobed):
    """ngram: tokens of the longest n-gram; block_complexity: rows of a step, the root's included."""

    name = "stand"
    watch: Watch | None = Watch(best=BEST, probs="whole", prompt=True)

    def __init__(self, *, ngram: int = 3, block_complexity: int = 30) -> None:
        self._ngram = ngram
        self._nodes = block_complexity - 1

    def start(self, prompt: Prompt) -> Text:
        return Text(prompt.sampling, self._ngram)

    def tree(self, state: Text, root_token: int, room: Room) -> TokenTree:
        return grow_best_first(partial(state.children, root_token), [0.0] * self._nodes, room.max_depth)

    def saw(self, states: Sequence[Text], seen: Sequence[Seen]) -> None:
        for state, each in zip(states, seen, strict=True):
            state.learn(each)

    def observe(
        self, states: Sequence[Text], committed: Sequence[Sequence[int]], probe_logits: Sequence[torch.Tensor]
    ) -> None:
        for state, run in zip(states, committed, strict=True):
            state.output += len(run)
