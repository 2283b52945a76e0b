"""How much memory a device has free, and how much of it the KV cache may take."""

from __future__ import annotations

import os
from pathlib import Path

import torch

# A cache that changes its size is there twice while it is copied; what is left over is for activations. Free CPU memory
# is shared with the rest of the machine.
CUDA_SHARE = 0.45
CPU_SHARE = 0.4

_CGROUPS = (  # (limit, usage) of this process's container, as cgroup 2 and 1 name them
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


def cache_budget(device: torch.device, engines: int = 1) -> int:
    """Bytes that the KV cache of one of `engines` on a device may take, from what is free now (weights loaded)."""
    return int(free_memory(device) * (CUDA_SHARE if device.type == "cuda" else CPU_SHARE)) // engines


def free_memory(device: torch.device) -> int:
    """Free bytes of a CUDA device; on a CPU what the machine has available, or what its container still allows."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min([_available(), *_container_rooms()])


def _available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _container_rooms() -> list[int]:
    rooms = []
    for limit, usage in _CGROUPS:
        try:
            rooms.append(max(int(limit.read_text()) - int(usage.read_text()), 0))
        except (OSError, ValueError):  # no such cgroup, or no limit ("max")
            continue
    return rooms
