"""The input's files, and their rows: one list, whatever the format, and one way to read and to count each.

How a format is read is `lines`' and `columnar`'s business, what a row means `parse`'s; counting all rows and finding
duplicate ids before the job starts is `scan`'s.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pipeline.columnar import Piece, arrow_pieces, count_pieces, parquet_pieces, piece_rows
from pipeline.config import InputConfig
from pipeline.errors import ConfigError, RowError, RowErrorType
from pipeline.hf import INFO, STATE, DatasetFile, hub_dataset, is_hub_id, saved_dataset
from pipeline.lines import count_lines, line_rows
from pipeline.parse import ParsedRow, RowParser, row_key, where_in_file
from pipeline.storage import Place, expand_with_root, open_place
from pipeline.values import RawRow

logger = logging.getLogger(__name__)

Format = Literal["jsonl", "parquet", "arrow"]
Position = tuple[str, int]  # (SourceFile.name, row_index)
Repeat = Position | str  # of an id that was used before: where; or the id that the row has in its place

_JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True)
class SourceFile:
    """One input file. `name` is its identity, which no other file has and which no other file changes.

    With one entry in input.path it is the path relative to that entry: to the folder, to the glob's fixed prefix, or
    the single file's base name. With several entries it is the absolute path, or bucket/key.
    """

    uri: str
    name: str
    format: Format
    size: int  # bytes
    take: int | None = None  # leading rows to read; None: all


# ---------------------------------------------------------------------------------------------------------- listing


def list_source(config: InputConfig, exclude: str | None = None) -> list[SourceFile]:
    """The input's files: entries of input.path in order, each one's files sorted; a file named twice is read once.

    `exclude`: the output place; what is there or below is no input, so a job may write to a subfolder of its input.

    Raises ConfigError: a path matches nothing, cannot be read, or holds a file of unknown format; a dataset lacks its
    split.
    """
    excluded = open_place(exclude).uri if exclude else None
    found: dict[str, SourceFile] = {}  # by URI
    for path in config.path:
        for file in _entry_files(path, config, excluded):
            if file.uri in found:
                logger.warning("input.path: %s is listed twice; it is read once", file.uri)
                continue
            found[file.uri] = file
    for file in found.values():
        if file.size == 0:
            logger.warning("input.path: %s is empty and gives no rows", file.uri)
    return list(found.values())


def canonical_paths(config: InputConfig) -> list[str]:
    """input.path's entries as absolute URIs, the same from every working directory and in every spelling; globs and hub
    ids stay.

    Raises ConfigError for what is neither a local path nor s3://bucket/key nor a hub id.
    """
    return [path if is_hub_id(path) else open_place(path).uri for path in config.path]


def _entry_files(path: str, config: InputConfig, excluded: str | None) -> list[SourceFile]:
    if is_hub_id(path):
        return _dataset_files(hub_dataset(path, config.subset, config.split), config)
    root, places = _expand(path)
    if not places:
        raise ConfigError(f"input.path: nothing matches {path}")
    wanted = [place for place in places if excluded is None or not _is_within(place, excluded)]
    if not wanted:
        raise ConfigError(f"input.path: nothing matches {path} outside the job's own output at {excluded}")
    if config.subset is not None:
        raise ConfigError(f"input.subset: {config.subset}: {path} is no hub dataset; leave input.subset out")
    if (dataset := saved_dataset(root, wanted, config.split)) is not None:
        return _dataset_files(dataset, config)
    if config.split is not None:
        raise ConfigError(f"input.split: {config.split}: {path} is no dataset with splits; leave input.split out")
    _refuse_inner_datasets(path, wanted)
    whole = len(config.path) > 1
    names = [place.path if whole else place.path.removeprefix(root.path).lstrip("/") for place in wanted]
    return [_source_file(place, name, _format(name, config)) for place, name in zip(wanted, names, strict=True)]


def _dataset_files(files: Sequence[DatasetFile], config: InputConfig) -> list[SourceFile]:
    several = len(config.path) > 1
    return [_source_file(file.place, file.whole_name if several else file.name, "arrow") for file in files]


def _refuse_inner_datasets(path: str, places: Sequence[Place]) -> None:
    """The JSON files beside a dataset's Arrow files are no prompts."""
    for place in places:
        if place.name == STATE and any(each.path == place.path.removesuffix(STATE) + INFO for each in places):
            raise ConfigError(
                f"input.path: {path} holds a dataset written by save_to_disk at {place.uri.removesuffix('/' + STATE)}; "
                "name that folder itself, one entry a dataset"
            )


