# SPDX-License-Identifier: Apache-2.0
"""SLRS-n with several candidates: a side branch has the same rows as in the draft's own place."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from harness import engine, metrics_of, proposer_of, slem
from vllm import SamplingParams

from vllm_hetero_spec.draft.sampling import DraftSampling
from vllm_hetero_spec.engine.drafter.kv_pool import KVPool
from vllm_hetero_spec.engine.drafter.requests import RequestState
from vllm_hetero_spec.engine.drafter.round_plan import RoundPlan
from vllm_hetero_spec.engine.drafter.slrs_spans import SlrsSpans
from vllm_hetero_spec.engine.drafter.steps import Steps
from vllm_hetero_spec.engine.drafter.tasks import DrafterTokens, DraftRow, DraftTask
from vllm_hetero_spec.slrs import slrs
from vllm_hetero_spec.slrs.slrs import SlrsFeed
from vllm_hetero_spec.text.context import IdentityContext

pytestmark = pytest.mark.engine
PARAMS = SamplingParams(temperature=0.9, max_tokens=40, ignore_eos=True)


class Checked:
    """A feed that computes each row again in the draft's own place and compares the results.

    It records the largest difference. An assertion here would count as a fault of the drafter.
    """

    def __init__(self, feed: SlrsFeed) -> None:
        self._feed = feed
        self.side_branches = 0
        self.apart = 0.0

    def __call__(
        self, indices: Sequence[int], ids: Sequence[Sequence[int]], side_branches: int = 0
    ) -> torch.Tensor:
        rows = self._feed(indices, ids, side_branches)
        kept = len(indices) - side_branches
        for line in range(kept, len(indices)):
            self._compare(self._feed([indices[line]], [ids[line]])[0], rows[line])
        if side_branches:
            self._compare(self._feed(indices[:kept], ids[:kept]), rows[:kept])
        self.side_branches += side_branches
        return rows

    def _compare(self, rows: torch.Tensor, others: torch.Tensor) -> None:
        self.apart = max(self.apart, float((rows - others).abs().max()))


@pytest.mark.full
def test_rows_of_side_branches_are_those_in_line(
    demo_pair: Path, code_prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contexts are shorter and longer than a block, and drafts cross block boundaries."""
    genuine, seen, sums = slrs.Slrs.draft, [], []

    def draft(self: slrs.Slrs, rows: torch.Tensor, paths: list, feed: SlrsFeed) -> torch.Tensor:
        seen.append(Checked(feed))
        draft_probs = genuine(self, rows, paths, seen[-1])
        sums.extend(draft_probs.sum(-1).tolist())
        return draft_probs

    monkeypatch.setattr(slrs.Slrs, "draft", draft)
    spec = slem(demo_pair / "drafter", method="slrs", merge_candidates=4)
    prompts = [text[: 60 + 70 * i] for i, text in enumerate(code_prompts[:12])]
    with engine(demo_pair / "target", spec, max_num_seqs=8) as llm:
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        assert metrics_of(llm)["num_accepted_tokens"] > 0
        size = proposer_of(llm).drafting.source.pool.block_size
        lengths = [len(output.prompt_token_ids) for output in outputs]
    assert min(lengths) < size < max(lengths)
    assert sum(feed.side_branches for feed in seen) > 500
    assert max(feed.apart for feed in seen) < 1e-5
    assert sums == pytest.approx([1.0] * len(sums), abs=1e-4)


def test_no_more_lines_than_attention_has_room_for() -> None:
    """Attention allocates its buffers once, for `max_lines` rows."""
    drafter: Any = SimpleNamespace(model=SimpleNamespace(max_lines=9))
    method: Any = SimpleNamespace(merge_span=slrs.MergeSpan(2, 4))
    spans, nothing = SlrsSpans(drafter, KVPool(64, 16), method, 1 << 20), cast(Any, None)
    states = [RequestState(name, IdentityContext()) for name in "abc"]
    tasks = [DraftTask(state, 2, draw=DraftSampling(1.0)) for state in states]
    spans.admit([DraftRow(task, nothing, [1], 2) for task in tasks])
    assert {name: len(blocks) for name, blocks in spans._side_blocks.items()} == {"a": 3, "b": 3}


def test_drafts_of_a_failed_round_do_not_reach_the_next_one() -> None:
    drafter: Any = SimpleNamespace(model=SimpleNamespace(max_lines=9))
    method: Any = SimpleNamespace(merge_span=slrs.MergeSpan(2, 4))
    spans, nothing = SlrsSpans(drafter, KVPool(64, 16), method, 1 << 20), cast(Any, None)
    spans._drafted = [DrafterTokens([7])]
    spans.admit([])
    drafted = [DrafterTokens([1])]
    spans.collect(nothing, drafted)
    assert drafted == [DrafterTokens([1])]


@pytest.mark.full
def test_without_room_drafts_look_behind_one(demo_pair: Path, code_prompts: list[str]) -> None:
    """If the pool has too few blocks for all side branches, drafting continues with fewer."""
    spec = slem(
        demo_pair / "drafter", method="slrs", merge_candidates=9, kv_cache_memory_bytes="1MiB"
    )
    with engine(demo_pair / "target", spec, max_num_seqs=4) as llm:
        source = proposer_of(llm).drafting.source
        pool, extensions = source.pool, source.drafter.extensions
        (spans,) = (of for of in extensions if isinstance(of, SlrsSpans))
        admit, lent = spans.admit, []

        def counted(rows: list) -> None:
            admit(rows)
            lent.append((len(rows), len(spans._lent.blocks), spans._lent))

        spans.admit = counted
        llm.generate([text[:60] for text in code_prompts[:8]], PARAMS, use_tqdm=False)
        assert pool.available < pool.capacity
        assert metrics_of(llm)["num_draft_tokens"] > 100
    assert any(count and blocks < 8 * count for count, blocks, _ in lent)
    assert not any(table.blocks for _, _, table in lent)


@pytest.mark.full
def test_a_round_keeps_its_packet_while_drawn_drafts_feed(
    demo_pair: Path, code_prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled drafts share a round. The single decode steps continue after the feeds."""
    greedy = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    drawn = SamplingParams(temperature=1, seed=5, max_tokens=48, ignore_eos=True)
    begin, step = Steps.begin, Steps.step
    sent: list[list[torch.Tensor]] = []
    kept: list[bool] = []

    def packet(steps: Steps) -> list[torch.Tensor]:
        return [steps._lengths, steps._places, steps._table]

    def begun(self: Steps, plan: RoundPlan) -> torch.Tensor:
        logits = begin(self, plan)
        sent[:] = [[tensor.clone() for tensor in packet(self)]]
        return logits

    def stepped(self: Steps, number: int) -> torch.Tensor:
        kept.append(all(map(torch.equal, packet(self), sent[0])))
        return step(self, number)

    monkeypatch.setattr(Steps, "begin", begun)
    monkeypatch.setattr(Steps, "step", stepped)
    spec = slem(demo_pair / "drafter", method="slrs", merge_candidates=3)
    with engine(demo_pair / "target", spec, max_num_seqs=8) as llm:
        llm.generate(code_prompts[:8], [greedy, drawn] * 4, use_tqdm=False)
    assert len(kept) > 50
    assert all(kept)
