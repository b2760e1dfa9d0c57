# SPDX-License-Identifier: Apache-2.0
"""Drafts drawn in an actor of Ray's: samples keep the target's law."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drawn_samples import SAMPLES, SETTINGS, WAVE, Law, sample, waiting
from goodness import ALPHA
from harness import engine, metrics_of, patient, slem
from ray_cluster import RayCluster

from vllm_hetero_spec import read_stats

pytestmark = [pytest.mark.engine, pytest.mark.ray]


@pytest.fixture(scope="module")
def llm(in_cluster: RayCluster, chain_pair: Path) -> Iterator[Any]:
    spec = slem(chain_pair / "drafter", 3, method="tli", parallel="ray")
    # So many rows of the drafter's that each request of a wave has guesses.
    with engine(chain_pair / "target", spec, max_num_seqs=4 * WAVE) as llm:
        yield llm


def test_samples_follow_the_targets_law(
    llm: Any, chain_pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At temperature 1, and where a wrong row shows; drafts that were foreseen, or waited for."""
    patient(llm, monkeypatch)
    hot, few = (Law.of(chain_pair / "target", SETTINGS[name]) for name in ("hot", "few"))
    foreseen = sample(llm, SAMPLES, SETTINGS["hot"])
    waiting(llm, monkeypatch)
    waited = sample(llm, 2 * SAMPLES, SETTINGS["few"])
    print(f"\np {hot.p_value(foreseen):.2g}, {few.p_value(waited):.2g}")
    assert hot.p_value(foreseen) > ALPHA
    assert few.p_value(waited) > ALPHA
    stats, metrics = read_stats(llm), metrics_of(llm)
    assert stats["drafts_ahead"] > SAMPLES // 4
    assert stats["drafts_waited"] > SAMPLES // 4
    assert stats["drafts_guessed"] > SAMPLES // 40
    assert 0 < metrics["num_accepted_tokens"] < metrics["num_draft_tokens"]
    assert set(stats["skipped"]) <= {"not_guessed", "not_ready", "catching_up"}
