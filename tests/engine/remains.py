# SPDX-License-Identifier: Apache-2.0
"""Find references to requests in objects of this package, to test that ended ones leave none."""

from collections.abc import Iterator, Mapping, Set
from typing import Any

PACKAGE = "vllm_hetero_spec"
NAME = "request-called-"  # prefix of the request ids; vLLM appends a suffix


def _parts(thing: object) -> Iterator[tuple[str, object]]:
    if isinstance(thing, Mapping):
        yield from (("{keys}", key) for key in thing)
        yield from ((f"[{key!r}]", value) for key, value in thing.items())
    elif isinstance(thing, list | tuple | Set):
        yield from ((f"[{index}]", value) for index, value in enumerate(thing))
    elif type(thing).__module__.startswith(PACKAGE):
        yield from ((f".{name}", value) for name, value in getattr(thing, "__dict__", {}).items())
        for slots in (getattr(kind, "__slots__", ()) for kind in type(thing).__mro__):
            yield from ((f".{name}", getattr(thing, name, None)) for name in slots)


def remains(root: Any) -> list[str]:
    """Return the attribute paths from `root` to strings that begin with `NAME`."""
    found: list[str] = []
    seen: set[int] = set()
    todo: list[tuple[str, object]] = [("", root)]
    while todo:
        path, thing = todo.pop()
        if isinstance(thing, str):
            if thing.startswith(NAME):
                found.append(path)
            continue
        if id(thing) not in seen:
            seen.add(id(thing))
            todo += [(path + step, part) for step, part in _parts(thing)]
    return found
