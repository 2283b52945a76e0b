"""Damaged prompt files, and what must hold of reading any of them; run as a script, it reads a range of them.

`python fuzz_readers.py FIRST COUNT` prints `begin N` before file N and `fault N ...` where something does not hold. A
file that takes too long, or that ends the process, is the last one begun: `run` starts again behind it.
"""

from __future__ import annotations

import faulthandler
import gzip
import io
import itertools
import json
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from pipeline.config import InputConfig
from pipeline.lines import _WIDE
from pipeline.scan import scan
from pipeline.source import list_source, read_rows

SECONDS_A_FILE = 20  # of processor time, so that a busy machine looks like no hang
MEMORY_BYTES = 8 << 30
ROWS = 600
SETTINGS: list[dict[str, Any]] = [{}, {"id_column": "id"}, {"messages_column": "chat", "keep_columns": {"n": "int64"}}]


# ----------------------------------------------------------------------------------------------------- sound files


@cache
def _rows(count: int) -> list[dict[str, Any]]:
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    chats = [
        [{"role": "user", "content": "hé \U0001f600"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}],
    ]
    return [
        {"id": f"row-{i}", "prompt": f"Prompt {i}: " + "ab" * (i % 9), "n": i, "chat": chats[i % 2]}
        for i in range(count)
    ]


@cache
def _json_lines(count: int) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=i % 3 == 0) + "\n" for i, row in enumerate(_rows(count))).encode()


@cache
def _table(count: int) -> pa.Table:
    return pa.Table.from_pylist(_rows(count))


