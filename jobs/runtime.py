"""What every command needs around its work: logging to stderr, a Ray to run on, a description of the machine."""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import ray
from ray.data import DataContext
from rich.console import Console
from rich.logging import RichHandler

from esp_worker.calibrate import cpu_name
from pipeline.errors import ConfigError

# Logical CPUs beyond the cores in a Ray that a command starts itself: actors may then use every core for their
# threads while reading and writing still find a CPU to run on.
SPARE_LOGICAL_CPUS = 2
_NOISY = ("ray", "ray.data", "httpx", "urllib3", "filelock", "matplotlib")


def set_up_logging() -> Console:
    """Log to stderr: rich on a terminal, plain lines elsewhere. Returns the console of stderr."""
    console = Console(stderr=True)
    handler: logging.Handler
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
    return console


@contextmanager
def ray_cluster() -> Iterator[None]:
    """Connect to the cluster that RAY_ADDRESS names (a submitted job's), else start a local Ray for this command."""
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"address": address}
    if not address:
        # "local": never a cluster that happens to run here. It needs no dashboard, and usage statistics are the user's
        # to give.
        cpus = (os.cpu_count() or 1) + SPARE_LOGICAL_CPUS
        options = {"address": "local", "num_cpus": cpus, "include_dashboard": False}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(logging_level=logging.WARNING, log_to_driver=True, **options)
    except (ConnectionError, ValueError) as error:
        raise ConfigError(f"RAY_ADDRESS: no Ray cluster to be had at {address}: {error}") from error
    quiet_ray_data()
    try:
        yield
    finally:
        ray.shutdown()


def quiet_ray_data() -> None:
    """The commands show their own progress, and know their own slowness."""
    context = DataContext.get_current()
    context.execution_no_progress_timeout_s = -1  # a batch of long rows may take more than Ray Data's half hour
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)


def machine() -> dict[str, Any]:
    """The driver's machine, for run.json and benchmarks."""
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "gpu": _gpu_name(), "platform": platform.platform()}


def versions() -> dict[str, str]:
    names = ("espstream", "ray", "torch", "transformers", "pyarrow")
    return {"python": platform.python_version()} | {name: version(name) for name in names}


def _gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
