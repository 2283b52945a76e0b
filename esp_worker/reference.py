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
from esp_worker.types import FinishReason, Request, StopMatch


@dataclass(frozen=True, slots=True)
class ReferenceCompletion:
    """token_ids as the engine must give them; logits: [output tokens, V], the raw row behind each token."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logits: torch.Tensor
    stop: StopMatch | None = None


@torch.inference_mode()
def decode(model: CausalModel, request: Request, max_length: int | None = None) -> ReferenceCompletion:
    """Decode one request by one-token steps. max_length: prompt + output tokens, the model's context by default."""
    max_length = model.context_length if max_length is None else max_length
    params, prompt = request.sampling, request.prompt_ids
    output: list[int] = []
    rows: list[torch.Tensor] = []
    if params.max_new_tokens == 0:
        return ReferenceCompletion((), FinishReason.LENGTH, torch.empty(0, model.vocab_size))
    with model.stock() as hf:
        cache = DynamicCache(config=hf.config)
        feed = list(prompt)
        while True:
            ids = torch.tensor([feed], device=model.device)
            logits = hf(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
            rows.append(logits)
            token = select_token(logits, params, prompt, output)
            output.append(token)
            if token in params.eos_token_ids:
                return ReferenceCompletion(tuple(output), FinishReason.STOP, torch.stack(rows))
            least = params.min_new_tokens
            match = request.stop.match(output, least) if request.stop and len(output) > least else None
            if match is not None:
                kept = torch.stack(rows)[: match.keep]
                return ReferenceCompletion(tuple(output[: match.keep]), FinishReason.STOP, kept, match)
            if len(output) == params.max_new_tokens or len(prompt) + len(output) == max_length:
                return ReferenceCompletion(tuple(output), FinishReason.LENGTH, torch.stack(rows))
            feed = [token]
