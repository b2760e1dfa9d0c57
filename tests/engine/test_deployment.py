# SPDX-License-Identifier: Apache-2.0
"""Deployment of the drafter process: its pickled configuration, its device and its cores."""

import copy
import dataclasses
import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_hetero_spec.engine.ahead import deployment
from vllm_hetero_spec.engine.ahead.deployment import Deployment, packed
from vllm_hetero_spec.engine.seam.drafter_config import drafter_vllm_config, stand_alone
from vllm_hetero_spec.engine.seam.drafter_model import drafter_model_config
from vllm_hetero_spec.engine.seam.tokenizers import load_pair
from vllm_hetero_spec.errors import ConfigError
from vllm_hetero_spec.options import HeteroOptions

CORE = max(os.sched_getaffinity(0))
Deploy = Callable[..., Deployment]


@pytest.fixture(scope="module")
def target(demo_pair: Path) -> VllmConfig:
    return EngineArgs(str(demo_pair / "target"), dtype="float32").create_engine_config()


@pytest.fixture(scope="module")
def deploy(demo_pair: Path, target: VllmConfig) -> Deploy:
    """A function that returns the deployment beside a target on a device."""

    def deploy(beside: str = "cuda:1", **keys: Any) -> Deployment:
        options = HeteroOptions("slem", str(demo_pair / "drafter"), 4, draft_ahead=True, **keys)
        drafter = drafter_model_config(options, target.model_config)
        pair = load_pair(target.model_config, drafter, options)
        return Deployment.of(target, drafter, options, pair, None, torch.device(beside))

    return deploy


def test_the_targets_layers_and_their_kv_are_not_sent(deploy: Deploy, target: VllmConfig) -> None:
    """The configuration has layers by name. Some cannot be pickled, and their KV is large."""
    layer = torch.nn.Identity()
    layer.kv_cache = torch.zeros(1 << 22)
    layers = target.compilation_config.static_forward_context
    layers["layer"], layers["expert"] = layer, lambda: None
    sent = deploy()
    assert len(packed(sent)) < 1 << 17
    assert set(layers) == {"layer", "expert"}
    received = pickle.loads(packed(sent)).vllm_config
    assert not received.compilation_config.static_forward_context
    target.cache_config.kv_cache_layout = "settled later"
    assert sent.vllm_config.cache_config.kv_cache_layout is None
    target.cache_config.kv_cache_layout = None
    layers.clear()


def test_a_model_with_code_of_its_own_is_sent_with_it(
    deploy: Deploy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class of the configuration is in a local folder that no other process can import."""
    folder = tmp_path / "transformers_modules"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "theirs.py").write_text(
        "from transformers import LlamaConfig\n\n\nclass Theirs(LlamaConfig):\n    own = 7\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)
    given = deploy()
    drafter = copy.copy(given.drafter_config)
    theirs = importlib.import_module("transformers_modules.theirs").Theirs
    drafter.hf_config = theirs(hidden_size=24)
    sent = tmp_path / "sent"
    sent.write_bytes(packed(dataclasses.replace(given, drafter_config=drafter)))
    code = (
        "import pickle, sys; given = pickle.load(open(sys.argv[1], 'rb'))\n"
        "config = given.drafter_config.hf_config\n"
        "print(type(config).__name__, config.own, config.hidden_size)"
    )
    command = [sys.executable, "-c", code, str(sent)]
    loaded = subprocess.run(command, capture_output=True, text=True, check=False)
    assert loaded.stdout.split("\n")[-2:] == ["Theirs 7 24", ""], loaded.stderr
    cloudpickle.unregister_pickle_by_value(sys.modules["transformers_modules"])
    for name in ("transformers_modules.theirs", "transformers_modules"):
        sys.modules.pop(name)


@pytest.mark.parametrize(
    ("keys", "device", "cores"),
    [
        ({}, "cuda:1", []),
        ({"drafter_device": "cuda:2"}, "cuda:2", []),
        ({"drafter_device": f"{CORE}"}, "cuda:1", [CORE]),  # cores of the host's threads
        ({"beside": "cpu"}, "cpu", [6, 7]),
        ({"beside": "cpu", "drafter_device": "cpu"}, "cpu", [6, 7]),
        ({"beside": "cpu", "drafter_device": f"{CORE}"}, "cpu", [CORE]),
    ],
)
def test_device_and_cores_of_the_drafter(
    deploy: Deploy,
    keys: dict[str, str],
    device: str,
    cores: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By default the drafter runs on the target's device, or on free cores of a CPU target."""
    monkeypatch.setattr(deployment, "free_cores", lambda _: [6, 7])
    given = deploy(**keys)
    assert (given.device, list(given.cores)) == (device, cores)


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
@pytest.mark.parametrize(("batched", "on_cpu"), [(256, 256), (8192, 512)])
def test_a_forward_on_a_cpu_is_short(
    deploy: Deploy, target: VllmConfig, device: str, batched: int, on_cpu: int
) -> None:
    """A longer forward on a CPU could take more time than `supervisor.SILENCE` allows."""
    given = dataclasses.replace(deploy(), device=device)
    given.vllm_config.scheduler_config = copy.copy(target.scheduler_config)
    given.vllm_config.scheduler_config.max_num_batched_tokens = batched
    assert given.most_tokens == (batched if device == "cuda:1" else on_cpu)


@pytest.mark.parametrize("device", ["cpu", "foo:7"])
def test_a_device_of_another_type_is_refused(deploy: Deploy, device: str) -> None:
    with pytest.raises(ConfigError, match=rf"drafter_device is '{device}', .* on cuda:1: .*CPU co"):
        deploy(drafter_device=device)


def test_cores_that_do_not_exist_are_refused(deploy: Deploy) -> None:
    """Cores are valid also if the affinity of this process does not include them."""
    ours = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {CORE})
    try:
        for core in ours:
            assert deploy(drafter_device=f"{core}").cores == [core]
        with pytest.raises(
            ConfigError, match=rf"is '{CORE},9999', .* core 9999 .* some of .*{CORE}"
        ):
            deploy(drafter_device=f"{CORE},9999")
        assert os.sched_getaffinity(0) == {CORE}
    finally:
        os.sched_setaffinity(0, ours)


def test_devices_are_counted_from_the_first(deploy: Deploy, target: VllmConfig) -> None:
    """The drafter's device index does not depend on the target's node, engine or rank."""
    given = deploy()
    config = drafter_vllm_config(target, given.drafter_config, given.options, solo=True)
    parallel = config.parallel_config
    parallel.data_parallel_index = parallel.data_parallel_rank_local = 3
    parallel.nnodes, parallel.node_rank, parallel.assigned_physical_gpu_ids = 2, 1, [5]
    stand_alone(parallel)
    assert parallel.assigned_physical_gpu_ids is None
    assert parallel.data_parallel_index == parallel.data_parallel_rank_local == 0
    assert (parallel.nnodes, parallel.node_rank, parallel.world_size) == (1, 0, 1)