def _expand(path: str) -> tuple[Place, list[Place]]:
    try:
        return expand_with_root(path)
    except OSError as error:
        raise ConfigError(f"input.path: cannot read {path}: {error}") from error


def _is_within(place: Place, uri: str) -> bool:
    return place.uri == uri or place.uri.startswith(uri.rstrip("/") + "/")


def _source_file(place: Place, name: str, format: Format) -> SourceFile:
    assert place.size is not None  # listings tell it
    return SourceFile(place.uri, name, format, place.size)


def _format(name: str, config: InputConfig) -> Format:
    """input.format, or what the suffix says. Raises ConfigError for a suffix that says nothing."""
    if config.format != "auto":
        return config.format
    lower = name.lower()
    if lower.endswith(".parquet"):
        return "parquet"
    if lower.endswith(".arrow"):
        return "arrow"
    if lower.removesuffix(".gz").removesuffix(".zst").endswith(_JSONL_SUFFIXES):
        return "jsonl"
    raise ConfigError(
        f"input.path: {name}: unknown format; expected .jsonl, .ndjson or .json (also .gz, .zst), .parquet or .arrow; "
        + _hint(lower)
    )


def _hint(name: str) -> str:
    table = name.removesuffix(".gz").removesuffix(".zst")
    if table.endswith((".csv", ".tsv")):
        separator = ", sep='\\t'" if table.endswith(".tsv") else ""
        return (
            'convert it to JSONL or Parquet, such as by python -c "import datasets; '
            f"datasets.Dataset.from_csv('FILE'{separator}).to_parquet('FILE.parquet')\""
        )
    return "set input.format to jsonl, parquet or arrow, or name the right files with a glob such as folder/*.jsonl"


# ---------------------------------------------------------------------------------------------------------- reading


def read_rows(file: SourceFile, config: InputConfig, duplicates: Mapping[Position, Repeat]) -> Iterator[ParsedRow]:
    """The file's rows in order, at most `file.take`, in bounded memory. `duplicates` is Scan's.

    Bad rows and what is corrupt in the file come as error rows. Raises FileNotFoundError, PermissionError or
    StorageError (the store failed: to be tried again, not to be written down as the data's fault).
    """
    parser = RowParser(config)
    unit = _unit(file.format)
    for raw in itertools.islice(raw_rows(file, parser.columns), file.take):
        row = parser.parse(raw, file.name, unit)
        repeat = duplicates.get((file.name, raw.index))
        yield row if repeat is None else _repeated(row, repeat, config)


def raw_rows(file: SourceFile, columns: Sequence[str]) -> Iterator[RawRow]:
    """The file's rows unparsed: of Parquet and Arrow `columns` only, of JSONL all. Errors as in `read_rows`."""
    return line_rows(file.uri) if file.format == "jsonl" else piece_rows(_pieces(file, columns), columns)


def count_rows(file: SourceFile, columns: Sequence[str], limit: int | None) -> int:
    """How many rows `raw_rows` yields, `limit` at most."""
    return count_lines(file.uri, limit) if file.format == "jsonl" else count_pieces(_pieces(file, columns), limit)


def _pieces(file: SourceFile, columns: Sequence[str]) -> Iterator[Piece]:
    if file.size == 0:
        return iter(())
    return (parquet_pieces if file.format == "parquet" else arrow_pieces)(file.uri, columns)


def _unit(format: Format) -> Literal["line", "row"]:
    return "line" if format == "jsonl" else "row"


def _repeated(row: ParsedRow, repeat: Repeat, config: InputConfig) -> ParsedRow:
    """A row whose id was used before, under its own new id or as an error row.

    The error row's key holds the row's index: name, id and content may all equal the first one's, and keys must differ.
    """
    if isinstance(repeat, str):
        # The old key stands for the content: an edited row is a new row here too.
        return replace(row, row_id=repeat, row_key=row_key(row.source_file, repeat, row.row_key.to_bytes(8, "big")))
    name, index = repeat
    where = where_in_file(name, index, _unit(_format(name, config)))
    error = RowError(RowErrorType.DUPLICATE_ID, f"id {row.row_id[:80]!r} was already used at {where}")
    key = row_key(row.source_file, row.row_id, f"duplicate:{row.row_index}".encode())
    return replace(row.failed(error), row_key=key)
