"""Output shards: each appears whole or not at all, under a name that its own rows decide.

A shard's name is a digest of the keys of its rows, so a write that is tried again replaces exactly its own shard and
can never touch another's. A killed driver's tasks may outlive it for seconds: each start of a run claims the folder
with a new attempt in run.json, and a writer of an older attempt refuses to write.

Error rows that are decoded again (resume.retry_errors) wait in RETRIED_FOLDER, in shards of their own. `put_in` gives
each its place: a shard with its error rows exchanged has the same keys, so the same name, and one atomic replacement
takes the old rows away and brings the new ones. A kill leaves each row once in DATA_FOLDER at every moment, the old or
the new one, and what waits is put in by the next start.
"""

from __future__ import annotations

import io
import json
import re
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from pipeline.schema import output_schema
from pipeline.storage import Place, open_place

DATA_FOLDER = "data"
RETRIED_FOLDER = "_retried"  # readers pass over such names
RUN_FILE = "run.json"
PUT_IN_SHARDS = 32  # waiting shards held in memory at a time
STORE_READERS = 8  # shards of a store read at a time, since each is a wait; a disk gains nothing from a second one
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


def write_batch(
    table: pa.Table, folder_uri: str, attempt: str, keep_columns: Mapping[str, str], retried: np.ndarray
) -> pa.Table:
    """A Ray Data stage: output rows in, one row of WRITTEN_SCHEMA per shard out. Raises LostFolderError.

    retried: keys (sorted uint64) of the rows that stand in the folder as errors; theirs are shards that wait.
    """
    folder = open_place(folder_uri)
    if read_attempt(folder) != attempt:
        raise LostFolderError(f"{folder.uri} was claimed by a later start of the run; this one stops")
    schema = output_schema(keep_columns)
    table = table.select(schema.names).cast(schema)
    waits = among(retried, table["row_key"].to_numpy())
    parts = {DATA_FOLDER: table.filter(pa.array(~waits)), RETRIED_FOLDER: table.filter(pa.array(waits))}
    receipts = [
        {
            "shard": write_shard(folder.child(name), rows),
            "rows": rows.num_rows,
            "failed": rows.num_rows - rows["error_type"].null_count,
        }
        for name, rows in parts.items()
        if rows.num_rows
    ]
    return pa.Table.from_pylist(receipts, schema=WRITTEN_SCHEMA)


def read_attempt(folder: Place) -> str | None:
    """The attempt that run.json names; None without one."""
    file = folder.child(RUN_FILE)
    return json.loads(file.read_bytes()).get("attempt") if file.exists() else None


def put_in(folder: Place) -> int:
    """Exchange error rows for the rows that wait in RETRIED_FOLDER; how many. What waits is deleted last.

    Only error rows are exchanged, so doing it again, or after a late writer's second answer, changes nothing.
    """
    data, waiting = folder.child(DATA_FOLDER), shards(folder.child(RETRIED_FOLDER))
    exchanged = 0
    for start in range(0, len(waiting), PUT_IN_SHARDS):
        group = waiting[start : start + PUT_IN_SHARDS]
        exchanged += _exchange(data, pa.concat_tables([_read(shard) for shard in group]))
        for shard in group:
            shard.delete()
    return exchanged


def _exchange(data: Place, fresh: pa.Table) -> int:
    keys, first = np.unique(fresh["row_key"].to_numpy(), return_index=True)
    fresh = fresh.take(first)  # in order of their keys
    exchanged = 0
    for shard, heads in read_shards(data, ["row_key", "error_type"]):
        old = heads["error_type"].is_valid().to_numpy() & among(keys, heads["row_key"].to_numpy())
        if not old.any():
            continue
        table = _read(shard)
        new = fresh.take(np.searchsorted(keys, table["row_key"].to_numpy()[old]))
        write_shard(data, pa.concat_tables([table.filter(pa.array(~old)), new]))
        exchanged += new.num_rows
    return exchanged


def remove_doubles(data: Place, doubled: np.ndarray) -> int:
    """Rewrite shards so that each (row_key, sample_index) stands once; how many rows were taken out.

    doubled: the keys (sorted uint64) that stand more than once. Needed only where a writer of an older attempt passed
    the check just before the folder was claimed. A shard's remaining rows are written before the shard goes, so a kill
    in between loses nothing.
    """
    seen: set[tuple[int, int]] = set()
    removed = 0
    for shard, heads in read_shards(data, ["row_key", "sample_index"]):
        keys = heads["row_key"].to_numpy()
        stays = ~among(doubled, keys)
        for at in np.flatnonzero(~stays):
            key = (int(keys[at]), heads["sample_index"][at].as_py())
            stays[at] = key not in seen
            seen.add(key)
        if stays.all():
            continue
        removed += int((~stays).sum())
        if stays.any():
            write_shard(data, _read(shard).filter(pa.array(stays)))
        shard.delete()
    return removed


def shards(folder: Place) -> list[Place]:
    """The shards in a folder, by their names: nothing else in it is this project's."""
    return [file for file in folder.list_files() if is_shard(file.name)]


def is_shard(name: str) -> bool:
    return _SHARD_NAME.fullmatch(name) is not None


def read_shards(folder: Place, columns: Sequence[str]) -> Iterator[tuple[Place, pa.Table]]:
    """Each shard with some of its columns, in order of name, with a few read ahead where they come from a store."""
    readers = 1 if folder.is_local else STORE_READERS
    ahead: deque[tuple[Place, Future[pa.Table]]] = deque()
    with ThreadPoolExecutor(readers) as pool:
        for shard in shards(folder):
            ahead.append((shard, pool.submit(_read, shard, columns)))
            if len(ahead) > 2 * readers:
                done, table = ahead.popleft()
                yield done, table.result()
        for done, table in ahead:
            yield done, table.result()


def _read(shard: Place, columns: Sequence[str] | None = None) -> pa.Table:
    with shard.open_input() as stream:
        return pq.ParquetFile(stream).read(columns, use_threads=False)


class Keys:
    """Row keys, gathered shard by shard: 8 bytes each, in one block that grows without a second copy."""

    def __init__(self) -> None:
        self._keys = array("Q")

    def add(self, column: pa.ChunkedArray) -> None:
        self._keys.frombytes(column.to_numpy().tobytes())

    def sorted(self) -> np.ndarray:
        """Those gathered so far, uint64, equal ones side by side. A view; nothing can be added while it lives."""
        if not self._keys:
            return np.empty(0, np.uint64)
        keys = np.frombuffer(self._keys, np.uint64)
        keys.sort()
        return keys


def doubled(keys: np.ndarray) -> np.ndarray:
    """The values that stand more than once in a sorted array, once each."""
    return np.unique(keys[1:][keys[1:] == keys[:-1]])


def among(keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """bool for each of `wanted`: whether it is in `keys`, which is sorted."""
    if not len(keys):
        return np.zeros(len(wanted), bool)
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.asarray(keys[at] == wanted)
