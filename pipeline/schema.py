"""The fixed Arrow schemas of the pipeline's two edges: rows ready to decode, and output rows.

Nothing is inferred from data: a column that is null in one shard and a string in another has one type in both.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

KEEP_TYPES: dict[str, pa.DataType] = {
    "string": pa.string(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
}

# Columns that identify a row; carried unchanged from the source to the output.
IDENTITY_FIELDS = [
    pa.field("row_id", pa.string(), nullable=False),  # the input's id, else "<file>:<line>"
    pa.field("row_key", pa.uint64(), nullable=False),  # hash of (file identity, id, content), sample; see parse.row_key
    pa.field(
        "source_file", pa.string(), nullable=False
    ),  # relative to input.path (the whole path where there are several)
    pa.field("row_index", pa.int64(), nullable=False),  # 0-based position in source_file (JSONL: line - 1)
]

ERROR_FIELDS = [
    pa.field("error", pa.string()),
    pa.field("error_type", pa.string()),
]

RESULT_FIELDS = [
    pa.field("sample_index", pa.int32(), nullable=False),
    pa.field("text", pa.string()),
    pa.field("token_ids", pa.list_(pa.int32())),
    pa.field("finish_reason", pa.string(), nullable=False),  # stop | length | error
    pa.field("stop_reason", pa.string()),  # the stop string that ended the row
    # One entry a token, null unless sampling.logprobs is set: under the model's own distribution, before any setting.
    pa.field("logprobs", pa.list_(pa.float32())),
    pa.field(
        "top_logprobs", pa.list_(pa.list_(pa.struct([("token_id", pa.int32()), ("logprob", pa.float32())])))
    ),  # the most probable tokens, best first
    *ERROR_FIELDS,
    pa.field("prompt_tokens", pa.int32()),
    pa.field("output_tokens", pa.int32()),
    pa.field("decode_calls", pa.int32()),
    pa.field("plain_steps", pa.int32()),  # decode calls that drafted nothing
    pa.field("prefill_calls", pa.int32()),
    pa.field("prefill_tokens", pa.int32()),  # prompt tokens computed
    pa.field("cached_tokens", pa.int32()),  # prompt tokens taken over from another row's KV
    pa.field("rows_computed", pa.int64()),
    pa.field("accept_lengths", pa.list_(pa.int16())),
    pa.field("tau", pa.float64()),
    pa.field("drafted_tokens", pa.int64()),
    pa.field("accepted_tokens", pa.int64()),
    pa.field("method", pa.string()),
    pa.field("seed", pa.uint64()),
    pa.field("latency_s", pa.float64()),  # from slot to end
    pa.field("engine_s", pa.float64()),  # this row's share of the engine's busy time; sums to it over rows
    pa.field("mean_batch", pa.float64()),  # sequences that shared this row's steps, itself included
    pa.field("finished_at", pa.timestamp("us", tz="UTC")),  # end of the method's own decoding; - latency_s: its start
    pa.field("worker", pa.string()),
    pa.field("worker_load_s", pa.float64()),
    pa.field("worker_warmup_s", pa.float64()),
    # Comparison with plain decoding (`compare.fraction` of the rows; null elsewhere).
    pa.field("ar_decode_calls", pa.int32()),
    pa.field("ar_latency_s", pa.float64()),
    pa.field("ar_finished_at", pa.timestamp("us", tz="UTC")),
    pa.field("ar_engine_s", pa.float64()),
    pa.field("ar_mean_batch", pa.float64()),
    pa.field("ar_output_tokens", pa.int32()),
    pa.field("exact_match", pa.bool_()),
    pa.field("first_divergence", pa.int32()),  # 0-based output position; null where equal
    pa.field("divergence_margin", pa.float64()),  # there, plain decoding's two best log-probabilities: their difference
]


def keep_fields(keep_columns: Mapping[str, str]) -> list[pa.Field]:
    """Input columns carried to the output, in the config's order."""
    return [pa.field(name, KEEP_TYPES[kind]) for name, kind in keep_columns.items()]


def prepared_schema(keep_columns: Mapping[str, str]) -> pa.Schema:
    """Rows ready to decode, one a sample: identity, kept columns, prompt_ids (null for a row that already failed),
    sampling (the row's own settings as JSON; see pipeline.sampling.RowSampling), error, and logged: the error without
    what it quotes of the row."""
    ready = [
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32())),
        pa.field("sampling", pa.string()),
        pa.field("logged", pa.string()),
    ]
    return pa.schema([*IDENTITY_FIELDS, *keep_fields(keep_columns), *ready, *ERROR_FIELDS])


def output_schema(keep_columns: Mapping[str, str]) -> pa.Schema:
    """Rows of `OUT/data/part-*.parquet`."""
    return pa.schema([*IDENTITY_FIELDS, *keep_fields(keep_columns), *RESULT_FIELDS])


def reserved_columns() -> frozenset[str]:
    """Names that `input.keep_columns` must not use, since the output has its own column of that name."""
    return frozenset(field.name for field in [*IDENTITY_FIELDS, *RESULT_FIELDS]) | {"prompt_ids", "sampling", "logged"}
