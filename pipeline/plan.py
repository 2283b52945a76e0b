"""What a run will really do: the model's files, precision, device, threads and actors, settled before anything starts.

Everything that the configuration leaves open is decided here, once, on the driver, and goes to the actors and into
run.json as it is. Nothing here starts work or writes.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from esp_worker.checkpoint import Checkpoint, ModelError, eos_token_ids, read_json, resolve
from esp_worker.model import read_config
from pipeline.config import JobConfig
from pipeline.errors import ConfigError
from pipeline.generation import FILE, GenerationDefaults, generation_defaults, with_defaults
from pipeline.prepare import Preparer, load_tokenizer
from pipeline.sampling import bad_word_ids
from pipeline.source import canonical_paths

logger = logging.getLogger(__name__)

# Logical CPUs that must stay free for reading and writing while every actor holds its own.
SPARE_CPUS = 1.0


@dataclass(frozen=True)
class Node:
    """Logical resources of one cluster node."""

    cpus: float
    gpus: float


@dataclass(frozen=True)
class Plan:
    """A JobConfig with nothing left open. Sent to every actor."""

    config: JobConfig  # its sampling section holds what generation.taken brought
    model_identity: str  # hub id and commit, or a digest of the files
    dtype: str
    device: str  # cpu | cuda
    threads: int
    num_cpus: float  # of one actor
    num_gpus: float  # of one actor
    max_length: int
    eos_token_ids: tuple[int, ...]
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)

    def resolved(self) -> dict[str, Any]:
        """The configuration as it runs, for run.json: the file's sections with the derived values in place."""
        data = self.config.model_dump()
        data["model"] |= {"dtype": self.dtype, "device": self.device, "identity": self.model_identity}
        data["engine"] |= {"threads": self.threads, "max_length": self.max_length}
        data["cluster"] |= {
            "min_actors": self.config.cluster.least,
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
        }
        data["sampling"] |= {"eos_token_ids": list(self.eos_token_ids)}
        data["generation_config"] = {
            "rule": self.config.sampling.generation_config,
            "taken": self.generation.taken,
            "not_taken": self.generation.not_taken,
        }
        return data

    def fingerprint(self) -> dict[str, Any]:
        """Everything that changes a row's tokens or the output's columns, as JSON gives it back.

        model is the hub id's commit, or a digest of weights, configuration, tokenizer and chat template. In 16 bits the
        method, the slots, the prefill and the number of actors are part of it, since kernels round differently for
        different numbers of rows. sampling.n is not: raising it adds samples to the rows that are there.
        """
        config = self.config
        sampling = config.sampling.model_dump(exclude={"n", "generation_config"})
        parts: dict[str, Any] = {
            "model": self.model_identity,
            "dtype": self.dtype,
            "max_length": self.max_length,
            "sampling": sampling | {"eos_token_ids": sorted(self.eos_token_ids)},
            # Where the files are, however it is written; credentials never reach a path (storage refuses them).
            "input": config.input.model_dump(exclude={"limit", "path"}) | {"path": canonical_paths(config.input)},
        }
        if self.dtype in ("bfloat16", "float16"):
            engine = config.engine.model_dump(include={"slots", "prefill_tokens", "prefix_reuse"})
            parts |= {"decoder": config.decoder.model_dump(), "engine": engine, "device": self.device}
            parts |= {"actors": config.cluster.actors}
        return dict(json.loads(json.dumps(parts)))  # a token id that is a key comes back from run.json as text


def make_plan(config: JobConfig, nodes: Sequence[Node]) -> Plan:
    """Settle a configuration on a cluster. Raises ConfigError naming the setting and what is missing."""
    checkpoint = find_checkpoint(config)
    model_config = read_model_config(config, checkpoint.folder)
    device = _device(config, nodes)
    threads = config.engine.threads or _threads(config, device, nodes)
    generation = _generation(config, checkpoint.folder)
    config = config.model_copy(update={"sampling": with_defaults(config.sampling, generation)})
    num_gpus = config.cluster.num_gpus
    plan = Plan(
        config=config,
        model_identity=checkpoint.identity,
        dtype=_dtype(config, device, model_config),
        device=device,
        threads=threads,
        num_cpus=config.cluster.num_cpus or (float(threads) if device == "cpu" else 1.0),
        num_gpus=(1.0 if device == "cuda" else 0.0) if num_gpus is None else num_gpus,
        max_length=_max_length(config, model_config),
        eos_token_ids=_eos(config, checkpoint.folder),
        generation=generation,
    )
    if device == "cuda" and plan.num_gpus == 0:
        raise ConfigError("cluster.num_gpus: 0 with model.device: cuda; an actor must ask Ray for the GPU it uses")
    tokenizer = load_tokenizer(checkpoint.folder, config.model.trust_remote_code)
    Preparer(tokenizer, config.input, config.sampling, plan.max_length - 1)
    _check_tokens(config, tokenizer, model_config)
    check_cluster(plan, nodes)
    return plan


def find_checkpoint(config: JobConfig) -> Checkpoint:
    try:
        return resolve(config.model.path, config.model.revision)
    except ModelError as error:
        raise ConfigError(f"model.path: {error}") from error


def read_model_config(config: JobConfig, folder: Path) -> Any:
    try:
        return read_config(folder, config.model.trust_remote_code)
    except ModelError as error:
        raise ConfigError(f"model.path: {error}") from error


