"""Places: local paths and s3://bucket/key URIs behind one small interface over pyarrow.fs.

Every other module names files by URI strings (cheap to send to Ray tasks) and opens them here. Credentials come only
from the environment or the AWS SDK's usual chain, so no URI, repr or error message of ours can hold one.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import functools
import io
import logging
import os
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs as pafs
import tenacity

from pipeline.errors import ConfigError

logger = logging.getLogger(__name__)

S3 = "s3://"
TRIES = 4
FIRST_WAIT_S = 0.25  # doubles after each try
BUFFER_BYTES = 1 << 20  # one request to S3 per so many bytes read

_T = TypeVar("_T")
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
# Arrow reports a refusal by S3 as a plain OSError; only the text tells.
_DENIED = re.compile(
    "ACCESS_DENIED|HTTP status 40[13]|INVALID_ACCESS_KEY_ID|INVALID_CLIENT_TOKEN_ID|SIGNATURE_DOES_NOT|ExpiredToken"
)
_MAGIC = re.compile(r"[*?\[]")
_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.tmp")


class StorageError(OSError):
    """The store failed while an open file was read (tries used up); says nothing about the file's content."""


@dataclass(frozen=True)
class Place:
    """A file or folder, present or not. Pickles as its URI and is opened again where it arrives."""

    fs: pafs.FileSystem = field(repr=False)
    path: str  # as `fs` wants it: absolute, or bucket/key
    uri: str
    size: int | None = field(default=None, compare=False)  # bytes, where a listing told it

    def __reduce__(self) -> tuple[Callable[[str], Place], tuple[str]]:
        return open_place, (self.uri,)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def is_local(self) -> bool:
        return not self.uri.startswith(S3)

    def child(self, name: str) -> Place:
        """The place `name` (may hold slashes) below this folder."""
        return self._at(f"{self.path.rstrip('/')}/{name}")

    def exists(self) -> bool:
        """Whether a file or folder is here. Raises PermissionError, or OSError when the store stays unreachable."""
        return bool(self._info().type != pafs.FileType.NotFound)

    def read_bytes(self) -> bytes:
        """The whole file. Raises FileNotFoundError, PermissionError, or OSError when the store stays unreachable."""

        def read() -> bytes:
            with self.fs.open_input_file(self.path) as stream:
                return bytes(stream.read())

        return _with_retries(read)

    def write_atomic(self, data: bytes) -> None:
        """Replace the file's content; a reader sees the old or the new one whole. Makes local folders as needed.

        Raises PermissionError, or OSError (disk full, the store stays unreachable).
        """
        write = _write_local if self.is_local else functools.partial(_write_object, self.fs)
        _with_retries(lambda: write(self.path, data))

    def list_files(self, recursive: bool = False) -> list[Place]:
        """Files in this folder, sorted by path; an absent folder has none. Raises as `exists`."""
        return [self._at(i.path, i.size) for i in self._entries(recursive) if i.type == pafs.FileType.File]

    def delete(self) -> None:
        """Remove the file; an absent one is fine (a try whose answer was lost may have removed it)."""
        with contextlib.suppress(FileNotFoundError):
            _with_retries(lambda: self.fs.delete_file(self.path))

    def sweep(self, is_ours: Callable[[str], bool]) -> int:
        """Remove what killed writers left of this folder's files: how many. is_ours: by a file's name.

        Locally `write_atomic`'s temporary files, whose names nobody else's have; on S3 unfinished uploads of our names.
        """
        if not self.is_local:
            return _abort_uploads(self.path, is_ours)
        left = [file for file in self.list_files() if _TEMPORARY.fullmatch(file.name)]
        for file in left:
            file.delete()
        return len(left)

    def open_input(self) -> io.BufferedReader:
        """The file as a seekable binary stream of its raw bytes; reads are retried.

        Raises FileNotFoundError, PermissionError or OSError at once, StorageError from reads.
        """
        file = _with_retries(lambda: self.fs.open_input_file(self.path))
        return io.BufferedReader(_RetryingReader(self.uri, file), BUFFER_BYTES)

    def _at(self, path: str, size: int | None = None) -> Place:
        return Place(self.fs, path, path if self.is_local else S3 + path, size)

    def _info(self) -> pafs.FileInfo:
        return _with_retries(lambda: self.fs.get_file_info(self.path))

    def _entries(self, recursive: bool = False) -> list[pafs.FileInfo]:
        selector = pafs.FileSelector(self.path, allow_not_found=True, recursive=recursive)
        return sorted(_with_retries(lambda: self.fs.get_file_info(selector)), key=lambda info: info.path)


