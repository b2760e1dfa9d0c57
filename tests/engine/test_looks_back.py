# SPDX-License-Identifier: Apache-2.0
"""Drafts that begin in the place of a text's last token, in a real engine."""

from pathlib import Path
from typing import Any

import pytest
from harness import engine, metrics_of, proposer_of, slem
from scenarios import generate, greedy
from tape_graphs import TapeGraphs
from transformers import AutoTokenizer

from vllm_hetero_spec import read_stats
from vllm_hetero_spec.engine.drafter import first_tokens
from vllm_hetero_spec.engine.drafter.model import GraphSupport
from vllm_hetero_spec.engine.seam.tokenizers import Pair
from vllm_hetero_spec.text.bridge import make_bridge
from vllm_hetero_spec.text.loading import load_tokenizer

pytestmark = pytest.mark.engine
SHAPES = [(size, width) for size in (1, 2, 4, 8) for width in (1, 4, 8)]


def watched(llm: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The known bytes of each draft that begins so, as they come."""
    bridge, seen = proposer_of(llm).drafting.bridge, []
    translate = bridge.to_target

    def noted(contexts: Any, drafts: Any, limits: Any, known: Any = ()) -> Any:
        seen.extend(count for count in known if count)
        for context, draft, count in zip(contexts, drafts, known, strict=False):
            first, last = (bridge._drafts._piece(ids) for ids in (draft[0], context.ids[-1]))
            assert not count or (first.startswith(last) and count == len(last) < len(first))
        return translate(contexts, drafts, limits, known)

    monkeypatch.setattr(bridge, "to_target", noted)
    return seen


def test_greedy_identity(
    demo_pair: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smaller vocabulary is the target's here; eagerly, by graphs, and with first tokens that
    are judged behind the steps, and behind tokens that were accepted after such a draft."""
    monkeypatch.setattr(first_tokens, "_LAST", 1 << 20)  # however unlikely: this is not about speed
    with engine(demo_pair / "drafter") as llm:
        alone = generate(llm, texts, greedy())
    with engine(demo_pair / "drafter", slem(demo_pair / "target"), max_num_seqs=8) as llm:
        drafter = proposer_of(llm).drafting.source.drafter
        assert drafter._rules.looks_back
        seen = watched(llm, monkeypatch)
        counts = []
        for recorded, waits in ((False, False), (True, False), (True, True)):
            if recorded:
                support = GraphSupport(in_graph=False, several_tokens=True)
                drafter.record(TapeGraphs(), SHAPES, support)
            monkeypatch.setattr(drafter, "waits", waits)
            proposer_of(llm).reset()
            seen.clear()
            accepted = metrics_of(llm)["num_accepted_tokens"]
            assert generate(llm, texts, greedy()) == alone
            counts.append((len(seen), metrics_of(llm)["num_accepted_tokens"] - accepted))
        assert counts[0] == counts[1]
        assert min(min(count) for count in counts) > 0
        assert "drafter_error" not in read_stats(llm)["skipped"]
        # Where each text would be read again without a graph, none is.
        drafter.record(TapeGraphs(), SHAPES, GraphSupport(in_graph=False, several_tokens=False))
        seen.clear()
        assert generate(llm, texts, greedy()) == alone
        assert not seen
        assert drafter.replays > 0


def test_only_where_the_target_often_ends_a_token_inside_one_of_the_drafters(
    demo_pair: Path,
) -> None:
    large, small = (
        load_tokenizer(AutoTokenizer.from_pretrained(demo_pair / name), name)
        for name in ("target", "drafter")
    )
    pairs = (large, small), (small, large), (large, large)
    looks = [Pair(*pair, make_bridge(*pair)).looks_back for pair in pairs]
    assert looks == [False, True, False]
