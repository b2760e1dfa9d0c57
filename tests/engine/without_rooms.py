# SPDX-License-Identifier: Apache-2.0
"""Run pytest while modules of optional features are empty: `without_rooms.py ROOM[,ROOM] ARGS...`.

Each name in such a module is a class whose constructor returns None. The lines that compose the
feature then run without effect, and code that needs the feature fails.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent


class Absent(metaclass=_Anything):
    """Stands in for every name of an empty module, and for its submodules."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return None


class EmptyModule(ModuleType):
    """A module in which each name is `Absent`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Absent,), {})


class Finder(MetaPathFinder, Loader):
    """Finds the modules of some rooms, and loads each as an empty module."""

    def __init__(self, rooms: Sequence[str]) -> None:
        self._rooms = tuple(f"vllm_hetero_spec.{room}" for room in rooms)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_empty = any(name == room or name.startswith(f"{room}.") for room in self._rooms)
        return ModuleSpec(name, self, is_package=True) if is_empty else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


if __name__ == "__main__":
    sys.meta_path.insert(0, Finder(sys.argv[1].split(",")))
    sys.exit(pytest.main(sys.argv[2:]))
