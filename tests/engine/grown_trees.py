# SPDX-License-Identifier: Apache-2.0
"""Trees of the engine's own drafter. `test_tree_engines.py` runs these tests in a child process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from harness import engine, metrics_of, slem
from scenarios import Outputs, generate, greedy
from vllm import SamplingParams

from vllm_hetero_spec import read_stats
from vllm_hetero_spec.engine.trees import scratch

LENGTH, NODES = 8, 8


class Run(NamedTuple):
    """Output and counters of one engine.

    `greedy` and `raced` are outputs of all prompts. `last_two` is the raced output of the last two
    prompts in a batch of their own. `kept` counts chains of requests that cannot have trees.
    """

    greedy: Outputs
    raced: Outputs
    last_two: Outputs
    stats: dict[str, Any]
    metrics: dict[str, int]
    kept: dict[str, int]


def run(pair: Path, prompts: list[str], drafter: str = "drafter", **changes: Any) -> Run:
    spec = slem(pair / drafter, LENGTH, method="push_forward", verification="race", **changes)
    drawn = [SamplingParams(temperature=0.9, seed=n, max_tokens=40) for n in range(len(prompts))]
    with engine(pair / "target", spec, max_num_seqs=64) as llm:
        found = [generate(llm, prompts, greedy(max_tokens=40)), generate(llm, prompts, drawn)]
        found.append(generate(llm, prompts[-2:], drawn[-2:]))
        counted = read_stats(llm), metrics_of(llm)
        generate(llm, prompts[:2], [greedy(presence_penalty=0.5), greedy(min_tokens=9)])
        return Run(*found, *counted, read_stats(llm)["chains"])


@pytest.fixture(scope="module")
def few(code_prompts: list[str]) -> list[str]:
    return code_prompts[:6]


@pytest.fixture(scope="module")
def chains(demo_pair: Path, few: list[str]) -> Run:
    return run(demo_pair, few)


@pytest.fixture(scope="module", params=["fixed", "goodput", "one path"])
def trees(request: pytest.FixtureRequest, demo_pair: Path, few: list[str]) -> Iterator[Run]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scratch, "_SHARE", 3)  # so that a small KV cache has blocks for branches
        debug: dict[str, Any] = {"calibrate": False}
        more: dict[str, Any] = {"tree_nodes": NODES, "controller": "fixed", "debug": debug}
        if request.param == "one path":
            debug["tree_width"] = 1
        elif request.param == "fixed":
            debug["tree_width"] = 4
        else:
            more["controller"] = request.param
        yield run(demo_pair, few, **more)


def test_trees_change_no_token(chains: Run, trees: Run, demo_pair: Path, few: list[str]) -> None:
    """Greedy and raced requests have the same tokens with trees, also in another batch."""
    assert trees.greedy == chains.greedy
    assert trees.raced == chains.raced
    assert list(trees.last_two.values()) == list(chains.raced.values())[-2:]
    assert not set(trees.stats["skipped"]) - {"catching_up", "not_worth_it"}


def test_trees_accept_more_than_chains(chains: Run, trees: Run) -> None:
    """A tree has as many nodes as a chain has tokens. Each is counted once, and by depth."""
    if trees.stats["trees"] < 20:
        pytest.skip("so tiny a target need not be worth drafting for")
    stats = trees.stats
    assert max(stats["lengths"]) <= LENGTH
    assert sum(stats["lengths"].values()) == stats["drafts"]
    assert stats["tree_tokens"] <= NODES * stats["trees"]
    assert stats["side_tokens_accepted"] > 0
    # vLLM counts no recomputed rows, and never verifies the last drafts of some requests.
    assert trees.metrics["num_draft_tokens"] <= stats["draft_tokens"]
    gains = [run.metrics["num_accepted_tokens"] / run.stats["drafts"] for run in (chains, trees)]
    if stats["off_steps"] == 0:
        assert gains[1] > 1.05 * gains[0]


def test_requests_that_keep_chains_are_counted(chains: Run, trees: Run) -> None:
    if trees.stats["off_steps"] == 0:
        assert min(trees.kept["penalties"], trees.kept["restricted"]) > 0
    assert not {"penalties", "restricted", "drawn"} & set(trees.stats["chains"])
    assert not chains.kept


def test_trees_of_a_parallel_drafter(chains: Run, demo_pair: Path, few: list[str]) -> None:
    """Branches change no token and no forward, and some of their tokens are accepted."""
    runs = []
    for nodes in (0, NODES):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scratch, "_SHARE", 3)
            runs.append(run(demo_pair, few, "parallel", tree_nodes=nodes, controller="fixed"))
    for found in runs:
        assert (found.greedy, found.raced) == (chains.greedy, chains.raced)
    _, trees = (found.stats for found in runs)
    assert trees["side_tokens_accepted"] > 0
    assert trees["tree_tokens"] <= NODES * trees["trees"]
    gains = [found.metrics["num_accepted_tokens"] / found.stats["drafts"] for found in runs]
    assert gains[1] > 1.05 * gains[0]
    rounds = [found.stats["forwards"] / found.stats["steps"] for found in runs]
    assert rounds[1] <= 1.05 * rounds[0]
