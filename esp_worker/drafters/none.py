"""Plain autoregressive decoding: the same engine, one row a step, nothing drafted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from esp_worker.drafters.base import EachByItself, Room
from esp_worker.tree import ROOT_ONLY, Draft


class NoDrafter(EachByItself):
    name = "ar"
    masks = 0

    def start(self, prompt_embeds: torch.Tensor) -> None:
        return None

    def mask_embeds(self, state: None) -> torch.Tensor:
        raise AssertionError("plain decoding has no mask tokens")

    def draft(self, state: None, root_token: int, room: Room) -> Draft:
        return ROOT_ONLY

    def observe(
        self, states: Sequence[None], committed: Sequence[Sequence[int]], probe_logits: Sequence[torch.Tensor]
    ) -> None:
        return None
