# SPDX-License-Identifier: Apache-2.0
"""Run Triton's kernels in numpy, all programs of a launch at once.

Triton's own interpreter runs one program after the other, at about 50 us for each operation. Here
the first dimension of a value is the program, and an operation is one of numpy's. If programs take
different branches or loop lengths, their stores are undone and each group runs again.

Triton's interpreter runs kernels that need other operations (`UNKNOWN`). With V2_CHECK=1 it also
runs every launch, and both must store the same values.
"""

import functools
import inspect
import os
import types
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import triton.language as tl
from lane_language import MEMORY, Language
from lane_values import Parting, Unknown, Value, dtype_of
from triton.runtime import interpreter
from triton.runtime.jit import _normalize_ty

LANES = Language()
UNKNOWN: dict[str, str] = {}  # kernels that Triton's interpreter runs -> reason
_left_to_triton = interpreter.InterpretedFunction.run
# With V2_CHECK=1: addresses that Triton's interpreter stored to in this launch, and the number of
# compared launches by kernel.
CHECKED = os.environ.get("V2_CHECK") == "1"
TOUCHED: list[tuple[np.ndarray, np.dtype]] = []
COMPARED: Counter[str] = Counter()


class _Device:
    """A Triton function that kernels call."""

    def __init__(self, function: interpreter.InterpretedFunction) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _in_lanes(self._function.fn)(*args, **kwargs)


@functools.cache
def _in_lanes(function: types.FunctionType) -> types.FunctionType:
    """Return a copy of the function whose global `triton.language` is `LANES`."""
    scope = dict(function.__globals__) | {"range": LANES.range}
    for name, held in function.__globals__.items():
        if held is tl:
            scope[name] = LANES
        elif isinstance(held, tl.constexpr):
            scope[name] = held.value
        elif isinstance(held, interpreter.InterpretedFunction):
            scope[name] = _Device(held)
    made = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


@functools.cache
def _signature(function: types.FunctionType) -> tuple[inspect.Signature, set[str]]:
    """Return the signature, and the names of the `constexpr` arguments."""
    given = inspect.get_annotations(function)
    constants = {name for name, ty in given.items() if _normalize_ty(ty) == "constexpr"}
    return inspect.signature(function), constants


def _argument(x: Any) -> Any:
    held = interpreter._implicit_cvt(x)
    if isinstance(held, tl.tensor):
        _, points = dtype_of(held.type)
        return Value(held.handle.data, points)
    if held is None or isinstance(held, float):
        return held
    raise Unknown(f"an argument that is a {type(x).__name__}")


def _go(function: Callable, values: dict[str, Any], grid: tuple, programs: np.ndarray) -> None:
    LANES.begin(grid, programs)
    since = len(LANES.stored)
    try:
        function(**values)
    except Parting as parting:
        LANES.take_back(since)
        for key in np.unique(parting.keys):
            _go(function, values, grid, programs[parting.keys == key])


def _all_lanes(
    kernel: interpreter.InterpretedFunction, args: Sequence[Any], kwargs: dict, grid: Any
) -> None:
    """Run all programs of a launch. Its stores are in `LANES.stored`."""
    signature, constants = _signature(kernel.fn)
    bound = signature.bind(*args, **{k: v for k, v in kwargs.items() if k in signature.parameters})
    bound.apply_defaults()
    given = bound.arguments
    shape = tuple(grid(given) if callable(grid) else grid)
    LANES.stored.clear()
    if kernel.pre_run_hooks:
        raise Unknown("hooks")
    values = {k: v if k in constants else _argument(v) for k, v in given.items()}
    shape += (1,) * (3 - len(shape))
    with np.errstate(all="ignore"):
        _go(_in_lanes(kernel.fn), values, shape, np.arange(np.prod(shape)))


def _run(
    self: interpreter.InterpretedFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any
) -> None:
    """Replacement for `InterpretedFunction.run`."""
    name, ours = self.__name__, None
    if name not in UNKNOWN:
        try:
            _all_lanes(self, args, kwargs, grid)
            if not CHECKED:
                return
            ours = _contents((where[mask], data.dtype) for where, data, mask in LANES.stored)
        except Unknown as unknown:
            UNKNOWN[name] = str(unknown)
        LANES.take_back()
    TOUCHED.clear()
    _left_to_triton(self, *args, grid=grid, warmup=warmup, **kwargs)
    if ours is not None:
        theirs = _contents(TOUCHED)
        assert ours.keys() == theirs.keys(), f"{name} stores elsewhere"
        for size, (where, data) in ours.items():
            assert np.array_equal(where, theirs[size][0]), f"{name} stores elsewhere"
            assert np.array_equal(data, theirs[size][1]), f"{name} stores something else"
        COMPARED[name] += 1


def _contents(touched: Iterable[tuple[np.ndarray, np.dtype]]) -> dict[int, tuple]:
    """Return, by element size in bytes, the sorted addresses and their present contents."""
    sizes: dict[int, list[np.ndarray]] = {}
    for where, dtype in touched:
        sizes.setdefault(dtype.itemsize, []).append(where)
    found = {}
    for size, parts in sizes.items():
        where = np.unique(np.concatenate(parts))
        nothing = np.zeros(where.shape, f"u{size}")
        found[size] = where, MEMORY.load(where, where == where, nothing, nothing.dtype)
    return found


class _Recorded:
    """The memory of Triton's interpreter, which also records stores in `TOUCHED`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(MEMORY, name)

    def store(self, where: np.ndarray, data: np.ndarray, mask: np.ndarray) -> None:
        TOUCHED.append((where[mask], data.dtype))
        MEMORY.store(where, data, mask)

    def atomic_rmw(self, kind: Any, where: Any, data: Any, mask: Any, order: Any) -> np.ndarray:
        TOUCHED.append((where[mask], data.dtype))
        return MEMORY.atomic_rmw(kind, where, data, mask, order)


def install() -> None:
    """Make all later launches in this process run in numpy."""
    interpreter.InterpretedFunction.run = _run
    if CHECKED:
        interpreter._interpreter = _Recorded()
