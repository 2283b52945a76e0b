"""JSON lines, plain or compressed, to raw rows in bounded memory.

A broken line is one error row. A file that is corrupt from some point on, or is no UTF-8 at all, ends in one there.
"""

from __future__ import annotations

import codecs
import gzip
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import xxhash
import zstandard

from pipeline.errors import RowError, RowErrorType
from pipeline.storage import open_place
from pipeline.values import RawRow, too_deep, type_name

CHUNK_BYTES = 1 << 18
MAX_LINE_BYTES = 1 << 26  # a longer line is an error row, and never held whole
SHOWN_CHARS = 60  # of a broken line, in its error

_CORRUPT = (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError)
_WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE, b"{\0", b"\0{", b"\0\0")


class _TooLong(bytes):
    """The digest of a line beyond MAX_LINE_BYTES, in its place."""


def line_rows(uri: str) -> Iterator[RawRow]:
    """The file's rows; its blank lines are none. Raises as Place.open_input and its reads do."""
    for index, line in _numbered_lines(uri):
        if isinstance(line, RowError):
            yield RawRow(index, {}, line)
            continue
        try:
            yield RawRow(index, _decode_line(line), line=line)
        except RowError as error:
            yield RawRow(index, {}, error, line)


def count_lines(uri: str, limit: int | None) -> int:
    """How many rows `line_rows` yields, `limit` at most."""
    return sum(1 for _ in itertools.islice(_numbered_lines(uri), limit))


def corrupt_file(error: Exception) -> RowError:
    reason = f"the file is truncated or corrupt from here on ({str(error)[:100]}); make it again"
    return RowError(RowErrorType.MALFORMED, reason)


def _decode_line(line: bytes) -> dict[str, Any]:
    if isinstance(line, _TooLong):
        raise RowError(
            RowErrorType.MALFORMED, f"the line is longer than {MAX_LINE_BYTES >> 20} MiB; shorten or split it"
        )
    if line.lstrip().startswith(b"["):
        hint = "a JSON array; expected one JSON object a line (jq -c '.[]' FILE makes such lines)"
        raise RowError(RowErrorType.MALFORMED, hint)
    try:
        text = line.decode()
        value = json.loads(text, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        reason = f"not valid UTF-8: byte 0x{line[error.start]:02x} at byte {error.start + 1}; save the file as UTF-8"
        raise RowError(RowErrorType.MALFORMED, reason) from error
    except json.JSONDecodeError as error:
        start = max(0, error.pos - SHOWN_CHARS // 2)
        shown = f"{text[start : start + SHOWN_CHARS]!r:.120}"
        reason = f"not valid JSON: {error.msg} at column {error.pos + 1}; expected one JSON object a line"
        raise RowError(RowErrorType.MALFORMED, reason, detail=f", found near there: {shown}") from error
    except ValueError as error:  # NaN and the like, or an integer past Python's limit of digits
        raise RowError(RowErrorType.MALFORMED, f"not valid JSON: {str(error)[:100]}") from error
    except RecursionError as error:
        raise too_deep() from error
    if not isinstance(value, dict):
        reason = f"expected one JSON object a line, found {type_name(value)}"
        raise RowError(RowErrorType.MALFORMED, reason)
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value; write null or a finite number")


def _numbered_lines(uri: str) -> Iterator[tuple[int, bytes | RowError]]:
    """(0-based line number, line) of the lines that are not blank; a RowError ends a file that cannot be read on."""
    index = 0
    with open_place(uri).open_input() as stream:
        try:
            for line in _lines(_chunks(stream, uri.lower())):
                if index == 0 and line.startswith(_WIDE):
                    yield 0, _wide_file()
                    return
                if index == 0 and not isinstance(line, _TooLong):
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield index, line
                index += 1
        except _CORRUPT as error:
            yield index, corrupt_file(error)


def _wide_file() -> RowError:
    reason = "the file is not UTF-8 but UTF-16 or UTF-32; convert it (iconv -f UTF-16 -t UTF-8 FILE)"
    return RowError(RowErrorType.MALFORMED, reason)


def _chunks(stream: BinaryIO, uri: str) -> Iterator[bytes]:
    """The decompressed bytes. Raises one of _CORRUPT where they end too early."""
    if uri.endswith(".zst"):
        return _zstd_chunks(stream)
    if uri.endswith(".gz"):
        unzipped = gzip.GzipFile(fileobj=stream)
        return iter(lambda: unzipped.read1(CHUNK_BYTES), b"")
    return iter(lambda: stream.read(CHUNK_BYTES), b"")


def _zstd_chunks(stream: BinaryIO) -> Iterator[bytes]:
    """Frame by frame: zstandard's own stream reader takes a truncated frame for the end of the file."""
    frame = None
    while chunk := stream.read(CHUNK_BYTES):
        while chunk:
            if frame is None or frame.eof:
                frame = zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(chunk)
            chunk = frame.unused_data if frame.eof else b""
    if frame is not None and not frame.eof:
        raise EOFError("compressed data ended before the end of the frame")


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    line = _Line()
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        line.add(first)
        for part in others:
            yield line.end()
            line = _Line()
            line.add(part)
    yield line.end()


class _Line:
    """Pieces of the unfinished line: joined once, so that a long one costs no quadratic copying; digested when they
    are too many."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0
        self._digest: Any = None

    def add(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._digest is None and self._size <= MAX_LINE_BYTES:
            self._pieces.append(piece)
            return
        if self._digest is None:
            self._digest = xxhash.xxh3_128(b"".join(self._pieces))
            self._pieces.clear()
        self._digest.update(piece)

    def end(self) -> bytes:
        return b"".join(self._pieces) if self._digest is None else _TooLong(self._digest.hexdigest().encode())
