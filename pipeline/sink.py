"""Output shards: each appears whole or not at all, under a name that its own rows decide.

A shard's name is a digest of the keys of its rows, so a write that is tried again replaces exactly its own shard and
can never touch another's. A killed driver's tasks may outlive it for seconds: each start of a run claims the folder
with a new attempt in run.json, and a writer of an older attempt refuses to write.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from pipeline.schema import output_schema
from pipeline.storage import Place, open_place

DATA_FOLDER = "data"
RUN_FILE = "run.json"
_SHARD_NAME = re.compile(r"part-[0-9a-f]{32}\.parquet")

WRITTEN_SCHEMA = pa.schema([("shard", pa.string()), ("rows", pa.int64()), ("failed", pa.int64())])


def shard_name(table: pa.Table) -> str:
    """part-<128-bit digest of the sorted (row_key, sample_index) pairs>.parquet"""
    keys = sorted(zip(table["row_key"].to_pylist(), table["sample_index"].to_pylist(), strict=True))
    digest = xxhash.xxh3_128(b"".join(key.to_bytes(8, "big") + sample.to_bytes(4, "big") for key, sample in keys))
    return f"part-{digest.hexdigest()}.parquet"


def write_shard(data: Place, table: pa.Table) -> str:
    """Write output rows as one shard of the folder `data`; returns its name. Raises OSError when storage gives up."""
    buffer = io.BytesIO()
    with pq.ParquetWriter(buffer, table.schema, compression="zstd") as writer:
        if table.num_rows:  # `datasets` cannot read a row group of no rows
            writer.write_table(table)
    name = shard_name(table)
    data.child(name).write_atomic(buffer.getvalue())
    return name


class LostFolderError(RuntimeError):
    """Another start of a run has claimed the output folder; this one must not write to it any more."""


def write_batch(table: pa.Table, folder_uri: str, attempt: str, keep_columns: Mapping[str, str]) -> pa.Table:
    """A Ray Data stage: output rows in, one row of WRITTEN_SCHEMA per shard out. Raises LostFolderError."""
    folder = open_place(folder_uri)
    if read_attempt(folder) != attempt:
        raise LostFolderError(f"{folder.uri} was claimed by a later start of the run; this one stops")
    schema = output_schema(keep_columns)
    table = table.select(schema.names).cast(schema)
    name = write_shard(folder.child(DATA_FOLDER), table)
    failed = table.num_rows - table["error_type"].null_count
    return pa.table({"shard": [name], "rows": [table.num_rows], "failed": [failed]}, schema=WRITTEN_SCHEMA)


def read_attempt(folder: Place) -> str | None:
    """The attempt that run.json names; None without one."""
    file = folder.child(RUN_FILE)
    return json.loads(file.read_bytes()).get("attempt") if file.exists() else None


def remove_doubles(data: Place) -> int:
    """Rewrite shards so that each (row_key, sample_index) stands once; how many rows were taken out.

    Needed only where a writer of an older attempt passed the check just before the folder was claimed. A shard's
    remaining rows are written before the shard goes, so a kill in between loses nothing.
    """
    seen: set[tuple[int, int]] = set()
    removed = 0
    for shard in shards(data):
        table = pq.read_table(pa.BufferReader(shard.read_bytes()))
        keys = list(zip(table["row_key"].to_pylist(), table["sample_index"].to_pylist(), strict=True))
        fresh = [key not in seen for key in keys]
        seen.update(keys)
        if all(fresh):
            continue
        removed += fresh.count(False)
        if any(fresh):
            write_shard(data, table.filter(pa.array(fresh)))
        shard.delete()
    return removed


def shards(data: Place) -> list[Place]:
    """The shards of an output folder, by their names: nothing else in it is this project's."""
    return [file for file in data.list_files() if _SHARD_NAME.fullmatch(file.name)]


def read_columns(data: Place, columns: list[str], schema: pa.Schema) -> pa.Table:
    """Some columns of all shards, as one table (empty, with its schema, when there is no shard)."""
    tables = [pq.read_table(pa.BufferReader(shard.read_bytes()), columns=columns) for shard in shards(data)]
    wanted = pa.schema([schema.field(name) for name in columns])
    return pa.concat_tables([table.select(columns).cast(wanted) for table in tables] or [wanted.empty_table()])
