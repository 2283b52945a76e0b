"""Hugging Face datasets as input: folders written by save_to_disk, and hub ids. Both end as lists of Arrow files.

A hub dataset is resolved once, on the driver, by the `datasets` library and its cache (HF_DATASETS_CACHE), which the
nodes that read must see too, like any local file. Its files are named repo@commit/config/split/shard, whatever the
machine and wherever the cache.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError
from pipeline.storage import Place, open_place

HUB = "hf://"
_HUB_ID = re.compile(r"hf://datasets/(?P<repo>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"


@dataclass(frozen=True)
class DatasetFile:
    """An Arrow file of a dataset; `name`: below the entry of input.path; `whole_name`: one that no other entry has."""

    place: Place
    name: str
    whole_name: str


def is_hub_id(path: str) -> bool:
    return path.startswith(HUB)


def saved_dataset(root: Place, places: Sequence[Place], split: str | None) -> list[DatasetFile] | None:
    """The files of a folder that save_to_disk wrote, `places` being all that it holds; None where it is something else.

    Raises ConfigError for a split that is missing or not there, and for rows picked by an indices mapping.
    """
    held = {place.path.removeprefix(root.path).lstrip("/"): place for place in places}
    if SPLITS in held:
        splits = _read(held[SPLITS]).get("splits", [])
        if split is None or split not in splits:
            raise _split_error(root.uri, split, splits)
        return _files(held, f"{split}/")
    if STATE not in held or INFO not in held:
        return None
    own = _read(held[STATE]).get("_split")
    if split is not None and split != own:
        raise _split_error(root.uri, split, [own] if own else [])
    return _files(held, "")


def _files(held: Mapping[str, Place], folder: str) -> list[DatasetFile]:
    """What the folder's state.json names, in its order."""
    try:
        place = held[folder + STATE]
        state = _read(place)
        if state.get("_indices_data_files") or state.get("_indices_files"):
            raise ConfigError(
                f"input.path: {place.uri} picks its rows by an indices mapping (select, shuffle, filter); write the "
                "dataset again with dataset.flatten_indices().save_to_disk(...)"
            )
        names = [folder + file["filename"] for file in state["_data_files"]]
        return [DatasetFile(held[name], name, held[name].path) for name in names]
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"input.path: the saved dataset is not complete: {folder or './'} lacks {error}; save it again"
        ) from error


def _read(file: Place) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ConfigError(f"input.path: {file.uri} is not valid JSON ({error}); save the dataset again") from error
    return content if isinstance(content, dict) else {}


def hub_dataset(path: str, subset: str | None, split: str | None) -> list[DatasetFile]:
    """The Arrow files of hf://datasets/ORG/NAME[@REVISION], downloaded and converted where the cache lacks them.

    Raises ConfigError for a spelling that is no hub id, a dataset or revision that cannot be had, and a split that is
    missing or not there.
    """
    match = _HUB_ID.fullmatch(path)
    if match is None:
        raise ConfigError(f"input.path: {path}: expected hf://datasets/ORG/NAME, or hf://datasets/ORG/NAME@REVISION")
    repo, revision = match["repo"], match["revision"]
    if Path(repo).exists():
        raise ConfigError(
            f"input.path: {path}: the datasets library would take the local folder {repo}; start elsewhere"
        )
    builder = _builder(path, repo, subset, revision)
    commit = str(builder.hash)
    if revision is not None and builder.__class__.__module__.startswith("datasets.packaged_modules.cache"):
        _check_cached(path, revision, commit)
    splits = dict(builder.info.splits or {})
    if split not in splits:
        raise _split_error(path, split, splits)
    from datasets.naming import filenames_for_dataset_split

    files = filenames_for_dataset_split(
        builder.cache_dir,
        dataset_name=builder.dataset_name,
        split=split,
        filetype_suffix="arrow",
        shard_lengths=splits[split].shard_lengths,
    )
    places = [_sized(path, file) for file in files]
    names = [f"{repo}@{commit}/{builder.config.name}/{split}/{place.name}" for place in places]
    return [DatasetFile(place, name, name) for place, name in zip(places, names, strict=True)]


def _sized(path: str, file: str) -> Place:
    place = open_place(file)
    try:
        return replace(place, size=Path(place.path).stat().st_size)
    except FileNotFoundError as error:
        raise ConfigError(f"input.path: {path}: the cache lacks {file}; remove its folder and load it again") from error


def _builder(path: str, repo: str, subset: str | None, revision: str | None) -> Any:
    """A builder whose files are in the cache."""
    import datasets

    try:
        builder = datasets.load_dataset_builder(repo, subset, revision=revision)
        builder.download_and_prepare()
    except (ValueError, OSError, RuntimeError) as error:  # OSError: ConnectionError and FileNotFoundError too
        reason = " ".join(str(error).split())[:400]
        raise ConfigError(
            f"input.path: {path} cannot be had: {reason}; check the name, input.subset and the network, or fill the "
            "cache (HF_DATASETS_CACHE) where there is one"
        ) from error
    return builder


def _check_cached(path: str, revision: str, commit: str) -> None:
    """The hub was not reached, and then `datasets` takes what it cached last, whatever was asked for."""
    if _COMMIT.fullmatch(revision) and revision == commit:
        return
    raise ConfigError(
        f"input.path: {path}: the hub cannot be reached, and the cache holds commit {commit}; ask for @{commit}, leave "
        "the revision out, or run where the hub can be reached"
    )


def _split_error(path: str, split: str | None, splits: Iterable[str]) -> ConfigError:
    there = ", ".join(splits) or "none with a name"
    told = f"no split {split!r}" if split else "it has splits and none is chosen"
    return ConfigError(f"input.split: {path}: {told}; the splits are: {there}")
