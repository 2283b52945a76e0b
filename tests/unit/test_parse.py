"""Strict parsing of one row: what a prompt, messages, an id and a kept column may be, error rows, row keys."""

import json
from collections.abc import Mapping
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from pipeline.config import InputConfig
from pipeline.errors import RowError, RowErrorType
from pipeline.parse import ParsedRow, RawRow, RowParser, row_key, sample_key
from pipeline.sampling import ROW_KEYS, SamplingConfig, row_sampling, row_seed


def parse_rows(*rows: Mapping[str, Any], **settings: Any) -> list[ParsedRow]:
    """The rows as if they were lines of prompts.jsonl, and what must hold of every parsed row."""
    parser = RowParser(InputConfig(path=["unused"], **settings))
    parsed = [parser.parse(RawRow(i, values), "prompts.jsonl", "line") for i, values in enumerate(rows)]
    for row in parsed:
        assert (row.error is None) == (row.error_type is None) == (row.messages_or_prompt is not None)
        assert row.error is None or row.error.startswith(f"{row.where}: ")
        json.dumps([row.error, row.row_id, row.kept], ensure_ascii=False).encode()  # no lone surrogate gets through
    return parsed


def only(values: Mapping[str, Any], **settings: Any) -> ParsedRow:
    (row,) = parse_rows(values, **settings)
    return row


def test_good_row() -> None:
    row = only({"prompt": "2024-01-31", "other": 1})
    assert row == ParsedRow(
        row_id="prompts.jsonl:1",
        row_key=row_key("prompts.jsonl", "prompts.jsonl:1", b'{"prompt":"2024-01-31"}'),
        source_file="prompts.jsonl",
        row_index=0,
        where="prompts.jsonl, line 1",
        messages_or_prompt="2024-01-31",  # date-like text stays text
        kept={},
    )


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        ({}, "missing_field", "no column 'prompt' (input.prompt_column); the row has no columns"),
        ({"text": 1, "id": None}, "missing_field", "no column 'prompt' (input.prompt_column); the row has id, text"),
        ({"a\n": 1, "\ud800": 2}, "missing_field", r"the row has '\ud800', 'a\n'"),
        (dict.fromkeys("ihgfedcba"), "missing_field", "the row has a, b, c, d, e, f, g, h, ..."),
        ({"x" * 1000: 1}, "missing_field", f"the row has {'x' * 120}, ..."),
        ({"prompt": None}, "missing_field", "column 'prompt' is null"),
        ({"prompt": 5}, "wrong_type", "column 'prompt' must be a string, found integer 5"),
        ({"prompt": True}, "wrong_type", "must be a string, found boolean True"),
        ({"prompt": {"a": 1}}, "wrong_type", "must be a string, found object"),
        ({"prompt": ["a"]}, "wrong_type", "found list; for chat messages set input.messages_column"),
        ({"prompt": ""}, "empty_prompt", "column 'prompt' is empty"),
        ({"prompt": " \n\t\u3000"}, "empty_prompt", "column 'prompt' is empty"),
        ({"prompt": "a \ud800 b"}, "invalid_text", r"column 'prompt' holds a lone surrogate ('\ud800')"),
    ],
)
def test_bad_prompt_names_its_place(values: Mapping[str, Any], kind: str, message: str) -> None:
    _, bad, _ = parse_rows({"prompt": "hello"}, values, {"prompt": "hello"})
    assert bad.error is not None
    assert bad.error.startswith("prompts.jsonl, line 2: ")
    assert message in bad.error
    assert bad.error_type == kind
    assert len(bad.error) < 300


def test_row_of_a_parquet_file_is_called_a_row() -> None:
    row = RowParser(InputConfig(path=["unused"])).parse(RawRow(1, {"prompt": 5}), "a.parquet", "row")
    assert row.error == "a.parquet, row 2: column 'prompt' must be a string, found integer 5"


def test_missing_column_lists_all_of_the_row_though_only_some_were_read() -> None:
    parser = RowParser(InputConfig(path=["unused"], messages_column="chat"))
    row = parser.parse(RawRow(2, {}, columns=["prompt", "id"]), "in.parquet")
    assert row.error == "in.parquet, row 3: no column 'chat' (input.messages_column); the row has id, prompt"


