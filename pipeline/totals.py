"""Running totals of output rows, added shard by shard: all that the report needs, whatever the number of rows.

Sums, counts and the few rows that the report shows by name are kept. Of each row only a latency is (8 bytes; of a
compared row one more, and 8 for a margin), since a percentile needs them all.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.figures import ratio
from pipeline.times import WorkerSpans

MAX_ERRORS = 20
MAX_DIVERGENCES = 10

_AR = "ar_"
_COMPARED = ("output_tokens", "decode_calls", "engine_s")
_METHOD = (
    *_COMPARED,
    *("prefill_calls", "prefill_tokens", "cached_tokens", "rows_computed", "plain_steps"),
    *("drafted_tokens", "accepted_tokens"),
)

REPORT_COLUMNS = list(
    dict.fromkeys(
        [
            *("row_id", "source_file", "row_index", "sample_index", "finish_reason", "error", "error_type", "method"),
            *("prompt_tokens", *_METHOD, "accept_lengths", "latency_s", "mean_batch"),
            *("finished_at", "worker", "worker_load_s", "worker_warmup_s"),
            *(_AR + name for name in (*_COMPARED, "latency_s", "finished_at", "mean_batch")),
            *("exact_match", "first_divergence", "divergence_margin"),
        ]
    )
)


class Totals:
    """Totals of the rows of any number of tables."""

    def __init__(self) -> None:
        self.rows = 0
        self.done = 0
        self.finish_reasons: Counter[str] = Counter()
        self.error_types: Counter[str] = Counter()
        self.tokens = {"prompt": 0, "output": 0}
        self.methods: dict[str, MethodTotals] = {}
        self.latency = Values()
        self.compared = SideTotals("")
        self.compared_methods: Counter[str] = Counter()
        self.plain = SideTotals(_AR)
        self.equal = 0  # compared rows whose outputs are the same
        self.margins = Values()
        self.divergences = FirstRows(("first_divergence", "row_id", "sample_index"), MAX_DIVERGENCES)
        self.errors = FirstRows(("source_file", "row_index", "sample_index"), MAX_ERRORS)
        self.spans = WorkerSpans()

    @property
    def failed(self) -> int:
        return self.rows - self.done

    def add(self, table: pa.Table) -> None:
        """Add rows; `table` holds at least REPORT_COLUMNS."""
        table = table.select(REPORT_COLUMNS)
        is_done = pc.not_equal(table["finish_reason"], "error")
        done = table.filter(is_done)
        self.rows += table.num_rows
        self.done += done.num_rows
        self.finish_reasons += value_counts(table["finish_reason"])
        self.error_types += value_counts(table["error_type"])
        self.tokens["prompt"] += total(done, "prompt_tokens")
        self.tokens["output"] += total(done, "output_tokens")
        self.latency.add(done["latency_s"])
        for name in value_counts(done["method"]):
            of_method = done.filter(pc.fill_null(pc.equal(done["method"], name), False))
            self.methods.setdefault(name, MethodTotals()).add(of_method)
        self._add_compared(done.filter(pc.is_valid(done["exact_match"])))
        self.errors.add(table.filter(pc.invert(is_done)))
        self.spans.add(table)

    def _add_compared(self, rows: pa.Table) -> None:
        self.compared.add(rows)
        self.compared_methods += value_counts(rows["method"])
        self.plain.add(rows)
        differing = rows.filter(pc.invert(rows["exact_match"]))
        self.equal += rows.num_rows - differing.num_rows
        self.divergences.add(differing)
        self.margins.add(differing["divergence_margin"])


class Sums:
    """Sums over one method's rows; its columns are named with `prefix`."""

    def __init__(self, columns: Sequence[str], prefix: str = "") -> None:
        self.rows = 0
        self.sums: dict[str, Any] = dict.fromkeys(columns, 0)
        self._prefix = prefix
        self._first_tokens = 0
        self._batches = self._batch_calls = 0.0

    def add(self, rows: pa.Table) -> None:
        self.rows += rows.num_rows
        for name in self.sums:
            self.sums[name] += total(rows, self._prefix + name)
        self._first_tokens += pc.sum(pc.greater(rows[self._prefix + "output_tokens"], 0)).as_py() or 0
        batch = rows[self._prefix + "mean_batch"]
        calls = pc.if_else(pc.is_valid(batch), rows[self._prefix + "decode_calls"], None)
        self._batches += pc.sum(pc.multiply(batch, pc.cast(calls, pa.float64()))).as_py() or 0
        self._batch_calls += pc.sum(calls).as_py() or 0

    @property
    def tokens_after_first(self) -> int:
        """Output tokens that decode calls gave: each row's first token is prefill's."""
        return int(self.sums["output_tokens"]) - self._first_tokens

    @property
    def mean_batch(self) -> float | None:
        """Sequences in a step, averaged over the rows' decode calls."""
        return ratio(self._batches, self._batch_calls)


class MethodTotals(Sums):
    """A method's done rows. lengths: accept length -> decode calls."""

    def __init__(self) -> None:
        super().__init__(_METHOD)
        self.lengths: Counter[int] = Counter()

    def add(self, rows: pa.Table) -> None:
        super().add(rows)
        self.lengths += value_counts(pc.list_flatten(rows["accept_lengths"]))


class SideTotals(Sums):
    """One side of the compared rows."""

    def __init__(self, prefix: str) -> None:
        super().__init__(_COMPARED, prefix)
        self.latency = Values()

    def add(self, rows: pa.Table) -> None:
        super().add(rows)
        self.latency.add(rows[self._prefix + "latency_s"])


class Values:
    """All values of a float column, 8 bytes each."""

    def __init__(self) -> None:
        self._values = array("d")

    def __len__(self) -> int:
        return len(self._values)

    def add(self, column: pa.ChunkedArray) -> None:
        self._values.frombytes(column.drop_null().to_numpy().astype(np.float64, copy=False).tobytes())

    def percentiles(self, *points: float) -> list[float | None]:
        """With linear interpolation; None without values."""
        if not self._values:
            return [None] * len(points)
        # In place: their order means nothing, and a copy would double the memory.
        return np.percentile(np.frombuffer(self._values), points, overwrite_input=True).tolist()


class FirstRows:
    """The first `most` rows in the order of some columns."""

    def __init__(self, order: Sequence[str], most: int) -> None:
        self._order = [(name, "ascending") for name in order]
        self._most = most
        self._rows: pa.Table | None = None

    def add(self, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        known = rows if self._rows is None else pa.concat_tables([self._rows, rows])
        self._rows = known.sort_by(self._order).slice(0, self._most)

    def to_pylist(self) -> list[dict[str, Any]]:
        return [] if self._rows is None else self._rows.to_pylist()


def total(table: pa.Table, column: str) -> Any:
    return pc.sum(table[column]).as_py() or 0


def value_counts(column: pa.ChunkedArray) -> Counter[Any]:
    """How often each value stands in a column; nulls do not count."""
    return Counter({item["values"]: item["counts"] for item in pc.value_counts(column.drop_null()).to_pylist()})
