# SPDX-License-Identifier: Apache-2.0
"""Advice for programs: every figure under stable names, times in seconds."""

from typing import Any

from vllm_hetero_spec.advice.findings import Advice, Candidate, DrafterFindings, Place
from vllm_hetero_spec.advice.prediction import Prediction


def as_json(advice: Advice) -> dict[str, Any]:
    """The whole of it."""
    plan = advice.plan
    return {
        "target": advice.target,
        "target_zero_mlp_columns": advice.widened[0] if advice.widened else 0,
        "load": {
            "prompts": len(plan.prompts),
            "max_tokens": plan.max_tokens,
            "batch_sizes": list(plan.batch_sizes),
            "temperatures": list(plan.temperatures),
            "repeats": plan.repeats,
            "num_speculative_tokens": plan.lookahead,
        },
        "drafters": [_drafter(advice, drafter) for drafter in advice.drafters],
        "ranking": [_place(advice, place) for place in advice.ranking()],
        "recommended": advice.recommended(),
    }


def _drafter(advice: Advice, drafter: DrafterFindings) -> dict[str, Any]:
    told: dict[str, Any] = {"name": drafter.name, "stopped": drafter.stopped}
    if drafter.view is not None and drafter.memory is not None:
        told |= drafter.view.as_json(drafter.memory, advice.plan.temperatures)
    return told | {
        "measured": [_candidate(candidate) for candidate in drafter.candidates],
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "method": candidate.method,
        "why": candidate.why,
        "failure": candidate.failure,
        "loads": [
            {"temperature": temperature, "batch_size": size, **_prediction(found, size)}
            for (temperature, size), found in candidate.predictions.items()
        ],
    }


def _prediction(found: Prediction, size: int) -> dict[str, Any]:
    costs = found.costs
    return {
        "target_step_seconds": costs.target(size, 0),
        "verifying_step_seconds": costs.target(size, costs.lookahead),
        "drafter_step_seconds": costs.drafter_step,
        "drafting_seconds": costs.drafting(costs.lookahead),
        "drafter_steps_per_target_token": costs.drafter_steps / costs.lookahead,
        "acceptance_by_position": [
            accepted / tested if tested else None for tested, accepted in found.acceptance
        ],
        "reading_seconds": found.reading,
        "alone_tokens_per_second": found.alone_tokens_per_second,
        "measured_speedup": found.measured_speedup,
        "best": found.best.lookahead,
        "foreseen": [
            {
                "num_speculative_tokens": each.lookahead,
                "speedup": each.speedup,
                "low": each.low,
                "high": each.high,
                "decode_speedup": each.decode_speedup,
                "acceptance_length": each.tokens_per_round,
            }
            for each in found.foreseen
        ],
    }


def _place(advice: Advice, place: Place) -> dict[str, Any]:
    index = place.lookahead - 1
    return {
        "drafter": place.drafter.name,
        "method": place.candidate.method,
        "num_speculative_tokens": place.lookahead,
        "chosen_at_batch_size": place.batch_size,
        "pays": place.pays,
        "speedups": [
            {"temperature": t, "batch_size": size, "speedup": found.foreseen[index].speedup}
            for (t, size), found in place.candidate.predictions.items()
        ],
    }
