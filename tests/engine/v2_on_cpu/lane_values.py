# SPDX-License-Identifier: Apache-2.0
"""Numbers and addresses of a kernel in all programs of a launch, with Triton's types."""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

ADDRESS = np.dtype(np.uint64)


class Unknown(Exception):
    """Raised if a kernel needs an operation that only Triton's interpreter has."""


class Parting(Exception):
    """Raised if programs take different branches; `keys` [programs] contains each one's branch."""

    def __init__(self, keys: np.ndarray) -> None:
        self.keys = keys


def dtype_of(ty: Any) -> tuple[np.dtype, np.dtype | None]:
    """Return numpy's type for a Triton type; for a pointer, also the type of its elements."""
    if isinstance(ty, tl.pointer_type):
        return ADDRESS, dtype_of(ty.element_ty)[0]
    if ty in (tl.bfloat16, tl.float16) or ty.is_fp8():
        raise Unknown(str(ty))
    return interpreter._get_np_dtype(ty), None


class Value:
    """The values of one variable in all programs.

    Attributes:
        data: [programs, *shape], or [1, *shape] if it is the same in all programs.
        points: Type of the elements that an address points to; None for numbers.
    """

    __slots__ = ("data", "points")

    def __init__(self, data: np.ndarray, points: np.dtype | None = None) -> None:
        self.data, self.points = data, points

    def __getattr__(self, name: str) -> Any:
        raise Unknown(f"{name} of a value")

    def to(self, ty: Any, *_: Any, **__: Any) -> "Value":
        dtype, points = dtype_of(ty)
        return Value(self.data.astype(dtype, copy=False), points)

    def reshape(self, *shape: Any) -> "Value":
        flat = shape[0] if isinstance(shape[0], (list, tuple)) else shape
        return Value(self.data.reshape(len(self.data), *flat), self.points)

    def __getitem__(self, key: Any) -> "Value":
        key = key if isinstance(key, tuple) else (key,)
        return Value(self.data[(slice(None), *key)], self.points)

    def _alike(self) -> Any:
        """Return the value if it is the same in all programs, or raise `Parting`."""
        if self.data.ndim != 1:
            raise Unknown("a block decides")
        if (self.data != self.data[0]).any():
            raise Parting(self.data)
        return self.data[0]

    def __bool__(self) -> bool:
        return bool(self._alike())

    def __index__(self) -> int:
        return int(self._alike())

    def __neg__(self) -> "Value":
        return Value(-self.data)

    def __invert__(self) -> "Value":
        return Value(~self.data)

    def __add__(self, other: Any) -> "Value":
        if self.points is not None:
            offset, address = aligned(value_of(other).data, self.data)
            size = np.uint64(self.points.itemsize)
            return Value(address + offset.astype(ADDRESS) * size, self.points)
        return value_of(other) + self if _points(other) else operate(np.add, self, other)

    def __sub__(self, other: Any) -> "Value":
        if self.points is not None:
            return self + -value_of(other)
        return operate(np.subtract, self, other)

    def __floordiv__(self, other: Any) -> "Value":
        a, b = common(self, other)
        if a.dtype.kind == "f":
            raise Unknown("// of floats")
        return Value((a - np.fmod(a, b)) // b)

    def __truediv__(self, other: Any) -> "Value":
        a, b = common(self, other)
        if a.dtype.kind != "f":
            a, b = a.astype(np.float32), b.astype(np.float32)
        return Value(np.divide(a, b))

    def __rtruediv__(self, other: Any) -> "Value":
        return value_of(other, self) / self


def _points(x: Any) -> bool:
    return isinstance(x, Value) and x.points is not None


def _method(name: str, operation: Callable[..., np.ndarray]) -> None:
    def method(self: Value, other: Any) -> Value:
        return operate(operation, self, other)

    def reflected(self: Value, other: Any) -> Value:
        return operate(operation, other, self)

    if f"__{name}__" not in Value.__dict__:
        setattr(Value, f"__{name}__", method)
    if name == "add":
        Value.__radd__ = Value.__add__
    elif name not in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Value, f"__r{name}__", reflected)


for _name, _operation in {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "mod": np.fmod,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "lshift": np.left_shift, "rshift": np.right_shift,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq": np.equal, "ne": np.not_equal,
}.items():  # fmt: skip
    _method(_name, _operation)


def value_of(x: Any, like: Value | None = None) -> Value:
    """Return the `Value` of a number.

    It has the type of `like` if that type is of the same kind or a higher one.
    """
    if isinstance(x, Value):
        return x
    if isinstance(x, tl.constexpr):
        return value_of(x.value, like)
    if isinstance(x, bool):
        dtype = np.dtype(bool)
    elif isinstance(x, int):
        fits = [np.int32, np.uint32, np.int64, np.uint64]
        dtype = next(np.dtype(d) for d in fits if np.iinfo(d).min <= x <= np.iinfo(d).max)
    elif isinstance(x, float):
        dtype = np.dtype(np.float32)
    else:
        raise Unknown(f"a {type(x).__name__}")
    if like is not None and like.points is None and _kind(dtype) <= _kind(like.data.dtype):
        if dtype.kind in "iu" and like.data.dtype.kind in "iu":
            return Value(np.array([x & (1 << 64) - 1], np.uint64).astype(like.data.dtype))
        dtype = like.data.dtype
    return Value(np.array([x], dtype))


def _kind(dtype: np.dtype) -> int:
    return {"b": 0, "u": 1, "i": 1, "f": 2}[dtype.kind]


def common(a: Any, b: Any) -> tuple[np.ndarray, np.ndarray]:
    """Convert both to the type in which Triton computes, and align their dimensions."""
    a, b = (
        value_of(a, b if isinstance(b, Value) else None),
        value_of(b, a if isinstance(a, Value) else None),
    )
    one, two = a.data.dtype, b.data.dtype
    if one != two:
        if "f" in (one.kind, two.kind):
            to = max((d for d in (one, two) if d.kind == "f"), key=lambda d: d.itemsize)
        elif "b" in (one.kind, two.kind):
            to = two if one.kind == "b" else one
        else:  # the larger one; at equal size, the unsigned one
            to = max(one, two, key=lambda d: (d.itemsize, d.kind == "u"))
        return aligned(a.data.astype(to), b.data.astype(to))
    return aligned(a.data, b.data)


def aligned(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reshape so that one number for each program broadcasts over the block of that program."""
    if a.ndim != b.ndim:
        if 1 not in (a.ndim, b.ndim):
            raise Unknown("blocks of different dimensions")
        if a.ndim == 1:
            a = a.reshape(-1, *(1 for _ in b.shape[1:]))
        else:
            b = b.reshape(-1, *(1 for _ in a.shape[1:]))
    return a, b


def operate(operation: Callable[..., np.ndarray], a: Any, b: Any) -> Value:
    """Apply an operation of numpy to both in the type in which Triton computes."""
    one, two = common(a, b)
    if one.dtype.kind == "b" and operation in (np.add, np.subtract, np.multiply):
        raise Unknown("arithmetic of truth values")
    return Value(operation(one, two))
