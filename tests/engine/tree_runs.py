# SPDX-License-Identifier: Apache-2.0
"""Draft trees in engines. `test_tree_engines.py` runs these tests with both model runners."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from harness import engine, metrics_of, slem
from known_trees import KnownTrees, overheard
from scenarios import TIGHT, TIGHT_LIMITS, Outputs, generate, greedy
from v2_runs import SOME
from vllm import LLM, SamplingParams

from vllm_hetero_spec.engine.trees import branches as branches_module
from vllm_hetero_spec.engine.trees import scratch
from vllm_hetero_spec.engine.trees.branches import BranchSequences
from vllm_hetero_spec.trees.layout import BranchPlan

LIMITS: dict[str, dict[str, Any]] = {
    "large blocks": {},
    "small blocks": {"block_size": 32},
    "tight": TIGHT_LIMITS | {"num_gpu_blocks_override": 30},  # half of them for branches
}
VERIFICATION = {"large blocks": "token", "small blocks": "race", "tight": "block"}


def taken_up(llm: LLM, prompts: list[str]) -> Outputs:
    """New prompts contain earlier output, so the prefix cache reads KV that draft steps wrote."""
    first = generate(llm, prompts, greedy(max_tokens=70, ignore_eos=True))
    tokenizer = llm.get_tokenizer()
    again = [
        {"prompt_token_ids": [*tokenizer.encode(prompt), *ids]}
        for prompt, ids in zip(prompts, first.values(), strict=True)
    ]
    hits = prefix_hits(llm)
    found = generate(llm, again, greedy())
    assert prefix_hits(llm) - hits >= 64 * len(prompts)
    return first | {f"again {name}": ids for name, ids in found.items()}


def prefix_hits(llm: LLM) -> int:
    return sum(m.value for m in llm.get_metrics() if m.name == "vllm:prefix_cache_hits")


def ending(llm: LLM, prompts: list[str]) -> Outputs:
    """Requests end by length or stop string, at different positions of a draft."""
    ends = [{"max_tokens": n} for n in (5, 6, 7, 8)] + [{"stop": [w]} for w in ("(", "self", "\n")]
    params = [greedy(**end) for end in ends for _ in prompts]
    return generate(llm, prompts * len(ends), params)


MORE = {"taken up": taken_up, "ending": ending}
ALL = SOME | MORE
RUN: dict[str, set[str]] = {
    "large blocks": ALL.keys() - TIGHT,
    "small blocks": {"batch 8", "joining and aborting", *MORE},
    "tight": ALL.keys() & TIGHT,
}
ONLY_CHAINS = ("penalties", "bad_words", "min_tokens")
# Only a part of the output of these requests has trees, so the number of accepted side branches
# depends on the models.
SELDOM_TREES = ("stops behind min_tokens",)


class Compared(NamedTuple):
    """An engine that drafts trees, and the outputs of the target alone, by scenario."""

    llm: LLM
    trees: KnownTrees
    known: dict[str, dict[tuple[int, ...], list[int]]]
    alone: dict[str, Outputs]


@pytest.fixture(scope="module")
def few(code_prompts: list[str]) -> list[str]:
    return code_prompts[:8]


@pytest.fixture(scope="module", params=LIMITS)
def compared(request: pytest.FixtureRequest, demo_pair: Any, few: list[str]) -> Iterator[Compared]:
    limits = LIMITS[request.param]
    names = [name for name in ALL if name in RUN[request.param]]
    alone, known = {}, {}
    with engine(demo_pair / "target", **limits) as llm:
        for name in names:
            with overheard(llm) as known[name]:
                alone[name] = ALL[name](llm, few)
    spec = slem(demo_pair / "drafter", tree_nodes=8, verification=VERIFICATION[request.param])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scratch, "_SHARE", 2)  # so that small KV caches have blocks for branches
        with engine(demo_pair / "target", spec, **limits) as llm:
            yield Compared(llm, KnownTrees(llm), known, alone)


def test_same_tokens_as_the_target_alone(compared: Compared, few: list[str]) -> None:
    trees = compared.trees
    for name, alone in compared.alone.items():
        trees.known, trees.past_the_end = compared.known[name], name == "ending"
        drafts, taken = trees.drafts, trees.taken
        assert ALL[name](compared.llm, few) == alone, name
        print(f"\n{name}: {trees.drafts - drafts} trees, {trees.taken - taken} sides taken")
        if name not in SELDOM_TREES:
            assert (trees.taken - taken > 4) is (name not in ONLY_CHAINS), name
    trees.past_the_end = False
    if "preemption" in compared.alone:
        assert metrics_of(compared.llm)["num_preemptions"] > 0


def test_log_probabilities_are_those_of_the_rows_on_the_way(
    compared: Compared, few: list[str]
) -> None:
    """The second run drafts its known output in trees, and has the values of the first run."""
    params, told = greedy(logprobs=2, max_tokens=16), []
    for prompts in (few, few):
        with overheard(compared.llm) as known:
            outputs = compared.llm.generate(prompts, params, use_tqdm=False)
        told.append([o.outputs[0].logprobs for o in outputs])
        compared.trees.known = known
    for alone, trees in zip(*told, strict=True):
        for at_alone, at_trees in zip(alone, trees, strict=True):
            assert at_alone.keys() == at_trees.keys()
            for token, probability in at_alone.items():
                assert at_trees[token].logprob == pytest.approx(probability.logprob, abs=1e-3)


def test_races_are_those_without_drafts(compared: Compared, few: list[str]) -> None:
    """Only with `race` do sampled requests have trees. Other rules ignore the side branches."""
    raced = compared.trees.verification == "race"
    params = [
        SamplingParams(temperature=0.9, top_p=0.95, seed=seed, max_tokens=20) for seed in range(8)
    ]
    with overheard(compared.llm) as known:
        alone = generate(compared.llm, few, params)
    compared.trees.known = known
    drafts, taken = compared.trees.drafts, compared.trees.taken
    found = generate(compared.llm, few, params)
    assert compared.trees.drafts > drafts
    if raced:
        assert found == alone
        assert compared.trees.taken > taken + 4
    else:
        assert compared.trees.taken == taken


def test_a_tree_that_is_void_on_the_device_emits_one_token(
    compared: Compared, few: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second tree is void, as if the device counted other tokens than the host."""

    def laid_out(self: BranchSequences, is_tree: torch.Tensor) -> None:
        original(self, is_tree & (torch.arange(len(is_tree), device=is_tree.device) % 2 == 0))

    original = BranchSequences.laid_out
    with overheard(compared.llm) as known:
        compared.trees.known = {}
        alone = generate(compared.llm, few, greedy())
    compared.trees.known = known
    monkeypatch.setattr(BranchSequences, "laid_out", laid_out)
    taken = compared.trees.taken
    assert generate(compared.llm, few, greedy()) == alone
    assert compared.trees.taken > taken


