# SPDX-License-Identifier: Apache-2.0
"""`vllm-hetero-spec advise TARGET` without drafters: public ones, none of which it downloads."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_hetero_spec.cli.main import main
from vllm_hetero_spec.inputs import known_drafters
from vllm_hetero_spec.inputs.known_drafters import KNOWN, KnownDrafter, family_of, ranked


def test_families_are_those_of_the_tokenizers() -> None:
    qwen, llama, old = (
        SimpleNamespace(model_type=kind, vocab_size=size)
        for kind, size in (("qwen3_moe", 151_936), ("llama", 128_256), ("llama", 32_000))
    )
    assert family_of(qwen) == "Qwen"
    assert family_of(llama) == "Llama 3"
    assert family_of(old) is None
    assert {each.tokenizer for each in KNOWN} == {"Qwen", "Llama 3", "SmolLM2", "Gemma 3"}


def test_ranking_of_known_drafters() -> None:
    found = ranked("Qwen", 1540)
    assert all(each.millions < 1540 / 2 for each in found)
    assert [each.name for each in found[:3]] == [
        "amd/PARD-Qwen2.5-0.5B",
        "Qwen/Qwen2.5-0.5B-Instruct",
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
    ]
    assert [each.millions for each in found[3:]] == [135, 268, 362]
    assert ranked("Qwen", 300) == []
    assert len(ranked(None, None)) == len(KNOWN)


@pytest.fixture
def target(demo_pair: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A target of 8 billion parameters, beside which nothing is on the machine."""
    target = str(demo_pair / "target")
    here = {target: Path(target)}
    monkeypatch.setattr(known_drafters, "weight_bytes", lambda *_: 16 << 30)
    monkeypatch.setattr(known_drafters, "local_folder", here.get)
    return target


def test_download_commands_are_printed(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", target]) == 0
    printed = capsys.readouterr().out
    for each in KNOWN:
        assert f"hf download {each.name}" in printed
    assert main(["advise", target, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    known = [{k: v for k, v in each.items() if k != "is_local"} for each in found["known"]]
    assert [KnownDrafter(**each) for each in known] == list(ranked(None, 8000))


def test_a_small_target_has_none(demo_pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", str(demo_pair / "target")]) == 0
    assert "so small that no known drafter" in capsys.readouterr().out


def test_a_target_is_not_its_own_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of the size of a target whose weights are not on the machine."""
    config = SimpleNamespace(model_type="qwen3")
    monkeypatch.setattr(known_drafters, "text_config", lambda *_: config)
    monkeypatch.setattr(known_drafters, "local_folder", lambda name: None)
    names = [each.name for each in known_drafters.known_for("Qwen/Qwen3-0.6B", False)]
    assert sorted([*names, "Qwen/Qwen3-0.6B"]) == sorted(each.name for each in KNOWN)
