"""How the next token is chosen: shared, line for line, by the engine and by the slow reference.

Greedy is argmax. Above temperature 0 the draw is Gumbel-max over the filtered logits: argmax(log p + g), with the
noise g keyed by (seed, sample index, output position) through a counter-based generator. The same key gives the same
token whatever the batch, the tree, the order or the worker, which is what makes sampled ESP equal sampled plain
decoding (method.md calls it sample matching). V: vocabulary size.

Order: logit bias, penalties, bad words, min_new_tokens; then temperature, top-k, top-p, min-p (Hugging Face's order).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import torch

from esp_worker.types import SamplingParams, TokenLogprobs

NUCLEUS = 512  # tokens that top-p looks at first; the rest only where their mass does not suffice
_CHUNK = 128  # tokens that Ranked looks at together


class NoTokenError(ValueError):
    """There is no token to choose: all are excluded, or the model's logits are not numbers."""


def select_token(
    logits: torch.Tensor, params: SamplingParams, prompt_ids: tuple[int, ...], output: Sequence[int]
) -> int:
    """The token that follows `output` (the row's own tokens so far), from logits [V]. Raises NoTokenError."""
    scores = edited_logits(logits, params, prompt_ids, output) if params.edits_logits else logits
    if params.temperature > 0:
        scores = filtered_logits(scores.double(), params)
    best, token = scores.max(-1)
    if not torch.isfinite(best):
        raise NoTokenError(why_no_token(logits))
    return _draw(scores, params, len(output)) if params.temperature > 0 else int(token)


def _draw(scores: torch.Tensor, params: SamplingParams, position: int) -> int:
    """Gumbel-max; only tokens that are left need noise."""
    tokens = torch.isfinite(scores).nonzero().flatten()
    noise = gumbel_noise(params.seed, params.sample_index, position, tokens)
    return int(tokens[(scores[tokens] + noise).argmax()])


def why_no_token(logits: torch.Tensor) -> str:
    if bool(torch.isfinite(logits).any()) and not bool(logits.isnan().any()):
        return "every token is excluded (bad_words, logit_bias, min_new_tokens)"
    return "the model's logits are not finite numbers (an overflow of 16 bits, or broken weights)"


def edited_logits(
    logits: torch.Tensor, params: SamplingParams, prompt_ids: tuple[int, ...], output: Sequence[int]
) -> torch.Tensor:
    """A copy of logits [V] with bias, penalties and exclusions (-inf) for the token that follows `output`."""
    scores = logits.clone()
    for token, bias in params.logit_bias:
        scores[token] += bias
    if params.repetition_penalty != 1:
        seen = _tensor(sorted(_distinct(prompt_ids).union(output)), scores)
        old = scores[seen]
        scores[seen] = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
    if output and (params.presence_penalty or params.frequency_penalty):
        tokens, counts = torch.unique(_tensor(output, scores), return_counts=True)
        scores[tokens] -= params.presence_penalty + params.frequency_penalty * counts.to(scores.dtype)
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
        scores = scores.masked_fill(scores < _nucleus_threshold(scores, params.top_p), -torch.inf)
    if params.min_p > 0:
        probs = scores.softmax(-1)
        scores = scores.masked_fill(probs < params.min_p * probs.max(), -torch.inf)
    return scores


def _nucleus_threshold(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """The lowest of the fewest best scores whose mass reaches top_p. Scores are sorted no further than that."""
    total, count = scores.logsumexp(-1), NUCLEUS
    while True:
        best = scores.topk(min(count, len(scores))).values
        mass = (best - total).exp().cumsum(-1)
        inside = int((mass < top_p).sum())  # the next one completes the mass
        if inside < len(best) or len(best) == len(scores):
            return best[min(inside, len(best) - 1)]
        count *= 8


def gumbel_noise(seed: int, sample_index: int, position: int, tokens: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise of each of `tokens` [n] (int64), in float64: a function of key and token alone.

    Counter-based: splitmix64 (Steele, Lea, Flood 2014) of a stream that the key picks, at the place of the token id.
    """
    stream = _mix_int(_mix_int(_mix_int(seed) ^ sample_index) ^ position)
    bits = _mix(tokens * _signed(_GOLDEN) + _signed(stream))
    uniform = ((bits >> 12 & (1 << 52) - 1).double() + 0.5) * 2.0**-52  # in (0, 1)
    return -(-uniform.log()).log()


_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def _mix_int(value: int) -> int:
    """One splitmix64 step of an unsigned 64-bit number."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ value >> 30) * _MIX_1) & _MASK
    value = ((value ^ value >> 27) * _MIX_2) & _MASK
    return value ^ value >> 31


def _mix(values: torch.Tensor) -> torch.Tensor:
    """The same step for many; int64 multiplication wraps as the unsigned one does."""
    values = values + _signed(_GOLDEN)
    values = (values ^ _shifted(values, 30)) * _signed(_MIX_1)
    values = (values ^ _shifted(values, 27)) * _signed(_MIX_2)
    return values ^ _shifted(values, 31)


def _shifted(values: torch.Tensor, by: int) -> torch.Tensor:
    """Right shift of the bits, without the sign."""
    return values >> by & (1 << 64 - by) - 1


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    return value - (1 << 64) if value >> 63 else value


class Ranked:
    """Logits [R, V], of whose rows the best tokens are asked for.

    By chunks: the largest value of each is found once, for all questions; then few chunks are looked into. On a CPU
    that takes a fifth of argmax's time, and a third of topk's, where the vocabulary is whole chunks.
    """

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits

    @cached_property
    def _chunks(self) -> torch.Tensor:
        """[R, C, _CHUNK], the last one filled up."""
        rows, size = self.logits.shape
        padding = -size % _CHUNK
        padded = torch.nn.functional.pad(self.logits, (0, padding), value=-torch.inf) if padding else self.logits
        return padded.view(rows, (size + padding) // _CHUNK, _CHUNK)

    @cached_property
    def _largest(self) -> torch.Tensor:
        """[R, C]"""
        return self._chunks.amax(-1)

    def argmax(self) -> list[int]:
        """Each row's best token, the first of equals, -1 where the best is no number."""
        if self.logits.shape[1] % _CHUNK:  # filling up would copy all logits
            best, tokens = self.logits.max(-1)
        else:
            chunk = self._largest.argmax(-1, keepdim=True)  # the first of equals
            best, place = self._inside(chunk).max(-1)
            tokens = chunk[:, 0] * _CHUNK + place
        return torch.where(torch.isfinite(best), tokens, -1).tolist()  # one wait for the device

    def top(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The `count` largest values of each row, largest first, and their tokens: [R, count] both, or [R, V]."""
        size = self.logits.shape[1]
        if size <= _CHUNK * count:
            return self.logits.topk(min(count, size))
        chunks = self._largest.topk(count).indices
        values, places = self._inside(chunks).topk(count)
        tokens = chunks.gather(1, places // _CHUNK) * _CHUNK + places % _CHUNK
        return values, tokens.clamp(max=size - 1)  # where all else is -inf, the padding is no worse

    def _inside(self, chunks: torch.Tensor) -> torch.Tensor:
        """[R, n] numbers of chunks -> [R, n * _CHUNK], what is in them."""
        return self._chunks.gather(1, chunks[..., None].expand(-1, -1, _CHUNK)).flatten(1)


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
