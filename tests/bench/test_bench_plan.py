# SPDX-License-Identifier: Apache-2.0
"""The plan of a benchmark: order, waves, skipped cells, and the rest after an interruption."""

import dataclasses

import pytest
from bench_fakes import SUITE, suite

from vllm_hetero_spec.bench.plan import Cell, EngineId, Measurement, Plan, make_plan
from vllm_hetero_spec.bench.suite import Suite, SuiteDrafter, Target
from vllm_hetero_spec.errors import ConfigError

ALL = ("alone", "vllm_tli", "draft_model", "hf_alone", "hf_assisted")


def methods(runs: list[Measurement]) -> list[str]:
    return [run.cell.engine.method for run in runs]


def plan_of(asked: Suite, at_once: int = 8, only: str | None = None) -> Plan:
    return make_plan(asked, at_once, lambda target, drafter: "they differ", only)


def engines(plan: Plan) -> list[list[str]]:
    """Return the methods of the first group of each wave."""
    return [[cell.engine.method for cell in wave.groups[0]] for wave in plan.waves]


def test_rounds_are_interleaved_and_rotated() -> None:
    plan = plan_of(suite(peers=("alone", "vllm_tli")))
    (runs,) = plan.pending(set())
    assert methods(runs) == [
        "alone", "slem", "vllm_tli",
        "slem", "vllm_tli", "alone",
        "vllm_tli", "alone", "slem",
    ]  # fmt: skip
    assert [run.round for run in runs] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_group_is_finished_before_the_next_begins() -> None:
    plan = plan_of(suite(batch_sizes=(1, 2), temperatures=(0.0, 1.0), repeats=2))
    (runs,) = plan.pending(set())
    loads = [run.cell[2:] for run in runs]
    assert list(dict.fromkeys(loads)) == [(1, 0.0), (1, 1.0), (2, 0.0), (2, 1.0)]
    assert loads == sorted(loads)
    assert len(runs) == 2 * 4 * 2


def test_every_lookahead_and_drafter_is_an_engine() -> None:
    target = Target("big", "m", (SuiteDrafter("a", "x"), SuiteDrafter("b", "y")), ("code",))
    plan = plan_of(suite(targets=(target,), num_speculative_tokens=(2, 4)))
    drafting = [f"big/slem/{drafter}/k{lookahead}" for drafter in "ab" for lookahead in (2, 4)]
    found = [str(cell.engine) for cell in plan.waves[0].groups[0]]
    assert found == ["big/alone", *drafting]


def test_alone_is_always_measured() -> None:
    plan = plan_of(suite(peers=("hf_assisted",)))
    assert engines(plan) == [["alone", "hf_alone", "slem", "hf_assisted"]]


def test_hugging_face_is_not_measured_beside_a_target_on_several_devices() -> None:
    (target,) = suite().targets
    split = dataclasses.replace(target, engine={"tensor_parallel_size": 2})
    plan = plan_of(suite(targets=(split,), peers=ALL))
    reasons = {cell.engine.method: why for cell, why in plan.skipped.items()}
    for method in ("hf_alone", "hf_assisted"):
        assert "on one device, and tensor_parallel_size is 2" in reasons[method]
    assert "vllm_tli" not in reasons


def test_skipped_cells_have_a_reason() -> None:
    plan = plan_of(suite(peers=ALL, batch_sizes=(1, 2)))
    reasons = {(cell.engine.method, cell.batch_size): why for cell, why in plan.skipped.items()}
    assert reasons[("draft_model", 1)] == reasons[("draft_model", 2)] == "they differ"
    assert "one request at a time" in reasons[("hf_alone", 2)]
    assert "one request at a time" in reasons[("hf_assisted", 2)]
    assert len(reasons) == 4
    wide = {cell.engine.method for cell in plan.waves[0].groups[1]}
    assert wide == {"alone", "slem", "vllm_tli"}


def test_draft_model_needs_equal_vocabularies() -> None:
    plan = make_plan(suite(peers=("alone", "draft_model")), 8, lambda target, drafter: None)
    assert "draft_model" in engines(plan)[0]
    assert plan.skipped == {}


def test_waves_have_a_reference_each() -> None:
    plan = plan_of(suite(peers=ALL), at_once=2)
    others = ("hf_alone", "slem", "vllm_tli", "hf_assisted")
    assert engines(plan) == [["alone", other] for other in others]
    assert [wave.number for wave in plan.waves] == [0, 1, 2, 3]


def test_one_engine_at_a_time_has_waves_of_its_own() -> None:
    plan = plan_of(suite(peers=("alone", "vllm_tli")), at_once=1)
    assert engines(plan) == [["alone"], ["slem"], ["vllm_tli"]]


def test_each_target_has_waves_of_its_own() -> None:
    (big,) = SUITE.targets
    other = Target("other", "m", big.drafters, ("code",))
    plan = plan_of(suite(targets=(big, other)))
    assert [wave.groups[0][0].engine.target for wave in plan.waves] == ["big", "other"]


def test_only_brings_the_references_along() -> None:
    plan = plan_of(suite(peers=ALL), only="assisted/*/t0")
    assert engines(plan) == [["alone", "hf_alone", "hf_assisted"]]
    plan = plan_of(suite(batch_sizes=(1, 2)), only="slem*/b2/")
    assert [str(cell) for group in plan.waves[0].groups for cell in group] == [
        "big/alone/code/b2/t0",
        "big/slem/small/k4/code/b2/t0",
    ]


def test_only_without_a_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="--only 'tli' fits none of the 2 cells, as big/slem"):
        plan_of(SUITE, only="tli")


def test_the_rest_of_a_round_is_measured_with_its_reference() -> None:
    plan = plan_of(suite(peers=("alone", "vllm_tli")))
    (runs,) = plan.pending(set())
    done = set(runs[:2])  # alone and slem of the first round
    (left,) = plan.pending(done)
    assert methods(left)[:2] == ["alone", "vllm_tli"]
    assert left[2:] == runs[3:]


def test_a_missing_reference_alone_brings_nothing_else() -> None:
    plan = plan_of(SUITE)
    (runs,) = plan.pending(set())
    alone = Measurement(Cell(EngineId("big", "alone"), "code", 1, 0.0), 0, 1)
    assert plan.pending(set(runs) - {alone}) == [[alone]]