def test_messages() -> None:
    """`content` as a string and as a list of parts; null keys go."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "image_url": None}]
    rows = parse_rows(
        {"chat": [{"role": "user", "content": "plain"}]},
        {"chat": [{"role": "system", "content": ""}, {"role": "user", "content": parts, "name": "Ann", "x": None}]},
        messages_column="chat",
    )
    assert [row.messages_or_prompt for row in rows] == [
        [{"role": "user", "content": "plain"}],
        [{"role": "system", "content": ""}, {"role": "user", "content": "ab", "name": "Ann"}],
    ]


@pytest.mark.parametrize(
    ("messages", "kind", "message"),
    [
        (None, "missing_field", "column 'chat' is null; input.messages_column names"),
        ([], "empty_prompt", "column 'chat' holds no text"),
        ([{"role": "user", "content": " "}], "empty_prompt", "column 'chat' holds no text"),
        ("hi", "wrong_type", "column 'chat' must be a list of messages, found string"),
        (["hi"], "wrong_type", "column 'chat[0]' must be an object with role and content, found string"),
        ([{"content": "x"}], "wrong_type", "column 'chat[0].role' must be a string, found null"),
        ([{"role": 1, "content": "x"}], "wrong_type", "column 'chat[0].role' must be a string, found integer 1"),
        ([{"role": "user"}], "wrong_type", "column 'chat[0].content' must be a string or a list of text parts"),
        ([{"role": "user", "content": 3}], "wrong_type", "found integer 3"),
        ([{"role": "user", "content": ["x"]}], "wrong_type", "'chat[0].content[0]' must be a text part"),
        ([{"role": "user", "content": [{"type": "image"}]}], "wrong_type", "found a part of type 'image'"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "wrong_type", "must be a text part"),
        ([{"role": "user", "content": "\ud800"}], "invalid_text", "column 'chat[0]' holds a lone surrogate"),
        ([{"role": "\udfff", "content": "x"}], "invalid_text", "column 'chat[0]' holds a lone surrogate"),
    ],
)
def test_bad_messages(messages: Any, kind: str, message: str) -> None:
    row = only({"chat": messages}, messages_column="chat")
    assert row.error is not None
    assert message in row.error
    assert row.error_type == kind


@pytest.mark.parametrize(("value", "expected"), [("a", "a"), (7, "7"), (-1, "-1"), ("ü 1", "ü 1"), (2**70, str(2**70))])
def test_ids(value: Any, expected: str) -> None:
    assert only({"prompt": "x", "id": value}, id_column="id").row_id == expected


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        ({}, "missing_field", "no column 'id' (input.id_column); the row has prompt"),
        ({"id": None}, "missing_field", "column 'id' is null"),
        ({"id": ""}, "wrong_type", "must be a non-empty string or an integer, found string ''"),
        ({"id": True}, "wrong_type", "found boolean True"),
        ({"id": 1.0}, "wrong_type", "found number 1.0"),
        ({"id": [1]}, "wrong_type", "found list"),
        ({"id": "\udc00"}, "invalid_text", "column 'id' holds a lone surrogate"),
    ],
)
def test_bad_ids_fall_back_to_the_line(values: Mapping[str, Any], kind: str, message: str) -> None:
    row = only({"prompt": "x", **values}, id_column="id")
    assert (row.row_id, row.error_type) == ("prompts.jsonl:1", kind)
    assert row.error is not None
    assert message in row.error


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("string", "as is", "as is"),
        ("string", {"b": [1, "ü"], "a": None}, '{"b":[1,"ü"],"a":null}'),
        ("string", 1, "1"),
        ("string", False, "false"),
        ("string", None, None),
        ("string", datetime(2024, 1, 31, 12, 30, tzinfo=UTC), "2024-01-31T12:30:00+00:00"),
        ("string", date(2024, 1, 31), "2024-01-31"),
        ("string", time(12, 30), "12:30:00"),
        ("string", Decimal("1.50"), "1.50"),
        ("string", float("nan"), "NaN"),
        ("string", float("-inf"), "-Infinity"),
        (
            "string",
            {"at": [date(2024, 1, 31), Decimal("1.50")], "x": float("inf")},
            '{"at":["2024-01-31","1.50"],"x":Infinity}',
        ),
        ("int64", 2**63 - 1, 2**63 - 1),
        ("int64", -(2**63), -(2**63)),
        ("int64", None, None),
        ("float64", 1.5, 1.5),
        ("float64", 2, 2.0),
        ("bool", True, True),
    ],
)
def test_kept_columns(kind: str, value: Any, expected: Any) -> None:
    row = only({"prompt": "x", "col": value}, keep_columns={"col": kind})
    assert row.error is None
    assert row.kept == {"col": expected}
    assert type(row.kept["col"]) is type(expected)


def test_absent_kept_column_is_null() -> None:
    assert only({"prompt": "x"}, keep_columns=["col"]).kept == {"col": None}


@pytest.mark.parametrize(
    ("kind", "value", "error_type"),
    [
        ("int64", 2**63, "wrong_type"),
        ("int64", 1.0, "wrong_type"),
        ("int64", True, "wrong_type"),
        ("int64", "1", "wrong_type"),
        ("float64", True, "wrong_type"),
        ("float64", "1.5", "wrong_type"),
        ("float64", 10**400, "wrong_type"),
        ("bool", 1, "wrong_type"),
        ("bool", "true", "wrong_type"),
        ("string", b"x", "wrong_type"),
        ("string", [b"x"], "wrong_type"),
        ("string", "\ud800", "invalid_text"),
        ("string", {"deep": ["\ud800"]}, "invalid_text"),
    ],
)
def test_kept_columns_are_strict(kind: str, value: Any, error_type: str) -> None:
    row = only({"prompt": "x", "col": value, "id": "a"}, keep_columns={"col": kind}, id_column="id")
    assert (row.kept, row.row_id, row.error_type) == ({"col": None}, "a", error_type)
    assert row.error is not None
    assert "prompts.jsonl, line 1: column 'col'" in row.error


def test_error_row_keeps_what_could_be_read() -> None:
    row = only({"id": "a", "n": 3, "prompt": 0}, id_column="id", keep_columns={"n": "int64"})
    assert (row.row_id, row.kept, row.error_type) == ("a", {"n": 3}, "wrong_type")


def test_row_that_cannot_be_read_keeps_its_columns_and_its_key_follows_the_line() -> None:
    parser = RowParser(InputConfig(path=["unused"], id_column="id"))
    unreadable = RowError(RowErrorType.MALFORMED, "column 'prompt' cannot be read: why")
    row = parser.parse(RawRow(0, {"id": "a"}, unreadable), "a.parquet")
    assert (row.row_id, row.error_type) == ("a", "malformed")
    assert row.error == "a.parquet, row 1: column 'prompt' cannot be read: why"
    keys = [parser.parse(RawRow(0, {}, unreadable, line), "a.jsonl").row_key for line in (b"{1", b"{2", b"{1")]
    assert keys[0] == keys[2] != keys[1]


def test_long_values_are_not_dumped() -> None:
    long = "x" * 10_000
    for value in ([long], {long: 1}, int("9" * 4000)):
        error = only({"prompt": value}).error
        assert error is not None
        assert len(error) < 200


def test_parser_without_a_file() -> None:
    """Rows of a user's own Dataset: the id is a hash of the content, and errors name it."""
    parser = RowParser(InputConfig(path=["unused"]))
    good, bad = (parser.parse(RawRow(-1, values)) for values in ({"prompt": "x"}, {"prompt": 1}))
    assert (good.source_file, good.row_index, len(good.row_id)) == ("", -1, 32)
    assert bad.error == f"row {bad.row_id}: column 'prompt' must be a string, found integer 1"
    assert good.row_id != bad.row_id


