# SPDX-License-Identifier: Apache-2.0
"""Engines whose workers are Ray actors, and engines that are Ray actors themselves."""

import json
from pathlib import Path
from typing import Any

import pytest
from goodness import follows
from harness import engine, slem
from ray_cluster import HERE, RayCluster
from scenarios import Outputs, generate, greedy
from target_law import Setting, counted, law_of, load

from vllm_hetero_spec import read_stats

pytestmark = [pytest.mark.full, pytest.mark.engine, pytest.mark.ray]

LAW = {"temperature": 0.8, "top_k": 3}


def run(cluster: RayCluster, name: str, environment: dict[str, str], **arguments: Any) -> Any:
    """Return the answer of a function of `programs.py`."""
    return cluster.answer(str(HERE / "programs.py"), name, json.dumps(arguments), **environment)


@pytest.fixture(scope="module")
def hetero(demo_pair: Path) -> dict[str, Any]:
    return slem(demo_pair / "drafter", method="hetero")


@pytest.fixture(scope="module")
def two_ranks(
    ray_cluster: RayCluster, demo_pair: Path, texts: list[str], hetero: dict[str, Any]
) -> Any:
    return run(
        ray_cluster,
        "executor",
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},
        target=str(demo_pair / "target"),
        spec=hetero,
        texts=texts,
        sampled={**LAW, "max_tokens": 6, "ignore_eos": True, "prompt": texts[0], "times": 400},
    )


def test_same_tokens_and_drafts(
    two_ranks: Any, alone: Outputs, demo_pair: Path, texts: list[str], hetero: dict[str, Any]
) -> None:
    """Tokens and drafts equal those of one rank in this process."""
    assert two_ranks["greedy"] == alone
    with engine(demo_pair / "target", hetero) as llm:
        for text in texts[:3]:
            generate(llm, [text], greedy())
        here = read_stats(llm)
    drafting, other = two_ranks["counts"]
    for name in ("drafts", "draft_tokens", "drafter_tokens"):
        assert drafting[name] == here[name]
    assert list(drafting["lengths"].values()) == list(here["lengths"].values())
    assert drafting["drafts"] > 0
    assert other["drafts"] == other["drafter_tokens"] == 0  # the whole drafter is on the first rank


def test_sampled_drafts_keep_the_targets_law(
    two_ranks: Any, demo_pair: Path, texts: list[str]
) -> None:
    model, start = load(demo_pair / "target", texts[0])
    found = counted(two_ranks["sampled"])
    assert follows(found, law_of(model, start, Setting(**LAW)))


def test_a_worker_that_is_killed(two_ranks: Any) -> None:
    """vLLM ends the engine with its own error, and the rank with the drafter ends too."""
    killed = two_ranks["killed"]
    assert killed["ranks"] == 2
    assert killed["said"].startswith("EngineDeadError")
    assert killed["alive"] == 0


def test_two_engines_as_actors(
    ray_cluster: RayCluster, demo_pair: Path, texts: list[str], alone: Outputs
) -> None:
    found = run(
        ray_cluster,
        "data_parallel",
        {},
        texts=texts,
        model=str(demo_pair / "target"),
        speculative_config=slem(demo_pair / "drafter"),
        data_parallel_size=2,
        data_parallel_backend="ray",
    )
    assert found["greedy"] == alone
    assert all(drafts and drafts > 0 for drafts in found["drafts"])
