"""Rows to token ids: the template and the BOS exactly once, the length check, error rows beside good ones."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from pipeline.config import InputConfig
from pipeline.errors import ConfigError, RowErrorType
from pipeline.parse import ParsedRow, RawRow, RowParser
from pipeline.prepare import Preparer, rows_from_mappings
from pipeline.schema import prepared_schema

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """One token a byte; adds a BOS to what it tokenizes with special tokens; drops snowmen."""
    vocab = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocab)}, merges=[]))
    tokenizer.normalizer = normalizers.Replace("\u2603", "")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


@pytest.fixture(scope="module")
def plain() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="module")
def chat() -> PreTrainedTokenizerFast:
    return make_tokenizer(TEMPLATE)


def make_config(**settings: Any) -> InputConfig:
    return InputConfig(path=["unused"], **settings)


def parse(config: InputConfig, *rows: Mapping[str, Any]) -> list[ParsedRow]:
    parser = RowParser(config)
    return [parser.parse(RawRow(i, values), "p.jsonl", "line") for i, values in enumerate(rows)]


def prepare(tokenizer: Any, *rows: Mapping[str, Any], room: int = 1000, **settings: Any) -> list[dict[str, Any]]:
    config = make_config(**settings)
    table = Preparer(tokenizer, config, room).prepare(parse(config, *rows))
    assert table.schema == prepared_schema(config.keep_columns)
    table.validate(full=True)
    return table.to_pylist()


def text_of(tokenizer: Any, row: Mapping[str, Any]) -> str:
    assert row["error"] is None
    return str(tokenizer.decode(row["prompt_ids"], clean_up_tokenization_spaces=False))


def test_raw_prompt_gets_one_bos(plain: Any) -> None:
    rows = prepare(plain, {"prompt": "ab c"}, {"prompt": "<s>ab c"}, {"prompt": "a<s>"}, {"prompt": "<s><s>x"})
    assert [text_of(plain, row) for row in rows] == ["<s>ab c", "<s>ab c", "<s>a<s>", "<s><s>x"]


def test_no_bos_where_the_tokenizer_adds_none() -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    rows = prepare(tokenizer, {"prompt": "ab"}, {"prompt": "<s>ab"})
    assert [text_of(tokenizer, row) for row in rows] == ["ab", "<s>ab"]


def test_template_is_applied_with_one_bos(chat: Any) -> None:
    (row,) = prepare(chat, {"prompt": "hi"})
    assert text_of(chat, row) == "<s><user>hi</s><assistant>"
    assert row["prompt_ids"].count(0) == 1
    reference = chat.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert row["prompt_ids"] == reference["input_ids"], "as transformers itself tokenizes a chat"


def test_never_uses_no_template(chat: Any) -> None:
    (row,) = prepare(chat, {"prompt": "hi"}, chat_template="never")
    assert text_of(chat, row) == "<s>hi"


def test_system_prompt(chat: Any) -> None:
    (row,) = prepare(chat, {"prompt": "hi"}, system_prompt="be brief")
    assert text_of(chat, row) == "<s><system>be brief</s><user>hi</s><assistant>"


def test_messages(chat: Any) -> None:
    user = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    rows = prepare(
        chat,
        {"chat": [user, {"role": "assistant", "content": "yes?"}, user]},
        {"chat": [{"role": "system", "content": "own"}, user]},
        messages_column="chat",
        system_prompt="default",
    )
    assert text_of(chat, rows[0]) == "<s><system>default</s><user>hi</s><assistant>yes?</s><user>hi</s><assistant>"
    assert text_of(chat, rows[1]) == "<s><system>own</s><user>hi</s><assistant>", "a row's own system message stays"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chat_template": "always"}, "input.chat_template: always needs a chat template"),
        ({"messages_column": "chat"}, "input.messages_column needs a chat template"),
        ({"system_prompt": "be brief"}, "input.system_prompt needs a chat template"),
    ],
)
def test_settings_that_need_a_template(plain: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Preparer(plain, make_config(**settings), 10)


def test_template_refusal_is_one_row(chat: Any) -> None:
    rows = prepare(
        chat,
        {"chat": [{"role": "alien", "content": "hi"}]},
        {"chat": [{"role": "user", "content": "hi"}]},
        messages_column="chat",
    )
    assert [row["error_type"] for row in rows] == ["template", None]
    assert rows[0]["error"] == "p.jsonl, line 1: the chat template refused it: TemplateError: unknown role alien"
    assert rows[0]["prompt_ids"] is None


def test_template_that_breaks_is_an_error_row() -> None:
    (row,) = prepare(make_tokenizer("{{ messages[0].nothing.at.all }}"), {"prompt": "hi"})
    assert row["error_type"] == "template"


def test_prompt_too_long_is_one_row(plain: Any) -> None:
    rows = prepare(plain, {"prompt": "a" * 9}, {"prompt": "a" * 10}, {"prompt": "a"}, room=10)
    assert [row["error_type"] for row in rows] == [None, "prompt_too_long", None]
    assert rows[1]["error"].startswith(
        "p.jsonl, line 2: the prompt has 11 tokens and engine.max_length leaves room for 10"
    )
    assert rows[1]["prompt_ids"] is None


def test_prompt_of_no_tokens() -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    rows = prepare(tokenizer, {"prompt": "\u2603"}, {"prompt": "\u2603a"})
    assert [row["error_type"] for row in rows] == ["empty_prompt", None]


def test_table_carries_identity_kept_columns_and_earlier_errors(plain: Any) -> None:
    config = make_config(id_column="id", keep_columns={"n": "int64", "s": "string"})
    parsed = parse(config, {"id": "a", "prompt": "x", "n": 1, "s": {"k": 1}}, {"id": "b", "prompt": 5, "n": 2})
    good, bad = Preparer(plain, config, 10).prepare(parsed).to_pylist()
    assert good == {
        "row_id": "a",
        "row_key": parsed[0].row_key,
        "source_file": "p.jsonl",
        "row_index": 0,
        "n": 1,
        "s": '{"k":1}',
        "prompt_ids": plain("x")["input_ids"],
        "error": None,
        "error_type": None,
    }
    assert (bad["row_id"], bad["n"], bad["s"], bad["prompt_ids"]) == ("b", 2, None, None)
    assert bad["error"] == "p.jsonl, line 2: column 'prompt' must be a string, found integer 5"
    assert bad["error_type"] == RowErrorType.WRONG_TYPE


def test_schema_is_the_same_for_any_rows(plain: Any) -> None:
    """No rows, only errors, only nulls: shards must read together."""
    config = make_config(keep_columns=["s"])
    preparer = Preparer(plain, config, 10)
    tables = [preparer.prepare(parse(config, *rows)) for rows in ([], [{"prompt": 1}], [{"prompt": "x", "s": "y"}])]
    assert pa.concat_tables(tables).num_rows == 2


def test_rows_from_a_users_table(plain: Any) -> None:
    config = make_config(keep_columns={"n": "int64"})
    table = pa.table({"prompt": ["a", None, "a", "b"], "n": [1, 2, 1, 1], "unread": [b"", b"", b"", b""]})
    rows = rows_from_mappings(table, RowParser(config))
    assert [(row.source_file, row.row_index) for row in rows] == [("", -1)] * 4
    assert [row.messages_or_prompt for row in rows] == ["a", None, "a", "b"]
    assert rows[0].row_id == rows[2].row_id
    assert len({row.row_id for row in rows}) == 3
    assert (
        rows[1].error == f"row {rows[1].row_id}: column 'prompt' is null; input.prompt_column names the column to read"
    )
    assert Preparer(plain, config, 10).prepare(rows).num_rows == 4


def test_rows_from_a_users_table_with_ids(plain: Any) -> None:
    config = make_config(id_column="id", messages_column="chat")
    table = pa.table({"id": [7, 8], "chat": [[{"role": "user", "content": "a"}], []]})
    rows = rows_from_mappings(table, RowParser(config))
    assert [row.row_id for row in rows] == ["7", "8"]
    assert [row.where for row in rows] == ["row 7", "row 8"]
    assert rows[1].error_type == RowErrorType.EMPTY_PROMPT