def check_cluster(plan: Plan, nodes: Sequence[Node]) -> None:
    """Refuse a plan that would wait for ever, saying what is missing."""
    actors, cpus, gpus = plan.config.cluster.least, plan.num_cpus, plan.num_gpus
    setting = "cluster.actors" if plan.config.cluster.min_actors is None else "cluster.min_actors"
    places = sum(_actors_on(node, cpus, gpus) for node in nodes)
    total = sum(node.cpus for node in nodes)
    if places < actors:
        raise ConfigError(
            f"{setting}: {actors} actors of {cpus:g} CPUs and {gpus:g} GPUs each do not fit: the cluster has "
            f"{len(nodes)} node(s), {total:g} logical CPUs and {sum(node.gpus for node in nodes):g} GPUs, room for "
            f"{places}; add nodes, or lower {setting}, engine.threads or cluster.num_cpus"
        )
    if total < actors * cpus + SPARE_CPUS:
        raise ConfigError(
            f"cluster: {actors} actors of {cpus:g} CPUs take all {total:g} logical CPUs and leave none for reading and "
            f"writing (the job would hang); {actors * cpus + SPARE_CPUS - total:g} more is needed: start Ray with a "
            f"higher --num-cpus, or lower {setting}, engine.threads or cluster.num_cpus"
        )


def continued(plan: Plan, nodes: Sequence[Node]) -> JobConfig:
    """The configuration that goes on with a job's rows on the nodes that are left, as many actors as they hold."""
    config = plan.config
    least = max(1, min(config.cluster.least, room(plan, nodes)))
    output = config.output.model_copy(update={"overwrite": False, "resume": True})
    return config.model_copy(
        update={"output": output, "cluster": config.cluster.model_copy(update={"min_actors": least})}
    )


def room(plan: Plan, nodes: Sequence[Node]) -> int:
    """How many actors the nodes hold beside reading and writing."""
    places = sum(_actors_on(node, plan.num_cpus, plan.num_gpus) for node in nodes)
    return min(places, int((sum(node.cpus for node in nodes) - SPARE_CPUS) / plan.num_cpus + 1e-4))


def _actors_on(node: Node, cpus: float, gpus: float) -> int:
    """num_gpus is at most 1; an actor's part of a GPU must be free on one GPU. Ray counts in ten-thousandths."""
    by_cpu = int(node.cpus / cpus + 1e-4)
    return min(by_cpu, int(node.gpus) * int(1 / gpus + 1e-4)) if gpus else by_cpu


def _device(config: JobConfig, nodes: Sequence[Node]) -> str:
    """The actors' device; Ray shows each actor its own GPU, so an index means nothing there."""
    wanted = config.model.device.partition(":")[0]
    if wanted == "auto":
        return "cuda" if any(node.gpus for node in nodes) and config.cluster.num_gpus != 0 else "cpu"
    return wanted


def _threads(config: JobConfig, device: str, nodes: Sequence[Node]) -> int:
    """On a CPU, the machine's cores shared among its actors (as if spread evenly over the nodes that take work), with
    one logical CPU left for reading and writing."""
    if device != "cpu":
        return 1
    able = [node.cpus - SPARE_CPUS for node in nodes if node.cpus] or [0.0]  # a head node may offer no CPU
    per_node = -(-config.cluster.actors // len(able))
    return max(1, int(min(*able, os.cpu_count() or 1) // per_node))


def _dtype(config: JobConfig, device: str, model_config: Any) -> str:
    """`auto`: float32 on a CPU, where 16 bits are slower and not exact; the checkpoint's own on a GPU."""
    if config.model.dtype != "auto":
        return config.model.dtype
    own = getattr(model_config, "dtype", None)
    return "float32" if device == "cpu" else str(own or "bfloat16").removeprefix("torch.")


def _max_length(config: JobConfig, model_config: Any) -> int:
    context, wanted = model_config.max_position_embeddings, config.engine.max_length
    if wanted is not None and wanted > context:
        raise ConfigError(f"engine.max_length: {wanted} is beyond the model's context of {context} tokens")
    return wanted or context


def _check_tokens(config: JobConfig, tokenizer: Any, model_config: Any) -> None:
    """The settings that speak of tokens must speak of the model's."""
    try:
        bad_word_ids(tokenizer, config.sampling.bad_words)
    except ValueError as error:
        raise ConfigError(f"sampling.{error}") from error
    outside = [token for token in config.sampling.logit_bias if token >= model_config.vocab_size]
    if outside:
        raise ConfigError(
            f"sampling.logit_bias: token {outside[0]} is outside the model's vocabulary of {model_config.vocab_size}"
        )


def _generation(config: JobConfig, folder: Path) -> GenerationDefaults:
    """What generation_config.json gives; its sampling settings that stay behind are told once."""
    try:
        found = generation_defaults(read_json(folder, FILE), config.sampling)
    except ModelError as error:
        raise ConfigError(f"model.path: {error}") from error
    if found.not_taken:
        told = ", ".join(f"{key}: {value!r:.60}" for key, value in found.not_taken.items())
        rule = config.sampling.generation_config
        logger.info("not taken from the checkpoint's %s (sampling.generation_config: %s): %s", FILE, rule, told)
    return found


def _eos(config: JobConfig, folder: Path) -> tuple[int, ...]:
    """sampling.eos_token_ids, else the checkpoint's generation_config or config, and its tokenizer's EOS."""
    if config.sampling.eos_token_ids is not None:
        return tuple(config.sampling.eos_token_ids)
    tokenizer_eos = load_tokenizer(folder, config.model.trust_remote_code).eos_token_id
    return tuple(sorted(eos_token_ids(folder) | ({tokenizer_eos} if tokenizer_eos is not None else set())))


def difference(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """`key: old -> new` for each leaf in which two fingerprints differ."""
    lines: list[str] = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += difference(before, after, f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key}: {before!r} -> {after!r}")
    return lines
