"""What the tests of the input's edge share: prompt files, and the whole way from them to parsed rows."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config import InputConfig
from pipeline.parse import ParsedRow
from pipeline.scan import Scan, scan
from pipeline.source import list_source, read_rows

GOOD = b'{"prompt": "hello"}\n'


def load(config: InputConfig) -> tuple[list[ParsedRow], Scan]:
    """The whole way: list, scan, read; and what must hold of every scan: its counts are what is read."""
    scanned = scan(list_source(config), config)
    per_file = [list(read_rows(file, config, scanned.duplicates)) for file in scanned.files]
    assert scanned.rows == [len(rows) for rows in per_file]
    rows = list(itertools.chain.from_iterable(per_file))
    assert scanned.total == len(rows)
    for row in rows:
        assert (row.error is None) == (row.error_type is None) == (row.messages_or_prompt is not None)
        assert row.error is None or row.error.startswith(f"{row.where}: ")
        json.dumps([row.error, row.row_id, row.kept], ensure_ascii=False).encode()  # no lone surrogate gets through
    return rows, scanned


def read_lines(tmp_path: Path, *lines: str | bytes | Mapping[str, Any], **settings: Any) -> list[ParsedRow]:
    data = [json.dumps(line) if isinstance(line, Mapping) else line for line in lines]
    data = [line.encode() if isinstance(line, str) else line for line in data]
    (tmp_path / "prompts.jsonl").write_bytes(b"\n".join(data) + b"\n")
    return load(InputConfig(path=[str(tmp_path / "prompts.jsonl")], **settings))[0]


def write_parquet(path: Path, columns: Mapping[str, Any], **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(dict(columns)), path, **options)