def no_tails(patch: pytest.MonkeyPatch) -> None:
    def plan(*args: Any) -> BranchPlan:
        made = original(*args)
        return replace(made, tails=made.tails[:0])

    original = branches_module.plan_branches
    patch.setattr(branches_module, "plan_branches", plan)


def chain_positions(patch: pytest.MonkeyPatch) -> None:
    def plan(starts: Any, counts: Any, *args: Any) -> BranchPlan:
        made = original(starts, counts, *args)
        scheduled = np.array([sum(own) for own in counts])
        ends = np.cumsum(scheduled)
        of = np.searchsorted(ends, made.rows, "right")
        return replace(made, depths=made.rows - (ends - scheduled)[of])

    original = branches_module.plan_branches
    patch.setattr(branches_module, "plan_branches", plan)


def no_copies_home(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BranchPlan, "blocks_to_copy", lambda *_: np.zeros((0, 2), np.int64))


def no_clones(patch: pytest.MonkeyPatch) -> None:
    from vllm_hetero_spec.engine.trees.attention_v2 import BranchSequencesV2

    def expand(self: BranchSequences, batch: Any, *args: Any) -> Any:
        own = batch.query_start_loc, batch.seq_lens
        shown = original(self, batch, *args)
        batch.query_start_loc, batch.seq_lens = own
        return shown

    original = BranchSequencesV2.expand
    patch.setattr(BranchSequencesV2, "expand", expand)


def anothers_tree(patch: pytest.MonkeyPatch) -> None:
    def fitted(tree: Any, *args: Any) -> Any:
        given = tree._replace(rows=(last or [tree])[0].rows)
        last[:] = [tree]
        return original(given, *args)

    last: list[Any] = []
    original = branches_module._fitted
    patch.setattr(branches_module, "_fitted", fitted)


FAULTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    no_tails,
    chain_positions,
    no_copies_home,
    no_clones,
    anothers_tree,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_are_caught(compared: Compared, few: list[str], fault: Any) -> None:
    """A fault changes tokens, or prevents requests from finishing within 40 steps."""
    if "preemption" in compared.alone:
        pytest.skip("blocks of that size have been seen")
    if fault is no_clones and not compared.trees.v2:
        pytest.skip("V1 does not change what sampling reads")
    trees, engine = compared.trees, compared.llm.llm_engine
    found: dict[str, list[int]] = {}
    with overheard(compared.llm) as known, pytest.MonkeyPatch.context() as patch:
        trees.known = {}
        alone = generate(compared.llm, few, greedy())
        trees.known = dict(known)
        fault(patch)
        for index, prompt in enumerate(few):
            engine.add_request(f"{fault.__name__} {index}", prompt, greedy())
        try:
            for _ in range(40):  # more steps than the target alone needs
                for output in engine.step():
                    found[output.request_id.split()[1]] = list(output.outputs[0].token_ids)
        except StopIteration:  # the accepted path is not in the tree; the engine has ended
            assert fault is FAULTS[-1]
            return
    assert found != alone
    engine.abort_request([f"{fault.__name__} {index}" for index in range(len(few))])
    engine.step()
    compared.llm.reset_prefix_cache()  # it may contain wrong KV


def test_an_untested_backend_gets_chains(
    demo_pair: Any, few: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    spec = slem(demo_pair / "drafter", tree_nodes=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branches_module, "BACKENDS", ("ANOTHER",))
        with engine(demo_pair / "target", spec, max_num_seqs=4, block_size=32) as llm:
            assert "Draft trees disabled: they are not tested on" in caplog.text
            generate(llm, few[:4], greedy())
            assert KnownTrees(llm).branches is None
            assert metrics_of(llm)["num_accepted_tokens"] > 0
