# SPDX-License-Identifier: Apache-2.0
"""A benchmark: targets, drafters, methods, prompts and loads, all of it checked."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, field
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, model_validator
from pydantic.dataclasses import dataclass

from vllm_hetero_spec.bench.methods import ALONE, PEERS
from vllm_hetero_spec.bench.values import DrafterName, Positive, Several, TargetName, Text, one_of
from vllm_hetero_spec.bench.yaml_file import Mistake, Part, strict
from vllm_hetero_spec.options import MAX_LOOKAHEAD, METHODS, parse, underscores

_AUTO = "auto"
# What the benchmark itself gives vllm.LLM.
_RESERVED = ("model", "speculative_config", "max_num_seqs", "disable_log_stats")
# What it gives our methods, by where it is set: rows are called by it.
_METHODS = "by methods in a suite, by --method or --methods on a command line"
_SET_ELSEWHERE = {
    "method": _METHODS,
    "heterogeneous_vocab_method": _METHODS,
    "model": "as the drafter's model, or as a drafter on a command line",
    "num_speculative_tokens": "by num_speculative_tokens in a suite, by --num-speculative-tokens "
    "on a command line",
}


def _engine_arguments(engine: dict[str, Any]) -> dict[str, Any]:
    for key in engine:
        if key in _RESERVED:
            raise Mistake("is the benchmark's own to set; leave it out.", key)
    ranks = engine.get("tensor_parallel_size", 1)
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise Mistake(f"is {ranks!r}; it must be a whole number from 1.", "tensor_parallel_size")
    return engine


def _not_set_elsewhere(given: dict[str, Any], *but: str) -> dict[str, Any]:
    for key in given:
        name = key.replace("-", "_")
        if name in _SET_ELSEWHERE and name not in but:
            raise Mistake(f"is set {_SET_ELSEWHERE[name]}; leave it out here.", key)
    return underscores(given)  # so that keys of a setting replace the drafter's


def _setting(given: dict[str, Any]) -> dict[str, Any]:
    """As above, but for the lookahead: the rows of a setting have its name."""
    return _not_set_elsewhere(given, "num_speculative_tokens")


def _auto(value: Any) -> Any:
    if isinstance(value, str) and value != _AUTO:
        raise Mistake(f"is {value!r}; it must be {_AUTO} or a number.")
    return None if value == _AUTO else value


def _by_name(value: Any) -> Any:
    return {"model": value} if isinstance(value, str) else value


def short_name(model: str) -> str:
    """What reports call a model: the last part of its name or folder."""
    return model.rstrip("/").rsplit("/", 1)[-1].rsplit(":", 1)[-1]


def _without_setting(name: str) -> str:
    if ":" in name:
        raise Mistake(
            f"is {name!r}; in the rows a colon parts a drafter's name from its setting's: "
            f"write {name.replace(':', '-')!r}."
        )
    return name


EngineArguments = Annotated[dict[str, Any], AfterValidator(_engine_arguments)]
SpeculativeKeys = Annotated[dict[str, Any], AfterValidator(_not_set_elsewhere)]
Setting = Annotated[dict[str, Any], AfterValidator(_setting)]
Method = Annotated[str, one_of(METHODS)]
Peer = Annotated[str, one_of(PEERS)]
Lookahead = Annotated[int, Field(strict=True, ge=1, le=MAX_LOOKAHEAD)]
Temperature = Annotated[float, Field(strict=True, ge=0, le=10, allow_inf_nan=False)]


@dataclass(frozen=True, config=strict)
class Named(Part):
    """A model, in files called by the last part of its own name unless they name it."""

    @model_validator(mode="before")
    @classmethod
    def _name(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        # Any name where there is no model, of which there is more to say.
        return {"name": short_name(str(given.get("model")).strip()) or "-", **given}


@dataclass(frozen=True, config=strict)
class Drafter(Named):
    """A drafter.

    Attributes:
        name: What reports call it.
        model: A Hugging Face name or a folder.
        speculative: Further keys of our methods' configuration; none that is set elsewhere.
        settings: By name, further keys with which it is measured side by side; in the rows each is
            a drafter of its own, DRAFTER:SETTING. May set num_speculative_tokens.
    """

    name: Annotated[Text, AfterValidator(_without_setting)]
    model: DrafterName
    speculative: SpeculativeKeys = field(default_factory=dict)
    settings: dict[str, Setting] = field(default_factory=dict)

    def in_each_setting(self) -> Iterator["Drafter"]:
        """The drafters that are measured: one for each setting, or this one alone."""
        if not self.settings:
            yield self
        for name, more in self.settings.items():
            yield InSetting(f"{self.name}:{name}", self.model, self.speculative | more)


@dataclass(frozen=True, config=strict)
class InSetting(Drafter):
    """A drafter in one of its settings, which may give it a lookahead."""

    name: Text
    speculative: Setting = field(default_factory=dict)


@dataclass(frozen=True, config=strict)
class Target(Named):
    """A target and what it is measured with.

    Attributes:
        name: What reports call it.
        model: A Hugging Face name or a folder.
        drafters: Its drafters.
        datasets: Names of datasets, in order; in a file all where left out.
        engine: Further arguments of `vllm.LLM`, the suite's included.
    """

    name: Text
    model: TargetName
    drafters: Several[Annotated[Drafter, BeforeValidator(_by_name)]]
    datasets: Several[Text] = ()
    engine: EngineArguments = field(default_factory=dict)


@dataclass(frozen=True, config=strict, kw_only=True)
class Suite(Part):
    """A benchmark.

    Attributes:
        name: What the results are called; in a file by default as the file.
        targets: Targets with their drafters.
        methods: Methods of this package.
        prompts: Texts by target and dataset, chat templates applied.
        peers: What the methods are measured beside (`PEERS`).
        batch_sizes: Requests in flight.
        temperatures: 0 is greedy.
        num_speculative_tokens: Lookaheads.
        max_tokens: Longest completion, in target tokens.
        repeats: Rounds in which every engine runs every load.
        ignore_eos: Generate `max_tokens` whatever comes.
        seed: Of the first request in the first round; None leaves sampling unseeded.
        top_p: Nucleus of the target's distribution.
        engines_at_once: Engines that are up together; None chooses by the machine.
    """

    name: Text = ""
    targets: Several[Target]
    methods: Several[Method] = METHODS
    prompts: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=dict)
    peers: Several[Peer] = (ALONE,)
    batch_sizes: Several[Positive] = (1,)
    temperatures: Several[Temperature] = (0.0,)
    num_speculative_tokens: Several[Lookahead] = (4,)
    max_tokens: Positive = 128
    repeats: Annotated[int, Field(strict=True, ge=1, le=1000)] = 3
    ignore_eos: StrictBool = False
    seed: Annotated[int, Field(strict=True, ge=0, le=1 << 31)] | None = 0
    top_p: Annotated[float, Field(strict=True, gt=0, le=1)] = 1.0
    engines_at_once: Annotated[
        Annotated[int, Field(strict=True, ge=1, le=100)] | None, BeforeValidator(_auto)
    ] = None

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


def check_drafter(target: Target, drafter: Drafter, methods: Iterable[str], lookahead: int) -> None:
    """Refuse what would be refused by an engine, which takes a while to start.

    Raises:
        ConfigError: The drafter's further keys do not fit some method, or the target.
    """
    ranks = target.engine.get("tensor_parallel_size", 1)
    for each in drafter.in_each_setting():
        for method in methods:
            parse(speculative_config(method, each, lookahead), target_tensor_parallel=ranks)


def speculative_config(method: str, drafter: Drafter, lookahead: int) -> dict[str, Any]:
    """vLLM's `speculative_config` for one of our methods."""
    return {
        "method": method,
        "model": drafter.model,
        "num_speculative_tokens": lookahead,
        **drafter.speculative,
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
