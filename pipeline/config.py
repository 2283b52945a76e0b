"""The job's configuration: one YAML file, `--set key.path=value` over it, checked by one strict schema.

Unknown keys are errors that name the nearest valid key. Everything that is derived (threads, CPUs per actor, block
complexity of a static tree) is derived here, once, so that `run.json` shows what really ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from pipeline.decoder_config import DecoderConfig
from pipeline.errors import ConfigError
from pipeline.sampling import ROW_KEYS, SamplingConfig
from pipeline.schema import reserved_columns
from pipeline.section import Section, as_list, nearest, problems
from pipeline.template import compiled


def _as_type_map(value: object) -> object:
    """`[a, b]` means both as strings; `{a: int64}` names the type."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return dict.fromkeys(value, "string")
    return value


ColumnType = Literal["string", "int64", "float64", "bool"]


class InputConfig(Section):
    """What is read. Paths: a file, a folder, a glob, a hub id, or a list of these; local, s3:// or hf://datasets/.

    split: of a dataset that has several; subset: a hub dataset's configuration. prompt_template: a Jinja template over
    the row's columns, in place of a prompt column. tools_column: the tools that the chat template is given.
    sampling_column: a column that holds a row's own sampling settings, as an object or as JSON text of one.
    sampling_columns: settings that are columns of their own, by their names.
    """

    path: Annotated[list[str], BeforeValidator(as_list), Field(min_length=1)]
    format: Literal["auto", "jsonl", "parquet", "arrow"] = "auto"
    split: str | None = None
    subset: str | None = None
    prompt_column: str | None = None
    prompt_template: str | None = None
    messages_column: str | None = None
    tools_column: str | None = None
    id_column: str | None = None
    sampling_column: str | None = None
    sampling_columns: Annotated[list[str], BeforeValidator(as_list)] = Field([])
    system_prompt: str | None = None
    chat_template: Literal["auto", "always", "never"] = "auto"
    keep_columns: Annotated[dict[str, ColumnType], BeforeValidator(_as_type_map)] = Field({})
    limit: int | None = Field(None, ge=1)

    @field_validator("sampling_columns")
    @classmethod
    def _row_keys(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in ROW_KEYS:
                raise ValueError(f"{name} is no setting that a row may have{nearest(name, ROW_KEYS)}")
        return list(dict.fromkeys(names))

    @field_validator("prompt_template")
    @classmethod
    def _valid_template(cls, source: str | None) -> str | None:
        if source is not None:
            compiled(source)
        return source

    @model_validator(mode="after")
    def _columns(self) -> Self:
        texts = [name for name in ("prompt_column", "prompt_template", "messages_column") if getattr(self, name)]
        if len(texts) > 1:
            raise ValueError(f"set {' or '.join(texts)}, not both")
        if self.tools_column and self.chat_template == "never":
            raise ValueError("tools_column needs the chat template: chat_template must be auto or always")
        if self.messages_column and self.chat_template == "never":
            raise ValueError("messages_column needs the chat template: chat_template must be auto or always")
        if self.system_prompt and self.chat_template == "never":
            raise ValueError("system_prompt needs the chat template: chat_template must be auto or always")
        taken = sorted(set(self.keep_columns) & reserved_columns())
        if taken:
            raise ValueError(
                f"keep_columns: {', '.join(taken)}: the output has columns of that name; rename the input's"
            )
        return self

    @property
    def text_column(self) -> str:
        """The column that holds the prompt or the messages."""
        return self.messages_column or self.prompt_column or "prompt"


class IdsConfig(Section):
    """on_duplicate: what a row is whose id was used before. error: an error row; suffix: a row under an id of its own,
    with -2, -3, ... behind it in input order, past ids that exist."""

    on_duplicate: Literal["error", "suffix"] = "error"


class OutputConfig(Section):
    """Where the run's folder is (`data/`, `run.json`, `report.json`, `report.html`)."""

    path: str = Field(min_length=1)
    rows_per_file: int = Field(512, ge=1)
    resume: bool = True
    overwrite: bool = False


class ResumeConfig(Section):
    """retry_errors: a resume decodes failed rows again; the new row takes the old one's place, failed or not."""

    retry_errors: bool = False


class ModelConfig(Section):
    """`path`: a hub id, a local folder, a GGUF file, or `package:NAME/FILE` inside an installed Python package."""

    path: str
    revision: str | None = None
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = "auto"
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    trust_remote_code: bool = False


class EngineConfig(Section):
    """How an actor's engine runs.

    slots: sequences decoded together. max_length: prompt + output tokens (null: the model's context). threads: CPU
    threads (null: the machine's cores divided among its actors on a CPU, 1 beside a GPU). kernels: auto packs linear
    layers where the machine can; stock leaves the model as Hugging Face has it. prefill_tokens: prompt tokens that one
    forward pass computes at most. prefix_reuse: whether a prompt takes over the KV of another row's equal beginning.
    cache_gib: memory for the KV cache (null: worked out from what is free).
    """

    slots: int = Field(8, ge=1)
    max_length: int | None = Field(None, ge=2)
    kernels: Literal["auto", "stock"] = "auto"
    threads: int | None = Field(None, ge=1)
    prefill_tokens: int = Field(512, ge=16)
    prefix_reuse: bool = True
    cache_gib: float | None = Field(None, gt=0)


class ClusterConfig(Section):
    """actors: engines. min_actors: how many of them the job begins with and needs; more are added while rows wait and
    the cluster has room (null: all at once). num_cpus and num_gpus: what one actor asks Ray for (null: its threads; 1
    on CUDA, else 0); num_gpus may be a fraction, so that actors share a GPU.
    """

    actors: int = Field(1, ge=1)
    min_actors: int | None = Field(None, ge=1)
    num_cpus: float | None = Field(None, gt=0)
    num_gpus: float | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.min_actors is not None and self.min_actors > self.actors:
            raise ValueError(f"min_actors: {self.min_actors} is more than actors: {self.actors}")
        if self.num_gpus is not None and self.num_gpus > 1:
            raise ValueError(
                f"num_gpus: an actor uses one GPU or a part of one (got {self.num_gpus:g}); for more GPUs set actors"
            )
        return self

    @property
    def least(self) -> int:
        """Actors that the job needs."""
        return self.actors if self.min_actors is None else self.min_actors


class CompareConfig(Section):
    """fraction: the share of rows that plain decoding decodes too, on the same engine."""

    fraction: float = Field(0.01, ge=0, le=1)


class ErrorsConfig(Section):
    """max_fraction: a run that ends with a larger share of error rows exits with code 3."""

    max_fraction: float = Field(0.1, ge=0, le=1)


class CostConfig(Section):
    """device_hour_usd: price of one actor's device for an hour (null: no cost in the report)."""

    device_hour_usd: float | None = Field(None, ge=0)


class JobConfig(Section):
    """The whole file."""

    input: InputConfig
    ids: IdsConfig = IdsConfig()
    output: OutputConfig
    resume: ResumeConfig = ResumeConfig()
    model: ModelConfig
    decoder: DecoderConfig = DecoderConfig()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    cluster: ClusterConfig = ClusterConfig()
    compare: CompareConfig = CompareConfig()
    errors: ErrorsConfig = ErrorsConfig()
    cost: CostConfig = CostConfig()

    @model_validator(mode="before")
    @classmethod
    def _bare_sections(cls, data: Any) -> Any:
        """`sampling:` with nothing under it is YAML's null and means a section of defaults."""
        return {k: {} if v is None else v for k, v in data.items()} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _ids_to_suffix(self) -> Self:
        if self.ids.on_duplicate == "suffix" and self.input.id_column is None:
            raise ValueError("ids.on_duplicate: suffix needs input.id_column; without one, ids are file and line")
        return self

    def dump_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(), sort_keys=False, allow_unicode=True)


