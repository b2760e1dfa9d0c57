# SPDX-License-Identifier: Apache-2.0
"""Packets between host and device."""

import time
from typing import ClassVar

import numpy as np
import pytest
import torch
from apart_buffer import ApartBuffer

from vllm_hetero_spec import staging
from vllm_hetero_spec.staging import Mirror, Receiver, Sender, Stopwatch

CPU = torch.device("cpu")
ARRAYS = (
    np.arange(8, dtype=np.int32),
    np.arange(15, dtype=np.int64).reshape(5, 3),
    np.linspace(0, 1, 7, dtype=np.float32),
    np.zeros((0, 4), np.int32),
    np.array([True, False, True]),
)


def test_a_packet_arrives_as_it_was_sent():
    sender = Sender(CPU)
    for scale in (1, 300, 1):  # the second packet needs a larger buffer
        arrays = [np.tile(array, (scale, *[1] * (array.ndim - 1))) for array in ARRAYS]
        for array, tensor in zip(arrays, sender.send(*arrays), strict=True):
            assert tensor.shape == array.shape
            assert tensor.numpy().dtype == array.dtype
            assert (tensor.numpy() == array).all()


def test_a_packet_outlives_the_next_one_and_the_arrays():
    sender = Sender(CPU)
    array = np.array([1, 2, 3])
    (first,) = sender.send(array)
    array[:] = 0
    (second,) = sender.send(np.array([4, 5, 6]))
    assert first.tolist() == [1, 2, 3]
    assert second.tolist() == [4, 5, 6]


@pytest.mark.parametrize("apart", [False, True])
def test_arrays_of_a_mirror_keep_their_place(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first rows of the last array are sent. `apart`: the device has its own memory."""
    if apart:
        monkeypatch.setattr(staging, "_Buffer", ApartBuffer)
    layout = [((2, 3), np.int64), ((5,), np.int32), ((4, 2), np.int32)]
    mirror = Mirror(CPU, layout)
    places = [tensor.data_ptr() for tensor in mirror.there]
    for number in range(1, 5):
        for array in mirror.write():
            array[...] = number
        mirror.send(4 if number < 4 else 1)
        assert [tensor.data_ptr() for tensor in mirror.there] == places
        whole, line, rows = mirror.there
        assert (whole == number).all()
        assert (line == number).all()
        assert (rows[:1] == number).all()
    assert (rows[1:] == 3).all() or not apart


def test_a_receiver_fetches_values():
    fetched = Receiver(CPU, 64).fetch(torch.arange(4))
    assert fetched.wait().tolist() == [0, 1, 2, 3]


def test_a_stopwatch_adds_up() -> None:
    stopwatch = Stopwatch(CPU)
    for _ in range(2):
        before, began = stopwatch.seconds, time.perf_counter()
        with stopwatch:
            pass
        assert 0 < stopwatch.seconds - before <= time.perf_counter() - began


def test_a_stopwatch_does_not_wait_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interval on the device is added after it has ended."""

    class Event:
        queue: ClassVar[list["Event"]] = []
        ended = 0

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.queue.append(self)

        def query(self) -> bool:
            return self.queue.index(self) < self.ended

        def elapsed_time(self, last: "Event") -> float:
            assert last.query()
            return 1000.0 * (self.queue.index(last) - self.queue.index(self))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    stopwatch = Stopwatch(torch.device("cuda"))
    for _ in range(3):
        with stopwatch:
            pass
    assert stopwatch.seconds == 0
    Event.ended = 3
    assert stopwatch.seconds == 1
    Event.ended = 6
    assert stopwatch.seconds == 3
