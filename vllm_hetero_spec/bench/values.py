# SPDX-License-Identifier: Apache-2.0
"""Types of values in a suite file: numbers, texts, names of models and files."""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, ValidationInfo

from vllm_hetero_spec.bench.yaml_file import Mistake
from vllm_hetero_spec.errors import ConfigError, nearest
from vllm_hetero_spec.inputs.model_folder import check_model
from vllm_hetero_spec.paths import demo_folder

Item = TypeVar("Item")
_DEMO = "demo:"


def _not_blank(value: str) -> str:
    if not value.strip():
        raise Mistake(f"is {value!r}; it must be a text.")
    return value


def _distinct(values: Any) -> Any:
    names = [getattr(value, "name", value) for value in values]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise Mistake(f"repeats {name!r}; names and values must differ.", index)
    return values


def check_choice(name: str, choices: Collection[str], *place: int | str) -> str:
    """Refuse, at a place, all but some names."""
    if name not in choices:
        raise Mistake(
            f"is {name!r}{nearest(name, choices)}; supported: {', '.join(choices)}.", *place
        )
    return name


def one_of(choices: Collection[str]) -> AfterValidator:
    """A text among some."""
    return AfterValidator(lambda name: check_choice(name, choices))


def located(name: str, info: ValidationInfo) -> str:
    """A path in a suite: of the demo pair, or relative to the suite's folder.

    Raises:
        ConfigError: The demo pair is not there.
    """
    if not name.startswith(_DEMO):
        return str(Path(info.context or "") / Path(name).expanduser())
    path = demo_folder() / name.removeprefix(_DEMO)
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist: make the demo pair with `python scripts/make_demo.py`."
        )
    return str(path)


def _model(role: str) -> AfterValidator:
    """A Hugging Face name, or the absolute path of a folder that holds a model."""

    def check(name: str, info: ValidationInfo) -> str:
        if name.startswith((_DEMO, "./", "../", "~", "/")):
            name = str(Path(located(name, info)).absolute())
        return check_model(name, role)

    return AfterValidator(check)


Text = Annotated[str, Field(strict=True), AfterValidator(_not_blank)]
Positive = Annotated[int, Field(strict=True, ge=1, le=1 << 31)]
# One or more, no two of them alike.
Several = Annotated[tuple[Item, ...], Field(min_length=1), AfterValidator(_distinct)]
TargetName = Annotated[Text, _model("target")]
DrafterName = Annotated[Text, _model("drafter")]
