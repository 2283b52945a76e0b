"""configs/, infra/ and the pre-commit file: do they agree with the code, with each other, and hold no secret?"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from ray.dashboard.modules.job.cli import job_cli_group
from ray.scripts.scripts import start as ray_start

from esp_worker.cache import rounded
from esp_worker.engine import BLOCK_COLUMNS
from esp_worker.memory import CUDA_SHARE
from pipeline.config import load_config

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
DOCKERFILE = ROOT / "infra" / "Dockerfile"
RAYJOB = ROOT / "infra" / "rayjob.yaml"
README = ROOT / "infra" / "README.md"
GENERATE_FLAGS = {"--config", "--set", "--limit", "--dry-run", "--print-config"}

SECRET_PATTERNS = [
    r"\b(AKIA|ASIA)[0-9A-Z]{16}\b",  # AWS access key ids
    r"\bhf_[A-Za-z0-9]{20,}\b",  # hub tokens
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    r"://[^/\s:@]+:[^/\s@]+@",  # user:password@host
    r"(?i)\b\w*(secret_access_key|access_key_id|password|auth_token|hf_token)\s*[:=]\s*[\"']?[^\s\"'$<{,`]",
]


# --- helpers ---------------------------------------------------------------------------------------------------------


def pinned(package: str) -> str:
    """The version of a package in constraints.txt."""
    match = re.search(rf"(?m)^{package}==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"))
    assert match, f"constraints.txt does not pin {package}"
    return match[1]


def docker_instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile, comments dropped and continued lines joined."""
    text = re.sub(r"(?m)^\s*#.*\n", "", DOCKERFILE.read_text(encoding="utf-8")).replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [(name.upper(), rest.strip()) for name, _, rest in (line.partition(" ") for line in lines)]


def docker_arguments(instruction: str) -> list[str]:
    return [rest for name, rest in docker_instructions() if name == instruction]


def rayjob() -> dict[str, Any]:
    documents = [document for document in yaml.safe_load_all(RAYJOB.read_text(encoding="utf-8")) if document]
    assert len(documents) == 1
    return documents[0]


def groups() -> list[dict[str, Any]]:
    """The head group, then the worker groups."""
    cluster = rayjob()["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def containers() -> list[dict[str, Any]]:
    return [container for group in groups() for container in group["template"]["spec"]["containers"]]


def image_config(command: str) -> Path:
    """The repository's file for the config that a command inside the image names."""
    words = shlex.split(command)
    path = Path(words[words.index("--config") + 1])
    (workdir,) = docker_arguments("WORKDIR")
    return ROOT / (path.relative_to(workdir) if path.is_absolute() else path)


def shell_commands(path: Path) -> list[list[str]]:
    """The commands of a Markdown file's bash blocks, as words; variables and $(...) stay as written."""
    blocks = re.findall(r"(?ms)^ *```bash\n(.*?)^ *```$", path.read_text(encoding="utf-8"))
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    commands = [shlex.split(line, comments=True) for line in lines if line.strip()]
    return [strip_assignments(words) for words in commands if words]


def strip_assignments(words: list[str]) -> list[str]:
    """`NAME=value command` -> `command`."""
    count = next((i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)), len(words))
    return words[count:]


def readme_commands(*prefix: str) -> list[list[str]]:
    """The arguments of every command of infra/README.md that starts with these words."""
    return [words[len(prefix) :] for words in shell_commands(README) if tuple(words[: len(prefix)]) == prefix]


def before_entrypoint(words: list[str]) -> list[str]:
    return words[: words.index("--")] if "--" in words else words


def flags(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if re.match(r"-{1,2}[a-z]", word)}


def options(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in [*parameter.opts, *parameter.secondary_opts]}


# --- configs/ --------------------------------------------------------------------------------------------------------


