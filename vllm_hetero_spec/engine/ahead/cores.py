# SPDX-License-Identifier: Apache-2.0
"""CPU cores for the threads of a drafter process.

If threads of two models share cores, they wait for each other at each OpenMP barrier, and both
models become many times slower. So the drafter gets cores that the target does not use. If there
are none, the engine does not start.
"""

import itertools
import os
from collections.abc import Iterable

import vllm.envs as envs
from vllm.config import VllmConfig
from vllm.utils.ompmultiprocessing import OMPProcessManager

from vllm_hetero_spec.errors import ConfigError


def free_cores(config: VllmConfig) -> list[int]:
    """Return the cores that the threads of a CPU target leave free.

    Empty if vLLM does not bind its threads. `config` is that of the worker in this process.

    Raises:
        ConfigError: The target uses all cores.
    """
    bound = envs.VLLM_CPU_OMP_THREADS_BIND
    if bound == "nobind" or config.parallel_config.distributed_executor_backend != "mp":
        return []
    ours = os.sched_getaffinity(0)
    # OpenMP has bound this thread. Its parent, the executor that chose the cores, is unbound.
    os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    try:
        allowed, chosen = os.sched_getaffinity(0), OMPProcessManager(config)
    finally:
        os.sched_setaffinity(0, ours)
    if chosen.auto_setup:
        used, free = chosen.cpu_lists, chosen.reserved_cpu_list
    else:  # includes the cores of other data-parallel engines
        used, free = [cores_of(part) for part in bound.split("|")], []
    free = free or sorted(allowed.difference(*used))
    if free:
        return free
    widest = max(used, key=len)
    core, fix = max(widest), ""
    if len(widest) > 1:
        fewer = "|".join(_spelt({*part} - {core}) for part in used)
        fix = f'set VLLM_CPU_OMP_THREADS_BIND={fewer} and "drafter_device": "{core}", or '
    raise ConfigError(
        f"VLLM_CPU_OMP_THREADS_BIND={bound} gives the target all CPU cores of this process "
        f'({_spelt(allowed)}), and with "draft_ahead": true the drafter needs cores that the '
        f'target does not use; {fix}leave out "draft_ahead".'
    )


def checked_cores(where: str) -> list[int]:
    """Parse a list like "0-2,5". Raises `ConfigError` if a child process cannot use all of it."""
    cores, ours = cores_of(where), os.sched_getaffinity(0)
    try:
        # This process may be bound to fewer cores. The kernel drops those that are not allowed.
        os.sched_setaffinity(0, {*range(os.cpu_count() or 1), *cores})
        found = os.sched_getaffinity(0)
    finally:
        os.sched_setaffinity(0, ours)
    missing = [core for core in cores if core not in found]
    if missing:
        raise ConfigError(
            f"drafter_device is {where!r}, and there is no CPU core {missing[0]} for this process; "
            f"give some of {_spelt(found)}, or leave it out."
        )
    return cores


def cores_of(text: str) -> list[int]:
    """Parse a list of cores like "0-2,5"."""
    cores: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def _spelt(cores: Iterable[int]) -> str:
    """Format cores as a list like "0-2,5"."""
    by_run = itertools.groupby(enumerate(sorted(cores)), lambda of: of[1] - of[0])
    runs = [[core for _, core in run] for _, run in by_run]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
