"""ESP: embedding-space probing (arXiv 2603.17942).

Mask tokens drawn from the prompt's own embeddings stand where future tokens will; the frozen model's logits at those
rows propose them.

k masks m_1..m_k per sequence, H hidden size, V vocabulary, P prompt length. p_j = softmax of the j-th probe row of the
deepest accepted node: p_1 proposes the token after the new root, p_2 the one after that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from esp_worker.drafters.base import EachByItself, Prompt, Room, possible_owners
from esp_worker.tree import (
    PRUNE_RULES,
    SHAPE_MAKERS,
    Candidates,
    Draft,
    PruneRule,
    TokenTree,
    affordable_nodes,
    best_first_tree,
    dynamic_tree,
    ending_probs,
    static_tree,
)

MaskInit = Literal["mean", "last_k", "sample", "offset"]
MomentsOf = Literal["prompt", "table"]
Prune = Literal["all", "deep", "none"]
TreeKind = Literal["dynamic", "static", "best_first"]
Impl = Literal["efficient", "naive"]
Moments = tuple[torch.Tensor, torch.Tensor]  # mean and standard deviation of each dimension, [H] each


@dataclass(slots=True)
class ProbeState:
    """masks: [k, H], in at least fp32; committed: tokens that they have not followed yet; levels: candidates of depth
    1.. of the next tree."""

    masks: torch.Tensor
    levels: list[Candidates] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)


class ProbeDrafter(EachByItself):
    """ESP. A static tree takes its `branches` [K1, K2, ..]; the other kinds fill `block_complexity` rows.

    probe_owners: how many of root and nodes own probes (None: all). impl: how a step comes by its block's geometry
    (tree.SHAPE_MAKERS). init_moments: whose mean and deviation init `offset` takes. table: the model's
    embedding_moments, which init `sample` needs, and `offset` where init_moments says so. Settings change how much is
    accepted and what a step costs, never the tokens.
    """

    name = "esp"

    def __init__(
        self,
        embed: Callable[[torch.Tensor], torch.Tensor],
        *,
        masks: int = 1,
        block_complexity: int = 30,
        tree: TreeKind = "dynamic",
        branches: Sequence[int] | None = None,
        probe_owners: int | None = None,
        prune: Prune = "all",
        ema: float = 0.1,
        init: MaskInit = "mean",
        init_offset: float = 1.0,
        init_moments: MomentsOf = "prompt",
        impl: Impl = "efficient",
        table: Callable[[], Moments] | None = None,
    ) -> None:
        if (tree == "static") != (branches is not None):
            raise ValueError(f"tree {tree} with branches {branches}: a static tree has branches, no other has")
        if branches is not None and len(branches) != masks:
            raise ValueError(f"branches {list(branches)} must have one width a mask ({masks})")
        nodes = affordable_nodes(block_complexity, masks, probe_owners)
        if branches is None and nodes < 1:
            raise ValueError(f"block_complexity {block_complexity} leaves no draft row with {masks} masks")
        self.masks = masks
        # A tree takes at most this many candidates from one mask: all for one parent, which may exclude one of them.
        self.candidates = 1 + (nodes if branches is None else max(branches))
        self._embed = embed
        self._grow = _tree_builder(tree, nodes, branches or (), PRUNE_RULES[prune])
        self._probe_owners = probe_owners
        self._ema = ema
        of_table = init == "sample" or (init == "offset" and init_moments == "table")
        if of_table and table is None:
            raise ValueError(f"init {init} takes the moments of the embedding table (`table`), which are not given")
        moments = table() if table is not None and of_table else None
        self._initial_masks = partial(initial_masks, masks=masks, init=init, offset=init_offset, table=moments)
        self._make_shape = SHAPE_MAKERS[impl]

    def start(self, prompt: Prompt) -> ProbeState:
        return ProbeState(self._initial_masks(prompt.embeds))

    def mask_embeds(self, state: ProbeState) -> torch.Tensor:
        """The masks follow the text here, so that steps without a probe spend nothing on them."""
        if state.committed:
            tokens = torch.tensor(state.committed, device=state.masks.device)
            state.masks = ema_update(state.masks, self._embed(tokens), self._ema)
            state.committed = []
        return state.masks

    def probe_embeds(self, state: ProbeState, draft: Draft) -> torch.Tensor:
        """The same masks for every owner."""
        return self.mask_embeds(state)[: draft.masks].repeat(len(draft.owners), 1)

    def draft(self, state: ProbeState, root_token: int, room: Room) -> Draft:
        return self.block(self.grow(state.levels, root_token, room), room, self._probe_owners)

    def grow(self, levels: Sequence[Candidates], root_token: int, room: Room) -> TokenTree:
        """The whole tree that the settings make of these candidates."""
        return self._grow(levels, root_token=root_token, max_depth=room.max_depth)

    def block(self, tree: TokenTree, room: Room, owners: int | None) -> Draft:
        """A tree with the probes of its `owners` most valuable rows (None: of all), as far as these have room."""
        masks = room.masks(self.masks)
        possible = possible_owners(tree, masks, room)
        chosen = possible if owners is None else most_valuable(tree, possible, owners)
        return Draft(tree, self._make_shape(tree.parents, chosen, masks if chosen else 0))

    def observe(
        self,
        states: Sequence[ProbeState],
        committed: Sequence[Sequence[int]],
        probe_logits: Sequence[torch.Tensor],
    ) -> None:
        for state, run in zip(states, committed, strict=True):
            state.committed += run
        if not any(map(len, probe_logits)):
            for state in states:
                state.levels = []
            return
        levels = top_candidates(torch.cat(list(probe_logits)), self.candidates)
        for state, logits in zip(states, probe_logits, strict=True):
            state.levels, levels = levels[: len(logits)], levels[len(logits) :]


def _tree_builder(kind: TreeKind, nodes: int, branches: Sequence[int], prune: PruneRule) -> Callable[..., TokenTree]:
    """(levels, root_token, max_depth) -> tree."""
    if kind == "static":
        return partial(static_tree, branches=branches, prune=prune)
    return partial(dynamic_tree if kind == "dynamic" else best_first_tree, nodes=nodes, prune=prune)


def most_valuable(tree: TokenTree, owners: Sequence[int], count: int) -> tuple[int, ...]:
    """The `count` of `owners` whose probes are most likely to be used, in row order; ties go to the earlier row.

    Only the deepest accepted row's probes are: a row is worth P(it is the deepest).
    """
    ending = ending_probs(tree)
    return tuple(sorted(sorted(owners, key=lambda row: -ending[row])[:count]))


def initial_masks(
    prompt_embeds: torch.Tensor, masks: int, init: MaskInit, offset: float = 1.0, table: Moments | None = None
) -> torch.Tensor:
    """[k, H] mask tokens from prompt embeddings [P, H] (paper, tables 5 and 14).

    mean: of the prompt, for every mask; last_k: the last k embeddings, m_k the last (a prompt shorter than k repeats
    its first token); sample: N(mu, sigma^2), mu and sigma being those of each dimension of the embedding `table`, drawn
    by the prompt's content alone; offset: mu + offset * sigma for every mask, mu and sigma being those of the `table`
    where it is given, else the prompt's.
    """
    embeds = prompt_embeds.to(torch.promote_types(prompt_embeds.dtype, torch.float32))
    if init == "last_k":
        rows = torch.arange(len(embeds) - masks, len(embeds), device=embeds.device).clamp(min=0)
        return embeds[rows].clone()
    if init == "mean":
        return embeds.mean(0).repeat(masks, 1)
    if table is None:  # the deviation of the prompt's own tokens: 0 where it has one
        mean, sigma = embeds.mean(0), embeds.std(0, correction=0)
    else:
        mean, sigma = (each.to(embeds) for each in table)
    if init == "sample":
        return mean + sigma * prompt_noise(prompt_embeds, masks).to(embeds)
    return (mean + offset * sigma).repeat(masks, 1)


def prompt_noise(prompt_embeds: torch.Tensor, masks: int) -> torch.Tensor:
    """[k, H] standard normal noise, in float64 on the CPU, that is a function of the embeddings [P, H] alone."""
    content = prompt_embeds.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    seed = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big", signed=True)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(masks, prompt_embeds.shape[-1], generator=generator, dtype=torch.float64)


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
