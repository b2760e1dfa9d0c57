# SPDX-License-Identifier: Apache-2.0
"""YAML files checked by pydantic models, every mistake told with its file and line."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass as pydantic_dataclass

from vllm_hetero_spec.errors import ConfigError, first_line, nearest

Place = tuple[int | str, ...]  # keys and indices on the way to a value
Checked = TypeVar("Checked", bound="Part")

# What a value must be, by the type of pydantic's error.
_MUST = {
    "dataclass_type": "a mapping of keys",
    "dict_type": "a mapping of keys",
    "tuple_type": "a list of one or more",
    "too_short": "a list of one or more",
    "string_type": "a text",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "greater_than_equal": "a number from {ge}",
    "greater_than": "a number above {gt}",
    "less_than_equal": "a number up to {le}",
}


class Mistake(ValueError):
    """What is wrong with a value, as the rest of a sentence that begins with the value's name.

    Args:
        rest: As "is 3; it must be a text."
        place: From the value that is being checked to the one that is wrong.
        line_of: From the wrong value to a key whose line is to be told.
    """

    def __init__(self, rest: str, *place: int | str, line_of: Place = ()) -> None:
        super().__init__(rest)
        self.place, self.line_of = place, line_of


# Of the classes whose values come from a file.
strict = ConfigDict(extra="forbid")


@pydantic_dataclass(frozen=True, config=strict)
class Part:
    """A mapping of a file, which holds no keys but its fields."""

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, given: Any) -> Any:
        known = [each.name for each in fields(cls) if each.name not in cls.not_in_files()]
        for key in given if isinstance(given, dict) else ():
            if key not in known:
                raise Mistake(
                    f"has an unknown key {key!r}{nearest(key, known)}; "
                    f"supported: {', '.join(known)}.",
                    line_of=(key,),
                )
        return given

    @classmethod
    def not_in_files(cls) -> Collection[str]:
        """Fields that are filled in later."""
        return ()


@dataclass(frozen=True)
class YamlFile:
    """A file and what YAML read there."""

    file: Path
    node: yaml.Node

    def checked(self, model: type[Checked]) -> Checked:
        """The whole of the file as a model, which is told the file's folder as its context.

        Raises:
            ConfigError: The first mistake.
        """
        try:
            value = yaml.constructor.SafeConstructor().construct_document(self.node)
        except (yaml.YAMLError, ValueError) as error:
            raise _no_yaml(self.file, error) from error
        try:
            return TypeAdapter(model).validate_python(value, context=self.file.parent)
        except ValidationError as error:
            found = error.errors()[0]
            raise self.refusal(found["loc"], _mistake(found)) from error

    def refusal(self, place: Place, error: Exception) -> ConfigError:
        """The error that says what is wrong at a place: of a `Mistake`, or a whole sentence."""
        sentence = _sentence(place, error)
        if isinstance(error, Mistake):
            place = (*place, *error.place, *error.line_of)
        return ConfigError(f"{self.file}:{self._line(place)}: {sentence}")

    def _line(self, place: Place) -> int:
        node = self.node
        line: int = node.start_mark.line
        for part in place:
            if isinstance(node, yaml.MappingNode):
                pairs = [pair for pair in node.value if pair[0].value == str(part)]
                if not pairs:
                    break
                # The key's line: a value may begin on the next one.
                line, node = pairs[0][0].start_mark.line, pairs[0][1]
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
                node = node.value[part]
                line = node.start_mark.line
        return line + 1


def read_yaml(file: Path) -> YamlFile:
    """The whole of a file.

    Raises:
        ConfigError: It cannot be read, is no YAML, is empty, or has a key twice.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the suite {file}: {error}.") from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise _no_yaml(file, error) from error
    if node is None:
        raise ConfigError(f"{file}:1: the suite is empty.")
    for key in _repeated(node):
        line = key.start_mark.line + 1
        raise ConfigError(f"{file}:{line}: {key.value!r} appears twice; names must differ.")
    return YamlFile(file, node)


def refusal(error: ValidationError, options: Mapping[str, str]) -> ConfigError:
    """The first mistake in values that are in no file.

    Args:
        error: Of a model.
        options: The command-line options that its fields come from.
    """
    found = error.errors()[0]
    place, mistake = found["loc"], _mistake(found)
    if not isinstance(mistake, Mistake) or not place or place[0] not in options:
        return ConfigError(_sentence(place, mistake))
    keys = tuple(key for key in (*place[1:], *mistake.place) if isinstance(key, str))
    within = f"{_name(keys)} of " if keys else ""
    return ConfigError(f"{within}{options[str(place[0])]} {mistake}")


def _repeated(node: yaml.Node) -> Iterator[yaml.Node]:
    """Keys that their mapping has already."""
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        for index, (key, value) in enumerate(node.value):
            if key.value in keys[:index]:
                yield key
            yield from _repeated(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _repeated(value)


def _mistake(found: Any) -> Exception:
    """One of pydantic's errors as ours; `found` is an entry of `ValidationError.errors()`."""
    kind, context = found["type"], found.get("ctx", {})
    if kind == "value_error":
        return context["error"]
    if kind == "missing":
        return ConfigError(f"{_name(found['loc'][:-1])} has no {found['loc'][-1]}.")
    must = f"it must be {_MUST[kind].format(**context)}" if kind in _MUST else found["msg"]
    return Mistake(f"is {found['input']!r}; {must}.")


def _sentence(place: Place, error: Exception) -> str:
    if isinstance(error, Mistake):
        return f"{_name((*place, *error.place))} {error}"
    return str(error)


def _name(place: Place) -> str:
    """A value as a message calls it, as "targets[0].model"."""
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return name.removeprefix(".") or "the suite"


def _no_yaml(file: Path, error: Exception) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    line = mark.line + 1 if mark else 1
    problem = first_line(getattr(error, "problem", None) or error)
    return ConfigError(f"{file}:{line}: not YAML: {problem}.")
