"""What an engine actor tells Prometheus, through Ray's own metrics endpoint on each node.

Counters only grow, so that any window gives a rate: tau over the last hour is the increase of
`espstream_committed_tokens` over that of `espstream_decode_calls`. Rows of a task that Ray ran again count twice; the
report, which counts the output's rows, does not. What a dying actor had not yet sent (seconds) is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

STEP_BOUNDS_S = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0]


class ActorMetrics:
    """One actor's metrics, each with the method (hybrid, ar) as a tag; Ray adds node, worker and session."""

    def __init__(self, method: str) -> None:
        self._rows = _counter("rows", "Rows that ended, failed ones included.")
        self._failed = _counter("failed_rows", "Error rows, by error_type.", "error_type")
        self._prompt_tokens = _counter("prompt_tokens", "Prompt tokens of done rows.")
        self._tokens = _counter("output_tokens", "Output tokens of done rows.")
        self._committed = _counter("committed_tokens", "Tokens that decode calls committed, bonus tokens included.")
        self._calls = _counter("decode_calls", "Decode calls, counted for each row that takes part.")
        self._in_hand = Gauge("espstream_rows_in_hand", "Rows in the actor's slots and queue.", ("method",))
        self._step = Histogram(
            "espstream_step_seconds", "A row's mean time from one of its calls to the next.", STEP_BOUNDS_S, ("method",)
        )
        self._waiting = 0
        for metric in vars(self).values():
            if not isinstance(metric, int):
                metric.set_default_tags({"method": method})

    @contextmanager
    def in_hand(self, rows: int) -> Iterator[None]:
        """Count a batch's rows as queued or decoding while the body runs."""
        self._add_waiting(rows)
        try:
            yield
        finally:
            self._add_waiting(-rows)

    def _add_waiting(self, rows: int) -> None:
        self._waiting += rows
        self._in_hand.set(self._waiting)

    def done(self, result: Mapping[str, Any]) -> None:
        """A decoded row; `result` has the output's columns."""
        calls = result["decode_calls"]
        self._rows.inc()
        _add(self._prompt_tokens, result["prompt_tokens"])
        _add(self._tokens, result["output_tokens"])
        _add(self._committed, sum(result["accept_lengths"]))
        _add(self._calls, calls)
        if calls:
            self._step.observe(result["latency_s"] / (calls + result["prefill_calls"]))

    def failed(self, error_type: str) -> None:
        self._rows.inc()
        self._failed.inc(tags={"error_type": error_type})


def _counter(name: str, description: str, *tags: str) -> Counter:
    return Counter(f"espstream_{name}", description, ("method", *tags))


def _add(counter: Counter, count: int) -> None:
    if count:  # Ray refuses an increase of 0
        counter.inc(count)
