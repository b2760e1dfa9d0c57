# SPDX-License-Identifier: Apache-2.0
"""A benchmark: targets, drafters, methods, prompts and loads."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_hetero_spec.bench.methods import ALONE


@dataclass(frozen=True)
class Drafter:
    """A drafter; `speculative` are further keys of our methods' configuration."""

    name: str
    model: str
    speculative: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """A target and what it is measured with.

    Attributes:
        name: What reports call it.
        model: A Hugging Face name or a folder.
        drafters: Its drafters.
        datasets: Names of datasets, in order.
        engine: Further arguments of `vllm.LLM`, the suite's included.
    """

    name: str
    model: str
    drafters: tuple[Drafter, ...]
    datasets: tuple[str, ...]
    engine: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Suite:
    """A benchmark.

    Attributes:
        name: What the results are called.
        targets: Targets with their drafters.
        methods: Methods of this package.
        prompts: Texts by target and dataset, chat templates applied.
        peers: What the methods are measured beside (`PEERS`).
        batch_sizes: Requests in flight.
        temperatures: 0 is greedy.
        lookaheads: Values of num_speculative_tokens.
        max_tokens: Longest completion, in target tokens.
        repeats: Rounds in which every engine runs every load.
        ignore_eos: Generate `max_tokens` whatever comes.
        seed: Of the first request in the first round; None leaves sampling unseeded.
        top_p: Nucleus of the target's distribution.
        engines_at_once: Engines that are up together; None chooses by the machine.
    """

    name: str
    targets: tuple[Target, ...]
    methods: tuple[str, ...]
    prompts: dict[str, dict[str, tuple[str, ...]]]
    peers: tuple[str, ...] = (ALONE,)
    batch_sizes: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    lookaheads: tuple[int, ...] = (4,)
    max_tokens: int = 128
    repeats: int = 3
    ignore_eos: bool = False
    seed: int | None = 0
    top_p: float = 1.0
    engines_at_once: int | None = None

    def target(self, name: str) -> Target:
        """The target of a name."""
        return next(target for target in self.targets if target.name == name)

    def described(self) -> dict[str, Any]:
        """The suite as JSON has it, prompts as their number and digest."""
        plain = json.loads(json.dumps(asdict(self)))
        plain["prompts"] = {
            target: {
                name: {"count": len(texts), "sha256": _digest(texts)}
                for name, texts in datasets.items()
            }
            for target, datasets in self.prompts.items()
        }
        return plain

    @property
    def digest(self) -> str:
        """Equal for suites that measure the same, whatever their files look like."""
        return _digest(self.described())


def speculative_config(method: str, drafter: Drafter, lookahead: int) -> dict[str, Any]:
    """vLLM's `speculative_config` for one of our methods."""
    return {
        "method": method,
        "model": drafter.model,
        "num_speculative_tokens": lookahead,
        **drafter.speculative,
    }


def short_name(model: str) -> str:
    """What reports call a model: the last part of its name or folder."""
    return model.rstrip("/").rsplit("/", 1)[-1]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
