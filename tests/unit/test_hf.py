"""Hugging Face datasets as input: folders of save_to_disk, and hub ids from a cache made here, without network."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from datasets.arrow_writer import ArrowWriter
from prompt_files import load

from pipeline.config import InputConfig
from pipeline.errors import ConfigError
from pipeline.source import canonical_paths, list_source

COMMIT, OTHER_COMMIT = "a" * 40, "b" * 40


def rows_of(path: Path | str, **settings: Any) -> list[tuple[str, Any]]:
    rows, _ = load(InputConfig(path=[str(path)], **settings))
    return [(row.row_id, row.messages_or_prompt) for row in rows]


def numbered(count: int, word: str = "prompt") -> datasets.Dataset:
    return datasets.Dataset.from_dict({"prompt": [f"{word} {i}" for i in range(count)], "n": list(range(count))})


# ------------------------------------------------------------------------------------------------------- save_to_disk


def test_a_saved_dataset(tmp_path: Path) -> None:
    numbered(1000).save_to_disk(tmp_path / "saved", num_shards=3)
    rows = rows_of(tmp_path / "saved")
    assert [prompt for _, prompt in rows] == [f"prompt {i}" for i in range(1000)]
    shards = [f"data-0000{i}-of-00003.arrow" for i in range(3)]
    lengths = [334, 333, 333]
    assert [name for name, _ in rows] == [
        f"{s}:{i + 1}" for s, n in zip(shards, lengths, strict=True) for i in range(n)
    ]


def test_selected_rows_are_what_save_to_disk_wrote(tmp_path: Path) -> None:
    numbered(10).shuffle(seed=1).select([3, 1]).save_to_disk(tmp_path / "saved")
    expected = numbered(10).shuffle(seed=1).select([3, 1])["prompt"]
    assert [prompt for _, prompt in rows_of(tmp_path / "saved")] == list(expected)


def test_a_dataset_dict_needs_its_split(tmp_path: Path) -> None:
    both = datasets.DatasetDict({"train": numbered(3), "test": numbered(2, "exam")})
    both.save_to_disk(tmp_path / "saved")
    assert rows_of(tmp_path / "saved", split="test") == [
        ("test/data-00000-of-00001.arrow:1", "exam 0"),
        ("test/data-00000-of-00001.arrow:2", "exam 1"),
    ]
    assert len(rows_of(tmp_path / "saved" / "train")) == 3, "a split's own folder is a dataset too"
    for split, told in ((None, "it has splits and none is chosen"), ("dev", "no split 'dev'")):
        with pytest.raises(ConfigError, match=rf"input.split: .*saved: {told}; the splits are: train, test"):
            rows_of(tmp_path / "saved", split=split)


def test_the_split_of_one_dataset(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"prompt": ["a"]}, split="train").save_to_disk(tmp_path / "saved")
    assert len(rows_of(tmp_path / "saved", split="train")) == 1
    with pytest.raises(ConfigError, match=r"input.split: .*: no split 'test'; the splits are: train"):
        rows_of(tmp_path / "saved", split="test")


def test_several_saved_datasets_have_whole_names(tmp_path: Path) -> None:
    for name in "ab":
        numbered(1).save_to_disk(tmp_path / name)
    files = list_source(InputConfig(path=[str(tmp_path / "a"), str(tmp_path / "b")]))
    assert [file.name for file in files] == [f"{tmp_path}/{name}/data-00000-of-00001.arrow" for name in "ab"]


def test_an_indices_mapping_is_refused(tmp_path: Path) -> None:
    """Written by old versions of `datasets`; the rows of the data files are not the dataset's."""
    numbered(3).save_to_disk(tmp_path / "saved")
    state = json.loads((tmp_path / "saved/state.json").read_text())
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (tmp_path / "saved/state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match=r"saved/state.json picks its rows by an indices mapping.*flatten_indices"):
        rows_of(tmp_path / "saved")


def test_an_incomplete_dataset(tmp_path: Path) -> None:
    numbered(3).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved/data-00000-of-00001.arrow").unlink()
    with pytest.raises(ConfigError, match=r"not complete: ./ lacks 'data-00000-of-00001.arrow'"):
        rows_of(tmp_path / "saved")


def test_a_folder_around_a_dataset_is_refused(tmp_path: Path) -> None:
    """Else its JSON files would be taken for prompts."""
    numbered(3).save_to_disk(tmp_path / "all" / "saved")
    with pytest.raises(ConfigError, match=r"all holds a dataset written by save_to_disk at .*all/saved; name that"):
        rows_of(tmp_path / "all")


def test_splits_and_subsets_of_what_has_none(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(ConfigError, match=r"input.split: train: .*p.jsonl is no dataset with splits"):
        rows_of(tmp_path / "p.jsonl", split="train")
    with pytest.raises(ConfigError, match=r"input.subset: en: .*p.jsonl is no hub dataset"):
        rows_of(tmp_path / "p.jsonl", subset="en")


# ------------------------------------------------------------------------------------------------------------ hub ids


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of `datasets`, and no way to the hub."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def fill(cache: Path, shards: list[list[str]], *, commit: str = COMMIT, config: str = "default") -> None:
    """org/name as `load_dataset` leaves it: one split, `train`."""
    folder = cache / "org___name" / config / "0.0.0" / commit
    folder.mkdir(parents=True)
    features = datasets.Features({"prompt": datasets.Value("string")})
    for i, prompts in enumerate(shards):
        ending = "" if len(shards) == 1 else f"-{i:05d}-of-{len(shards):05d}"
        with ArrowWriter(path=str(folder / f"name-train{ending}.arrow"), features=features) as writer:
            writer.write_table(pa.table({"prompt": prompts}))
            writer.finalize()
    lengths = [len(prompts) for prompts in shards]
    split = datasets.SplitInfo("train", num_examples=sum(lengths), dataset_name="name")
    split.shard_lengths = lengths if len(shards) > 1 else None
    info = datasets.DatasetInfo(
        features=features, builder_name="parquet", dataset_name="name", config_name=config, version="0.0.0"
    )
    info.splits = datasets.SplitDict({"train": split}, dataset_name="name")
    info.write_to_directory(str(folder))


def test_a_hub_id_is_read_from_the_cache(cache: Path) -> None:
    fill(cache, [["a", "b"], ["c"]])
    within = f"org/name@{COMMIT}/default/train/name-train"
    expected = [
        (f"{within}-00000-of-00002.arrow:1", "a"),
        (f"{within}-00000-of-00002.arrow:2", "b"),
        (f"{within}-00001-of-00002.arrow:1", "c"),
    ]
    assert rows_of("hf://datasets/org/name", split="train") == expected, "no path of this machine in it"
    assert rows_of(f"hf://datasets/org/name@{COMMIT}", split="train") == expected
    assert canonical_paths(InputConfig(path=["hf://datasets/org/name"])) == ["hf://datasets/org/name"]


def test_the_split_of_a_hub_id(cache: Path) -> None:
    fill(cache, [["a"]])
    with pytest.raises(ConfigError, match=r"input.split: hf://datasets/org/name: .*none is chosen; the splits are: tr"):
        rows_of("hf://datasets/org/name")
    with pytest.raises(ConfigError, match=r"no split 'test'; the splits are: train"):
        rows_of("hf://datasets/org/name", split="test")


def test_the_subset_of_a_hub_id(cache: Path) -> None:
    fill(cache, [["english"]], config="en")
    fill(cache, [["deutsch"]], config="de")
    ((name, prompt),) = rows_of("hf://datasets/org/name", split="train", subset="de")
    assert (name, prompt) == (f"org/name@{COMMIT}/de/train/name-train.arrow:1", "deutsch")
    with pytest.raises(ConfigError, match=r"cannot be had: There are multiple .*configurations.*input.subset"):
        rows_of("hf://datasets/org/name", split="train")


def test_another_revision_than_the_cached_one_is_refused(cache: Path) -> None:
    """Offline, `datasets` would give what it has, whatever is asked for."""
    fill(cache, [["a"]])
    for revision in (OTHER_COMMIT, "main"):
        with pytest.raises(ConfigError, match=rf"the cache holds commit {COMMIT}; ask for @{COMMIT}"):
            rows_of(f"hf://datasets/org/name@{revision}", split="train")


def test_no_cache_and_no_hub(cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"hf://datasets/org/name cannot be had: .*HF_DATASETS_CACHE"):
        rows_of("hf://datasets/org/name", split="train")


def test_a_local_folder_of_that_name_is_no_hub_dataset(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(cache, [["a"]])
    (tmp_path / "org/name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="the datasets library would take the local folder org/name"):
        rows_of("hf://datasets/org/name", split="train")


@pytest.mark.parametrize("path", ["hf://org/name", "hf://datasets/a/b/c", "hf://datasets/", "hf://models/a/b"])
def test_other_spellings_are_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"expected hf://datasets/ORG/NAME"):
        rows_of(path, split="train")