# --------------------------------------------------------------------------------------------------- sampling settings


ALL_SETTINGS: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": -0.2,
    "logit_bias": {"5": 1.0},
    "bad_words": ["no"],
    "stop": ["\n", "\u00fc"],
    "keep_stop": True,
    "min_new_tokens": 2,
    "max_new_tokens": 40,
    "seed": 2**64 - 1,
}


def test_all_settings_of_a_row() -> None:
    text = json.dumps(ALL_SETTINGS)
    assert set(ALL_SETTINGS) == set(ROW_KEYS)
    rows = parse_rows({"prompt": "x", "p": ALL_SETTINGS}, {"prompt": "x", "p": text}, sampling_column="p")
    own = parse_rows({"prompt": "x", **ALL_SETTINGS}, sampling_columns=list(ALL_SETTINGS))
    for row in [*rows, *own]:
        assert row.error is None
        assert json.loads(row.sampling or "") == ALL_SETTINGS
    assert rows[0].sampling == rows[1].sampling == own[0].sampling
    sampling = row_sampling(SamplingConfig(top_p=0.2, n=4), rows[0].sampling)
    assert sampling == SamplingConfig(**ALL_SETTINGS, n=4)


def test_settings_that_a_row_leaves_out_are_the_jobs() -> None:
    config = SamplingConfig(temperature=0.7, top_k=5, stop=["a"], min_new_tokens=3)
    for given in (None, {}, {"temperature": None}, "{}", "null", dict.fromkeys(ROW_KEYS)):
        row = only({"prompt": "x", "p": given, "seed": None}, sampling_column="p", sampling_columns=["seed"])
        assert (row.error, row.sampling) == (None, None)
        assert row_sampling(config, row.sampling) == config
    row = only({"prompt": "x", "p": {"temperature": 0, "stop": []}}, sampling_column="p")
    assert row_sampling(config, row.sampling) == SamplingConfig(top_k=5, min_new_tokens=3)


