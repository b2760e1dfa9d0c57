# SPDX-License-Identifier: Apache-2.0
"""Types of the values in a suite file, and a YAML reader that names the line of a mistake."""

from collections.abc import Iterator
from contextlib import contextmanager
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
    must,
    sentence,
)
from vllm_hetero_spec.inputs.model_folder import check_model
from vllm_hetero_spec.paths import demo_folder

Item = TypeVar("Item")
Model = TypeVar("Model", bound=Table)
_DEMO = "demo:"


def _distinct(values: Any) -> Any:
    names = [getattr(value, "name", value) for value in values]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise Mistake(f"repeats {name!r}; names and values must differ.", index)
    return values


def located(name: str, info: ValidationInfo) -> str:
    """Resolve "demo:..." in the demo folder, which must exist; others from the suite's folder."""
    if not name.startswith(_DEMO):
        return str(Path(info.context or "") / Path(name).expanduser())
    path = demo_folder() / name.removeprefix(_DEMO)
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist: the demo pair is not part of the installed package; make it "
            "with `python scripts/make_demo.py` of a checkout."
        )
    return str(path)


def model_name(role: str) -> AfterValidator:
    """Validator of a Hugging Face name or of a model folder, which becomes an absolute path."""

    def check(name: str, info: ValidationInfo) -> str:
        if name.startswith((_DEMO, "./", "../", "~", "/")):
            name = str(Path(located(name, info)).absolute())
        return check_model(name, role)

    return AfterValidator(check)


Text = Annotated[str, must("a string", lambda value: isinstance(value, str) and value.strip())]
Positive = Annotated[int, Field(strict=True, ge=1, le=1 << 31)]
# One or more different values.
Several = Annotated[tuple[Item, ...], Field(min_length=1), AfterValidator(_distinct)]


@dataclass(frozen=True)
class YamlFile:
    """A suite file, its tree of YAML nodes, and its content."""

    file: Path
    node: yaml.Node
    value: Any

    def checked(self, model: type[Model]) -> Model:
        """Convert the file to a model, or raise ConfigError about the first mistake.

        Validators receive the file's folder as their context.
        """
        try:
            return TypeAdapter(model).validate_python(self.value, context=self.file.parent)
        except ValidationError as error:
            raise self.refusal(*first_mistake(error)) from error

    @contextmanager
    def line_of(self, *place: int | str) -> Iterator[None]:
        """Add file and line to a refusal inside the context; it is about the value at a place."""
        try:
            yield
        except (ConfigError, Mistake) as error:
            raise self.refusal(place, error) from error

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


class _UniqueKeys(yaml.SafeLoader):
    """PyYAML accepts a key twice and keeps the last value; this loader refuses it."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for index, (key, _) in enumerate(node.value):
            if key.value in keys[:index]:
                problem = f"{key.value!r} appears twice; names must differ"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        return super().construct_mapping(node, deep)


def read_yaml(file: Path) -> YamlFile:
    """Read a YAML file; ConfigError if it is empty, no YAML or unreadable, or repeats a key."""
    try:
        loader = _UniqueKeys(file.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if node is None:
            raise ConfigError(f"{file}:1: the suite is empty.")
        return YamlFile(file, node, loader.construct_document(node))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the suite {file}: {error}.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = first_line(getattr(error, "problem", None) or error)
        raise ConfigError(f"{file}:{mark.line + 1 if mark else 1}: not YAML: {problem}.") from error
