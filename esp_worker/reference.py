"""The correctness specification: the stock model, its own cache and attention, one sequence, one token a call.

Slow on purpose, and written apart from the engine: everything that the engine returns must equal this, token for token
in fp64 and fp32. Only token choice (sampling.py) is shared, because sampled output is defined by it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import DynamicCache

from esp_worker.model import CausalModel
from esp_worker.sampling import select_token
from esp_worker.types import FinishReason, Request


@dataclass(frozen=True, slots=True)
class ReferenceCompletion:
    """token_ids as the engine must give them; logits: [output tokens, V], the row that chose each token."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logits: torch.Tensor


@torch.inference_mode()
def decode(model: CausalModel, request: Request, max_length: int | None = None) -> ReferenceCompletion:
    """Decode one request by one-token steps. max_length: prompt + output tokens, the model's context by default."""
    max_length = model.context_length if max_length is None else max_length
    params = request.sampling
    output: list[int] = []
    rows: list[torch.Tensor] = []
    with model.stock() as hf:
        cache = DynamicCache(config=hf.config)
        feed = list(request.prompt_ids)
        while True:
            ids = torch.tensor([feed], device=model.device)
            logits = hf(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
            rows.append(logits)
            token = select_token(logits, params, len(output))
            output.append(token)
            reason = _end(output, request, max_length)
            if reason is not None:
                return ReferenceCompletion(tuple(output), reason, torch.stack(rows))
            feed = [token]


def _end(output: list[int], request: Request, max_length: int) -> FinishReason | None:
    if output[-1] in request.sampling.eos_token_ids:
        return FinishReason.STOP
    if request.stop is not None and request.stop.met(output):
        return FinishReason.STOP
    if len(output) == request.sampling.max_new_tokens or len(request.prompt_ids) + len(output) == max_length:
        return FinishReason.LENGTH
    return None
