# SPDX-License-Identifier: Apache-2.0
"""Reads a suite file and checks all of it before any model is loaded."""

from collections.abc import Collection
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Any

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from vllm_hetero_spec.bench.datasets import Dataset, in_chat_template, load_dataset
from vllm_hetero_spec.bench.methods import PEERS
from vllm_hetero_spec.bench.suite import EngineArguments, Peer, Suite, check_drafter
from vllm_hetero_spec.bench.values import Several, check_choice
from vllm_hetero_spec.bench.yaml_file import Mistake, YamlFile, read_yaml, strict
from vllm_hetero_spec.errors import ConfigError


@dataclass(frozen=True, config=strict, kw_only=True)
class SuiteFile(Suite):
    """A suite as it is written: all peers, datasets, and engine arguments of all targets."""

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
                check_choice(name, self.datasets, "targets", index, "datasets", number)
        return self

    def suite(self, **more: Any) -> Suite:
        """The suite, with what is left to say of it."""
        kept = {each.name: getattr(self, each.name) for each in fields(Suite)}
        return Suite(**{**kept, **more})


def read_suite(file: Path) -> Suite:
    """Read and check a suite file, and load its prompts.

    Raises:
        ConfigError: The first mistake, with its line and what is supported.
    """
    source = read_yaml(file)
    asked = source.checked(SuiteFile)
    targets = tuple(
        replace(
            target,
            datasets=target.datasets or tuple(asked.datasets),
            engine=asked.engine | target.engine,
        )
        for target in asked.targets
    )
    suite = asked.suite(name=asked.name or file.stem, targets=targets)
    _check_configurations(source, suite)
    apart = tuple(
        replace(
            target,
            drafters=tuple(
                each for drafter in target.drafters for each in drafter.in_each_setting()
            ),
        )
        for target in targets
    )
    return replace(suite, targets=apart, prompts=_prompts(source, suite, asked.datasets))


def _check_configurations(source: YamlFile, suite: Suite) -> None:
    for index, target in enumerate(suite.targets):
        for number, drafter in enumerate(target.drafters):
            try:
                check_drafter(target, drafter, suite.methods, suite.num_speculative_tokens[0])
            except ConfigError as error:
                place = ("targets", index, "drafters", number)
                raise source.refusal(place, error) from error


def _prompts(
    source: YamlFile, suite: Suite, datasets: dict[str, Dataset]
) -> dict[str, dict[str, tuple[str, ...]]]:
    plain: dict[str, tuple[str, ...]] = {}
    prompts: dict[str, dict[str, tuple[str, ...]]] = {}
    largest = max(suite.batch_sizes)
    for target in suite.targets:
        prompts[target.name] = {}
        for name in target.datasets:
            try:
                if name not in plain:
                    plain[name] = tuple(load_dataset(datasets[name], name))
                texts = plain[name]
                if datasets[name].chat_template:
                    texts = in_chat_template(texts, target.model, target.engine)
            except (ConfigError, Mistake) as error:
                raise source.refusal(("datasets", name), error) from error
            if len(texts) < largest:
                wants = f"batch size {largest} needs as many prompts"
                has = f"dataset {name!r} has {len(texts)}"
                raise source.refusal(("batch_sizes",), ConfigError(f"{wants}; {has}."))
            prompts[target.name][name] = texts
    return prompts
