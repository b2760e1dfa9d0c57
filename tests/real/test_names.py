# SPDX-License-Identifier: Apache-2.0
"""Pairs given by their names on the hub, without a network: loading, and `inspect`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_models import GEMMA, QWEN, SMOLLM

pytestmark = [pytest.mark.full, pytest.mark.real]


@pytest.fixture(scope="module")
def inspected(run_as_user: Callable[..., str]) -> Callable[..., dict[str, Any]]:
    """Return a function that returns the JSON output of `inspect` for a target and a drafter."""
    code = "import sys; from vllm_hetero_spec.cli.main import main; sys.exit(main())"
    return lambda *pair: json.loads(run_as_user("-c", code, "inspect", "--json", *pair))


@pytest.mark.engine
def test_an_engine_takes_names(run_as_user: Callable[..., str], smollm: Path, gemma: Path) -> None:
    program = str(Path(__file__).with_name("by_name.py"))
    line = run_as_user(program, SMOLLM, GEMMA, "The capital of France is").splitlines()[-1]
    found = json.loads(line)
    assert len(found["ids"]) == 16
    assert found["drafts"] > 0
    assert set(found["skipped"]) <= {"catching_up"}


def test_two_byte_level_vocabularies(
    inspected: Callable[..., dict[str, Any]], qwen: Path, smollm: Path
) -> None:
    found = inspected(QWEN, SMOLLM)
    target, drafter = found["target"]["vocabulary"], found["drafter"]["vocabulary"]
    # The model has 151,936 rows of logits; 271 of them are padding.
    assert (target["ids"], target["special"]) == (151_665, 14)
    assert (drafter["ids"], drafter["special"]) == (49_152, 17)
    # Both vocabularies cover all bytes, so most tokens of the smaller one are in the larger one.
    assert found["intersection"]["true_bytes"] == 39_237
    assert found["pair"]["omega_k"] >= found["pair"]["omega_t"] > 0.75
    assert found["drafter"]["changed_lines"] == 0
    bridge = found["bridge"]
    assert bridge["kind"] == "text"
    assert bridge["chat_template"] == {"active": True, "reason": ""}
    turns = {token["content"]: token["drafter_id"] for token in bridge["control_tokens"]}
    assert (turns["<|im_start|>"], turns["<|im_end|>"]) == (1, 2)
    assert found["methods"]["temperature_0"][0]["method"] == "slem"
    assert found["methods"]["temperature_1"][0]["method"] == "push_forward"


def test_a_vocabulary_of_pieces_with_spaces(
    inspected: Callable[..., dict[str, Any]], gemma: Path, smollm: Path
) -> None:
    found = inspected(GEMMA, SMOLLM)
    target, overlap = found["target"]["vocabulary"], found["intersection"]
    assert target["ids"] == 262_144
    # Tokens are compared by bytes, so pieces such as "▁the" and "Ġthe" are equal.
    assert overlap["true_bytes"] == 46_145 > 3 * overlap["get_vocab"]
    assert found["pair"]["omega_t"] > 0.8
    assert found["target"]["changed_lines"] == 0
    assert "no chat template" in found["bridge"]["chat_template"]["reason"]
    control = {token["content"]: token["drafter_id"] for token in found["bridge"]["control_tokens"]}
    assert (control["<eos>"], control["<mask>"]) == (2, None)
