"""Places, local and on a fake S3: listing, globs, atomic writes, retries, refusals."""

import http.server
import os
import pickle
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pyarrow.fs as pafs
import pytest
from moto.server import ThreadedMotoServer

from pipeline import storage
from pipeline.errors import ConfigError
from pipeline.storage import Place, StorageError, expand, expand_with_root, open_place

SECRET = "do-not-show-me"


@pytest.fixture(scope="module")
def moto_endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return monkeypatch


@pytest.fixture
def bucket(moto_endpoint: str, aws: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    aws.setenv("AWS_ENDPOINT_URL", moto_endpoint)
    name = request.node.name.replace("_", "-")[:60]
    boto3.client("s3", endpoint_url=moto_endpoint, region_name="us-east-1").create_bucket(Bucket=name)
    return f"s3://{name}"


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "FIRST_WAIT_S", 0)


TREE = ["a.jsonl", "b.txt", "sub/c.jsonl", "sub/deep/d.jsonl"]
HIDDEN = ["_done", ".tmp/x.jsonl", "sub/_part/y.jsonl", "sub/.z.jsonl"]


def make_tree(root: Place) -> None:
    for name in TREE + HIDDEN:
        root.child(name).write_atomic(name.encode())


def names_of(root: str, places: list[Place]) -> list[str]:
    return [place.uri.removeprefix(f"{root}/") for place in places]


def check_expansion(root: str) -> None:
    """The same rules hold on every kind of storage."""
    make_tree(open_place(root))
    assert names_of(root, expand(root)) == TREE
    assert names_of(root, expand(f"{root}/")) == TREE
    assert names_of(root, expand(f"{root}/a.jsonl")) == ["a.jsonl"]
    assert names_of(root, expand(f"{root}/*.jsonl")) == ["a.jsonl"]
    assert names_of(root, expand(f"{root}/?.jsonl")) == ["a.jsonl"]
    assert names_of(root, expand(f"{root}/[bx].*")) == ["b.txt"]
    assert names_of(root, expand(f"{root}/*/*.jsonl")) == ["sub/c.jsonl"]
    assert names_of(root, expand(f"{root}/**/*.jsonl")) == ["a.jsonl", "sub/c.jsonl", "sub/deep/d.jsonl"]
    assert names_of(root, expand(f"{root}/**")) == TREE
    assert names_of(root, expand(f"{root}/**/*")) == TREE
    assert names_of(root, expand(f"{root}/su*")) == ["sub/c.jsonl", "sub/deep/d.jsonl"], "a folder stands for its files"
    assert names_of(root, expand(f"{root}/sub/_*/*.jsonl")) == ["sub/_part/y.jsonl"], "a pattern may name hidden ones"
    assert names_of(root, expand(f"{root}/_done")) == ["_done"]
    assert expand(f"{root}/nothing*") == []
    assert expand(f"{root}/absent") == []
    assert [place.size for place in expand(f"{root}/*.txt")] == [len("b.txt")]


def check_reading_and_writing(root: str) -> None:
    place = open_place(root).child("folder/data.gz")  # a suffix that pyarrow would compress by
    assert not place.exists()
    place.write_atomic(b"first")
    place.write_atomic(b"0123456789")
    assert place.exists()
    assert place.read_bytes() == b"0123456789"
    with place.open_input() as stream:
        stream.seek(4)
        assert stream.read(3) == b"456"
        stream.seek(-2, os.SEEK_END)
        assert stream.read() == b"89"
    assert names_of(root, open_place(root).child("folder").list_files()) == ["folder/data.gz"]
    assert pickle.loads(pickle.dumps(place)).read_bytes() == b"0123456789"
    place.delete()
    place.delete()  # deleting twice is no error
    assert not place.exists()
    with pytest.raises(FileNotFoundError):
        place.read_bytes()
    with pytest.raises(FileNotFoundError):
        place.open_input()


def test_local_expansion(tmp_path: Path) -> None:
    check_expansion(str(tmp_path))


def test_local_reading_and_writing(tmp_path: Path) -> None:
    check_reading_and_writing(str(tmp_path))


def test_s3_expansion(bucket: str) -> None:
    check_expansion(f"{bucket}/data")


def test_s3_reading_and_writing(bucket: str) -> None:
    check_reading_and_writing(bucket)


def test_s3_file_larger_than_one_request(bucket: str) -> None:
    data = os.urandom(3 * storage.BUFFER_BYTES + 17)
    place = open_place(f"{bucket}/large")
    place.write_atomic(data)
    with place.open_input() as stream:
        assert b"".join(iter(lambda: stream.read(100_000), b"")) == data


def test_s3_endpoint_for_s3_alone_wins(bucket: str, aws: pytest.MonkeyPatch) -> None:
    aws.setenv("AWS_ENDPOINT_URL_S3", os.environ["AWS_ENDPOINT_URL"])
    aws.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    open_place(f"{bucket}/x").write_atomic(b"x")
    assert open_place(f"{bucket}/x").read_bytes() == b"x"


def test_listing_is_sorted_and_absent_folder_is_empty(tmp_path: Path) -> None:
    for name in ["b", "a", "c/d"]:
        open_place(str(tmp_path)).child(name).write_atomic(b"")
    root = open_place(str(tmp_path))
    assert [place.name for place in root.list_files()] == ["a", "b"]
    assert [place.name for place in root.list_files(recursive=True)] == ["a", "b", "d"]
    assert root.child("absent").list_files(recursive=True) == []


