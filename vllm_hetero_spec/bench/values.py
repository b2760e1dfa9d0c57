# SPDX-License-Identifier: Apache-2.0
"""Types of values in a suite file."""

from collections.abc import Collection
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field

from vllm_hetero_spec.bench.yaml_file import Mistake
from vllm_hetero_spec.errors import nearest

Item = TypeVar("Item")


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


Text = Annotated[str, Field(strict=True), AfterValidator(_not_blank)]
Positive = Annotated[int, Field(strict=True, ge=1, le=1 << 31)]
# One or more, no two of them alike.
Several = Annotated[tuple[Item, ...], Field(min_length=1), AfterValidator(_distinct)]
