"""Parsed rows to rows ready to decode: chat template, tokenizer, length check.

One bad row becomes an error row and never stops the others. The decoder below sees token ids only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pipeline.columnar import table_rows
from pipeline.config import InputConfig
from pipeline.errors import ConfigError, RowError, RowErrorType
from pipeline.parse import ParsedRow, RowParser, sample_key
from pipeline.sampling import SamplingConfig, row_sampling
from pipeline.schema import prepared_schema

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONG_CHARS = 32  # a token of a long prompt; tokens of ordinary text have about four


@lru_cache(maxsize=2)
def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, loaded once a process. Raises ConfigError when it has none that can be read."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"model.path: {folder} has no tokenizer that can be loaded ({reason})") from error


class Preparer:
    """Applies the chat template and tokenizes. `max_prompt_tokens`: what engine.max_length leaves for a prompt."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: InputConfig,
        sampling: SamplingConfig,
        max_prompt_tokens: int,
    ) -> None:
        """Raises ConfigError when the config needs a chat template and the tokenizer has none."""
        self.tokenizer = tokenizer
        self.config = config
        self.sampling = sampling
        self.max_prompt_tokens = max_prompt_tokens
        self.schema = prepared_schema(config.keep_columns)
        self._use_template = _use_template(tokenizer, config)

    def prepare(self, rows: Iterable[ParsedRow]) -> pa.Table:
        """A table row per sample of each input row, in order, of `schema`; an error row has null prompt_ids."""
        records = [record for row in rows for record in self._records(row)]
        return pa.Table.from_pylist(records, schema=self.schema)

    def _records(self, row: ParsedRow) -> list[dict[str, Any]]:
        prompt_ids = None
        if row.error is None:
            try:
                prompt_ids = self._prompt_ids(row)
                self._check_sampling(row)
            except RowError as error:
                prompt_ids, row = None, row.failed(error)
        record = {
            "row_id": row.row_id,
            "source_file": row.source_file,
            "row_index": row.row_index,
            **row.kept,
            "prompt_ids": prompt_ids,
            "sampling": row.sampling,
            "logged": row.logged,
            "error": row.error,
            "error_type": row.error_type,
        }
        return [{**record, "row_key": sample_key(row.row_key, i), "sample_index": i} for i in row.samples]

    def _check_sampling(self, row: ParsedRow) -> None:
        """Each setting is valid in itself; the row's and the config's must go together too."""
        try:
            row_sampling(self.sampling, row.sampling)
        except ValueError as error:
            reason = f"the row's sampling settings do not go with the others: {error}"
            raise RowError(RowErrorType.SAMPLING, reason) from error

    def _prompt_ids(self, row: ParsedRow) -> list[int]:
        assert row.messages_or_prompt is not None
        ids = self._template_ids(row) if self._use_template else self._raw_ids(row)
        if not ids:
            raise RowError(RowErrorType.EMPTY_PROMPT, "the prompt has no token that the model's tokenizer knows")
        if len(ids) > self.max_prompt_tokens:
            raise self._too_long(f"{len(ids)} tokens")
        return ids

    def _too_long(self, length: str) -> RowError:
        return RowError(
            RowErrorType.PROMPT_TOO_LONG,
            f"the prompt has {length} and engine.max_length leaves room for {self.max_prompt_tokens}; "
            "shorten the prompt or raise engine.max_length",
        )

    def _template_ids(self, row: ParsedRow) -> list[int]:
        # The template writes the BOS and all other special tokens itself, so the tokenizer must add none.
        return self._tokenize(self._render(row), add_special_tokens=False)

    def _render(self, row: ParsedRow) -> str:
        prompt = row.messages_or_prompt
        assert prompt is not None
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.config.system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.config.system_prompt}, *messages]
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=row.tools, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template is the checkpoint's own program and may raise anything over one row
            reason = f"the chat template refused it: {type(error).__name__}"
            raise RowError(RowErrorType.TEMPLATE, reason, detail=f": {str(error)[:200]}") from error
        return str(text)

    def _raw_ids(self, row: ParsedRow) -> list[int]:
        text, bos = row.messages_or_prompt, self.tokenizer.bos_token_id
        assert isinstance(text, str)
        ids = self._tokenize(text, add_special_tokens=True)
        brought_its_own = bos is not None and text.startswith(self.tokenizer.bos_token)
        return ids[1:] if brought_its_own and ids[:2] == [bos, bos] else ids

    def _tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        """Of a text that is far too long only the beginning is tokenized: tokens take many times its memory."""
        start = LONG_CHARS * self.max_prompt_tokens
        if len(text) > start:
            ids = self._tokenize(text[:start], add_special_tokens)
            if len(ids) > 2 * self.max_prompt_tokens:  # no joining of tokens at the cut gives so many back
                raise self._too_long(f"{len(text)} characters, more than {2 * self.max_prompt_tokens} tokens,")
        # verbose=False: the tokenizer's own warning about length says nothing about this row.
        return list(self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])


def rows_from_mappings(table: pa.Table, parser: RowParser, n: int) -> list[ParsedRow]:
    """Rows of a user's own Ray Dataset block, n samples of each: no file, index -1.

    Without id_column a row's id is a hash of its content, so rows that are equal share id and key. Ids in id_column
    are taken as given: duplicates are not looked for.
    """
    parsed = (parser.parse(replace(raw, index=-1)) for raw in table_rows(table, parser.columns))
    return [replace(row, samples=tuple(range(n))) for row in parsed]


def _use_template(tokenizer: PreTrainedTokenizerBase, config: InputConfig) -> bool:
    if config.chat_template == "never":
        return False
    if tokenizer.chat_template:
        _check_tools(tokenizer, config)
        return True
    needs = {
        "input.chat_template: always": config.chat_template == "always",
        "input.messages_column": config.messages_column,
        "input.tools_column": config.tools_column,
        "input.system_prompt": config.system_prompt,
    }
    for setting, needed in needs.items():
        if needed:
            raise ConfigError(
                f"{setting} needs a chat template and the model's tokenizer has none; "
                "use an instruction-tuned model, or input.prompt_column with complete prompts"
            )
    return False


def _check_tools(tokenizer: PreTrainedTokenizerBase, config: InputConfig) -> None:
    """A template that takes no tools would drop them in silence."""
    if config.tools_column and "tools" not in tokenizer.get_chat_template(tools=[{}]):
        raise ConfigError(
            "input.tools_column: the model's chat template takes no tools; leave it out, or take a model that was "
            "trained for them"
        )
