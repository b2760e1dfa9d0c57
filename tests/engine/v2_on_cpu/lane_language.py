# SPDX-License-Identifier: Apache-2.0
"""Functions of `triton.language` in numpy, for all programs of a launch at once."""

from typing import Any

import numpy as np
import triton.language as tl
from lane_values import Unknown, Value, aligned, common, dtype_of, operate, value_of
from triton.runtime import interpreter

MEMORY = interpreter._interpreter


def _reduced(x: Value, axis: int | None) -> tuple[np.ndarray, int]:
    return (x.data.reshape(len(x.data), -1), 1) if axis is None else (x.data, axis + 1)


class Language:
    """Replaces `triton.language` in kernels, and runs some programs of a launch at once.

    Attributes:
        stored: All stores of a launch so far: addresses, previous values, mask.
    """

    def __init__(self) -> None:
        self.stored: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def begin(self, grid: tuple[int, ...], programs: np.ndarray) -> None:
        """Select the programs to run, as flat indices into the grid."""
        self._grid, self._places = grid, np.unravel_index(programs, grid)

    def take_back(self, since: int = 0) -> None:
        """Undo all stores except the first `since`."""
        while len(self.stored) > since:
            MEMORY.store(*self.stored.pop())

    def __getattr__(self, name: str) -> Any:
        found = getattr(tl, name, None)
        if isinstance(found, tl.dtype) or name in ("pointer_type", "constexpr"):
            return found
        raise Unknown(f"tl.{name}")

    def program_id(self, axis: int) -> Value:
        return Value(self._places[axis].astype(np.int32))

    def num_programs(self, axis: int) -> Value:
        return Value(np.array([self._grid[axis]], np.int32))

    def load(self, pointer: Value, mask: Any = None, other: Any = None, **_: Any) -> Value:
        points = pointer.points
        if points is None:
            raise Unknown("a load of no address")
        bound = value_of(True if mask is None else mask)
        rest = value_of(0 if other is None else other)
        where, mask_data = aligned(pointer.data, bound.data)
        where, rest_data = aligned(where, rest.data)
        where, mask_data, rest_data = np.broadcast_arrays(
            where, mask_data, rest_data.astype(points)
        )
        return Value(MEMORY.load(where, mask_data.astype(bool), rest_data, points))

    def store(self, pointer: Value, value: Any, mask: Any = None, **_: Any) -> None:
        points = pointer.points
        if points is None:
            raise Unknown("a store to no address")
        where, data = aligned(pointer.data, value_of(value).data)
        where, bound = aligned(where, value_of(True if mask is None else mask).data)
        where, data, bound = np.broadcast_arrays(where, data.astype(points), bound.astype(bool))
        self._remember(where, bound, points)
        MEMORY.store(where, data, bound)

    def _remember(self, where: np.ndarray, mask: np.ndarray, dtype: np.dtype) -> None:
        before = MEMORY.load(where, mask, np.zeros(where.shape, dtype), dtype)
        self.stored.append((where, before, mask))

    def _atomic(self, kind: Any, pointer: Value, value: Any, mask: Any) -> None:
        count = len(self._places[0])
        where, data = aligned(pointer.data, value_of(value).data.astype(pointer.points))
        where, bound = aligned(where, value_of(True if mask is None else mask).data)
        where, data, bound = np.broadcast_arrays(where, data, bound.astype(bool))
        shape = (count, *where.shape[1:])
        where, data, bound = (
            np.ascontiguousarray(np.broadcast_to(x, shape)) for x in (where, data, bound)
        )
        self._remember(where, bound, data.dtype)
        MEMORY.atomic_rmw(kind, where, data, bound, MEMORY.MEM_SEMANTIC.ACQUIRE_RELEASE)

    def atomic_add(self, pointer: Value, value: Any, mask: Any = None, **_: Any) -> None:
        self._atomic(MEMORY.RMW_OP.ADD, pointer, value, mask)

    def atomic_or(self, pointer: Value, value: Any, mask: Any = None, **_: Any) -> None:
        self._atomic(MEMORY.RMW_OP.OR, pointer, value, mask)

    def range(self, *bounds: Any, **_: Any) -> Any:
        """Return a loop with the same number of steps in all programs; starts may differ."""
        if not any(isinstance(bound, Value) for bound in bounds):
            return range(*bounds)
        start, stop, step = (0, bounds[0], 1) if len(bounds) == 1 else (*bounds, 1)[:3]
        start = value_of(start)
        count = ((stop - start + (step - 1)) // step).__index__()
        return (start + step * turn for turn in range(count))

    static_range = range

    @staticmethod
    def arange(start: int, stop: int) -> Value:
        return Value(np.arange(start, stop, dtype=np.int32)[None])

    @staticmethod
    def full(shape: Any, value: Any, dtype: Any) -> Value:
        return Value(np.full((1, *shape), value, dtype_of(dtype)[0]))

    def zeros(self, shape: Any, dtype: Any) -> Value:
        return self.full(shape, 0, dtype)

    @staticmethod
    def cast(x: Any, dtype: Any) -> Value:
        return value_of(x).to(dtype)

    @staticmethod
    def where(condition: Any, x: Any, y: Any) -> Value:
        one, two = common(x, y)
        chosen, one = aligned(value_of(condition).data.astype(bool), one)
        one, two = aligned(one, two)
        chosen, one = aligned(chosen, one)
        return Value(np.where(chosen, one, two))

    @staticmethod
    def maximum(x: Any, y: Any) -> Value:
        return operate(np.fmax, x, y)

    @staticmethod
    def minimum(x: Any, y: Any) -> Value:
        return operate(np.fmin, x, y)

    @staticmethod
    def max(x: Value, axis: int | None = None, return_indices: bool = False, **_: Any) -> Any:
        data, along = _reduced(x, axis)
        best = Value(np.nanmax(data, along))
        return (best, Value(np.nanargmax(data, along).astype(np.int32))) if return_indices else best

    @staticmethod
    def min(x: Value, axis: int | None = None, **_: Any) -> Value:
        return Value(np.nanmin(*_reduced(x, axis)))

    @staticmethod
    def argmax(x: Value, axis: int, **_: Any) -> Value:
        return Value(np.nanargmax(*_reduced(x, axis)).astype(np.int32))

    @staticmethod
    def sum(x: Value, axis: int | None = None, **_: Any) -> Value:
        dtype = np.dtype(np.int32) if x.data.dtype.kind == "b" else x.data.dtype
        return Value(np.sum(*_reduced(Value(x.data.astype(dtype)), axis)).astype(dtype))

    @staticmethod
    def cumsum(x: Value, axis: int = 0, **_: Any) -> Value:
        return Value(np.cumsum(x.data, axis + 1).astype(x.data.dtype))

    @staticmethod
    def exp(x: Value) -> Value:
        return Value(np.exp(x.data))

    @staticmethod
    def log(x: Value) -> Value:
        return Value(np.log(x.data))

    @staticmethod
    def abs(x: Value) -> Value:
        return Value(np.abs(x.data))

    @staticmethod
    def cdiv(x: Any, by: Any) -> Any:
        return (x + (by - 1)) // by

    @staticmethod
    def reshape(x: Value, *shape: Any) -> Value:
        return x.reshape(*shape)

    @staticmethod
    def multiple_of(x: Value, _: Any) -> Value:
        return x

    @staticmethod
    def debug_barrier() -> None:
        """Do nothing, because each operation ends in all programs before the next one begins."""
