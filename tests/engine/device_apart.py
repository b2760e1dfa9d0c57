# SPDX-License-Identifier: Apache-2.0
"""Simulate a device that is separate from the host, to find refused operations and waits.

The values of its tensors are in host memory, but host code cannot read them directly. Operations of
this package or of vLLM's workers on tensors of both sides are refused. Reads of values, indexing by
masks, blocking copies and waits for pending events are recorded with the lines that caused them.

PyTorch cannot remove such a device from a process, so tests use it in a child process.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import library
from torch._C import DispatchKey
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

HOST = torch.device("cpu")
aten = torch.ops.aten
_READS = {
    aten._local_scalar_dense.default,
    aten._unique2.default,
    aten.equal.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten.repeat_interleave.Tensor,
}
_INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
_COPIES = {aten.copy_.default, aten._to_copy.default}
# Code that may not mix host and device. Models and kernels may: their weights are on the host.
_STRICT = ("/vllm_hetero_spec/", "/v1/worker/", "/apart_engines.py")


class _Module(backend_registration._DummyBackendModule):
    """The functions that PyTorch requires of a device module."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.zeros(1)

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        pass


backend_registration._setup_privateuseone_for_python_backend("apart", backend_module=_Module())
DEVICE = torch.device("apart", 0)


class Wait(NamedTuple):
    """One operation that waited for the device.

    Attributes:
        operation: PyTorch's name of it.
        lines: Its call stack as "file:line", innermost first, without PyTorch's own files.
    """

    operation: str
    lines: Sequence[str]

    @property
    def line(self) -> str:
        """The innermost line, without the folder."""
        return self.lines[0].rpartition("/")[2]

    @property
    def ours(self) -> bool:
        """True if the innermost line is in this package."""
        return "/vllm_hetero_spec/" in self.lines[0]


class Queued(NamedTuple):
    """Operations on the device so far.

    Attributes:
        waits: Operations that waited for the device.
        ours: Number of operations of this package, by line, without views and empty tensors.
        events: Waits for events that were still pending.
    """

    waits: list[Wait]
    ours: Counter[str]
    events: list[Wait]


