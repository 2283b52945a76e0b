"""Shared fixtures: one Ray and one S3 server for the whole session, the real small model, a tiny model's folder."""

from __future__ import annotations

import os

# Before ray is imported: a test session has no token, and its first init must not look for a cluster.
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.pop("RAY_ADDRESS", None)
# Before torch is: on a busy machine OpenMP's threads would spin through their whole time slice at every barrier.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from common import ROOT, S3_CREDENTIALS, SMOLLM2
from flaky_proxy import FlakyProxy
from tiny_checkpoint import save_tiny_checkpoint

from esp_worker.accel import accelerate
from esp_worker.checkpoint import resolve
from esp_worker.model import CausalModel, load_model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models gain nothing from more, and lose much where other work shares the cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def two_threads() -> Iterator[None]:
    """For tests of real models, which gain from both cores."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2() -> CausalModel:
    """In fp32 with the kernels that a job takes by default."""
    model = load_model(resolve(SMOLLM2).folder, dtype="float32", device="cpu")
    accelerate(model)
    return model


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random Llama, a byte-level tokenizer and a chat template."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def s3_proxy() -> Iterator[FlakyProxy]:
    """A real S3 server (moto) behind a proxy that can fail. Sets the usual AWS variables, so it must start before Ray
    for workers to see them."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    proxy = FlakyProxy(f"http://{host}:{port}")
    os.environ.update(S3_CREDENTIALS, AWS_ENDPOINT_URL=proxy.endpoint)
    yield proxy
    for name in (*S3_CREDENTIALS, "AWS_ENDPOINT_URL"):
        os.environ.pop(name, None)
    proxy.stop()
    server.stop()


@pytest.fixture(scope="session")
def s3_endpoint(s3_proxy: FlakyProxy) -> str:
    return s3_proxy.endpoint


@pytest.fixture(scope="session")
def ray_session(s3_endpoint: str) -> Iterator[None]:
    import ray

    from jobs.runtime import quiet_ray_data

    # Workers find the tests' own modules (the fake decoder) where this process does.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    quiet_ray_data()
    yield
    ray.shutdown()
