"""Plain autoregressive decoding: the same engine, one row a step, nothing drafted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from esp_worker.drafters.base import Prompt, Room, Unprobed
from esp_worker.tree import EMPTY_TREE, TokenTree


class NoDrafter(Unprobed):
    name = "ar"

    def start(self, prompt: Prompt) -> None:
        return None

    def tree(self, state: None, root_token: int, room: Room) -> TokenTree:
        return EMPTY_TREE

    def observe(
        self, states: Sequence[None], committed: Sequence[Sequence[int]], probe_logits: Sequence[torch.Tensor]
    ) -> None:
        return None
