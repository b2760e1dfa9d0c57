# SPDX-License-Identifier: Apache-2.0
"""`fast_argmax` returns the same as torch, also for ties, NaN and parts of rows."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_hetero_spec.fast_argmax import fast_argmax, fast_max

ROWS = torch.randint(0, 50, (7, 300), generator=torch.Generator().manual_seed(1)).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("rows", [ROWS, ROWS[:, 3:-5], ROWS[::2], ROWS[:0], ROWS.T])
def test_equals_torch(rows: torch.Tensor, dtype: torch.dtype) -> None:
    assert fast_argmax(rows.to(dtype)).tolist() == rows.to(dtype).argmax(-1).tolist()


def test_nan_is_larger_than_any_number() -> None:
    rows = ROWS.clone()
    rows[2, 17] = rows[2, 90] = float("nan")
    rows[4] = float("-inf")
    assert fast_argmax(rows).tolist() == rows.argmax(-1).tolist()
    assert fast_argmax(rows)[2] == 17
    assert fast_argmax(rows)[4] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_numbers(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways find the first of equal numbers, and the first NaN."""
    rows = ROWS.to(dtype, copy=True)
    rows[2, 17] = rows[2, 90] = float("nan")
    rows[4] = float("-inf")
    for on_cpu in (True, False):
        monkeypatch.setattr(torch.Tensor, "is_cpu", on_cpu)
        values, ids = fast_max(rows)
        assert ids.tolist() == rows.argmax(-1).tolist()
        expected = rows.gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


def test_rows_without_numbers() -> None:
    """Fake tensors, as used while operations are traced, give the shape and dtype."""
    with FakeTensorMode():
        found = fast_argmax(torch.rand(3, 5))
    assert (found.shape, found.dtype) == ((3,), torch.int64)


def test_rows_in_16_bits_are_searched_by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch takes about 20 times as long for these dtypes."""
    monkeypatch.setattr(torch.Tensor, "argmax", None)
    rows = ROWS[:, :60].clone()
    rows[3, 40] = rows[3, 50] = float("nan")
    for dtype in (torch.bfloat16, torch.float16):
        assert fast_argmax(rows.to(dtype)).tolist() == rows.numpy().argmax(-1).tolist()
