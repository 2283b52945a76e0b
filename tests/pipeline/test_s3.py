"""s3:// in and s3:// out, against a real S3 server, also one that fails."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import s3fs
from common import S3_CREDENTIALS
from fake_decoder import FakeDecoder
from flaky_proxy import FlakyProxy
from helpers import Command, Result, prompts

SECRETS = (S3_CREDENTIALS["AWS_ACCESS_KEY_ID"], S3_CREDENTIALS["AWS_SECRET_ACCESS_KEY"])


@pytest.fixture
def bucket(s3_endpoint: str) -> s3fs.S3FileSystem:
    fs = s3fs.S3FileSystem(
        endpoint_url=s3_endpoint, key="test-key-id", secret="test-secret-key", use_listings_cache=False
    )
    if not fs.exists("espstream-test"):
        fs.mkdir("espstream-test")
    return fs


def test_read_from_and_write_to_s3(command: Command, bucket: s3fs.S3FileSystem) -> None:
    lines = [json.dumps(row) + "\n" for row in prompts(12)]
    for number in (0, 1):
        bucket.pipe(f"espstream-test/in/{number}.jsonl", "".join(lines[6 * number : 6 * number + 6]).encode())
    settings = {"input__path": "s3://espstream-test/in/*.jsonl", "output__path": "s3://espstream-test/out"}
    first = command("--limit", "5", **settings)
    assert first.code == 0
    result = command(**settings)
    assert result.code == 0
    rows = pq.read_table("espstream-test/out/data", filesystem=bucket).to_pylist()
    assert sorted(row["row_id"] for row in rows) == sorted(row["id"] for row in prompts(12))
    assert all(row["output_tokens"] for row in rows)
    run = json.loads(bucket.cat("espstream-test/out/run.json"))
    assert run["counts"]["already_done"] == 5
    assert b"<html" in bucket.cat("espstream-test/out/report.html")
    written = bucket.find("espstream-test/out")
    assert len(written) >= 4
    for secret in SECRETS:
        assert secret not in result.out + result.err
        assert not [file for file in written if secret.encode() in bucket.cat(file)]


def put_prompts(bucket: s3fs.S3FileSystem, count: int, files: int) -> None:
    bucket.rm("espstream-test", recursive=True)
    bucket.mkdir("espstream-test")
    lines = [json.dumps(row) + "\n" for row in prompts(count)]
    for number in range(files):
        bucket.pipe(f"espstream-test/in/{number}.jsonl", "".join(lines[number::files]).encode())


@pytest.fixture
def run(command: Command, tmp_path: Path) -> Any:
    """A job from s3:// to s3:// with a decoder that costs nothing."""
    settings = {"input__path": "s3://espstream-test/in/*.jsonl", "cluster__num_cpus": 0.5}
    (tmp_path / "log").mkdir()

    def run(out: str = "out", **more: Any) -> Result:
        decoder = partial(FakeDecoder, log=tmp_path / "log")
        return command(decoder=decoder, output__path=f"s3://espstream-test/{out}", **settings, **more)

    return run


def rows_in(bucket: s3fs.S3FileSystem, out: str) -> dict[str, list[int]]:
    rows = pq.read_table(f"espstream-test/{out}/data", filesystem=bucket, columns=["row_id", "token_ids"]).to_pylist()
    assert len({row["row_id"] for row in rows}) == len(rows)
    return {row["row_id"]: row["token_ids"] for row in rows}


def only_error(result: Result) -> str:
    (line,) = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in result.err
    return line


def test_busy_answers_and_broken_uploads_change_nothing(
    run: Any, bucket: s3fs.S3FileSystem, s3_proxy: FlakyProxy
) -> None:
    """Issue: 503 on every tenth request, and connections that break in the middle of an upload."""
    put_prompts(bucket, 60, files=3)
    assert run("calm").code == 0
    with s3_proxy.failing(busy_every=10, drops=3) as faults:
        assert run("stormy").code == 0
    assert faults.seen["busy"] >= 5
    assert faults.seen["dropped"] == 3
    assert rows_in(bucket, "stormy") == rows_in(bucket, "calm")
    assert len(rows_in(bucket, "calm")) == 60


@pytest.mark.parametrize(
    ("status", "code", "where", "words"),
    [
        (403, "AccessDenied", "/data/", "ACCESS_DENIED"),
        (503, "SlowDown", "/data/", "SLOW_DOWN"),
        (400, "ExpiredToken", "/run.json", "ExpiredToken"),
        (404, "NoSuchBucket", "/run.json", "NO_SUCH_BUCKET"),
    ],
)
def test_a_store_that_refuses_ends_the_job_and_resume_continues(
    run: Any, bucket: s3fs.S3FileSystem, s3_proxy: FlakyProxy, status: int, code: str, where: str, words: str
) -> None:
    put_prompts(bucket, 12, files=1)
    with s3_proxy.failing(refusal=(status, code), refused=where) as faults:
        result = run()
    assert faults.seen["refused"] > 0
    assert result.code == 1
    line = only_error(result)
    assert words in line
    assert "the same command continues" in line
    assert not any(secret in result.out + result.err for secret in SECRETS)
    if where == "/data/":  # the others end before anything is decoded
        assert run().code == 0
        assert len(rows_in(bucket, "out")) == 12


def test_uploads_that_a_killed_writer_left_are_aborted(run: Any, bucket: s3fs.S3FileSystem) -> None:
    put_prompts(bucket, 4, files=1)
    assert run().code == 0
    shard = bucket.ls("espstream-test/out/data")[0].rpartition("/")[2]
    keys = [f"out/data/{shard}", "out/run.json", "out/data/mine.parquet", f"elsewhere/data/{shard}"]
    for key in keys:
        bucket.call_s3("create_multipart_upload", Bucket="espstream-test", Key=key)
    assert run().code == 0
    left = bucket.call_s3("list_multipart_uploads", Bucket="espstream-test")["Uploads"]
    assert sorted(upload["Key"] for upload in left) == sorted(keys[2:])


def test_a_bucket_that_is_not_there_is_bad_configuration(command: Command) -> None:
    result = command(input__path="s3://no-such-bucket-here/in.jsonl")
    assert result.code == 2
    assert "no-such-bucket-here" in result.err