@cache
def _parquet(count: int, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(_table(count), sink, row_group_size=max(1, count * 2 // 5), data_page_size=2000, **options)
    return sink.getvalue()


@cache
def _arrow(count: int, stream: bool, compression: str | None) -> bytes:
    sink = io.BytesIO()
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(sink, _table(count).schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(_table(count), max_chunksize=max(1, count // 3))
    return sink.getvalue()


def _zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def _gzip(data: bytes) -> bytes:
    return gzip.compress(data, 1, mtime=0)


KINDS: list[tuple[str, Callable[[int], bytes]]] = [
    ("jsonl", _json_lines),
    ("jsonl.gz", lambda n: _gzip(_json_lines(n))),
    ("jsonl.zst", lambda n: _zstd(_json_lines(n))),
    ("parquet", _parquet),
    ("parquet", lambda n: _parquet(n, compression="none", use_dictionary=False)),
    ("parquet", lambda n: _parquet(n, compression="zstd", data_page_version="2.0", write_page_checksum=True)),
    ("arrow", lambda n: _arrow(n, True, None)),
    ("arrow", lambda n: _arrow(n, False, None)),
    ("arrow", lambda n: _arrow(n, True, "zstd")),
]
PACKED = {"jsonl.gz": _gzip, "jsonl.zst": _zstd}

# ---------------------------------------------------------------------------------------------------------- damage


FILLS = [b"\x00", b"\xff", b"\x7f", b"\n", b"\xed\xa0\x80"]
NUMBERS = [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x00010000]


def damage(data: bytes, draw: random.Random) -> bytes:
    """One to four changes, more of them near the ends, where headers and footers are."""
    for _ in range(draw.randint(1, 4)):
        data = _changed(data, _place(len(data), draw), draw.choice([1, 1, 2, 8, 64, 500]), draw)
    return data


def _changed(data: bytes, at: int, size: int, draw: random.Random) -> bytes:
    before, hit, after = data[:at], data[at : at + size], data[at + size :]
    kind = draw.choice(["flip", "noise", "fill", "cut", "twice", "insert", "number", "end"])
    if kind == "flip":
        return before + bytes([byte ^ 1 << draw.randrange(8) for byte in hit[:1]]) + hit[1:] + after
    if kind == "noise":
        return before + draw.randbytes(size) + after
    if kind == "fill":
        return before + draw.choice(FILLS) * size + after
    if kind == "cut":
        return before + after
    if kind == "twice":
        return before + hit * 2 + after
    if kind == "insert":
        return before + draw.randbytes(size) + hit + after
    if kind == "number":
        return before + draw.choice(NUMBERS).to_bytes(4, "little") + data[at + 4 :]
    return before if draw.random() < 0.5 else data + draw.randbytes(size)


def _place(length: int, draw: random.Random) -> int:
    ends = min(length, 600)
    return draw.choice([draw.randint(0, length), draw.randint(0, ends), length - draw.randint(0, ends)])


def damaged_file(number: int, rows: int = ROWS) -> tuple[str, bytes]:
    """(suffix, content) of file `number`; the same in every run. Some compressed files have sound packing around
    damaged lines."""
    draw = random.Random(number)
    suffix, make = KINDS[number % len(KINDS)]
    if suffix in PACKED and draw.random() < 0.5:
        return suffix, PACKED[suffix](damage(_json_lines(rows), draw))
    return suffix, damage(make(rows), draw)


# ----------------------------------------------------------------------------------------------------------- checks


def check(path: Path, settings: dict[str, Any]) -> None:
    """Scan and read one file: every row is done or an error row, counted as it is read, each with a key of its own."""
    config = InputConfig(path=[str(path)], **settings)
    scanned = scan(list_source(config), config)
    rows = [row for file in scanned.files for row in read_rows(file, config, scanned.duplicates)]
    assert scanned.total == len(rows), f"counted {scanned.total}, read {len(rows)}"
    assert all((row.error is None) == (row.messages_or_prompt is not None) for row in rows)
    assert len({row.row_key for row in rows}) == len(rows), "keys meet"
    indices = [row.row_index for row in rows]
    assert all(a < b for a, b in itertools.pairwise(indices)), "out of order"
    json.dumps([[row.row_id, row.error, row.kept] for row in rows], ensure_ascii=False).encode()
    if path.suffix == ".jsonl":
        _check_lines(path.read_bytes(), indices)
    if path.suffix == ".parquet":
        _check_groups(path, indices, [row.error or "" for row in rows])


def _check_lines(data: bytes, indices: list[int]) -> None:
    """Each line that is not blank is one row."""
    if data.startswith(_WIDE):
        assert indices == [0]
        return
    assert indices == [i for i, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n")) if line.strip()]


def _check_groups(path: Path, indices: list[int], errors: list[str]) -> None:
    """Rows, and the ranges that error rows stand for, are all rows of the footer."""
    try:
        promised = pq.ParquetFile(path).metadata.num_rows
    except Exception:
        return
    if any("truncated or corrupt" in error for error in errors):
        return
    covered = 0
    for error in errors:
        lost = re.search(r"rows (\d+) to (\d+) \(row group", error)
        covered += int(lost[2]) - int(lost[1]) + 1 if lost else 1
    assert covered == promised, f"{covered} rows accounted for, {promised} promised"


def main(first: int, count: int) -> None:
    """Read `count` files from number `first` on."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    faulthandler.enable()
    faulthandler.register(signal.SIGPROF, chain=True)  # shows where, and then ends the process
    with tempfile.TemporaryDirectory() as folder:
        for number in range(first, first + count):
            print(f"begin {number}", flush=True)
            signal.setitimer(signal.ITIMER_PROF, SECONDS_A_FILE)
            suffix, content = damaged_file(number)
            path = Path(folder, f"{number}.{suffix}")
            path.write_bytes(content)
            try:
                check(path, SETTINGS[number // len(KINDS) % len(SETTINGS)])
            except Exception as error:
                print(f"fault {number} {suffix}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            path.unlink()
    signal.setitimer(signal.ITIMER_PROF, 0)


def run(first: int, count: int) -> list[str]:
    """Read the files in processes of their own; what was wrong, one line each."""
    faults: list[str] = []
    while count > 0:
        ended = subprocess.run(
            [sys.executable, __file__, str(first), str(count)], capture_output=True, text=True, check=False
        )
        lines = ended.stdout.splitlines()
        faults += [line for line in lines if line.startswith("fault")]
        begun = int([line for line in lines if line.startswith("begin")][-1].split()[1])
        if ended.returncode:
            faults.append(f"file {begun} ended the process ({ended.returncode}):\n{ended.stderr[-2000:]}")
        count -= begun + 1 - first
        first = begun + 1
    return faults


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
