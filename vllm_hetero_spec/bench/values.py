# SPDX-License-Identifier: Apache-2.0
"""Types of the values in a suite file, and a YAML reader that names the line of a mistake."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError, ValidationInfo

from vllm_hetero_spec.errors import (
    ConfigError,
    Mistake,
    Place,
    Table,
    first_line,
    first_mistake,
    sentence,
)
from vllm_hetero_spec.inputs.model_folder import check_model
from vllm_hetero_spec.paths import demo_folder

Item = TypeVar("Item")
Model = TypeVar("Model", bound=Table)
_DEMO = "demo:"


def optional(module: str, purpose: str) -> Any:
    """Import a library that only some suites need.

    Raises:
        ConfigError: It is not installed. The message contains the pip command.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise ConfigError(f"{purpose} needs {package}: `pip install {package}`.") from error


def _not_blank(value: str) -> str:
    if not value.strip():
        raise Mistake(f"is {value!r}; it must be a string.")
    return value


def _distinct(values: Any) -> Any:
    names = [getattr(value, "name", value) for value in values]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise Mistake(f"repeats {name!r}; names and values must differ.", index)
    return values


def located(name: str, info: ValidationInfo) -> str:
    """Resolve a path: "demo:..." in the demo folder, others relative to the suite's folder.

    Raises:
        ConfigError: The demo pair does not exist.
    """
    if not name.startswith(_DEMO):
        return str(Path(info.context or "") / Path(name).expanduser())
    path = demo_folder() / name.removeprefix(_DEMO)
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist: make the demo pair with `python scripts/make_demo.py`."
        )
    return str(path)


def model_name(role: str) -> AfterValidator:
    """Validator of a Hugging Face name or of a model folder, which becomes an absolute path."""

    def check(name: str, info: ValidationInfo) -> str:
        if name.startswith((_DEMO, "./", "../", "~", "/")):
            name = str(Path(located(name, info)).absolute())
        return check_model(name, role)

    return AfterValidator(check)


Text = Annotated[str, Field(strict=True), AfterValidator(_not_blank)]
Positive = Annotated[int, Field(strict=True, ge=1, le=1 << 31)]
# One or more different values.
Several = Annotated[tuple[Item, ...], Field(min_length=1), AfterValidator(_distinct)]


@dataclass(frozen=True)
class YamlFile:
    """A suite file and its tree of YAML nodes."""

    file: Path
    node: yaml.Node

    def checked(self, model: type[Model]) -> Model:
        """Convert the file to a model; validators receive the file's folder as their context.

        Raises:
            ConfigError: The first mistake.
        """
        try:
            value = yaml.constructor.SafeConstructor().construct_document(self.node)
        except (yaml.YAMLError, ValueError) as error:
            raise _not_yaml(self.file, error) from error
        try:
            return TypeAdapter(model).validate_python(value, context=self.file.parent)
        except ValidationError as error:
            raise self.refusal(*first_mistake(error)) from error

    def refusal(self, place: Place, error: Exception) -> ConfigError:
        """Describe a mistake at a place, with file and line."""
        told = sentence(place, error, "the suite")
        if isinstance(error, Mistake):
            place = (*place, *error.place, *error.line_of)
        return ConfigError(f"{self.file}:{self._line(place)}: {told}")

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
    """Read a YAML file.

    Raises:
        ConfigError: It is empty, no YAML or cannot be read, or a key appears twice.
    """
    try:
        node = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the suite {file}: {error}.") from error
    except yaml.YAMLError as error:
        raise _not_yaml(file, error) from error
    if node is None:
        raise ConfigError(f"{file}:1: the suite is empty.")
    for key in _repeated(node):
        line = key.start_mark.line + 1
        raise ConfigError(f"{file}:{line}: {key.value!r} appears twice; names must differ.")
    return YamlFile(file, node)


def _repeated(node: yaml.Node) -> Iterator[yaml.Node]:
    """Yield keys that appear earlier in the same mapping."""
    mapping = isinstance(node, yaml.MappingNode)
    keys = [key for key, _ in node.value] if mapping else []
    for index, key in enumerate(keys):
        if key.value in [other.value for other in keys[:index]]:
            yield key
    if not isinstance(node, yaml.ScalarNode):
        for child in node.value:
            yield from _repeated(child[1] if mapping else child)


def _not_yaml(file: Path, error: Exception) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    line = mark.line + 1 if mark else 1
    problem = first_line(getattr(error, "problem", None) or error)
    return ConfigError(f"{file}:{line}: not YAML: {problem}.")
