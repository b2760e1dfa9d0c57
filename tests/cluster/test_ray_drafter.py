# SPDX-License-Identifier: Apache-2.0
"""A drafter that is an actor of Ray's and is shared: the target's text, whatever becomes of it."""

import dataclasses
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from drawn_samples import SAMPLES, SETTINGS, WAVE, Law, sample, waiting
from goodness import ALPHA
from harness import drafted_ahead, engine, metrics_of, patient, proposer_of, slem, warnings
from ray_cluster import HERE, RayCluster, processes
from scenarios import Outputs, generate, greedy

from vllm_hetero_spec import read_stats
from vllm_hetero_spec.config import ConfigError, RayDrafter
from vllm_hetero_spec.engine.source import deployment, kept_process
from vllm_hetero_spec.engine.source.deployment import Deployment
from vllm_hetero_spec.engine.source.kept_process import KeptProcess

pytestmark = [pytest.mark.full, pytest.mark.engine, pytest.mark.ray]


def actor_of(drafter: Path, **changes: Any) -> dict[str, Any]:
    return slem(drafter, parallel="ray", **changes)


@pytest.fixture(scope="module")
def llm(in_cluster: RayCluster, demo_pair: Path, alone: Outputs) -> Iterator[Any]:
    with engine(demo_pair / "target", actor_of(demo_pair / "drafter")) as llm:
        yield llm


def kept(llm: Any) -> KeptProcess:
    found: KeptProcess = proposer_of(llm).drafting.source._process
    return found


def actors(cluster: RayCluster) -> list[psutil.Process]:
    return processes(cluster.address, "DrafterActor")


