# SPDX-License-Identifier: Apache-2.0
"""Configuration of the drafter process, with its device or CPU cores.

If threads of two models share cores, they wait for each other at each OpenMP barrier, and both
models become many times slower. So the drafter gets cores that the target does not use. If there
are none, the engine does not start.
"""

import copy
import itertools
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import cloudpickle
import torch
import vllm.envs as envs
from vllm.config import ModelConfig, VllmConfig
from vllm.transformers_utils.config import maybe_register_config_serialize_by_value
from vllm.utils.ompmultiprocessing import OMPProcessManager

from vllm_hetero_spec.draft.token_map import TokenMap
from vllm_hetero_spec.engine.drafter.round_plan import STEPS_PER_TOKEN
from vllm_hetero_spec.engine.seam.tokenizers import TokenizerPair
from vllm_hetero_spec.errors import ConfigError
from vllm_hetero_spec.options import HeteroOptions

logger = logging.getLogger("vllm.hetero_spec")

# Slots per request of the largest batch. Waiting requests keep theirs while there are enough.
_SLOTS = 2
# Maximum number of branches beside each chain.
_BRANCHES = 8
# Maximum tokens of a forward on a CPU, where thousands may take longer than `supervisor.SILENCE`.
_CPU_TOKENS = 512


@dataclass(frozen=True)
class Deployment:
    """Everything that a drafter process needs. `packed` serializes it.

    Attributes:
        vllm_config: The configuration of the target's worker, without the target's layers.
        banned: Drafter ids that are never drafted.
        ends: Drafter ids that end a draft.
        cores: CPU cores for its threads; empty to run on those of the engine.
        slots: Maximum number of requests.
        longest: Maximum drafter tokens of a continuation.
        tokens: Target token that each drafter token proposes first, on the host. None if all drafts
            are greedy.
    """

    vllm_config: VllmConfig
    drafter_config: ModelConfig
    options: HeteroOptions
    banned: frozenset[int]
    vocab_size: int
    ends: frozenset[int]
    device: str
    cores: Sequence[int]
    slots: int
    longest: int
    tokens: TokenMap | None = None

    @property
    def most_rows(self) -> int:
        """Maximum sequences of a forward."""
        return int(self.vllm_config.scheduler_config.max_num_seqs) + _BRANCHES

    @property
    def most_tokens(self) -> int:
        """Maximum tokens of a forward."""
        most = int(self.vllm_config.scheduler_config.max_num_batched_tokens)
        return min(most, _CPU_TOKENS) if torch.device(self.device).type == "cpu" else most

    @property
    def table_shape(self) -> tuple[int, int, int, int]:
        """Arguments of `DraftTable`: slots, longest, branches, drawn."""
        # A sampled token proposes at least one target token. The table has room for two drafts, and
        # for the target's own tokens between and after them.
        drawn = 2 * (self.options.num_speculative_tokens + 1) * (self.tokens is not None)
        return self.slots, self.longest, _BRANCHES, drawn

    @classmethod
    def of(
        cls,
        vllm_config: VllmConfig,
        drafter_config: ModelConfig,
        options: HeteroOptions,
        pair: TokenizerPair,
        tokens: TokenMap | None,
        beside: torch.device,
    ) -> "Deployment":
        """Build the deployment of an engine; `beside` is the target's device.

        Raises:
            ConfigError: `drafter_device` is no device of the target's type, or names cores that are
                not available; or a target on a CPU uses all cores.
        """
        where = str(beside if options.drafter_device is None else options.drafter_device)
        on_cores = where[:1].isdigit()
        if not on_cores and where.partition(":")[0] != beside.type:
            raise ConfigError(
                f"drafter_device is {where!r}, and the target runs on {beside}: a drafter runs on "
                f'a device of the same type, as "{beside.type}"; give one, or CPU cores as "2-3".'
            )
        cores = _checked_cores(where) if on_cores else []
        if not on_cores and beside.type == "cpu" and (cores := free_cores(vllm_config)):
            logger.info("Drafter process: CPU cores %s, which the target leaves free.", cores)
        return cls(
            vllm_config=_without_layers(vllm_config),
            drafter_config=drafter_config,
            options=options,
            banned=pair.bridge.banned,
            vocab_size=pair.drafter.vocab_size,
            ends=pair.bridge.drafter_eos,
            device=str(beside) if on_cores else where,
            cores=cores,
            slots=_SLOTS * vllm_config.scheduler_config.max_num_seqs,
            longest=STEPS_PER_TOKEN * (options.num_speculative_tokens + 1),
            tokens=tokens,
        )


def packed(deployment: Deployment) -> bytes:
    """Pickle a deployment. Classes from a model's repository are pickled by value."""
    maybe_register_config_serialize_by_value()
    made: bytes = cloudpickle.dumps(deployment)
    return made


def _without_layers(config: VllmConfig) -> VllmConfig:
    """Copy a worker's configuration without the layers and their KV, which cannot be pickled.

    Later changes to the target's cache configuration do not reach the copy.
    """
    compilation = copy.copy(config.compilation_config)
    compilation.static_forward_context = {}
    compilation.static_all_moe_layers = []
    config = copy.copy(config)
    config.compilation_config, config.cache_config = compilation, copy.copy(config.cache_config)
    return config


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
        used, free = [_cores_of(part) for part in bound.split("|")], []
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


def _checked_cores(where: str) -> list[int]:
    """Parse a list like "0-2,5". Raises `ConfigError` if a child process cannot use all of it."""
    cores, ours = _cores_of(where), os.sched_getaffinity(0)
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


def _cores_of(text: str) -> list[int]:
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
