# SPDX-License-Identifier: Apache-2.0
"""`vllm-hetero-spec doctor`: all is well here, and what is not is named with its fix."""

import json
from typing import Any

import pytest

from vllm_hetero_spec.cli import health
from vllm_hetero_spec.cli.health import Finding
from vllm_hetero_spec.cli.main import main
from vllm_hetero_spec.cli.nodes import COLUMNS, DRAFTER, KEY, PLUGIN, faults


def test_a_sound_installation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["good"]
    assert len(found["findings"]) == 8


@pytest.mark.parametrize(
    ("asked", "triton", "said"),
    [
        ("0", True, "V1 (VLLM_USE_V2_MODEL_RUNNER=0)"),
        ("1", True, "V2 (VLLM_USE_V2_MODEL_RUNNER=1)"),
        (None, True, "V2 (vLLM's default)"),
        (None, False, "V1 (V2 needs Triton, which has no backend here)"),
    ],
)
def test_the_model_runner_is_named_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, triton: bool, said: str
) -> None:
    from vllm.triton_utils import importing

    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    monkeypatch.setattr(importing, "HAS_TRITON", triton)
    if asked is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", asked)
    (finding,) = (f for f in health.examine(run=False) if f.check == "model runner")
    assert finding.found == said


@pytest.mark.engine
def test_a_tiny_pair() -> None:
    found = list(health.examine())[-1]
    assert found.good, found.found


def test_a_plugin_that_is_kept_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    assert main(["doctor", "--no-run"]) == 1
    printed = capsys.readouterr().out
    assert "BAD  plugin          VLLM_PLUGINS=another keeps it out" in printed
    assert "fix: unset VLLM_PLUGINS or add hetero_spec to it" in printed


def test_a_check_that_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Finding:
        raise RuntimeError("no such thing\nand more")

    monkeypatch.setattr(health, "_ledger", broken)
    found = {finding.check: finding for finding in health.examine(run=False)}
    assert not found["vLLM's sources"].good
    assert found["vLLM's sources"].found == "RuntimeError: no such thing"
    assert found["vLLM's sources"].fix


def test_an_unsupported_release_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.version

    monkeypatch.setattr(vllm.version, "__version__", "0.19.1")
    found = next(finding for finding in health.examine(run=False) if "release" in finding.check)
    assert not found.good
    assert "0.19.1" in found.fix


# ---- the nodes of a Ray cluster -----------------------------------------------------------------


SOUND = dict.fromkeys(COLUMNS, "1")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, []),
        ({PLUGIN: None}, [f"{PLUGIN} is missing on b; pip install the same version"]),
        ({PLUGIN: "2"}, [f"{PLUGIN} differs: 1 on a, 2 on b; pip install the same version"]),
        ({"vLLM": None, KEY: None}, ["vLLM is missing on b; install the same release"]),
        ({KEY: "none"}, [f"{KEY} differs: 1 on a, none on b; install the same build"]),
        ({DRAFTER: None}, ["the drafter 'small' is not there on b; copy its folder"]),
        ("ActorDiedError: gone", ["b did not answer (ActorDiedError: gone); see Ray's log"]),
    ],
)
def test_what_a_node_lacks_is_said_with_its_fix(change: Any, said: list[str]) -> None:
    nodes = {"a": SOUND, "b": change if isinstance(change, str) else SOUND | change}
    found = list(faults(nodes, "small"))
    assert len(found) == len(said)
    for sentence, beginning in zip(found, said, strict=True):
        assert sentence.startswith(beginning)
        assert sentence.endswith(".")


def test_a_drafter_that_is_not_asked_for_is_not_missed() -> None:
    assert not list(faults({"a": SOUND | {DRAFTER: None}}, None))
