"""How the next token is chosen: shared, line for line, by the engine and by the slow reference.

Greedy is argmax. Above temperature 0 the draw is Gumbel-max over the filtered logits: argmax(log p + g), with the
noise g keyed by (seed, sample index, output position) through a counter-based generator. The same key gives the same
token whatever the batch, the tree, the order or the worker, which is what makes sampled ESP equal sampled plain
decoding (method.md calls it sample matching). V: vocabulary size.
"""

from __future__ import annotations

import numpy as np
import torch

from esp_worker.types import SamplingParams


def select_token(logits: torch.Tensor, params: SamplingParams, position: int) -> int:
    """The token at output position `position` (0: the first new token), from logits [V]."""
    if params.temperature == 0:
        return int(logits.argmax())
    scores = filtered_logits(logits.double(), params)
    noise = torch.from_numpy(gumbel_noise(params.seed, params.sample_index, position, logits.shape[-1]))
    return int((scores + noise.to(scores.device)).argmax())


def filtered_logits(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Logits [V] after temperature, top-k and top-p, in that order (Hugging Face's); excluded tokens are -inf."""
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
    return scores


def gumbel_noise(seed: int, sample_index: int, position: int, size: int) -> np.ndarray:
    """[size] float64 standard Gumbel noise; a function of its arguments alone (Philox, counter-based)."""
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, (sample_index << 32) | position], np.uint64)))
    return generator.gumbel(size=size)
