"""What a user can ask of sampling and ending, for the job and for a row, and how the two become a request's parameters.

A value's rule is esp_worker.types.SamplingParams' own, asked for one setting at a time, so that it stands once and
reads the same wherever a user meets it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import xxhash
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from esp_worker.types import SamplingParams
from pipeline.section import Section, as_list

_FAR = 2**31  # a max_new_tokens that no other setting conflicts with


def _fits(value: Any, info: ValidationInfo) -> Any:
    assert info.field_name
    try:
        SamplingParams(**{"max_new_tokens": _FAR, info.field_name: value})
    except ValueError as error:
        rule = str(error).removeprefix(f"{info.field_name} ").rpartition(", got ")[0]
        raise PydanticCustomError("sampling", "{rule}", {"rule": rule}) from error
    return value


def _token_keys(value: object) -> object:
    """JSON's keys are strings; a Parquet struct gives every row the tokens of all, null where they are not its own."""
    if not isinstance(value, Mapping):
        return value
    return {_token(key): bias for key, bias in value.items() if bias is not None}


def _token(key: object) -> object:
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key


Whole = Annotated[int, AfterValidator(_fits)]
Real = Annotated[float, AfterValidator(_fits)]
Texts = Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(as_list)]
Biases = Annotated[dict[Annotated[int, Field(ge=0)], float], BeforeValidator(_token_keys)]


class SamplingConfig(Section):
    """How tokens are chosen and when a row ends; SamplingParams says what each means.

    stop: strings that end a row, cut from it unless keep_stop. bad_words: each is banned as its own tokens and, where
    they differ, as those behind a space. logit_bias: token id to number. n: samples of a prompt. logprobs: null, or how
    many of the most probable tokens to return at each position (0: the chosen token's log-probability alone).
    eos_token_ids null: the checkpoint's own; []: none. generation_config: what is taken of the checkpoint's
    generation_config.json: its EOS ids (`eos`), or also the sampling settings that are not set here (`all`).
    """

    max_new_tokens: Whole = 256
    min_new_tokens: Whole = 0
    temperature: Real = 0.0
    top_p: Real = 1.0
    top_k: Whole = 0
    min_p: Real = 0.0
    repetition_penalty: Real = 1.0
    presence_penalty: Real = 0.0
    frequency_penalty: Real = 0.0
    logit_bias: Biases = Field({})
    bad_words: Texts = Field([])
    seed: Whole = 0
    stop: Texts = Field([])
    keep_stop: bool = False
    eos_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    n: int = Field(1, ge=1, le=2**16)
    logprobs: Whole | None = None
    generation_config: Literal["eos", "all"] = "eos"

    @model_validator(mode="after")
    def _together(self) -> Self:
        self.params(seed=self.seed)  # raises ValueError where settings do not go together
        return self

    def over(self, row: RowSampling) -> SamplingConfig:
        """These settings under a row's own. Raises ValueError where the two do not go together."""
        changed = self.model_copy(update=row.model_dump(exclude_none=True))
        changed.params(seed=changed.seed)
        return changed

    def params(
        self,
        *,
        seed: int,
        sample_index: int = 0,
        eos_token_ids: frozenset[int] = frozenset(),
        bad_words: tuple[tuple[int, ...], ...] = (),
    ) -> SamplingParams:
        """The decoder's parameters. bad_words: the token sequences of self.bad_words."""
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple(self.logit_bias.items()),
            bad_words=bad_words,
            seed=seed,
            sample_index=sample_index,
            eos_token_ids=eos_token_ids,
            logprobs=self.logprobs,
        )


class RowSampling(Section):
    """A row's own settings, of the same names and rules; None: the config's. Types are strict: data is no YAML."""

    model_config = ConfigDict(strict=True)

    temperature: Real | None = None
    top_k: Whole | None = None
    top_p: Real | None = None
    min_p: Real | None = None
    repetition_penalty: Real | None = None
    presence_penalty: Real | None = None
    frequency_penalty: Real | None = None
    logit_bias: Biases | None = None
    bad_words: Texts | None = None
    stop: Texts | None = None
    keep_stop: bool | None = None
    min_new_tokens: Whole | None = None
    max_new_tokens: Whole | None = None
    seed: Whole | None = None

    def canonical(self) -> str | None:
        """JSON text of what is set, the same for the same settings; None where nothing is."""
        given = self.model_dump(exclude_none=True)
        return json.dumps(given, sort_keys=True, separators=(",", ":"), ensure_ascii=False) if given else None


ROW_KEYS = tuple(RowSampling.model_fields)


def row_sampling(config: SamplingConfig, text: str | None) -> SamplingConfig:
    """The settings of a row with the overrides `text` (RowSampling.canonical). Raises ValueError; see `over`."""
    return config if text is None else config.over(RowSampling.model_validate_json(text))


def row_seed(config: SamplingConfig, text: str | None, row_id: str) -> int:
    """A row's seed: its own, or a hash of sampling.seed and its id, so that equal prompts under other ids differ and
    order does not matter."""
    own = None if text is None else RowSampling.model_validate_json(text).seed
    return xxhash.xxh3_64_intdigest(f"{config.seed}\0{row_id}".encode()) if own is None else own


def bad_word_ids(tokenizer: Any, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token sequences of `words`: of each as it is and behind a space, without doubles. Raises ValueError for a word of
    no tokens."""
    spelled = [text for word in words for text in (word, f" {word}")]
    sequences = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in spelled]
    for text, sequence in zip(spelled, sequences, strict=True):
        if not sequence:
            raise ValueError(f"bad_words: {text!r} has no token that the model's tokenizer knows")
    return tuple(dict.fromkeys(sequences))
