# SPDX-License-Identifier: Apache-2.0
"""Tests of token healing in an engine: a draft's first token replaces the text's last token."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from chain_pair import PROMPT
from goodness import follows
from harness import engine, metrics_of, proposer_of, slem
from scenarios import generate, greedy
from tape_graphs import TapeGraphs
from target_law import counted, law_of, load
from test_sampling import SETTINGS, sample
from transformers import AutoTokenizer

from vllm_hetero_spec import read_stats
from vllm_hetero_spec.engine.drafter import token_healing
from vllm_hetero_spec.engine.drafter.model import GraphSupport
from vllm_hetero_spec.engine.drafter.token_healing import TokenHealing
from vllm_hetero_spec.engine.seam import tokenizers
from vllm_hetero_spec.engine.seam.tokenizers import TokenizerPair
from vllm_hetero_spec.text.bridge import make_bridge
from vllm_hetero_spec.text.drafts import DraftTranslator, FirstToken
from vllm_hetero_spec.text.loading import load_tokenizer
from vllm_hetero_spec.text.retokenization import TextContext

pytestmark = pytest.mark.engine
SHAPES = [(size, width) for size in (1, 2, 4, 8) for width in (1, 4, 8)]


def watched(llm: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the number of known bytes of each healed draft."""
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


@pytest.mark.full
def test_greedy_identity(
    demo_pair: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without graphs, with graphs, and with a check of first tokens after the steps."""
    monkeypatch.setattr(token_healing, "_LAST", 1 << 20)  # all tokens are candidates
    with engine(demo_pair / "drafter") as llm:
        alone = generate(llm, texts, greedy())
    with engine(demo_pair / "drafter", slem(demo_pair / "target"), max_num_seqs=8) as llm:
        drafter = proposer_of(llm).drafting.source.drafter
        assert drafter.rules.back
        seen = watched(llm, monkeypatch)
        counts = []
        for recorded, waits in ((False, False), (True, False), (True, True)):
            if recorded:
                support = GraphSupport(in_graph=False, several_tokens=True)
                drafter.record(TapeGraphs().capture, SHAPES, support)
            monkeypatch.setattr(drafter, "waits", waits)
            proposer_of(llm).reset()
            seen.clear()
            accepted = metrics_of(llm)["num_accepted_tokens"]
            assert generate(llm, texts, greedy()) == alone
            counts.append((len(seen), metrics_of(llm)["num_accepted_tokens"] - accepted))
        assert counts[0] == counts[1]
        assert min(min(count) for count in counts) > 0
        assert "drafter_error" not in read_stats(llm)["skipped"]
        # If graphs have one token per request only, healing would need forwards without graphs.
        # Then no draft is healed.
        drafter.record(
            TapeGraphs().capture, SHAPES, GraphSupport(in_graph=False, several_tokens=False)
        )
        seen.clear()
        assert generate(llm, texts, greedy()) == alone
        assert not seen
        assert drafter.steps.replays > 0


def longer_if_any(
    self: DraftTranslator,
    context: TextContext,
    candidates: Sequence[int],
    judged: Callable[..., FirstToken | None] = DraftTranslator.longer_last,
) -> FirstToken | None:
    """Return a longer token if there is one. The present one is always likelier in `chain_pair`."""
    others = [token for token in candidates if token != context.ids[-1]]
    found = judged(self, context, others)
    return found and found._replace(among=[candidates.index(found.id)])


@pytest.mark.full
@pytest.mark.parametrize(("method", "verification"), [("push_forward", "token"), ("tli", "block")])
def test_samples_follow_the_targets_law(
    method: str, verification: str, chain_pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one batch some sampled requests have healed drafts, which are greedy; others have not."""
    monkeypatch.setattr(tokenizers, "_OFTEN_INSIDE", -1.0)
    monkeypatch.setattr(DraftTranslator, "longer_last", longer_if_any)
    model, start = load(chain_pair / "target", PROMPT)
    laws = {name: law_of(model, start, setting) for name, setting in SETTINGS.items()}
    spec = slem(chain_pair / "drafter", 3, method=method, verification=verification)
    with engine(chain_pair / "target", spec, max_num_seqs=64) as llm:
        source, seen = proposer_of(llm).drafting.source, []
        healing = next(of for of in source.drafter.extensions if isinstance(of, TokenHealing))
        judge = healing.before_picking

        def noted(current: Any, behind: Any) -> None:
            drawn = [row.task.draw is not None for row in current.rows]
            judge(current, behind)
            early = healing._early or {}
            seen.extend(i for i, other in early.items() if other.known and drawn[i])

        monkeypatch.setattr(healing, "before_picking", noted)
        for name, texts in sample(llm, 800, SETTINGS, seeds=True).items():
            assert follows(counted(texts), laws[name]), name
        assert len(seen) > 100  # healed drafts of sampled requests
        assert metrics_of(llm)["num_accepted_tokens"] > 0


def test_only_where_the_target_often_ends_a_token_inside_one_of_the_drafters(
    demo_pair: Path,
) -> None:
    """Here this is the case only if the target has the smaller vocabulary."""
    large, small = (
        load_tokenizer(AutoTokenizer.from_pretrained(demo_pair / name), name)
        for name in ("target", "drafter")
    )
    pairs = (large, small), (small, large), (large, large)
    looks = [TokenizerPair(*pair, make_bridge(*pair)).token_healing for pair in pairs]
    assert looks == [False, True, False]
