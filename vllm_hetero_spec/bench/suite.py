# SPDX-License-Identifier: Apache-2.0
"""Read and check a suite: targets, drafters, methods, prompts and loads.

All checks run before a model is loaded.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, model_validator
from pydantic.dataclasses import dataclass

from vllm_hetero_spec.bench.datasets import Dataset, in_chat_template, load_dataset
from vllm_hetero_spec.bench.values import Positive, Several, Text, YamlFile, model_name, read_yaml
from vllm_hetero_spec.errors import ConfigError, Mistake, Table, must, not_among, one_of
from vllm_hetero_spec.options import MAX_LOOKAHEAD, METHODS, parse, underscores

ALONE = "alone"
HF_ALONE = "hf_alone"


@dataclass(frozen=True)
class Kind:
    """Requirements of a method."""

    drafts: bool = True  # needs a drafter and a draft length
    huggingface: bool = False  # runs in Hugging Face transformers, one request at a time
    same_vocabulary: bool = False
    reference: str = ALONE  # method with speculation disabled and the same greedy output


PEERS = {
    ALONE: Kind(drafts=False),
    "vllm_tli": Kind(),
    "draft_model": Kind(same_vocabulary=True),
    HF_ALONE: Kind(drafts=False, huggingface=True, reference=HF_ALONE),
    "hf_assisted": Kind(huggingface=True, reference=HF_ALONE),
}
KINDS = {**{method: Kind() for method in METHODS}, **PEERS}

# Arguments of vllm.LLM that the benchmark sets.
_RESERVED = ("model", "speculative_config", "max_num_seqs", "disable_log_stats")
# Keys of a method that are part of a row's name, with the place where a user sets each.
_METHODS = "by methods in a suite, by --method or --methods on a command line"
_LOOKAHEAD = "num_speculative_tokens"
_SET_ELSEWHERE = {
    "method": _METHODS,
    "model": "as the drafter's model, or as a drafter on a command line",
    _LOOKAHEAD: f"by {_LOOKAHEAD} in a suite, by --num-speculative-tokens on a command line",
}


def _engine_arguments(engine: dict[str, Any]) -> dict[str, Any]:
    for key in engine:
        if key in _RESERVED:
            raise Mistake("is set by the benchmark; leave it out.", key)
    ranks = engine.get("tensor_parallel_size", 1)
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise Mistake(f"is {ranks!r}; it must be a whole number from 1.", "tensor_parallel_size")
    return engine


def _keys_without(*names: str) -> AfterValidator:
    """Refuse keys that are set elsewhere; write others with underscores, so that they merge."""

    def check(given: dict[str, Any]) -> dict[str, Any]:
        for key in given:
            if (name := key.replace("-", "_")) in names:
                raise Mistake(f"is set {_SET_ELSEWHERE[name]}; leave it out here.", key)
        return underscores(given)

    return AfterValidator(check)


def _by_name(value: Any) -> Any:
    return {"model": value} if isinstance(value, str) else value


def short_name(model: str) -> str:
    """Name of a model in reports: the last part of its Hugging Face name or folder."""
    return model.rstrip("/").rsplit("/", 1)[-1].rsplit(":", 1)[-1]


def _without_setting(name: str) -> str:
    if ":" in name:
        raise Mistake(
            f"is {name!r}; in the rows a colon parts a drafter's name from its setting's: "
            f"write {name.replace(':', '-')!r}."
        )
    return name


EngineArguments = Annotated[dict[str, Any], AfterValidator(_engine_arguments)]
SpeculativeKeys = Annotated[dict[str, Any], _keys_without(*_SET_ELSEWHERE)]
# A draft length is allowed, because the setting's own name distinguishes its rows.
Setting = Annotated[dict[str, Any], _keys_without("method", "model")]
Method = Annotated[str, one_of(METHODS)]
Peer = Annotated[str, one_of(tuple(PEERS))]
Lookahead = Annotated[int, Field(strict=True, ge=1, le=MAX_LOOKAHEAD)]
Temperature = Annotated[float, Field(strict=True, ge=0, le=10, allow_inf_nan=False)]


@dataclass(frozen=True)
class Named(Table):
    """A model; its name in reports defaults to the last part of the model's name."""

    @model_validator(mode="before")
    @classmethod
    def _name(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        # Without a model any name will do, because the missing model is reported instead.
        return {"name": short_name(str(given.get("model")).strip()) or "-", **given}


@dataclass(frozen=True)
class SuiteDrafter(Named):
    """A drafter, with further keys of `--speculative-config`.

    All settings are measured side by side; rows name them DRAFTER:SETTING.
    """

    name: Annotated[Text, AfterValidator(_without_setting)]  # in reports
    model: Annotated[Text, model_name("drafter")]
    speculative: SpeculativeKeys = field(default_factory=dict)
    settings: dict[str, Setting] = field(default_factory=dict)  # further keys by name

    def in_each_setting(self) -> Iterator["SuiteDrafter"]:
        """Yield one drafter per setting, or this drafter if it has no settings."""
        if not self.settings:
            yield self
        for name, more in self.settings.items():
            yield InSetting(f"{self.name}:{name}", self.model, self.speculative | more)


@dataclass(frozen=True)
class InSetting(SuiteDrafter):
    """A drafter with one of its settings, which may contain a draft length."""

    name: Text
    speculative: Setting = field(default_factory=dict)


@dataclass(frozen=True)
class Target(Named):
    """A target, its drafters and the names of its datasets."""

    name: Text  # in reports
    model: Annotated[Text, model_name("target")]
    drafters: Several[Annotated[SuiteDrafter, BeforeValidator(_by_name)]]
    datasets: Several[Text] = ()  # default in a suite file: all
    engine: EngineArguments = field(default_factory=dict)  # includes those of the suite


@dataclass(frozen=True, kw_only=True)
class Suite(Table):
    """A benchmark; `prompts` by target and dataset have chat templates applied."""

    name: Text = ""  # default for a suite file: the name of the file
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
    seed: Annotated[int, Field(strict=True, ge=0, le=1 << 31)] | None = 0  # for the first request
    top_p: Annotated[float, Field(strict=True, gt=0, le=1)] = 1.0
    engines_at_once: Annotated[
        Annotated[int, Field(strict=True, ge=1, le=100)] | None,
        must(
            "auto or a number",
            lambda found: not isinstance(found, str),
            lambda value: None if value == "auto" else value,
        ),
    ] = None  # None: derived from the machine

    def target(self, name: str) -> Target:
        return next(target for target in self.targets if target.name == name)

    def described(self) -> dict[str, Any]:
        """The suite as JSON data; the number and digest of prompts replace their texts."""
        suite: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        for datasets in suite["prompts"].values():
            for name, texts in datasets.items():
                datasets[name] = {"count": len(texts), "sha256": _digest(texts)}
        return suite

    @property
    def digest(self) -> str:
        """Hash of all that determines the measurement, independent of the file's layout."""
        return _digest(self.described())


@dataclass(frozen=True, kw_only=True)
class SuiteFile(Suite):
    """A suite as written in a file; its default is all peers."""

    peers: Several[Peer] = tuple(PEERS)
    datasets: dict[str, Dataset]
    engine: EngineArguments = field(default_factory=dict)

    @classmethod
    def not_in_files(cls) -> Collection[str]:
        return ("prompts",)

    @model_validator(mode="after")
    def _names_of_datasets(self) -> "SuiteFile":
        if not self.datasets:
            raise Mistake("is empty; name one or more.", "datasets")
        for index, target in enumerate(self.targets):
            for number, name in enumerate(target.datasets):
                if name not in self.datasets:
                    wrong = str(not_among(name, self.datasets))
                    raise Mistake(wrong, "targets", index, "datasets", number)
        return self


def read_suite(file: Path) -> Suite:
    """Read and check a suite file, and load its prompts; ConfigError names the first mistake."""
    source = read_yaml(file)
    asked = source.checked(SuiteFile)
    targets = []
    for index, target in enumerate(asked.targets):
        names = target.datasets or tuple(asked.datasets)
        target = replace(target, engine=asked.engine | target.engine, datasets=names)
        apart: list[SuiteDrafter] = []
        for number, drafter in enumerate(target.drafters):
            with source.line_of("targets", index, "drafters", number):
                check_drafter(target, drafter, asked.methods, asked.num_speculative_tokens[0])
            apart += drafter.in_each_setting()
        targets.append(replace(target, drafters=tuple(apart)))
    given = {each.name: getattr(asked, each.name) for each in fields(Suite)}
    given |= {"name": asked.name or file.stem, "targets": tuple(targets)}
    return Suite(**given | {"prompts": _prompts(source, asked, targets)})


def check_drafter(
    target: Target, drafter: SuiteDrafter, methods: Iterable[str], lookahead: int
) -> None:
    """Check the drafter's keys now, because an engine that refuses them starts slowly.

    Raises:
        ConfigError: The keys do not fit one of the methods, or the target.
    """
    ranks = target.engine.get("tensor_parallel_size", 1)
    for each in drafter.in_each_setting():
        for method in methods:
            parse(speculative_config(method, each, lookahead), target_tensor_parallel=ranks)


def speculative_config(method: str, drafter: SuiteDrafter, lookahead: int) -> dict[str, Any]:
    """`speculative_config` of `vllm.LLM` for one of our methods."""
    given = {"method": method, "model": drafter.model, _LOOKAHEAD: lookahead}
    return {**given, **drafter.speculative}


def _prompts(
    source: YamlFile, asked: SuiteFile, targets: Iterable[Target]
) -> dict[str, dict[str, tuple[str, ...]]]:
    plain: dict[str, tuple[str, ...]] = {}
    prompts: dict[str, dict[str, tuple[str, ...]]] = {}
    largest = max(asked.batch_sizes)
    for target in targets:
        prompts[target.name] = {}
        for name in target.datasets:
            dataset = asked.datasets[name]
            with source.line_of("datasets", name):
                texts = plain[name] = plain.get(name) or tuple(load_dataset(dataset, name))
                if dataset.chat_template:
                    texts = in_chat_template(texts, target.model, target.engine)
            with source.line_of("batch_sizes"):
                if len(texts) < largest:
                    raise ConfigError(
                        f"batch size {largest} needs as many prompts; dataset {name!r} has "
                        f"{len(texts)}."
                    )
            prompts[target.name][name] = texts
    return prompts


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