def test_absent_sampling_columns_are_null() -> None:
    assert only({"prompt": "x"}, sampling_column="p", sampling_columns=["seed"]).sampling is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -1}, "column 'p', key 'temperature': must be 0 or >= 0.0001 (got -1)"),
        ({"temperature": "hot"}, "column 'p', key 'temperature': Input should be a valid number (got 'hot')"),
        ({"temperature": True}, "column 'p', key 'temperature': Input should be a valid number (got True)"),
        ({"temperature": float("nan")}, "key 'temperature': Input should be a finite number (got nan)"),
        ({"top_k": 1.0}, "column 'p', key 'top_k': Input should be a valid integer (got 1.0)"),
        ({"top_k": "5"}, "column 'p', key 'top_k': Input should be a valid integer (got '5')"),
        ({"top_p": 0}, "column 'p', key 'top_p': must lie in (0, 1] (got 0)"),
        ({"min_p": 2}, "column 'p', key 'min_p': must lie in [0, 1] (got 2)"),
        ({"seed": -1}, "column 'p', key 'seed': must fit in 64 unsigned bits (got -1)"),
        ({"max_new_tokens": -1}, "column 'p', key 'max_new_tokens': must not be negative (got -1)"),
        ({"keep_stop": 1}, "column 'p', key 'keep_stop': Input should be a valid boolean (got 1)"),
        ({"stop": ["a", ""]}, "column 'p', key 'stop': String should have at least 1 character (got '')"),
        ({"stop": 5}, "column 'p', key 'stop': Input should be a valid list (got 5)"),
        ({"bad_words": [5]}, "column 'p', key 'bad_words': Input should be a valid string (got 5)"),
        ({"logit_bias": {"five": 1}}, "column 'p', key 'logit_bias': Input should be a valid integer"),
        ({"logit_bias": {"-5": 1}}, "column 'p', key 'logit_bias': Input should be"),
        ({"logit_bias": {"5": "1"}}, "column 'p', key 'logit_bias': Input should be a valid number (got '1')"),
        ({"logit_bias": [5]}, "column 'p', key 'logit_bias': Input should be a valid dictionary (got [5])"),
        ({"temprature": 1}, "key 'temprature': unknown setting; the nearest valid key is temperature"),
        ({"n": 2}, "column 'p', key 'n': unknown setting; the nearest valid key is "),
        ({"logprobs": 2}, "column 'p', key 'logprobs': unknown setting; the nearest valid key is "),
        ({"eos_token_ids": [2]}, "column 'p', key 'eos_token_ids': unknown setting"),
        ({"stop.0": 2}, "column 'p', key 'stop.0': unknown setting; the nearest valid key is stop"),
        ({"x" * 1000: None}, "unknown setting"),
        ({"stop": "x" * 1000, "seed": "x" * 1000}, "key 'seed': Input should be a valid integer"),
        ("{", "column 'p' is not valid JSON"),
        ("temperature", "column 'p' is not valid JSON"),
        ("[1]", "column 'p' must be an object of sampling settings, or JSON text of one, found list"),
        (5, "column 'p' must be an object of sampling settings, or JSON text of one, found integer 5"),
        ({"seed": 1, "top_p": 0.5}, "column 'p', key 'top_p' has a column of its own too; give it once"),
        ({"stop": "\ud800"}, "column 'p', key 'stop': Input should be a valid string, unable to parse raw"),
        ({"bad_words": ["ok", "\ud800"]}, "column 'p', key 'bad_words': Input should be a valid string"),
    ],
)
def test_bad_sampling_settings_name_their_place(given: Any, message: str) -> None:
    settings = {"sampling_column": "p", "sampling_columns": ["top_p"]}
    own = {"top_p": 0.1} if isinstance(given, dict) and "seed" in given and "top_p" in given else {}
    _, bad, _ = parse_rows({"prompt": "x"}, {"prompt": "x", "p": given, **own}, {"prompt": "x"}, **settings)
    assert bad.error is not None
    assert bad.error.startswith("prompts.jsonl, line 2: column ")
    assert message in bad.error
    assert bad.error_type in ("sampling", "wrong_type")
    assert len(bad.error) < 400
    assert bad.sampling is None


