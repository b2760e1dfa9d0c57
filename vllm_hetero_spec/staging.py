# SPDX-License-Identifier: Apache-2.0
"""Transfers between host and device, one packet in each direction, and timing of device work.

PyTorch turns `.to(device)` from pageable memory, `torch.tensor(..., device=...)` and `.tolist()`
into a copy and a wait for all work queued before. So the inputs of a round are sent from pinned
memory in one copy, without a wait. Results are copied beside the work, and waited for when they are
read. A round uses no other transfers; a test lists the few other files that move data. On a CPU,
host and device share the memory.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

_ALIGNED = 16  # bytes; alignment of the arrays of a packet, for every dtype and kernel
_SMALLEST = 4096  # bytes of the smallest buffer


# `Sender.send`, or `on_host`.
Send = Callable[..., list[torch.Tensor]]


def on_host(*arrays: np.ndarray) -> list[torch.Tensor]:
    """`Send` for a CPU device: tensors over the arrays' own memory."""
    return [torch.from_numpy(array) for array in arrays]


class Sender:
    """Sends arrays to the device, all arrays of a call in one copy.

    Args:
        turns: Number of buffers. The tensors of a call are valid until so many further calls.
    """

    def __init__(self, device: torch.device, turns: int = 2) -> None:
        self._device = device
        self._buffers = [_Buffer(0, device) for _ in range(turns)]

    def send(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """Return the arrays as tensors on the device. The arrays may be changed afterwards."""
        *starts, size = _starts(array.nbytes for array in arrays)
        self._buffers.append(self._buffers.pop(0))
        if self._buffers[0].size < size:
            self._buffers[0] = _Buffer(max(_SMALLEST, 2 * size), self._device)
        buffer = self._buffers[0]
        host = buffer.writable()
        for start, array in zip(starts, arrays, strict=True):
            np.ndarray(array.shape, array.dtype, host, start)[...] = array
        buffer.send(size)
        tensors = []
        for start, array in zip(starts, arrays, strict=True):
            first = start // array.itemsize
            part = buffer.there(array.dtype)[first : first + array.size]
            tensors.append(part if array.ndim == 1 else part.view(array.shape))
        return tensors


class Mirror:
    """Arrays with fixed addresses on the device, as CUDA graphs need, sent in one copy.

    Args:
        layout: Shape and dtype of each array, in the order of their addresses.

    Attributes:
        there: The tensors on the device; zeros at first.
    """

    def __init__(
        self, device: torch.device, layout: Sequence[tuple[tuple[int, ...], type[np.number]]]
    ) -> None:
        self._layout = [(shape, np.dtype(dtype)) for shape, dtype in layout]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in self._layout]
        self._starts = list(_starts(sizes))
        size = self._starts.pop()
        first = _Buffer(size, device)
        first.there(np.dtype(np.uint8)).zero_()
        buffers = [first] if first.on_host else [first, _Buffer(size, device, first)]
        self._turns = [(buffer, self._arrays(buffer.writable())) for buffer in buffers]
        self.there = [
            first.there(dtype)[start // dtype.itemsize :][: math.prod(shape)].view(shape)
            for (shape, dtype), start in zip(self._layout, self._starts, strict=True)
        ]

    def write(self) -> list[np.ndarray]:
        """Return the arrays of the next packet, on the host. Their old values are undefined."""
        self._turns.append(self._turns.pop(0))
        buffer, arrays = self._turns[0]
        buffer.writable()
        return arrays

    def send(self, rows: int) -> None:
        """Send the packet to the device: all arrays, but only `rows` rows of the last one."""
        (_, *row), dtype = self._layout[-1]
        self._turns[0][0].send(self._starts[-1] + rows * math.prod(row) * dtype.itemsize)

    def _arrays(self, host: np.ndarray) -> list[np.ndarray]:
        return [
            np.ndarray(shape, dtype, host, start)
            for (shape, dtype), start in zip(self._layout, self._starts, strict=True)
        ]


def _starts(sizes: Iterable[int]) -> Iterator[int]:
    """Yield the offset in bytes of each array of a packet, then the size of the packet."""
    start = 0
    for size in sizes:
        yield start
        start += -(-size // _ALIGNED) * _ALIGNED
    yield start


class _Buffer:
    """Bytes on the host and on the device; the same bytes if the device is a CPU.

    Args:
        other: A buffer to share the bytes on the device with.
    """

    def __init__(self, size: int, device: torch.device, other: "_Buffer | None" = None) -> None:
        self.size = size
        self.on_host = device.type == "cpu"
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=not self.on_host and size > 0)
        self._there: torch.Tensor = self._host
        if other is not None:
            self._there = other._there
        elif not self.on_host:
            self._there = torch.empty(size, dtype=torch.uint8, device=device)
        self._copied: torch.cuda.Event | None = None
        self._typed: dict[np.dtype, torch.Tensor] = {}

    def writable(self) -> np.ndarray:
        """Wait until the last copy has read the host's bytes, and return them."""
        if self._copied is not None:
            self._copied.synchronize()
        array: np.ndarray = self._host.numpy()
        return array

    def send(self, size: int) -> None:
        """Start the copy of the first `size` bytes to the device."""
        if not self.on_host:
            self._there[:size].copy_(self._host[:size], non_blocking=True)
            if self._copied is None:
                self._copied = torch.cuda.Event()
            self._copied.record()

    def there(self, dtype: np.dtype) -> torch.Tensor:
        """All bytes on the device, as a tensor of this dtype."""
        if dtype not in self._typed:
            of_torch = torch.from_numpy(np.empty(0, dtype)).dtype
            self._typed[dtype] = self._there.view(of_torch)
        return self._typed[dtype]


class Fetched(NamedTuple):
    """A tensor on its way to the host.

    Attributes:
        tensor: In host memory; complete once `copied` has happened.
        copied: None if there is nothing to wait for.
    """

    tensor: torch.Tensor
    copied: "torch.cuda.Event | None" = None

    @property
    def there(self) -> bool:
        """True if `wait` returns at once."""
        return self.copied is None or self.copied.query()

    def wait(self) -> np.ndarray:
        """Wait for the values. They are valid until their source or host memory is used again."""
        if self.copied is not None:
            self.copied.synchronize()
        array: np.ndarray = self.tensor.numpy()
        return array


class Receiver:
    """Copies tensors of at most `size` bytes to the host without waiting, one at a time."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._pinned: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        if device.type != "cpu":
            self._pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            self._copied = torch.cuda.Event()

    def fetch(self, tensor: torch.Tensor) -> Fetched:
        """Start the copy of a tensor. It overwrites the one before."""
        if self._pinned is None:
            return Fetched(tensor)
        assert self._copied is not None
        size = tensor.numel() * tensor.element_size()
        here = self._pinned[:size].view(tensor.dtype).view(tensor.shape)
        here.copy_(tensor, non_blocking=True)
        self._copied.record()
        return Fetched(here, self._copied)


class Mark:
    """A point in the queued work of a device; on a CPU, the present time."""

    def __init__(self, device: torch.device) -> None:
        self._now = time.perf_counter()
        self._event = None if device.type == "cpu" else torch.cuda.Event(enable_timing=True)
        if self._event is not None:
            self._event.record()

    def since(self, earlier: "Mark") -> float | None:
        """Return the seconds since an earlier mark; None if the device has not reached this one."""
        if self._event is None or earlier._event is None:
            return self._now - earlier._now
        if not self._event.query():
            return None
        return earlier._event.elapsed_time(self._event) / 1e3


class Stopwatch:
    """Adds up the duration of work where it runs: `with stopwatch:` around the code that queues it.

    It never waits, so work of a device that has not ended is added later. It cannot be nested.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began: Mark | None = None
        self._running: list[tuple[Mark, Mark]] = []
        self._seconds = 0.0

    def __enter__(self) -> None:
        self._began = Mark(self._device)

    def __exit__(self, *error: object) -> None:
        assert self._began is not None
        self._running.append((self._began, Mark(self._device)))

    @property
    def seconds(self) -> float:
        """Duration of all work that has ended."""
        while self._running:
            first, last = self._running[0]
            if (took := last.since(first)) is None:
                break
            self._seconds += took
            del self._running[0]
        return self._seconds
