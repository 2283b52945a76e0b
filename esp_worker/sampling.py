"""How the next token is chosen: shared, line for line, by the engine and by the slow reference.

Greedy is argmax. Above temperature 0 the draw is Gumbel-max over the filtered logits: argmax(log p + g), with the
noise g keyed by (seed, sample index, output position) through a counter-based generator. The same key gives the same
token whatever the batch, the tree, the order or the worker, which is what makes sampled ESP equal sampled plain
decoding (method.md calls it sample matching). V: vocabulary size.

Order: penalties, logit bias, bad words, min_new_tokens; then temperature, top-k, top-p, min-p (Hugging Face's order).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from esp_worker.types import SamplingParams, TokenLogprobs


class NoTokenError(ValueError):
    """There is no token to choose: all are excluded, or the model's logits are not numbers."""


def select_token(
    logits: torch.Tensor, params: SamplingParams, prompt_ids: tuple[int, ...], output: Sequence[int]
) -> int:
    """The token that follows `output` (the row's own tokens so far), from logits [V]. Raises NoTokenError."""
    scores = edited_logits(logits, params, prompt_ids, output) if params.edits_logits else logits
    if params.temperature > 0:
        noise = torch.from_numpy(gumbel_noise(params.seed, params.sample_index, len(output), logits.shape[-1]))
        scores = filtered_logits(scores.double(), params) + noise.to(scores.device)
    best, token = scores.max(-1)
    if not torch.isfinite(best):
        raise NoTokenError(why_no_token(logits))
    return int(token)


def why_no_token(logits: torch.Tensor) -> str:
    if bool(torch.isfinite(logits).any()) and not bool(logits.isnan().any()):
        return "every token is excluded (bad_words, logit_bias, min_new_tokens)"
    return "the model's logits are not finite numbers (an overflow of 16 bits, or broken weights)"


def edited_logits(
    logits: torch.Tensor, params: SamplingParams, prompt_ids: tuple[int, ...], output: Sequence[int]
) -> torch.Tensor:
    """A copy of logits [V] with penalties, bias and exclusions (-inf) for the token that follows `output`."""
    scores = logits.clone()
    if params.repetition_penalty != 1:
        seen = _tensor(sorted(_distinct(prompt_ids).union(output)), scores)
        old = scores[seen]
        scores[seen] = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
    if output and (params.presence_penalty or params.frequency_penalty):
        tokens, counts = torch.unique(_tensor(output, scores), return_counts=True)
        scores[tokens] -= params.presence_penalty + params.frequency_penalty * counts.to(scores.dtype)
    for token, bias in params.logit_bias:
        scores[token] += bias
    excluded = [word[-1] for word in params.bad_words if _ends_with(output, word[:-1])]
    if len(output) < params.min_new_tokens:
        excluded += [token for token in params.eos_token_ids if token < len(scores)]
    if excluded:
        scores[_tensor(excluded, scores)] = -torch.inf
    return scores


def filtered_logits(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Logits [V] after temperature, top-k, top-p and min-p; excluded tokens are -inf."""
    scores = logits / params.temperature
    if 0 < params.top_k < scores.shape[-1]:
        threshold = scores.topk(params.top_k).values[-1]
        scores = scores.masked_fill(scores < threshold, -torch.inf)
    if params.top_p < 1:
        ordered, order = scores.sort(descending=True, stable=True)
        probs = ordered.softmax(-1)
        before = probs.cumsum(-1) - probs  # mass ahead of each token: the best one is always kept
        scores = scores.masked_fill(
            torch.zeros_like(before, dtype=torch.bool).scatter(0, order, before >= params.top_p), -torch.inf
        )
    if params.min_p > 0:
        probs = scores.softmax(-1)
        scores = scores.masked_fill(probs < params.min_p * probs.max(), -torch.inf)
    return scores


def gumbel_noise(seed: int, sample_index: int, position: int, size: int) -> np.ndarray:
    """[size] float64 standard Gumbel noise; a function of its arguments alone (Philox, counter-based)."""
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, (sample_index << 32) | position], np.uint64)))
    return generator.gumbel(size=size)


def token_logprobs(logits: torch.Tensor, token: int, top: int) -> TokenLogprobs:
    """The chosen token's log-probability and the `top` best ones, from the model's raw logits [V]."""
    logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    values, tokens = logprobs.topk(min(top, logprobs.shape[-1]))
    return TokenLogprobs(float(logprobs[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))


@lru_cache(maxsize=1024)
def _distinct(prompt_ids: tuple[int, ...]) -> frozenset[int]:
    return frozenset(prompt_ids)


def _tensor(tokens: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.long, device=like.device)


def _ends_with(output: Sequence[int], tail: Sequence[int]) -> bool:
    return not tail or tuple(output[-len(tail) :]) == tuple(tail)