def test_root_of_an_expansion(tmp_path: Path) -> None:
    make_tree(open_place(str(tmp_path)))
    assert expand_with_root(f"{tmp_path}/sub/**/*.jsonl")[0].uri == f"{tmp_path}/sub"
    assert expand_with_root(f"{tmp_path}/sub")[0].uri == f"{tmp_path}/sub"
    assert expand_with_root(f"{tmp_path}/sub/c.jsonl")[0].uri == f"{tmp_path}/sub"


def test_file_whose_name_holds_wildcards(tmp_path: Path) -> None:
    (tmp_path / "a[1].jsonl").write_text("x")
    (tmp_path / "a1.jsonl").write_text("y")
    assert names_of(str(tmp_path), expand(f"{tmp_path}/a[1].jsonl")) == ["a[1].jsonl"]


def test_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("x")
    assert expand("*.jsonl")[0].uri == str(tmp_path / "a.jsonl")


def test_failed_write_keeps_the_old_file_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = open_place(str(tmp_path / "file"))
    place.write_atomic(b"old")

    def fail(_: int) -> None:
        assert sorted(path.name[0] for path in tmp_path.iterdir()) == [".", "f"], "hidden while unfinished"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        place.write_atomic(b"new")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
    assert place.read_bytes() == b"old"


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("gs://bucket/x", "gs://...: unknown kind of place"),
        ("s3://", "expected s3://bucket/key"),
        ("s3://id:password@bucket/x", "must not hold credentials"),
        ("s3://id:pass/password@bucket/x", "must not hold credentials"),
        ("s3://id:/password/@/bucket/x@y", "must not hold credentials"),
        ("s3://password@bucket/x", "must not hold credentials"),
        ("s3://buck*/x", "bucket's name cannot hold wildcards"),
    ],
)
def test_bad_uri(uri: str, message: str, aws: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=message.replace("*", r"\*")) as raised:
        storage._split_glob(open_place(uri))
    assert "password" not in str(raised.value)


@pytest.mark.parametrize("key", ["a@b.jsonl", "a/b@c/d:e", "user@host:1/x"])
def test_an_object_key_may_hold_an_at_sign(key: str, aws: pytest.MonkeyPatch) -> None:
    assert open_place(f"s3://bucket/{key}").path == f"bucket/{key}"


def test_every_spelling_of_a_local_path_is_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    monkeypatch.setenv("HOME", str(tmp_path))
    for spelling in ("../in/x", "./../in//x/", "~/in/x", "~/a/../in/./x", f"/{tmp_path}/b/../in/x"):
        assert open_place(spelling).uri == f"{tmp_path}/in/x"
    assert open_place("~").uri == str(tmp_path)
    assert open_place("..").uri == str(tmp_path)
    assert open_place("..x/.y..").uri == f"{tmp_path}/a/..x/.y.."


def test_parent_of_a_link_is_that_of_its_target(tmp_path: Path) -> None:
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "real" / "x").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "real" / "deep")
    assert open_place(f"{tmp_path}/link/../x").read_bytes() == b"x"
    assert open_place(f"{tmp_path}/link/y/../x").uri == f"{tmp_path}/link/x"


@pytest.fixture
def refusing_endpoint(aws: pytest.MonkeyPatch) -> Iterator[str]:
    class Refuse(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # answers "Expect: 100-continue" at once

        def do_GET(self) -> None:
            self.send_response(403)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def do_PUT(self) -> None:
            self.rfile.read1(65536)
            self.do_GET()

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuse)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    aws.setenv("AWS_ENDPOINT_URL", endpoint)
    yield endpoint
    server.shutdown()
    server.server_close()


def test_s3_refusal_is_a_permission_error_without_credentials(refusing_endpoint: str) -> None:
    place = open_place("s3://private/file")
    for act in (place.exists, place.read_bytes, place.open_input, place.list_files, lambda: place.write_atomic(b"x")):
        with pytest.raises(PermissionError, match="private") as raised:
            act()
        assert SECRET not in f"{raised.value!r} {raised.value}"
    assert SECRET not in repr(place) + pickle.dumps(place).decode("latin-1")


class Flaky:
    """A file system, or a file, whose calls fail `failures` times before they work."""

    def __init__(self, real: Any, failures: int, error: Exception) -> None:
        self.real, self.failures, self.error = real, failures, error
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls <= self.failures:
                raise self.error
            return getattr(self.real, name)(*args, **kwargs)

        return call


def test_passing_errors_are_retried(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("data")
    for act in (Place.read_bytes, Place.exists, lambda place: place.open_input().read()):
        flaky = Flaky(pafs.LocalFileSystem(), storage.TRIES - 1, OSError("AWS Error UNKNOWN (HTTP status 503)"))
        assert act(replace(open_place(str(tmp_path / "file")), fs=flaky))
        assert flaky.calls == storage.TRIES


def test_lasting_errors_are_not_retried_and_tries_end(tmp_path: Path) -> None:
    for error, calls in ((FileNotFoundError("gone"), 1), (PermissionError("no"), 1), (OSError("503"), storage.TRIES)):
        flaky = Flaky(pafs.LocalFileSystem(), 99, error)
        with pytest.raises(type(error)):
            replace(open_place(str(tmp_path / "file")), fs=flaky).read_bytes()
        assert flaky.calls == calls


def test_failing_read_of_an_open_file_is_retried_at_its_offset(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    file = pafs.LocalFileSystem().open_input_file(str(tmp_path / "file"))
    flaky = Flaky(file, 0, OSError("timeout"))
    reader = storage._RetryingReader("the-uri", flaky)
    assert reader.read(4) == b"0123"
    flaky.failures = flaky.calls + 2
    assert reader.read(4) == b"4567"
    flaky.failures = 99
    with pytest.raises(StorageError, match="the-uri: timeout"):
        reader.read(4)