def open_place(uri: str) -> Place:
    """The place of a local path or an s3://bucket/key URI. Opens no file or connection.

    However a local path is spelled (relative, `~/`, `.`, `..`), the place's URI is the same absolute path. Raises
    ConfigError for other URIs, without showing them where they may hold a credential.
    """
    if uri.startswith(S3):
        return _open_s3(uri)
    scheme, separator, _ = uri.partition("://")
    if separator:
        raise ConfigError(f"{scheme}://...: unknown kind of place; use a local path or s3://bucket/key")
    path = _absolute(uri)
    return Place(_local_fs(), path, path)


def _absolute(path: str) -> str:
    expanded = Path(path).expanduser() if path == "~" or path.startswith("~/") else Path(path)
    absolute = expanded.absolute()
    normal = os.path.normpath("/" + str(absolute).lstrip("/"))
    if ".." not in absolute.parts or os.path.realpath(normal) == os.path.realpath(absolute):
        return normal
    return os.path.realpath(absolute)  # ".." after a link means the parent of the link's target


def expand(uri: str) -> list[Place]:
    """Files that a path means: the file, all files below the folder, or the glob's matches (*, ?, [..], **), sorted.

    Names that begin with "." or "_" (markers, temporary files) are skipped at every level below the root, unless the
    path itself names them. A glob's match that is a folder stands for its files.

    Raises ConfigError (bad URI), PermissionError, or OSError when the store stays unreachable.
    """
    return expand_with_root(uri)[1]


def expand_with_root(uri: str) -> tuple[Place, list[Place]]:
    """`expand`, and the root it started from: the folder, the glob's fixed prefix, or the single file's folder."""
    place = open_place(uri)
    info = place._info()
    if info.type == pafs.FileType.File:
        return place._at(place.path.rpartition("/")[0] or "/"), [place._at(place.path, info.size)]
    if info.type == pafs.FileType.Directory:
        return place, _visible_files(place)
    root, patterns = _split_glob(place)
    found = {match.path: match for match in _glob(root, patterns)} if patterns else {}
    return root, [found[path] for path in sorted(found)]


def _split_glob(place: Place) -> tuple[Place, list[str]]:
    """The folder before the first part with a wildcard, and the parts from there on."""
    parts = place.path.split("/")
    fixed = next((i for i, part in enumerate(parts) if _MAGIC.search(part)), len(parts))
    if fixed == 0:
        raise ConfigError(f"{place.uri}: a bucket's name cannot hold wildcards")
    return place._at("/".join(parts[:fixed]) or "/"), parts[fixed:]


def _glob(folder: Place, patterns: Sequence[str]) -> Iterator[Place]:
    pattern, rest = patterns[0], patterns[1:]
    if pattern == "**" and not rest:
        yield from _visible_files(folder)
        return
    if pattern == "**":
        yield from _glob(folder, rest)  # `**` also means no folder at all
    for info in folder._entries():
        entry, is_folder = folder._at(info.path, info.size), info.type == pafs.FileType.Directory
        if not _matches(entry.name, pattern):
            continue
        if pattern == "**" and is_folder:
            yield from _glob(entry, patterns)
        elif rest and is_folder:
            yield from _glob(entry, rest)
        elif not rest:
            yield from _visible_files(entry) if is_folder else [entry]


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) and (_visible(name) or name[0] == pattern[0])


def _visible(name: str) -> bool:
    return not name.startswith((".", "_"))


def _visible_files(root: Place) -> list[Place]:
    start = len(root.path.rstrip("/")) + 1
    return [file for file in root.list_files(recursive=True) if all(map(_visible, file.path[start:].split("/")))]


