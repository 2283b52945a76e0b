"""ESP: embedding-space probing (arXiv 2603.17942).

Mask tokens drawn from the prompt's own embeddings stand where future tokens will; the frozen model's logits at those
rows propose them.

k masks m_1..m_k per sequence, H hidden size, V vocabulary. p_j = softmax of the j-th probe row of the deepest accepted
node: p_1 proposes the token after the new root, p_2 the one after that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from esp_worker.drafters.base import Room, probing_owners
from esp_worker.tree import PRUNE_RULES, Candidates, Draft, TokenTree, dynamic_tree, static_tree

MaskInit = Literal["mean", "last_k"]
Prune = Literal["all", "deep", "none"]


@dataclass(slots=True)
class ProbeState:
    """masks: [k, H], in at least fp32; levels: candidates of depth 1.. of the next tree."""

    masks: torch.Tensor
    levels: list[Candidates] = field(default_factory=list)


class ProbeDrafter:
    """ESP with a dynamic tree (branches None: Algorithm 1 under `block_complexity`) or static branches [K1, K2, ..]."""

    name = "esp"

    def __init__(
        self,
        embed: Callable[[torch.Tensor], torch.Tensor],
        *,
        masks: int = 1,
        block_complexity: int = 30,
        branches: Sequence[int] | None = None,
        prune: Prune = "all",
        ema: float = 0.1,
        init: MaskInit = "mean",
    ) -> None:
        self._embed = embed
        self.masks = masks
        self.nodes = block_complexity // (masks + 1) - 1
        self.branches = None if branches is None else tuple(branches)
        self.init: MaskInit = init
        self._prune = PRUNE_RULES[prune]
        self._ema = ema
        if self.branches is not None and len(self.branches) != masks:
            raise ValueError(f"branches {list(self.branches)} must have one width a mask ({masks})")
        if self.branches is None and self.nodes < 1:
            raise ValueError(f"block_complexity {block_complexity} leaves no draft row with {masks} masks")

    @property
    def candidates(self) -> int:
        """Most candidates that a tree takes from one mask; one more in case pruning drops one."""
        return (max(self.branches) if self.branches is not None else self.nodes) + 1

    def start(self, prompt_embeds: torch.Tensor) -> ProbeState:
        return ProbeState(initial_masks(prompt_embeds, self.masks, self.init))

    def mask_embeds(self, state: ProbeState) -> torch.Tensor:
        return state.masks

    def draft(self, state: ProbeState, root_token: int, room: Room) -> Draft:
        tree = self._tree(state, root_token, room.max_depth)
        masks = room.masks(self.masks)
        owners = probing_owners(tree, masks, room)
        return Draft(tree, owners, masks if owners else 0)

    def _tree(self, state: ProbeState, root_token: int, max_depth: int) -> TokenTree:
        if self.branches is not None:
            return static_tree(state.levels, self.branches, root_token, self._prune, max_depth)
        return dynamic_tree(state.levels, self.nodes, root_token, self._prune, max_depth)

    def observe(
        self,
        states: Sequence[ProbeState],
        committed: Sequence[Sequence[int]],
        probe_logits: Sequence[torch.Tensor],
    ) -> None:
        tokens = torch.tensor([token for run in committed for token in run], device=probe_logits[0].device)
        embeds = self._embed(tokens).split([len(run) for run in committed])
        for state, run in zip(states, embeds, strict=True):
            state.masks = ema_update(state.masks, run, self._ema)
        levels = top_candidates(torch.cat(list(probe_logits)), self.candidates)
        for state, logits in zip(states, probe_logits, strict=True):
            state.levels, levels = levels[: len(logits)], levels[len(logits) :]


def initial_masks(prompt_embeds: torch.Tensor, masks: int, init: MaskInit) -> torch.Tensor:
    """[k, H] mask tokens from prompt embeddings [P, H]: their mean for every mask, or the last k of them (m_k the last;
    a prompt shorter than k repeats its first token)."""
    embeds = prompt_embeds.to(torch.promote_types(prompt_embeds.dtype, torch.float32))
    if init == "mean":
        return embeds.mean(0).expand(masks, -1).clone()
    rows = torch.arange(len(embeds) - masks, len(embeds), device=embeds.device).clamp(min=0)
    return embeds[rows].clone()


def ema_update(masks: torch.Tensor, embeds: torch.Tensor, rate: float) -> torch.Tensor:
    """m <- m + rate (e(t) - m) for each committed token in order, in closed form:
    (1-rate)^n m + rate sum_j (1-rate)^(n-j) e_j. masks [k, H], embeds [n, H]."""
    count = len(embeds)
    powers = torch.arange(count - 1, -1, -1, device=embeds.device, dtype=masks.dtype)
    weights = rate * (1 - rate) ** powers
    return (1 - rate) ** count * masks + (weights @ embeds.to(masks.dtype))


def top_candidates(logits: torch.Tensor, count: int) -> list[Candidates]:
    """The `count` most probable tokens of each row of logits [R, V]."""
    if not len(logits):
        return []
    probs, tokens = logits.float().softmax(-1).topk(min(count, logits.shape[-1]), dim=-1)
    return [Candidates(t, p) for t, p in zip(tokens.tolist(), probs.tolist(), strict=True)]
