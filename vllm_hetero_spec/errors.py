# SPDX-License-Identifier: Apache-2.0
"""Error messages for users. Each is one sentence: what was found, what is supported, how to fix it.

Models of pydantic check the input, and `checked` turns a `ValidationError` into a sentence. A class
that derives from `Table` names its keys if one is misspelt. A validator raises `Mistake` if
pydantic's own message does not name what is supported. `must`, `between`, `whole` and `one_of`
build such validators.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from types import GenericAlias
from typing import Annotated, Any, TypeVar

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.dataclasses import dataclass

Model = TypeVar("Model")
_NUMBER = TypeAdapter[Any](Annotated[int | float, Field(union_mode="left_to_right")])

Place = tuple[int | str, ...]  # keys and indices that lead to a value

# Expected values, by the type of pydantic's error.
_MUST = {
    "dataclass_type": "a mapping of keys",
    "dict_type": "a mapping of keys",
    "tuple_type": "a list of one or more",
    "too_short": "a list of one or more",
    "string_type": "a string",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "greater_than_equal": "a number from {ge}",
    "greater_than": "a number above {gt}",
    "less_than_equal": "a number up to {le}",
}


class ConfigError(ValueError):
    """A speculative configuration is refused at start-up; the message is one sentence."""


class Mistake(ValueError):
    """The rest of a sentence that begins with the name of the wrong value.

    Args:
        rest: For example "is 3; it must be a string."
        place: Path from the checked value to the wrong one.
        line_of: Path from the wrong value to the key whose line an error in a file names.
    """

    def __init__(self, rest: str, *place: int | str, line_of: Place = ()) -> None:
        super().__init__(rest)
        self.place, self.line_of = place, line_of


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Table:
    """A mapping whose only keys are the fields of its class."""

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, given: Any) -> Any:
        known = [each.name for each in fields(cls) if each.name not in cls.not_in_files()]
        for key in given if isinstance(given, Mapping) else ():
            if key not in known:
                rest = f"{key!r}{nearest(key, known)}; supported: {', '.join(known)}."
                raise Mistake(f"has an unknown key {rest}", line_of=(key,))
        return given

    @classmethod
    def not_in_files(cls) -> Iterable[str]:
        """Fields that users cannot set."""
        return ()


def number(value: Any) -> Any:
    """Parse a number that may be given as text. Return other values unchanged."""
    try:
        return value if isinstance(value, bool) else _NUMBER.validate_python(value)
    except ValueError:
        return value


def must(
    be: str, right: Callable[[Any], bool], read: Callable[[Any], Any] = lambda value: value
) -> BeforeValidator:
    """Build a validator: parse with `read`, then check with `right`. `be` completes the message."""

    def check(value: Any) -> Any:
        if not right(found := read(value)):
            given = "missing" if value is None else repr(value)
            raise Mistake(f"is {given}; it must be {be}.")
        return found

    return BeforeValidator(check)


def between(low: float, high: float, be: str, kind: Any = int | float) -> BeforeValidator:
    """Build a validator for a number in a range, also if it is given as text."""

    def right(value: Any) -> bool:
        return isinstance(value, kind) and not isinstance(value, bool) and low <= value <= high

    return must(be, right, number)


def whole(low: int, high: int) -> BeforeValidator:
    """Build a validator for a whole number in a range, also if it is given as text."""
    return between(low, high, f"a whole number from {low} to {high}", int)


def one_of(words: Sequence[str], **tables: type) -> BeforeValidator:
    """Build a validator for one of `words`.

    A word with keys of its own, in `tables`, may be given as {word: {key: value}}.
    """

    def check(value: Any) -> Any:
        given = value if isinstance(value, Mapping) and len(value) == 1 else {str(value): {}}
        ((word, keys),) = given.items()
        if word in tables:
            alone: Any = GenericAlias(dict, (str, tables[word]))
            return TypeAdapter[Any](alone).validate_python({word: keys})[word]
        if value not in words and not isinstance(value, tuple(tables.values())):
            raise not_among(value, words)
        return value

    return BeforeValidator(check)


def first_mistake(error: ValidationError) -> tuple[Place, Exception]:
    """Return the first mistake that pydantic found.

    Returns:
        The place of the value, and a `Mistake`, or the exception that a validator raised.
    """
    found = error.errors()[0]
    kind, place, value = found["type"], found["loc"], found["input"]
    context = found.get("ctx", {})
    if kind == "value_error":
        return place, context["error"]
    if kind == "missing":
        return place[:-1], Mistake(f"has no {place[-1]}.")
    if kind == "literal_error":
        return place, not_among(value, re.findall(r"'([^']*)'", context["expected"]))
    must = f"it must be {_MUST[kind].format(**context)}" if kind in _MUST else found["msg"]
    return place, Mistake(f"is {value!r}; {must}.")


def checked(model: type[Model], given: Any, root: str) -> Model:
    """Convert a mapping to a model. `root` names the mapping in a message.

    Raises:
        ConfigError: The first mistake, in one sentence.
    """
    try:
        return TypeAdapter(model).validate_python(given)
    except ValidationError as error:
        raise ConfigError(sentence(*first_mistake(error), root)) from None


def sentence(place: Place, error: Exception, root: str) -> str:
    """Describe a mistake in one sentence. `place` is the path of the value that was checked."""
    if isinstance(error, Mistake):
        return f"{named((*place, *error.place)) or root} {error}"
    return str(error)


def named(place: Sequence[int | str]) -> str:
    """Format a path as a name, for example "targets[0].model"."""
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return name.removeprefix(".")


def not_among(value: Any, choices: Iterable[str]) -> Mistake:
    """A value that is not among the choices."""
    choices = list(choices)
    return Mistake(f"is {value!r}{nearest(value, choices)}; supported: {', '.join(choices)}.")


def first_line(error: object) -> str:
    """The first line of an error message without its full stop. The rest may be pages long."""
    return str(error).strip().split("\n")[0].rstrip(".")


def one_line(text: object) -> str:
    """Join all lines of a text."""
    return " ".join(str(text).split())


def nearest(word: Any, choices: Iterable[str]) -> str:
    """A question that names the most similar choice; empty if none is similar."""
    near = difflib.get_close_matches(str(word), list(choices), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
