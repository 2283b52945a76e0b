"""Where the time of a decode step goes: a model's parts timed from outside, for `jobs.bench step` and `decode`.

Watching costs time, so what is watched is never what a benchmark times.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from esp_worker.accel.packed import LinearPart, PackedLinear
from esp_worker.block import Block
from esp_worker.cache import SlotCache
from esp_worker.drafters.base import Drafter, Turn
from esp_worker.engine import Engine
from esp_worker.model import CausalModel
from esp_worker.tree import Draft
from esp_worker.types import Completion

# draft_verify: all but the forward pass and lm_head: drafting, verification, commit, compaction, learning. other: of
# the forward pass, norms, rotary embedding, cache writes, activations.
PARTS = ("linears", "attention", "lm_head", "draft_verify", "other")
_LINEARS = (nn.Linear, Conv1D, PackedLinear)


class Watch:
    """Seconds by part since the latest drafting, and all rows of the latest pass."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._began = 0.0  # the latest drafting
        self._drafted = 0  # rows
        self.rows = 0

    def step(self, engine: Engine) -> tuple[list[Completion], dict[str, float] | None]:
        """One step of an engine: what ended, and its seconds by part; None where it did not decode, or prefilled too.

        Drafting begins it.
        """
        self._drafted = 0
        done = engine.step()
        if not self._drafted or self.rows != self._drafted:
            return done, None
        total, seconds = time.perf_counter() - self._began, self._seconds
        parts = {name: seconds[name] for name in ("linears", "attention", "lm_head")}
        parts["draft_verify"] = total - seconds["backbone"] - seconds["lm_head"]
        parts["other"] = seconds["backbone"] - seconds["linears"] - seconds["attention"]
        return done, parts

    def timed(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            out = work(*args, **kwargs)
            self._seconds[part] += time.perf_counter() - began
            return out

        return run

    def backbone(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        timed = self.timed("backbone", forward)

        def run(cache: SlotCache, block: Block, embeds: torch.Tensor) -> torch.Tensor:
            self.rows = block.rows
            return timed(cache, block, embeds)

        return run

    def drafting(self, draft_all: Callable[..., list[Draft]]) -> Callable[..., list[Draft]]:
        def run(turns: Sequence[Turn], waiting: bool) -> list[Draft]:
            self._seconds.clear()
            self._began = time.perf_counter()
            drafts = draft_all(turns, waiting)
            self._drafted = sum(draft.shape.rows for draft in drafts)
            return drafts

        return run


@contextmanager
def watched(model: CausalModel, drafters: Sequence[Drafter]) -> Iterator[Watch]:
    """Time the model's parts within, in the steps of the engines that these drafters draft for.

    Each module's forward is wrapped: a hook would cost more than small layers do.
    """
    watch = Watch()
    hf: Any = model.module
    modules = [module.product if isinstance(module, LinearPart) else module for module in hf.base_model.modules()]
    linears = {module for module in modules if isinstance(module, _LINEARS)}
    wraps: list[tuple[Any, str, Callable[..., Any]]] = [
        (model, "forward_block", watch.backbone),
        (hf.get_output_embeddings(), "forward", partial(watch.timed, "lm_head")),
        *((module, "forward", partial(watch.timed, "linears")) for module in linears),
        *((drafter, "draft_all", watch.drafting) for drafter in drafters),
    ]
    with ExitStack() as stack:
        for owner, name, wrap in wraps:
            setattr(owner, name, wrap(getattr(owner, name)))
            stack.callback(delattr, owner, name)  # the class's own shows again
        stack.enter_context(model.attention_within(partial(watch.timed, "attention")))
        yield watch


def shares(parts: Mapping[str, float]) -> dict[str, float]:
    """Of the parts' sum."""
    return {name: round(seconds / sum(parts.values()), 4) for name, seconds in parts.items()}
