"""PLD: prompt lookup decoding (Saxena 2023), as Hugging Face's `generate(prompt_lookup_num_tokens=...)` does it.

The longest n-gram that the text ends with is looked up in prompt and output; what followed it there, where it stood
first, is drafted as a chain. No row is spent on anything but the chain, which is as long as `depth` at most.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from esp_worker.drafters.base import Prompt, Room, Unprobed
from esp_worker.drafters.ngrams import History
from esp_worker.tree import TokenTree


class PromptLookup(Unprobed):
    """ngram: tokens of the longest n-gram that is looked up (its max_matching_ngram_size); depth: of the chain."""

    name = "pld"

    def __init__(self, *, ngram: int = 3, depth: int = 10) -> None:
        self._ngram, self._depth = ngram, depth

    def start(self, prompt: Prompt) -> History:
        return History(prompt.ids, self._ngram)

    def tree(self, state: History, root_token: int, room: Room) -> TokenTree:
        chain = tuple(state.continuation(min(self._depth, room.max_depth)))
        return TokenTree(chain, tuple(range(len(chain))))

    def observe(
        self, states: Sequence[History], committed: Sequence[Sequence[int]], probe_logits: Sequence[torch.Tensor]
    ) -> None:
        for state, run in zip(states, committed, strict=True):
            state.extend(run)
