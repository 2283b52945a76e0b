"""A real engine that breaks, for tests of what follows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from pipeline.decoder import EngineDecoder
from pipeline.plan import Plan, find_checkpoint
from pipeline.prepare import load_tokenizer

BAD = "~~~~"


class FragileDecoder(EngineDecoder):
    """The first `breaks` processes break after some forward passes, for good. A prompt with BAD fails in any engine,
    and harms nothing else."""

    def __init__(self, plan: Plan, marks: Path, passes: int, breaks: int) -> None:
        """marks: a folder in which each process leaves a file: `broken-PID` or `sound-PID`."""
        super().__init__(plan)
        self._left = passes
        sound = len(list(marks.iterdir())) >= breaks
        (marks / f"{'sound' if sound else 'broken'}-{os.getpid()}").touch()
        model = self._engine.model
        forward, embed = model.forward_block, model.embed
        bad = str(load_tokenizer(find_checkpoint(plan.config).folder).encode(BAD, add_special_tokens=False))[1:-1]

        def fragile_forward(*arguments: Any) -> torch.Tensor:
            self._left -= 1
            if self._left < 0 and not sound:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return forward(*arguments)

        def fragile_embed(tokens: torch.Tensor) -> torch.Tensor:
            if bad in str(tokens.tolist()):
                raise RuntimeError("a bad token")
            return embed(tokens)

        vars(model).update(forward_block=fragile_forward, embed=fragile_embed)