class Apart(torch.Tensor):
    """A tensor on the device. `here` is a tensor on the host with its values."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    here: torch.Tensor

    @staticmethod
    def __new__(cls, here: torch.Tensor) -> "Apart":
        made: Apart = torch.Tensor._make_wrapper_subclass(
            cls,
            here.shape,
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=DEVICE,
        )
        made.here = here
        return made

    def data_ptr(self) -> int:
        return self.here.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def untyped_storage(self) -> Any:
        """Return a storage of size 0, so that no caller finds that a view covers all of it."""
        return SimpleNamespace(data_ptr=self.here.untyped_storage().data_ptr, nbytes=lambda: 0)

    def __repr__(self, **_: Any) -> str:
        return f"Apart({self.here})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} outside of `device_apart`")


def _lines() -> list[str]:
    frame, found = sys._getframe(2), []
    while frame is not None and len(found) < 8:
        name = frame.f_code.co_filename
        if "/torch/" not in name and name != __file__:
            found.append(f"{name}:{frame.f_lineno}")
        frame = frame.f_back
    return found


def _is_apart(device: Any) -> bool:
    return torch.device(device).type == DEVICE.type


def _values(value: Any) -> Any:
    return value.here if isinstance(value, Apart) else value


class _Computing(TorchDispatchMode):
    """Runs operations of the device on the host, and records them."""

    def __init__(self, queued: Queued) -> None:
        super().__init__()
        self._queued = queued

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        with self:
            if func.namespace == "vllm":  # implemented in Python, by other operations
                return func._op_dk(DispatchKey.CPU, *args, **kwargs)
            if func.namespace == "aten":  # composite ones arrive undecomposed in inference mode
                found = func.decompose(*args, **kwargs)
                if found is not NotImplemented:
                    return found
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        there = {id(each.here): each for each in tensors if isinstance(each, Apart)}
        here = {id(each): each for each in tensors if not isinstance(each, Apart)}
        device = kwargs.pop("device", None)
        to_device = bool(there) if device is None else _is_apart(device)
        if device is not None:
            kwargs["device"] = HOST
        kwargs.pop("pin_memory", None)
        if func is aten.copy_.default:
            to_device = isinstance(args[0], Apart)
        elif not tensors and any("/vllm/_custom_ops.py" in line for line in _lines()[:2]):
            to_device = True  # CPU kernels create host tensors, also during a recording
        self._judge(func, args, kwargs, there, here, to_device)
        args, kwargs = tree_map(_values, (args, kwargs))
        with torch.inference_mode(mode=False):
            found = func(*args, **kwargs)
            known = here | there

            def placed(value: Any) -> Any:
                if not isinstance(value, torch.Tensor) or id(value) in known:
                    return known.get(id(value), value)
                return Apart(value) if to_device else value

            return tree_map(placed, found)

    def _judge(
        self, func: Any, args: Any, kwargs: Any, there: dict, here: dict, to_device: bool
    ) -> None:
        if func in _COPIES:
            crosses = (bool(there) or to_device) and (bool(here) or not to_device)
            background = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            waits = crosses and not background
        else:
            if there and any(each.dim() for each in here.values()):
                lines = _lines()
                if any(name in lines[0] for name in _STRICT):
                    raise RuntimeError(f"{func} of tensors on two devices, at {lines[0]}")
            masks = func in _INDEXING and any(
                index is not None and index.dtype == torch.bool for index in args[1]
            )
            waits = bool(there) and (func in _READS or masks)
        if waits:
            self._queued.waits.append(Wait(str(func), _lines()))
        launches = (there or to_device) and not func.is_view and "empty" not in str(func)
        if launches and (asked := Wait(str(func), _lines()[:1])).ours:
            self._queued.ours[asked.line] += 1


_QUEUED: list[Queued] = []  # one for each active context


def _made(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Apart:
    return Apart(torch.empty_strided(size, stride, dtype=dtype, device=HOST))


def _copied(source: torch.Tensor, to: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _QUEUED[-1].waits.append(Wait("a list", _lines()))
    _values(to).copy_(_values(source))
    return to


# PyTorch creates tensors from lists with these two operations, without any dispatch mode.
library.impl("aten::empty_strided", "PrivateUse1", _made)
library.impl("aten::_copy_from", "PrivateUse1", _copied)


class Event:
    """An event. It is complete if `lag` later events were recorded, or if it was waited for."""

    lag, _recorded, _happened = 0, 0, 0  # the last two count all events

    def __init__(self, **_: Any) -> None:
        self._number = 0

    def record(self, *_: Any) -> None:
        Event._recorded += 1
        self._number = Event._recorded

    def query(self) -> bool:
        Event._happened = max(Event._happened, Event._recorded - Event.lag)
        return self._number <= Event._happened

    def synchronize(self) -> None:
        if not self.query():
            _QUEUED[-1].events.append(Wait("an event", _lines()))
            Event._happened = max(Event._happened, self._number)

    def elapsed_time(self, later: "Event") -> float:
        return float(later._number - self._number)


class _Generator(torch.Generator):
    def __new__(cls, device: Any = None) -> "_Generator":
        return super().__new__(cls)


@contextmanager
def device_apart() -> Iterator[Queued]:
    """Context in which the device works. It yields the record of queued operations."""
    queued = Queued([], Counter(), [])
    with ExitStack() as stack:
        for owner, name, stand_in in (
            (torch, "Event", Event),
            (torch.cuda, "Event", Event),
            (torch, "Generator", _Generator),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        _QUEUED.append(queued)
        stack.callback(_QUEUED.pop)
        stack.enter_context(_Computing(queued))
        yield queued
