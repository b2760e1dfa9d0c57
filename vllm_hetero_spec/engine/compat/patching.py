# SPDX-License-Identifier: Apache-2.0
"""Replacing one attribute of vLLM, once, by name.

Every replacement goes through `replace`: it refuses a target that does not exist and does nothing
where the same patch stands already, because vLLM runs plugins several times and in every process.
"""

import functools
from collections.abc import Callable
from dataclasses import fields
from types import ModuleType
from typing import Any

_MARK = "__vllm_hetero_spec_patch__"
Function = Callable[..., Any]  # of vLLM, or what takes its place


class PatchError(RuntimeError):
    """A patch whose target is missing, or that another patch of ours already holds."""


def replace(
    owner: type | ModuleType, name: str, patch: str, make: Callable[[Function], Function]
) -> bool:
    """Put `make(original)` in the place of `owner.name`.

    Args:
        owner: A class or module; the attribute must be its own, not inherited.
        name: The attribute.
        patch: Name of this patch, for the marker on the replacement.
        make: Builds the replacement from the original function; where the attribute is a static or
            class method or a property, from the function behind it, and the result becomes one
            again.

    Returns:
        False where this patch stands already.

    Raises:
        PatchError: No such attribute, or a different patch of ours holds it.
    """
    if name not in vars(owner):
        raise PatchError(f"{_label(owner)}.{name} does not exist; patch {patch!r} has no target")
    held = vars(owner)[name]
    kind = type(held) if isinstance(held, staticmethod | classmethod | property) else None
    original, holder = _function(held), standing(owner, name)
    if holder == patch:
        return False
    if holder is not None:
        raise PatchError(f"{_label(owner)}.{name} is held by {holder!r}; {patch!r} refused")
    made = functools.wraps(original)(make(original))
    setattr(made, _MARK, patch)
    setattr(owner, name, kind(made) if kind else made)
    return True


def standing(owner: type | ModuleType, name: str) -> str | None:
    """The patch of ours that holds `owner.name`, None where there is none."""
    return getattr(_function(vars(owner).get(name)), _MARK, None)


def _function(held: Any) -> Any:
    """What is called, of a method of any kind or a property."""
    return held.fget if isinstance(held, property) else getattr(held, "__func__", held)


def add(owner: type, name: str, value: object) -> None:
    """Give `owner` an attribute that it must not have yet, other than this very value.

    Raises:
        PatchError: The attribute exists with another value.
    """
    if name in vars(owner) and vars(owner)[name] is not value:
        raise PatchError(f"{_label(owner)}.{name} exists already")
    setattr(owner, name, value)


def add_fields(owner: type, template: type) -> None:
    """Give dataclass `owner` the fields of dataclass `template`, each with a plain default.

    They are fields to serializers, and attributes with their default on every instance; the
    constructor does not take them.

    Raises:
        PatchError: `owner` is no dataclass, or has such a field of its own.
    """
    standing_fields = vars(owner).get("__dataclass_fields__")
    if standing_fields is None:
        raise PatchError(f"{_label(owner)} is no dataclass")
    for added in fields(template):
        standing = standing_fields.setdefault(added.name, added)
        if standing is not added:
            raise PatchError(f"{_label(owner)} has a field {added.name!r} already")
        owner.__annotations__[added.name] = added.type
        setattr(owner, added.name, added.default)


def _label(owner: type | ModuleType) -> str:
    return getattr(owner, "__qualname__", owner.__name__)