def test_there_are_configs() -> None:
    assert {path.name for path in CONFIGS} >= {"demo.yaml", "example_cluster.yaml", *PAPERS_MODELS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_is_valid(path: Path) -> None:
    load_config(path)


def test_demo_reads_a_file_of_the_repository_and_keeps_its_category() -> None:
    config = load_config(ROOT / "configs" / "demo.yaml")
    (path,) = config.input.path
    first = json.loads((ROOT / path).read_text(encoding="utf-8").splitlines()[0])
    assert {config.input.text_column, config.input.id_column, *config.input.keep_columns} == set(first)


def test_demo_prompts_are_three_of_each_kind() -> None:
    lines = (ROOT / "configs" / "demo_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 24
    assert len({row["id"] for row in rows}) == 24
    assert len({row["prompt"] for row in rows}) == 24
    kinds = ["writing", "roleplay", "coding", "translation", "summarization", "qa", "rag", "math"]
    assert Counter(row["category"] for row in rows) == dict.fromkeys(kinds, 3)
    for row in rows:
        assert set(row) == {"id", "category", "prompt"}
        assert row["id"].rpartition("-")[0] == row["category"]
        assert 0 < len(row["prompt"].split()) <= 200
        assert row["prompt"] == row["prompt"].strip()


@pytest.mark.parametrize("path", [path for path in CONFIGS if path.name != "demo.yaml"], ids=lambda path: path.name)
def test_cluster_configs_name_no_local_place(path: Path) -> None:
    config = load_config(path)
    assert all(place.startswith("s3://") for place in [*config.input.path, config.output.path])


# The paper's models (its table 1), from their model cards: parameters, layers; all have 8 key/value heads of 128.
# gib: memory of the smallest GPU that the file's comments name, as its driver gives it.
PAPERS_MODELS = {
    "llama_3.2_3b.yaml": {"path": "meta-llama/Llama-3.2-3B-Instruct", "parameters": 3.21e9, "layers": 28, "gib": 79},
    "llama_3.1_8b.yaml": {"path": "meta-llama/Llama-3.1-8B-Instruct", "parameters": 8.03e9, "layers": 32, "gib": 79},
    "qwen3_8b.yaml": {"path": "Qwen/Qwen3-8B", "parameters": 8.19e9, "layers": 36, "gib": 79},
    "qwen3_32b.yaml": {"path": "Qwen/Qwen3-32B", "parameters": 32.8e9, "layers": 64, "gib": 139},
}


@pytest.mark.parametrize("name", PAPERS_MODELS)
def test_the_papers_models_fit_their_gpus_with_all_slots_full(name: str) -> None:
    """In bfloat16: the weights, and of what they leave the engine's share for the KV cache of every slot."""
    model, config = PAPERS_MODELS[name], load_config(ROOT / "configs" / name)
    assert (config.model.path, config.model.dtype, config.model.device) == (model["path"], "bfloat16", "cuda")
    assert config.cluster.num_gpus == 1
    length = config.engine.max_length
    assert length is not None
    assert config.sampling.max_new_tokens < length
    cache = config.engine.slots * rounded(length + BLOCK_COLUMNS) * model["layers"] * 2 * 8 * 128 * 2
    free = model["gib"] * 2**30 - 2 * model["parameters"]
    assert 0.8 < cache / (CUDA_SHARE * free) < 1


# --- infra/Dockerfile ------------------------------------------------------------------------------------------------


def test_base_image_is_an_argument_with_the_pinned_ray() -> None:
    first, second = docker_instructions()[:2]
    assert first == ("ARG", f"BASE_IMAGE=rayproject/ray:{pinned('ray')}-py311-gpu")
    assert second == ("FROM", "${BASE_IMAGE}")


def test_copied_paths_exist() -> None:
    copied = [word for rest in docker_arguments("COPY") for word in rest.split()[:-1] if not word.startswith("--")]
    assert "constraints.txt" in copied
    assert "configs" in copied
    missing = [name for name in copied if not (ROOT / name).exists()]
    assert not missing, f"infra/Dockerfile copies what the repository lacks: {', '.join(missing)}"


def test_dockerignore_lets_copied_paths_through() -> None:
    ignored = {line.strip().rstrip("/") for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()}
    copied = {word for rest in docker_arguments("COPY") for word in rest.split()[:-1]}
    assert not ignored & copied
    assert {".git", ".venv", "out"} <= ignored


def test_image_installs_only_under_the_constraints() -> None:
    installs = [rest for rest in docker_arguments("RUN") if "pip install" in rest]
    assert installs
    assert all("-c constraints.txt" in rest for rest in installs)
    assert any(rest.endswith(" .") for rest in installs), "the project itself is not installed"


def test_image_runs_as_the_base_images_user() -> None:
    assert docker_arguments("USER") == ["ray"]


# --- infra/rayjob.yaml -----------------------------------------------------------------------------------------------


def test_rayjob_is_a_rayjob_of_the_pinned_ray_with_a_token() -> None:
    job = rayjob()
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job["metadata"]["name"]
    assert job["spec"]["rayClusterSpec"]["rayVersion"] == pinned("ray")
    assert job["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}


def test_rayjob_entrypoint_runs_a_config_of_the_image() -> None:
    entrypoint = rayjob()["spec"]["entrypoint"]
    assert entrypoint.startswith("python -m jobs.generate ")
    config = image_config(entrypoint)
    assert config.is_file(), config
    load_config(config)


def test_every_container_has_an_image_and_resources() -> None:
    assert len(containers()) >= 2
    for container in containers():
        assert re.fullmatch(r"\S+:[^:/\s]+", container["image"]), f"{container['name']}: image without a tag"
        requests, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert {"cpu", "memory"} <= set(requests) & set(limits), container["name"]
    assert len({container["image"] for container in containers()}) == 1, "head and workers must run one image"


def test_head_takes_no_work() -> None:
    assert groups()[0]["rayStartParams"]["num-cpus"] == "0"


def test_workers_have_a_gpu_for_every_actor_and_cpus_to_spare() -> None:
    config = load_config(image_config(rayjob()["spec"]["entrypoint"]))
    (group,) = groups()[1:]
    (container,) = group["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    assert config.cluster.num_gpus is not None
    assert config.cluster.num_cpus is not None
    assert group["replicas"] * int(limits["nvidia.com/gpu"]) >= config.cluster.actors * config.cluster.num_gpus
    actors_a_pod = int(limits["nvidia.com/gpu"]) / config.cluster.num_gpus
    assert int(limits["cpu"]) > actors_a_pod * config.cluster.num_cpus, "no CPU is left for reading and writing"


def test_credentials_come_from_secrets() -> None:
    for container in containers():
        names = {source["secretRef"]["name"] for source in container["envFrom"]}
        assert "espstream-s3" in names
        literal = [entry["name"] for entry in container.get("env", []) if "value" in entry]
        assert not [name for name in literal if re.search(r"KEY|TOKEN|SECRET|PASSWORD", name)]


@pytest.mark.parametrize(
    "path", [*CONFIGS, *(path for path in sorted((ROOT / "infra").iterdir()) if path.is_file())], ids=lambda p: p.name
)
def test_no_plaintext_secret(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = [match[0] for pattern in SECRET_PATTERNS for match in re.finditer(pattern, text)]
    assert not found, f"{path.name}: looks like a secret: {found}"
    assert not re.search(r"(?m)^kind:\s*Secret\b", text)


# --- infra/README.md -------------------------------------------------------------------------------------------------


def test_ray_job_commands_use_flags_that_exist() -> None:
    assert readme_commands("ray", "job", "submit")
    for words in readme_commands("ray", "job"):
        subcommand = job_cli_group.commands[words[0]]
        unknown = flags(before_entrypoint(words[1:])) - options(subcommand)
        assert not unknown, f"ray job {words[0]} has no {', '.join(sorted(unknown))}"


def test_ray_start_commands_use_flags_that_exist() -> None:
    commands = readme_commands("ray", "start")
    assert commands
    for words in commands:
        assert flags(words) <= options(ray_start)


def test_submitted_entrypoints_are_runnable() -> None:
    for words in readme_commands("ray", "job", "submit"):
        entrypoint = words[words.index("--") + 1 :]
        assert entrypoint[:3] == ["python", "-m", "jobs.generate"]
        assert flags(entrypoint[3:]) <= GENERATE_FLAGS
        overrides = [entrypoint[i + 1] for i, word in enumerate(entrypoint) if word == "--set"]
        load_config(image_config(shlex.join(entrypoint)), overrides)


def test_generate_has_the_flags_that_the_documents_use() -> None:
    source = (ROOT / "jobs" / "generate.py").read_text(encoding="utf-8")
    missing = [flag for flag in sorted(GENERATE_FLAGS) if not re.search(rf"[\"']{flag}[\"']", source)]
    assert not missing, f"jobs/generate.py does not define {', '.join(missing)}"


def test_token_authentication_is_explained_and_never_switched_off() -> None:
    text = README.read_text(encoding="utf-8")
    assert {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} <= set(re.findall(r"RAY_[A-Z_]+", text))
    for path in [README, RAYJOB, DOCKERFILE]:
        assert not re.search(r"(?i)auth_?mode\W+disabled|mode:\s*disabled", path.read_text(encoding="utf-8")), path.name


# --- the repository's own tools --------------------------------------------------------------------------------------


def test_pre_commit_hooks_are_local() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [repo["repo"] for repo in hooks["repos"]] == ["local"]
    entries = [hook["entry"] for hook in hooks["repos"][0]["hooks"]]
    assert all(entry.startswith(".venv/bin/") for entry in entries)
    assert {entry.split()[0].rpartition("/")[2] for entry in entries} == {"ruff", "mypy", "lint-imports"}


def test_ci_runs_the_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert "make test" in script.read_text(encoding="utf-8")
