# SPDX-License-Identifier: Apache-2.0
"""A drafter's actor, without Ray: what cannot be loaded, and what Ray refuses."""

import os
import pickle
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_hetero_spec.engine.source import drafter_main, ray_actor
from vllm_hetero_spec.engine.source.answers import Failed, answer_of
from vllm_hetero_spec.engine.source.errand import Errand
from vllm_hetero_spec.engine.source.ray_joining import _actor

ERRAND = Errand("name", {"num_gpus": 1.0}, b"", (2, 3), None, 1.0, 1.0, 1.0)


def failure(monkeypatch: pytest.MonkeyPatch, deployment: bytes) -> str:
    """Why an actor cannot load a deployment, as its engine is told before the actor ends."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(ray_actor, "_LAST_WORDS", 0.0)
    actor = ray_actor.DrafterActor(deployment, (3, 2), 1.0, 1.0)
    answer = answer_of(actor._loaded.result(timeout=60))
    assert isinstance(answer, Failed)
    while not ended:
        time.sleep(0.01)
    return answer.sentence


def test_what_an_actor_cannot_read_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    said = failure(monkeypatch, b"cnobody_has.this\nmodule\n.")
    assert "cannot be loaded" in said
    assert "No module named 'nobody_has'" in said


def test_other_plugins_are_loaded_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that they register are read by name in what the drafter is told."""
    import vllm.plugins

    def stop() -> None:
        raise RuntimeError("plugins first")

    monkeypatch.setattr(vllm.plugins, "load_general_plugins", stop)
    monkeypatch.setattr(drafter_main, "_load", pytest.fail)
    assert "RuntimeError: plugins first" in failure(monkeypatch, b"")


@pytest.mark.parametrize("device", [None, "1"])
def test_no_key_is_to_be_left_out_that_was_not_given(
    monkeypatch: pytest.MonkeyPatch, device: str | None
) -> None:
    given = SimpleNamespace(
        options=SimpleNamespace(drafter_device=device),
        drafter_config=SimpleNamespace(model="drafter", quantization=None),
    )

    def fail(*_: Any) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(drafter_main, "_load", fail)
    said = failure(monkeypatch, pickle.dumps(given))
    assert 'RuntimeError: no room); leave out "parallel"' in said
    assert ("drafter_device" in said) is (device is not None)


@pytest.mark.parametrize(("says", "seen"), [("1", "3"), ("0", "0,1"), (None, "0,1")])
def test_an_actor_sees_the_gpu_that_is_set_aside(
    monkeypatch: pytest.MonkeyPatch, says: str | None, seen: str
) -> None:
    """Where Ray leaves it to the actor, as it does on nodes with this variable."""
    variable = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
    monkeypatch.delenv(variable, raising=False)
    if says is not None:
        monkeypatch.setenv(variable, says)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": ["3"], "TPU": []})
    ray = SimpleNamespace(get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(ray_actor.DrafterActor, "_live", lambda actor, deployment: None)
    ray_actor.DrafterActor(b"", (3, 2), 1.0, 1.0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


def ray_with(found: list[object], error: str) -> Any:
    """Where an actor is found only after another engine has started it, if at all."""

    def get_actor(*name: str) -> object:
        if not (asked := found.pop(0)):
            raise ValueError("Failed to look up actor")
        return asked

    def remote(*args: object) -> None:
        raise ValueError(error)

    started = SimpleNamespace(options=lambda **options: SimpleNamespace(remote=remote))
    return SimpleNamespace(get_actor=get_actor, remote=lambda of: started)


def test_another_engine_may_be_faster() -> None:
    assert _actor(ray_with([None, "theirs"], "The name is already taken"), ERRAND, 0) == (
        "theirs",
        False,
    )


def test_what_ray_refuses_is_what_is_said() -> None:
    with pytest.raises(ValueError, match="GPU quantities must be whole"):
        _actor(ray_with([None, None], "GPU quantities must be whole"), ERRAND, 0)
