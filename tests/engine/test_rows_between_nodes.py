# SPDX-License-Identifier: Apache-2.0
"""Rows of `draft_probs` are sent whole only if all ranks are in one node."""

from types import SimpleNamespace

import pytest

from vllm_hetero_spec.engine.verifier import draft_probs


@pytest.mark.parametrize(
    ("size", "same", "expected"),
    [(1, [], None), (2, [True, True], None), (3, [True, True, False], 64)],
)
def test_rows_have_few_tokens_between_nodes(
    size: int, same: list[bool], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_probs, "in_the_same_node_as", lambda group: same)
    # `far_apart` may have set a smaller number in this process.
    monkeypatch.setattr(draft_probs, "SPARSE_TOP_K", 64)
    group = SimpleNamespace(world_size=size, cpu_group=None)
    assert draft_probs.likeliest_between(group) == expected  # type: ignore[arg-type]
