# SPDX-License-Identifier: Apache-2.0
"""Tests of a target on two ranks. The drafter is on the first rank, or split like the target."""

import os
from collections import Counter
from pathlib import Path

import pytest
from chain_pair import PROMPT
from far_apart import forget_to_renormalise
from goodness import follows
from harness import engine, metrics_of, slem
from scenarios import Outputs, generate, greedy
from target_law import Setting, counted, law_of, load
from vllm import SamplingParams

from vllm_hetero_spec import read_stats

pytestmark = [pytest.mark.full, pytest.mark.engine]


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or (os.cpu_count() or 1) < 2:
        pytest.skip("needs a CPU build of vLLM and two cores")
    # vLLM needs a list of cores if two ranks share a NUMA node.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")


def test_same_tokens_on_two_ranks(demo_pair: Path, texts: list[str], alone: Outputs) -> None:
    """The drafter is split like its target. In the other tests it is on the first rank."""
    spec = slem(demo_pair / "drafter", tensor_parallel="sharded")
    with engine(demo_pair / "target", spec, tensor_parallel_size=2) as llm:
        assert generate(llm, texts, greedy()) == alone
        counts, counted = read_stats(llm), metrics_of(llm)
    assert counts["drafts"] == counted["num_drafts"] > 0
    assert counts["draft_tokens"] == counted["num_draft_tokens"]
    assert counts["draft_tokens"] <= 4 * counts["drafts"]
    assert set(counts["skipped"]) <= {"catching_up"}


def test_a_drafter_in_a_process_of_its_own_beside_two_ranks(
    demo_pair: Path, texts: list[str], alone: Outputs
) -> None:
    spec = slem(demo_pair / "drafter", draft_ahead=True, drafter_device="1")
    with engine(demo_pair / "target", spec, tensor_parallel_size=2) as llm:
        assert generate(llm, texts, greedy()) == alone
        counts = read_stats(llm)
    assert counts["forwards"] > 0
    assert counts["drafts"] <= counts["drafts_ahead"]
    assert set(counts["skipped"]) <= {"catching_up", "not_guessed", "not_ready"}


def test_trees_on_two_ranks(demo_pair: Path, texts: list[str], alone: Outputs) -> None:
    """Both ranks verify the same trees and commit the same branch KV."""
    spec = slem(demo_pair / "drafter", 8, tree_nodes=8)
    with engine(demo_pair / "target", spec, tensor_parallel_size=2, block_size=32) as llm:
        assert generate(llm, texts, greedy()) == alone
        counts = read_stats(llm)
    assert counts["side_tokens_accepted"] > 0
    assert set(counts["skipped"]) <= {"catching_up"}


def test_no_trees_where_one_rank_does_not_support_them(
    demo_pair: Path, texts: list[str], alone: Outputs
) -> None:
    spec = slem(demo_pair / "drafter", 8, tree_nodes=8)
    changes = {"tensor_parallel_size": 2, "worker_cls": "one_rank_wrong.OneRankWrong"}
    with engine(demo_pair / "target", spec, block_size=32, **changes) as llm:
        assert generate(llm, texts, greedy()) == alone
        counts = read_stats(llm)
    assert counts["drafts"] > counts["trees"] == 0


@pytest.mark.parametrize(("method", "verification"), [("slrs", "block"), ("push_forward", "race")])
def test_sampled_drafts_on_two_ranks(chain_pair: Path, method: str, verification: str) -> None:
    """Both ranks verify with the first rank's `draft_probs`, and choose the same tokens.

    Ranks that chose different tokens would write different KV. The drafter is the target, so some
    of its draft tokens would then be rejected, most often with a broad distribution (`top_k` 0).
    """
    params = SamplingParams(temperature=0.8, top_k=3, max_tokens=24, ignore_eos=True)
    model, start = load(chain_pair / "target", PROMPT)
    spec = slem(chain_pair / "target", method=method, verification=verification)
    with engine(chain_pair / "target", spec, tensor_parallel_size=2) as llm:
        outputs = llm.generate([PROMPT] * 600, params, use_tqdm=False)
        params.top_k = 0
        before = metrics_of(llm)
        llm.generate([PROMPT] * 100, params, use_tqdm=False)
        gained = metrics_of(llm)
    found = counted(output.outputs[0].token_ids for output in outputs)
    assert follows(found, law_of(model, start, Setting(0.8, top_k=3)))
    accepted, drafted = (
        gained[name] - before[name] for name in ("num_accepted_tokens", "num_draft_tokens")
    )
    assert accepted == drafted


def test_between_nodes_few_tokens_of_a_row_travel(chain_pair: Path) -> None:
    """Without renormalization of their probabilities the output has another distribution."""
    params = SamplingParams(temperature=0.8, top_k=3, max_tokens=6, ignore_eos=True)
    law = law_of(*load(chain_pair / "target", PROMPT), Setting(0.8, top_k=3))
    spec = slem(chain_pair / "drafter", method="push_forward", verification="block")
    changes = {"tensor_parallel_size": 2, "worker_cls": "far_apart.FarApart"}
    with engine(chain_pair / "target", spec, **changes) as llm:

        def sample(count: int) -> Counter:
            outputs = llm.generate([PROMPT] * count, params, use_tqdm=False)
            return counted(output.outputs[0].token_ids for output in outputs)

        assert follows(sample(1200), law)
        assert metrics_of(llm)["num_accepted_tokens"] > 100
        llm.collective_rpc(forget_to_renormalise)
        wrong = sample(1200)
    assert not follows(wrong, law)