def _open_s3(uri: str) -> Place:
    path = "/".join(part for part in uri.removeprefix(S3).split("/") if part)
    bucket = path.partition("/")[0]
    before_at, at, _ = path.partition("@")
    if "@" in bucket or (at and ":" in before_at):  # a secret may hold "/", and a key may hold "@"
        raise ConfigError(
            "s3://...@...: a URI must not hold credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "or use the AWS SDK's profile or role"
        )
    if not bucket:
        raise ConfigError(f"{uri}: expected s3://bucket/key")
    return Place(_s3_fs(*_endpoint()), path, S3 + path)


def _endpoint() -> tuple[str, str | None]:
    """The S3 endpoint's URL ("": Amazon's) and region that the environment names."""
    url = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    return url, os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")


@functools.cache
def _local_fs() -> pafs.LocalFileSystem:
    return pafs.LocalFileSystem()


@functools.cache
def _s3_fs(endpoint: str, region: str | None) -> pafs.S3FileSystem:
    """Credentials are left to the AWS SDK's chain, which reads the environment first."""
    # allow_delayed_open: a file of one buffer is one PUT, no multipart upload that a kill would leave behind.
    options: dict[str, Any] = {"region": region, "allow_delayed_open": True}
    if endpoint:
        url = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
        options |= {"endpoint_override": url.netloc + url.path.rstrip("/"), "scheme": url.scheme}
    return pafs.S3FileSystem(**options)


def _write_local(path: str, data: bytes) -> None:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # The leading dot keeps a file left by a killed process out of every listing by `expand`.
    temporary = target.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write_object(fs: pafs.FileSystem, path: str, data: bytes) -> None:
    # compression=None: pyarrow would otherwise compress by the name's suffix.
    with fs.open_output_stream(path, compression=None) as stream:
        stream.write(data)


def _abort_uploads(folder: str, is_ours: Callable[[str], bool]) -> int:
    """pyarrow cannot list uploads. A store or a role that does not allow it keeps them, which costs space alone."""
    import s3fs

    bucket, _, prefix = folder.partition("/")
    url, region = _endpoint()
    store = s3fs.S3FileSystem(endpoint_url=url or None, client_kwargs={"region_name": region})
    aborted = 0
    try:
        found = store.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/")
        for upload in found.get("Uploads", []):
            parent, _, name = upload["Key"].rpartition("/")
            if parent == prefix and is_ours(name):
                store.call_s3("abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
                aborted += 1
    except OSError as error:  # s3fs gives botocore's errors as these
        logger.warning("storage: unfinished uploads below s3://%s stay where they are: %s", folder, error)
    return aborted


class _RetryingReader(io.RawIOBase):
    """Random-access file whose reads are retried at the same offset."""

    def __init__(self, uri: str, file: pa.NativeFile) -> None:
        super().__init__()
        self._uri = uri
        self._file = file
        self._size: int = file.size()
        self._offset = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._offset, io.SEEK_END: self._size}[whence]
        self._offset = start + offset
        return self._offset

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), max(0, self._size - self._offset))
        try:
            data = _with_retries(lambda: self._file.read_at(wanted, self._offset))
        except OSError as error:
            raise StorageError(f"{self._uri}: {error}") from error
        buffer[: len(data)] = data
        self._offset += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _with_retries(call: Callable[[], _T]) -> _T:
    """Run `call`; try again after errors that may pass (a store's 5xx, and 403s, which S3 gives now and then)."""
    retrying = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(TRIES),
        wait=tenacity.wait_exponential(multiplier=FIRST_WAIT_S),
        retry=tenacity.retry_if_exception(lambda error: isinstance(error, OSError) and not isinstance(error, _LASTING)),
        before_sleep=_log_retry,
        reraise=True,
    )
    try:
        return retrying(call)
    except OSError as error:
        if _DENIED.search(str(error)):
            raise PermissionError(errno.EACCES, f"access denied: {error}") from error
        raise


def _log_retry(state: tenacity.RetryCallState) -> None:
    assert state.outcome
    logger.warning("storage: trying again after: %s", state.outcome.exception())
