"""s3:// in and s3:// out, against a real S3 server."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
import s3fs
from common import S3_CREDENTIALS
from helpers import Command, prompts


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
    for name in ("run.json", "report.json", "report.html"):
        for secret in (S3_CREDENTIALS["AWS_ACCESS_KEY_ID"], S3_CREDENTIALS["AWS_SECRET_ACCESS_KEY"]):
            assert secret.encode() not in bucket.cat(f"espstream-test/out/{name}")
            assert secret not in result.out + result.err


def test_a_bucket_that_is_not_there_is_bad_configuration(command: Command) -> None:
    result = command(input__path="s3://no-such-bucket-here/in.jsonl")
    assert result.code == 2
    assert "no-such-bucket-here" in result.err