def until(holds: Callable[[], Any], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def start(llm: Any, **changes: Any) -> KeptProcess:
    """Start a drafter as that of an engine, but for some options."""
    deployment: Deployment = kept(llm)._deployment
    options = dataclasses.replace(deployment.options, **changes)
    found = KeptProcess(dataclasses.replace(deployment, options=options))
    found.start()
    return found


def test_samples_follow_the_targets_law(
    in_cluster: RayCluster, chain_pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At temperature 1, and where a wrong row shows; drafts that were foreseen, or waited for."""
    hot, few = (Law.of(chain_pair / "target", SETTINGS[name]) for name in ("hot", "few"))

    def drawn() -> tuple[Any, Any, dict[str, Any], dict[str, int]]:
        spec = slem(chain_pair / "drafter", 3, method="tli", parallel="ray")
        # So many rows of the drafter's that each request of a wave has guesses.
        with engine(chain_pair / "target", spec, max_num_seqs=4 * WAVE) as llm:
            patient(llm, monkeypatch)
            foreseen = sample(llm, SAMPLES, SETTINGS["hot"])
            waiting(llm, monkeypatch)
            waited = sample(llm, SAMPLES, SETTINGS["few"])
            monkeypatch.undo()
            return foreseen, waited, read_stats(llm), metrics_of(llm)

    foreseen, waited, stats, metrics = drawn()
    gc.collect()  # the engine is gone when that of the other tests begins
    print(f"\np {hot.p_value(foreseen):.2g}, {few.p_value(waited):.2g}")
    assert hot.p_value(foreseen) > ALPHA
    assert few.p_value(waited) > ALPHA
    assert stats["drafts_ahead"] > SAMPLES // 4
    assert stats["drafts_waited"] > SAMPLES // 4
    assert stats["drafts_guessed"] > SAMPLES // 40
    assert 0 < metrics["num_accepted_tokens"] < metrics["num_draft_tokens"]
    # On a machine that is busy for seconds the actor may seem to hang, and is replaced.
    assert set(stats["skipped"]) <= {"not_guessed", "not_ready", "catching_up", "drafter_down"}
    until(lambda: not actors(in_cluster))


def test_texts_are_the_targets_own(
    llm: Any, texts: list, alone: Outputs, monkeypatch: pytest.MonkeyPatch, in_cluster: RayCluster
) -> None:
    patient(llm, monkeypatch)
    assert generate(llm, texts, greedy()) == alone
    drafted_ahead(llm)
    assert len(actors(in_cluster)) == 1
    assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()  # not even here


def test_two_engines_share_one_actor_and_one_is_killed(
    llm: Any,
    texts: list,
    alone: Outputs,
    monkeypatch: pytest.MonkeyPatch,
    in_cluster: RayCluster,
    demo_pair: Path,
) -> None:
    spec = actor_of(demo_pair / "drafter")
    target = str(demo_pair / "target")

    def arguments(times: int) -> list[str]:
        given = {"target": target, "spec": spec, "texts": texts, "times": times}
        return [str(HERE / "programs.py"), "sharing", json.dumps(given)]

    patient(llm, monkeypatch)
    (actor,) = actors(in_cluster)
    before = read_stats(llm)
    found = in_cluster.answer(*arguments(3))
    assert found["greedy"] == [alone] * 3
    assert found["stats"]["drafts_ahead"] > 0
    assert found["stats"]["forwards"] > before["forwards"]  # those of the other among them
    other = in_cluster.popen(*arguments(1000))
    assert other.stdout is not None
    while "again" not in other.stdout.readline():
        assert other.poll() is None
    family = psutil.Process(other.pid).children(recursive=True)
    assert family  # its relay
    for _ in range(2):
        assert generate(llm, texts, greedy()) == alone
    other.kill()
    other.communicate()
    assert generate(llm, texts, greedy()) == alone
    assert psutil.wait_procs(family, timeout=240)[1] == []
    stats = read_stats(llm)
    assert stats["drafts_ahead"] > before["drafts_ahead"]
    assert stats["restarts"] == 0
    assert actors(in_cluster) == [actor]


def test_another_share_is_another_actor_and_ends_once_no_engine_is_left(
    llm: Any, monkeypatch: pytest.MonkeyPatch, in_cluster: RayCluster
) -> None:
    """Not while one is there that says nothing; also where it could not see it go."""
    silence, idle_exit = 4.0, 4.0
    monkeypatch.setattr(deployment, "SILENCE", silence)
    monkeypatch.setattr(deployment, "IDLE_EXIT", idle_exit)
    others = actors(in_cluster)
    engine = start(llm, ray_drafter=RayDrafter(share="short"))
    (actor,) = [of for of in actors(in_cluster) if of not in others]
    time.sleep(silence + idle_exit)
    assert actor.is_running()
    assert engine.up
    actor.suspend()
    engine.rest()
    time.sleep(idle_exit)
    actor.resume()
    until(lambda: actors(in_cluster) == others)


def test_what_cannot_start_says_why(
    llm: Any, monkeypatch: pytest.MonkeyPatch, in_cluster: RayCluster, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(deployment, "PATIENCE", 3.0)
        with pytest.raises(ConfigError, match=r"asks for 0 GPU, 64 CPU .* have 2 GPU, 8 CPU, of"):
            start(llm, ray_drafter=RayDrafter(num_cpus=64))
    with monkeypatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "127.0.0.1:1")
        with pytest.raises(ConfigError, match=r"no Ray cluster was found .*RAY_ADDRESS"):
            start(llm)
    with monkeypatch.context() as patch:
        (tmp_path / "ray.py").write_text("raise ImportError('not installed')")
        patch.syspath_prepend(tmp_path)
        with pytest.raises(ConfigError, match=r"Ray is not installed here; .*vllm-hetero-spec.ray"):
            start(llm)
        (tmp_path / "ray.py").unlink()
        (tmp_path / "sitecustomize.py").write_text(
            "import vllm_hetero_spec; vllm_hetero_spec.__version__ = '0.0.1'"
        )
        with pytest.raises(ConfigError, match=r"the drafter's actor has .* this engine 0\.0\.1"):
            start(llm)
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes=1 is less"):
        start(llm, ray_drafter=RayDrafter(share="tiny"), kv_cache_memory_bytes=1)
    until(lambda: len(actors(in_cluster)) == 1)


def test_an_actor_that_is_killed_is_started_again(
    llm: Any,
    texts: list,
    alone: Outputs,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: Any,
    in_cluster: RayCluster,
) -> None:
    before = read_stats(llm)
    (actor,) = actors(in_cluster)
    actor.kill()
    until(lambda: not kept(llm).up)
    assert generate(llm, texts, greedy()) == alone
    stats = read_stats(llm)
    assert stats["skipped"]["drafter_down"] > before["skipped"].get("drafter_down", 0)
    assert len(warnings(caplog, "drafter_down")) == 1
    until(lambda: kept(llm).up)
    patient(llm, monkeypatch)
    assert generate(llm, texts, greedy()) == alone
    after = read_stats(llm)
    assert after["restarts"] == before["restarts"] + 1
    assert after["drafts_ahead"] > stats["drafts_ahead"]
    (again,) = actors(in_cluster)
    assert again.pid != actor.pid


def test_an_actor_that_hangs_is_replaced_for_all_its_engines(
    llm: Any,
    texts: list,
    alone: Outputs,
    monkeypatch: pytest.MonkeyPatch,
    in_cluster: RayCluster,
    demo_pair: Path,
) -> None:
    """By one other; it is ended once nobody uses it, and not before."""
    (hung,) = actors(in_cluster)
    given = {"target": str(demo_pair / "target"), "spec": actor_of(demo_pair / "drafter")}
    arguments = json.dumps(given | {"texts": texts})
    other = in_cluster.popen(str(HERE / "programs.py"), "moving", arguments)
    assert other.stdout is not None
    while "again" not in other.stdout.readline():
        assert other.poll() is None
    before = read_stats(llm)
    hung.suspend()

    def replaced() -> bool:
        assert generate(llm, texts, greedy()) == alone
        return kept(llm).restarts > before["restarts"]

    with monkeypatch.context() as patch:
        patch.setattr(kept_process, "SILENCE", 2.0)
        until(replaced)
    until(lambda: len(actors(in_cluster)) == 2)
    assert hung.is_running()
    until(lambda: kept(llm).up)
    found = in_cluster.answer_of(other)
    assert found["greedy"] == [alone]
    assert found["before"]["restarts"] == 1
    assert found["after"]["drafts_ahead"] > found["before"]["drafts_ahead"]
    patient(llm, monkeypatch)
    assert generate(llm, texts, greedy()) == alone
    after = read_stats(llm)
    assert after["restarts"] == before["restarts"] + 1
    assert after["drafts_ahead"] > before["drafts_ahead"]
    until(lambda: not hung.is_running())
    assert len(actors(in_cluster)) == 1
