# SPDX-License-Identifier: Apache-2.0
"""Simulate CUDA graphs without a GPU: record the operations of a function and replay them.

A replay runs no Python, so results differ if the function depended on a constant, a new tensor or a
branch. The tape refuses what a capture refuses: reading a value on the host, shapes that depend on
values, and copies between host and device. It keeps only tensors that it created itself.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten
_REFUSED = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.item.default,
    aten.is_nonzero.default,
    aten.unique_dim.default,
    aten._unique2.default,
}


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Any]]] = []
        self._made: dict[int, tuple[int, torch.Tensor]] = {}  # id -> number on the tape, tensor
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _REFUSED:
            raise RuntimeError(f"{func} cannot be captured: it waits for the device")
        if func is aten.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        ):
            raise RuntimeError("indexing by a boolean mask cannot be captured")
        noted = tree_map(self._note, (args, kwargs))
        result = func(*args, **kwargs)
        if func in (aten.copy_.default, aten._to_copy.default):
            target = args[0] if func is aten.copy_.default else result
            source = args[1] if func is aten.copy_.default else args[0]
            if target.device != source.device:
                raise RuntimeError(f"{func} between host and device cannot be captured")
        outs = []
        for out in tree_flatten(result)[0]:
            if isinstance(out, torch.Tensor) and id(out) not in self._made:
                self._made[id(out)] = self._count, out
                self._count += 1
            outs.append(self._made[id(out)][0] if isinstance(out, torch.Tensor) else None)
        self.calls.append((func, *noted, outs))
        return result

    def _note(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in self._made:
            return _Made(self._made[id(value)][0])
        return _Outside(value)

    def finish(self) -> None:
        """Release all tensors that were created during the recording."""
        self._made.clear()


class _Made:
    def __init__(self, number: int) -> None:
        self.number = number


class _Outside:
    """A tensor from outside of the tape; it must exist, at the same address, in each replay."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._address = tensor.data_ptr()

    def get(self) -> torch.Tensor:
        tensor = self._tensor()
        if tensor is None:
            raise RuntimeError("a replay reads a tensor that nobody keeps")
        if tensor.data_ptr() != self._address:
            raise RuntimeError("a replay reads a tensor that has moved")
        return tensor


class TapeGraphs:
    """Records on a CPU; `capture` is a `Capture`. Counts the tapes and the replays of all tapes."""

    def __init__(self) -> None:
        self.replays = 0
        self.captured = 0

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        work()  # warm-up, which a real capture needs too
        tape = _Tape()
        with tape:
            work()
        tape.finish()
        self.captured += 1

        def replay() -> None:
            self.replays += 1
            made: dict[int, torch.Tensor] = {}

            def now(value: Any) -> Any:
                if isinstance(value, _Made):
                    return made[value.number]
                return value.get() if isinstance(value, _Outside) else value

            for func, args, kwargs, outs in tape.calls:
                args, kwargs = tree_map(now, (args, kwargs))
                result = func(*args, **kwargs)
                for number, out in zip(outs, tree_flatten(result)[0], strict=True):
                    if number is not None:
                        made[number] = out

        return replay
