# SPDX-License-Identifier: Apache-2.0
"""Replacement of attributes of vLLM, once and by name.

vLLM loads plugins several times and in every process. Therefore `replace` does nothing if the same
patch is installed already. It raises an error if the target does not exist.
"""

import functools
from collections.abc import Callable
from dataclasses import fields
from types import ModuleType
from typing import Any

_MARK = "__vllm_hetero_spec_patch__"
Function = Callable[..., Any]  # of vLLM, or its replacement


class PatchError(RuntimeError):
    """The target of a patch is missing, or another patch of ours has replaced it."""


def replace(
    owner: type | ModuleType, name: str, patch: str, make: Callable[[Function], Function]
) -> bool:
    """Replace `owner.name` by `make(original)`. Return False if this patch is installed already.

    For a static method, class method or property, `make` receives the underlying function, and the
    result is wrapped again. The attribute must be the owner's own, not inherited.

    Raises:
        PatchError: The attribute does not exist, or has another patch of ours.
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


def wrap(owner: type | ModuleType, name: str, patch: str, around: Function) -> bool:
    """Replace a function as `replace` does, by `around(original, *args, **kwargs)`."""
    return replace(
        owner, name, patch, lambda original: lambda *args, **named: around(original, *args, **named)
    )


def standing(owner: type | ModuleType, name: str) -> str | None:
    """Return the name of our patch of `owner.name`; None without one."""
    return getattr(_function(vars(owner).get(name)), _MARK, None)


def _function(held: Any) -> Any:
    """Return the underlying function of a property or a method of any kind."""
    return held.fget if isinstance(held, property) else getattr(held, "__func__", held)


def add(owner: type, name: str, value: object) -> None:
    """Add an attribute to `owner`. Idempotent. Raise PatchError if it has another value."""
    if name in vars(owner) and vars(owner)[name] is not value:
        raise PatchError(f"{_label(owner)}.{name} exists already")
    setattr(owner, name, value)


def add_fields(owner: type, template: type) -> None:
    """Add the fields of dataclass `template`, each with a plain default, to dataclass `owner`.

    Serializers see them as fields, and every instance has their default as an attribute. The
    constructor does not accept them. Raises PatchError if `owner` has its own field of that name.
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
