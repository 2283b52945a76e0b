"""Rows to token ids: the template and the BOS exactly once, the length check, error rows beside good ones."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from pipeline.config import InputConfig
from pipeline.errors import ConfigError, RowErrorType
from pipeline.parse import ParsedRow, RawRow, RowParser, sample_key
from pipeline.prepare import Preparer, rows_from_mappings
from pipeline.sampling import SamplingConfig, bad_word_ids
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


def prepare(
    tokenizer: Any,
    *rows: Mapping[str, Any],
    room: int = 1000,
    sampling: SamplingConfig | None = None,
    **settings: Any,
) -> list[dict[str, Any]]:
    config = make_config(**settings)
    table = Preparer(tokenizer, config, sampling or SamplingConfig(), room).prepare(parse(config, *rows))
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
        Preparer(plain, make_config(**settings), SamplingConfig(), 10)


def test_template_refusal_is_one_row(chat: Any) -> None:
    rows = prepare(
        chat,
        {"chat": [{"role": "alien", "content": "hi"}]},
        {"chat": [{"role": "user", "content": "hi"}]},
        messages_column="chat",
    )
    assert [row["error_type"] for row in rows] == ["template", None]
    assert rows[0]["error"] == "p.jsonl, line 1: the chat template refused it: TemplateError: unknown role alien"
    assert rows[0]["logged"] == "p.jsonl, line 1: the chat template refused it: TemplateError", (
        "templates quote the row"
    )
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
    good, bad = Preparer(plain, config, SamplingConfig(), 10).prepare(parsed).to_pylist()
    assert good == {
        "row_id": "a",
        "row_key": parsed[0].row_key,
        "source_file": "p.jsonl",
        "row_index": 0,
        "n": 1,
        "s": '{"k":1}',
        "sample_index": 0,
        "sampling": None,
        "prompt_ids": plain("x")["input_ids"],
        "logged": None,
        "error": None,
        "error_type": None,
    }
    assert (bad["row_id"], bad["n"], bad["s"], bad["prompt_ids"]) == ("b", 2, None, None)
    assert bad["error"] == bad["logged"] == "p.jsonl, line 2: column 'prompt' must be a string, found integer 5"
    assert bad["error_type"] == RowErrorType.WRONG_TYPE


def test_schema_is_the_same_for_any_rows(plain: Any) -> None:
    """No rows, only errors, only nulls: shards must read together."""
    config = make_config(keep_columns=["s"])
    preparer = Preparer(plain, config, SamplingConfig(), 10)
    tables = [preparer.prepare(parse(config, *rows)) for rows in ([], [{"prompt": 1}], [{"prompt": "x", "s": "y"}])]
    assert pa.concat_tables(tables).num_rows == 2


def test_rows_from_a_users_table(plain: Any) -> None:
    config = make_config(keep_columns={"n": "int64"})
    table = pa.table({"prompt": ["a", None, "a", "b"], "n": [1, 2, 1, 1], "unread": [b"", b"", b"", b""]})
    rows = rows_from_mappings(table, RowParser(config), 1)
    assert [(row.source_file, row.row_index) for row in rows] == [("", -1)] * 4
    assert [row.messages_or_prompt for row in rows] == ["a", None, "a", "b"]
    assert rows[0].row_id == rows[2].row_id
    assert len({row.row_id for row in rows}) == 3
    assert (
        rows[1].error == f"row {rows[1].row_id}: column 'prompt' is null; input.prompt_column names the column to read"
    )
    assert Preparer(plain, config, SamplingConfig(), 10).prepare(rows).num_rows == 4


def test_rows_from_a_users_table_with_ids(plain: Any) -> None:
    config = make_config(id_column="id", messages_column="chat")
    table = pa.table({"id": [7, 8], "chat": [[{"role": "user", "content": "a"}], []]})
    rows = rows_from_mappings(table, RowParser(config), 1)
    assert [row.row_id for row in rows] == ["7", "8"]
    assert [row.where for row in rows] == ["row 7", "row 8"]
    assert rows[1].error_type == RowErrorType.EMPTY_PROMPT


# ---------------------------------------------------------------------------------------------------------- sampling


def test_a_rows_own_settings_travel_as_canonical_json(plain: Any) -> None:
    settings = {"sampling_column": "p", "sampling_columns": ["seed"]}
    own = {"top_p": 0.5, "stop": "x", "logit_bias": {"7": 1, "5": 0.5}, "temperature": None}
    rows = prepare(plain, {"prompt": "a", "p": own, "seed": 3}, {"prompt": "a", "p": None}, {"prompt": "a"}, **settings)
    assert [row["sampling"] for row in rows] == [
        '{"logit_bias":{"5":0.5,"7":1.0},"seed":3,"stop":["x"],"top_p":0.5}',
        None,
        None,
    ]


def test_a_rows_settings_must_go_with_the_jobs(plain: Any) -> None:
    sampling = SamplingConfig(max_new_tokens=20, min_new_tokens=10)
    given = [{"max_new_tokens": 10}, {"max_new_tokens": 9}, {"min_new_tokens": 21}, {"min_new_tokens": 9}]
    rows = prepare(plain, *({"prompt": "a", "p": p} for p in given), sampling=sampling, sampling_column="p")
    assert [row["error_type"] for row in rows] == [None, "sampling", "sampling", None]
    assert rows[1]["error"] == (
        "p.jsonl, line 2: the row's sampling settings do not go with the others: "
        "min_new_tokens must lie in 0..max_new_tokens, got 10"
    )
    assert (rows[1]["prompt_ids"], rows[1]["sampling"]) == (None, None)


def test_samples_stand_side_by_side_with_keys_of_their_own(plain: Any) -> None:
    config = make_config()
    good, bad, other = parse(config, {"prompt": "a"}, {"prompt": 5}, {"prompt": "b"})
    wanted = [replace(good, samples=(0, 1, 2)), replace(bad, samples=(0, 1)), replace(other, samples=(2,))]
    rows = Preparer(plain, config, SamplingConfig(), 10).prepare(wanted).to_pylist()
    assert [(row["row_id"], row["sample_index"]) for row in rows] == [
        *((good.row_id, i) for i in range(3)),
        *((bad.row_id, i) for i in range(2)),
        (other.row_id, 2),
    ]
    assert [row["row_key"] for row in rows[:3]] == [sample_key(good.row_key, i) for i in range(3)]
    assert rows[0]["row_key"] == good.row_key
    assert len({row["row_key"] for row in rows}) == 6
    assert rows[0]["prompt_ids"] == rows[1]["prompt_ids"] == rows[2]["prompt_ids"]
    assert [row["error_type"] for row in rows] == [None] * 3 + ["wrong_type"] * 2 + [None]


def test_samples_of_a_users_table(plain: Any) -> None:
    rows = rows_from_mappings(pa.table({"prompt": ["a", "b"]}), RowParser(make_config()), 3)
    assert [row.samples for row in rows] == [(0, 1, 2)] * 2


def test_bad_words_are_tokenized_as_they_are_and_behind_a_space(plain: Any) -> None:
    def ids(text: str) -> tuple[int, ...]:
        return tuple(plain(text, add_special_tokens=False)["input_ids"])

    assert bad_word_ids(plain, ["ab", "c"]) == (ids("ab"), ids(" ab"), ids("c"), ids(" c"))
    assert bad_word_ids(plain, ["c", " c", "c"]) == (ids("c"), ids(" c"), ids("  c")), "none stands twice"
    assert bad_word_ids(plain, []) == ()
    with pytest.raises(ValueError, match=r"^bad_words: '\u2603' has no token that the model's tokenizer knows$"):
        bad_word_ids(plain, ["ab", "\u2603"])


# -------------------------------------------------------------------------------------------------- tools, long prompts

TOOLS_TEMPLATE = "{% for t in tools or [] %}[{{ t.name }}]{% endfor %}" + TEMPLATE


def test_tools_reach_the_template() -> None:
    tokenizer = make_tokenizer(TOOLS_TEMPLATE)
    rows = prepare(tokenizer, {"prompt": "x", "tools": [{"name": "f"}]}, {"prompt": "x"}, tools_column="tools")
    assert [text_of(tokenizer, row) for row in rows] == ["[f]<s><user>x</s><assistant>", "<s><user>x</s><assistant>"]


def test_a_template_that_takes_no_tools_is_refused(chat: Any, plain: Any) -> None:
    with pytest.raises(ConfigError, match=r"input.tools_column: the model's chat template takes no tools"):
        prepare(chat, tools_column="tools")
    with pytest.raises(ConfigError, match=r"input.tools_column needs a chat template"):
        prepare(plain, tools_column="tools")


def test_of_a_prompt_far_too_long_only_the_beginning_is_tokenized(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    tokenize = type(plain).__call__

    def spy(self: Any, text: str, **options: Any) -> Any:
        seen.append(len(text))
        return tokenize(self, text, **options)

    monkeypatch.setattr(type(plain), "__call__", spy)
    (long,) = prepare(plain, {"prompt": "ab" * 100_000}, room=100)
    assert long["error_type"] == RowErrorType.PROMPT_TOO_LONG
    assert "has 200000 characters, more than 200 tokens, and engine.max_length leaves room for 100" in long["error"]
    assert max(seen) == 3200
    (dropped,) = prepare(plain, {"prompt": "\u2603" * 10_000 + "ab"}, room=100)
    assert text_of(plain, dropped) == "<s>ab", "many characters, and few tokens all the same"