class _UniqueKeyLoader(yaml.SafeLoader):
    """A key that stands twice is an error: YAML would let the last one win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"the key {key} stands twice{node.start_mark}")
        return super().construct_mapping(node, deep)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Read a YAML file, apply `key.path=value` overrides (values are YAML), validate.

    Raises ConfigError naming the file or the setting.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file {path}: not valid UTF-8: {error}") from error
    try:
        data = yaml.load(text, _UniqueKeyLoader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that the calendar lacks
        raise ConfigError(f"config file {path}: not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"config file {path}: expected a mapping of sections (input, output, model, ...)")
    for override in overrides:
        _apply_override(data, override)
    return parse_config(data)


def parse_config(data: Mapping[str, Any]) -> JobConfig:
    """Validate a plain mapping. Raises ConfigError with one line per problem."""
    try:
        return JobConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_told(error)) from error


def parse_decoder(settings: Mapping[str, Any]) -> DecoderConfig:
    """Validate the decoder's section alone. Raises ConfigError with one line per problem."""
    try:
        return DecoderConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(_told(error, "decoder")) from error


def _told(error: ValidationError, *within: str) -> str:
    return "\n".join(f"{setting}: {problem}" for setting, problem in problems(error, setting_names(), *within))


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise ConfigError(f"--set {override}: expected key.path=value, such as sampling.max_new_tokens=64")
    node = data
    for part in parts[:-1]:
        if node.get(part) is None:
            node[part] = {}
        node = node[part]
        if not isinstance(node, dict):
            raise ConfigError(f"--set {override}: {part} is a value, not a section")
    try:
        node[parts[-1]] = yaml.safe_load(value)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"--set {override}: the value is not valid YAML: {error}") from error


def setting_names() -> list[str]:
    """Every valid `section.key`, and the sections themselves."""
    names: list[str] = []
    for section, info in JobConfig.model_fields.items():
        names.append(section)
        assert isinstance(info.annotation, type)
        assert issubclass(info.annotation, Section)
        names += [f"{section}.{key}" for key in info.annotation.model_fields]
    return names
