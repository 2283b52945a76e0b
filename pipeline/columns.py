"""A completion as columns of its output row, and beside its plain decoding."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import xxhash

from esp_worker.types import Completion, Request, SamplingParams, TokenLogprobs


def result_columns(completion: Completion, finished: datetime, method: str, text: str) -> dict[str, Any]:
    """What the method gave and cost. text: the output's, already decoded."""
    stats = completion.stats
    return {
        "text": text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop and completion.stop.reason,
        **logprob_columns(completion.logprobs),
        "output_tokens": len(completion.token_ids),
        "decode_calls": stats.decode_calls,
        "plain_steps": stats.plain_steps,
        "prefill_calls": stats.prefill_calls,
        "prefill_tokens": stats.prefill_tokens,
        "cached_tokens": stats.cached_tokens,
        "rows_computed": stats.rows_computed,
        "accept_lengths": stats.accept_lengths,
        "tau": stats.tau,
        "drafted_tokens": stats.drafted_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "method": method,
        "latency_s": completion.latency_s,
        "engine_s": stats.engine_s,
        "mean_batch": stats.mean_batch,
        "finished_at": finished,
    }


def comparison_columns(
    method: Completion, plain: Completion, finished: datetime, best_two: Completion | None
) -> dict[str, Any]:
    """A row beside its plain decoding. best_two: the answer to margin_request, None where there was none."""
    divergence = first_divergence(method.token_ids, plain.token_ids)
    return {
        "ar_decode_calls": plain.stats.decode_calls,
        "ar_latency_s": plain.latency_s,
        "ar_finished_at": finished,
        "ar_engine_s": plain.stats.engine_s,
        "ar_mean_batch": plain.stats.mean_batch,
        "ar_output_tokens": len(plain.token_ids),
        "exact_match": divergence is None,
        "first_divergence": divergence,
        "divergence_margin": None if best_two is None else margin(best_two),
    }


def logprob_columns(logprobs: tuple[TokenLogprobs, ...] | None) -> dict[str, Any]:
    if logprobs is None:
        return {"logprobs": None, "top_logprobs": None}
    tops = [[{"token_id": token, "logprob": logprob} for token, logprob in at.top] for at in logprobs]
    return {"logprobs": [at.logprob for at in logprobs], "top_logprobs": tops}


def margin_request(request: Request, method: Completion, plain: Completion) -> Request | None:
    """What plain decoding is asked for where two outputs first differ: its two best tokens there, from one prefill.

    None where there is no such position: equal outputs; an output that only goes on where the other has been cut or
    has ended (the tokens that led there are not known); draws and edited logits, whose best token is not the model's.
    """
    at = first_divergence(method.token_ids, plain.token_ids)
    greedy = request.sampling.temperature == 0 and not request.sampling.edits_logits
    if at is None or at >= min(len(method.token_ids), len(plain.token_ids)) or not greedy:
        return None
    best_two = SamplingParams(max_new_tokens=1, logprobs=2)
    return Request(request.request_id, (*request.prompt_ids, *plain.token_ids[:at]), best_two)


def margin(best_two: Completion) -> float:
    """How near a tie was: the difference of the two best log-probabilities."""
    assert best_two.logprobs is not None
    (_, best), (_, second) = best_two.logprobs[0].top
    return best - second


def first_divergence(a: tuple[int, ...], b: tuple[int, ...]) -> int | None:
    """First position at which two outputs differ (a shorter one differs at its end); None where they are equal."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def is_compared(row_key: int, fraction: float) -> bool:
    """Whether a row is in the sample that plain decoding decodes too; the key decides, so a resume picks the same."""
    return xxhash.xxh3_64_intdigest(row_key.to_bytes(8, "big")) < fraction * 2**64
