# SPDX-License-Identifier: Apache-2.0
"""Values of a YAML file that know their line, so that every mistake is told with its place."""

import math
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vllm_hetero_spec.config import ConfigError
from vllm_hetero_spec.errors import first_line, nearest


@dataclass(frozen=True)
class Entry:
    """One value of a file.

    Attributes:
        file: The file.
        name: The value as a message calls it, as "targets[0].model".
        node: What YAML read there.
    """

    file: Path
    name: str
    node: yaml.Node

    def refuse(self, sentence: str) -> ConfigError:
        """The error that says what is wrong here."""
        return ConfigError(f"{self.file}:{self.node.start_mark.line + 1}: {sentence}")

    def value(self) -> Any:
        """The value with everything below it as plain Python."""
        constructor = yaml.constructor.SafeConstructor()
        try:
            return constructor.construct_document(self.node)
        except (yaml.YAMLError, ValueError) as error:
            raise self.refuse(f"{self.name} is no YAML value: {_problem(error)}.") from error

    def mapping(self, known: Collection[str] | None = None) -> dict[str, "Entry"]:
        """The values of a mapping by their keys, which must be among `known`, if given."""
        if not isinstance(self.node, yaml.MappingNode):
            raise self.refuse(f"{self.name} is {self._kind()}; it must be a mapping of keys.")
        found: dict[str, Entry] = {}
        for key_node, node in self.node.value:
            key = key_node.value
            # The key's line: a value may begin on the next one.
            here = Entry(self.file, self.name, key_node)
            if not isinstance(key, str):
                raise here.refuse(f"a key of {self.name} is no text.")
            if known is not None and key not in known:
                raise here.refuse(
                    f"unknown key {key!r} in {self.name}{nearest(key, known)}; "
                    f"supported: {', '.join(known)}."
                )
            if key in found:
                raise here.refuse(f"{key!r} appears twice in {self.name}; names must differ.")
            found[key] = Entry(self.file, f"{self.name}.{key}" if self.name != SUITE else key, node)
        return found

    def sequence(self) -> list["Entry"]:
        """The values of a list that is not empty."""
        if not isinstance(self.node, yaml.SequenceNode) or not self.node.value:
            raise self.refuse(f"{self.name} is {self._kind()}; it must be a list of one or more.")
        return [
            Entry(self.file, f"{self.name}[{i}]", node) for i, node in enumerate(self.node.value)
        ]

    def text(self) -> str:
        """A text that is not empty."""
        value = self.value()
        if not isinstance(value, str) or not value.strip():
            raise self.refuse(f"{self.name} is {value!r}; it must be a text.")
        return value

    def flag(self) -> bool:
        """True or false."""
        value = self.value()
        if not isinstance(value, bool):
            raise self.refuse(f"{self.name} is {value!r}; it must be true or false.")
        return value

    def integer(self, low: int, high: int) -> int:
        """A whole number in a range, both ends included."""
        value = self.value()
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refuse(
                f"{self.name} is {value!r}; it must be a whole number from {low} to {high}."
            )
        return value

    def number(self, low: float, high: float) -> float:
        """A finite number in a range, both ends included."""
        value = self.value()
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        if not fits or not math.isfinite(value) or not low <= value <= high:
            raise self.refuse(
                f"{self.name} is {value!r}; it must be a number from {low:g} to {high:g}."
            )
        return float(value)

    def choice(self, choices: Collection[str]) -> str:
        """One of some names."""
        value = self.value()
        if value not in choices:
            raise self.refuse(
                f"{self.name} is {value!r}{nearest(value, choices)}; "
                f"supported: {', '.join(choices)}."
            )
        return value

    def options(self) -> dict[str, Any]:
        """A mapping whose keys another program judges."""
        self.mapping()
        return self.value()

    def _kind(self) -> str:
        if isinstance(self.node, yaml.MappingNode):
            return "a mapping"
        return repr(self.value())


SUITE = "the suite"


def read_yaml(file: Path) -> Entry:
    """The whole of a file.

    Raises:
        ConfigError: It cannot be read, is no YAML, or is empty.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the suite {file}: {error}.") from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        raise ConfigError(f"{file}:{line}: not YAML: {_problem(error)}.") from error
    if node is None:
        raise ConfigError(f"{file}:1: the suite is empty.")
    return Entry(file, SUITE, node)


def distinct(entries: Iterable[Entry], values: Iterable[Hashable]) -> None:
    """Refuse the second of two equal values."""
    seen = set[Hashable]()
    for entry, value in zip(entries, values, strict=True):
        if value in seen:
            raise entry.refuse(f"{entry.name} repeats {value!r}; names and values must differ.")
        seen.add(value)


def _problem(error: Exception) -> str:
    return first_line(getattr(error, "problem", None) or error)
