"""What must not be written anywhere: values of credential keys, and the userinfo and signed queries of URIs."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pipeline.redact import REMOVED, scrub, scrub_text


@pytest.mark.parametrize(
    "key",
    [
        *("token", "hf_token", "HF_TOKEN", "sessionToken", "password", "db.password", "client_secret"),
        *("aws_secret_access_key", "AWSAccessKeyId", "access_key", "apiKey", "api-key", "key", "Authorization"),
    ],
)
def test_values_of_credential_keys_are_blanked(key: str) -> None:
    assert scrub({"a": [{key: "hunter2"}]}) == {"a": [{key: REMOVED}]}


@pytest.mark.parametrize(
    "key", ["max_new_tokens", "eos_token_ids", "prompt_tokens", "row_key", "id_column", "author", "keep_columns"]
)
def test_other_keys_are_kept(key: str) -> None:
    assert scrub({key: "value"}) == {key: "value"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://AKIA:s3cr3t@bucket/in", "s3://bucket/in"),
        ("s3://AKIA:s3/cr3t+x@bucket/in", "s3://bucket/in"),
        ("https://user@host:9000/a@b/c?X-Amz-Signature=f00", "https://host:9000/a@b/c"),
        ("https://host/x?bare", "https://host/x?bare"),
        ("https://host/w?curid=12&page=3#part", "https://host/w?curid=12&page=3#part"),
        ("https://host/w?curid=12&access_token=1", "https://host/w"),
        ("https://host/w?a=1;sig=1", "https://host/w"),
        ("https://host/w?X-Amz-Date=1", "https://host/w"),
        ("https://host/w?X%2DAmz%2DCredential=1", "https://host/w"),
        ("https://b.example/o?GoogleAccessId=a&Expires=1&Signature=f00", "https://b.example/o"),
        ("https://u:p@host/w?curid=12", "https://host/w?curid=12"),
        ("https://host/r?to=https://u:p@h/x", "https://host/r"),
        ("https://host/r?to=https%3A%2F%2Fh%2Fx%3Fsig%3D1", "https://host/r"),
        ("s3://bucket/in?versionId=7", "s3://bucket/in?versionId=7"),
        ("https://host/x#access_token=1", "https://host/x"),
        ("http://host:9000/x@v1", "http://host:9000/x@v1"),
        ("s3://bucket/part-?.jsonl", "s3://bucket/part-?.jsonl"),
        ("cannot read 'https://u:p@h/x?sig=1': gone", "cannot read 'https://h/x': gone"),
        ("plain text, 3 < 4 @ home?", "plain text, 3 < 4 @ home?"),
    ],
)
def test_uris_lose_userinfo_and_signed_queries(text: str, expected: str) -> None:
    assert scrub_text(text) == expected


def test_scrubbed_values_are_plain_json() -> None:
    value = {
        1: (1, 2.5, None, True),
        "path": Path("a/b"),
        "at": datetime(2026, 1, 2, tzinfo=UTC),
        "rates": [float("nan"), float("inf"), -float("inf")],
        "ids": frozenset({3}),
    }
    expected = {
        "1": [1, 2.5, None, True],
        "path": "a/b",
        "at": "2026-01-02 00:00:00+00:00",
        "rates": [None] * 3,
        "ids": [3],
    }
    assert scrub(value) == expected
    assert json.loads(json.dumps(scrub(value), allow_nan=False)) == expected


def test_empty_credentials_show_that_there_are_none() -> None:
    assert scrub({"hf_token": None, "password": ""}) == {"hf_token": None, "password": ""}


def test_column_types_are_no_credentials() -> None:
    config = {"keep_columns": {"token": "string", "key": "int64", "auth": "float64", "password": "bool"}}
    assert scrub(config) == config


def test_whole_sections_under_a_credential_key_go() -> None:
    assert scrub({"credentials": {"id": "hunter2"}, "secrets": ["hunter2"]}) == {
        "credentials": REMOVED,
        "secrets": REMOVED,
    }