def test_bad_setting_in_a_column_of_its_own() -> None:
    row = only({"prompt": "x", "top_p": 7}, sampling_columns=["top_p"])
    assert row.error == "prompts.jsonl, line 1: column 'top_p': must lie in (0, 1] (got 7)"
    assert row.error_type == "sampling"


def test_settings_from_parquet() -> None:
    """A struct gives every row the keys of all, null where they are not its own; a bias for no token likewise."""
    given = {**dict.fromkeys(ROW_KEYS), "seed": 3, "logit_bias": {"5": None, "7": 2.0}}
    assert only({"prompt": "x", "p": given}, sampling_column="p").sampling == '{"logit_bias":{"7":2.0},"seed":3}'


def test_seeds_of_rows() -> None:
    config = SamplingConfig(seed=5)
    assert row_seed(config, '{"seed":9}', "a") == 9
    assert row_seed(config, '{"top_k":9}', "a") == row_seed(config, None, "a") == xxh3_64_intdigest(b"5\0a")
    assert len({row_seed(SamplingConfig(seed=seed), None, name) for seed in (5, 6) for name in "ab"}) == 4


# ------------------------------------------------------------------------------------------------------------- row keys


def test_row_key_follows_content_and_identity_only() -> None:
    settings: dict[str, Any] = {"id_column": "id", "keep_columns": ["k"]}
    base = {"id": "a", "prompt": "p", "k": "v"}

    def key(*lines: Mapping[str, Any]) -> int:
        return next(row.row_key for row in parse_rows(*lines, **settings) if row.row_id == "a")

    reference = key(base)
    assert key({"id": "z", "prompt": "other"}, base) == reference, "other lines do not matter"
    assert key({"prompt": "p", "k": "v", "id": "a"}) == reference, "nor does the order of keys"
    assert key(base | {"unread": 1}) == reference, "nor columns that are not read"
    changed = [key(base | {"prompt": "P"}), key(base | {"k": "V"}), key(base | {"k": None})]
    assert len({reference, *changed}) == 4
    assert 0 <= reference < 2**64


def test_row_key_follows_the_rows_own_sampling_settings() -> None:
    def key(values: Mapping[str, Any], **settings: Any) -> int:
        return only({"prompt": "p", "id": "a", **values}, id_column="id", **settings).row_key

    by_column = {"sampling_column": "s", "sampling_columns": ["seed"]}
    keys = [key(values, **by_column) for values in ({}, {"s": {"top_k": 1}}, {"s": {"top_k": 2}}, {"seed": 1})]
    assert len(set(keys)) == 4
    assert key({"s": {"top_k": 1}}) == key({}), "a column that is not read does not matter"


def test_sample_keys() -> None:
    """Golden, as row_key is: sample 0 has the row's key, and no other sample of any row."""
    assert sample_key(6398904925121007804, 0) == 6398904925121007804
    assert sample_key(6398904925121007804, 1) == 18001047594159819966
    keys = [sample_key(key, sample) for key in (1, 2, 2**64 - 1) for sample in range(100)]
    assert len(set(keys)) == 300
    assert all(0 <= key < 2**64 for key in keys)


def test_row_key_is_fixed() -> None:
    """Golden: a change of the hash would make every finished run start over."""
    assert row_key("f.jsonl", "a", b"{}") == 6398904925121007804
    assert row_key("f", "ab", b"c") != row_key("f", "a", b"bc")
    assert row_key("fa", "b", b"") != row_key("f", "ab", b"")
