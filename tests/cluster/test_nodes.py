# SPDX-License-Identifier: Apache-2.0
"""`vllm-hetero-spec doctor --ray` on a cluster with equal nodes, and on one with a fault."""

import json
from pathlib import Path
from typing import Any

import pytest
from ray_cluster import RayCluster

import vllm_hetero_spec

pytestmark = [pytest.mark.full, pytest.mark.ray]

DOCTOR = "import sys; from vllm_hetero_spec.cli.main import main; sys.exit(main(sys.argv[1:]))"
# On this node the package cannot be imported.
WITHOUT = "import sys; sys.modules['vllm_hetero_spec'] = None\n"


def examined(cluster: RayCluster, *arguments: str) -> tuple[int, str, str]:
    """Return exit code, output and errors of the command."""
    process = cluster.popen("-c", DOCTOR, "doctor", "--ray", *arguments)
    said, errors = process.communicate(timeout=300)
    return process.returncode, said, errors


def found(cluster: RayCluster, drafter: Path) -> tuple[int, Any]:
    code, said, errors = examined(cluster, str(drafter), "--json")
    assert said, errors
    return code, json.loads(said)


def test_a_sound_cluster(ray_cluster: RayCluster, demo_pair: Path) -> None:
    code, report = found(ray_cluster, demo_pair / "drafter")
    assert (code, report["good"], report["faults"]) == (0, True, [])
    (node,) = report["nodes"].values()
    assert node["vllm-hetero-spec"] == vllm_hetero_spec.__version__
    assert node["Ray device"] == "GPU"
    assert node["drafter"] == "there"
    assert all(node.values())


def test_a_drafter_that_is_nowhere(ray_cluster: RayCluster, tmp_path: Path) -> None:
    code, said, _ = examined(ray_cluster, str(tmp_path))
    assert code == 1
    assert "MISSING" in said
    assert f"the drafter '{tmp_path}' is not there on" in said


def test_a_node_without_the_plugin_is_named(
    ray_cluster: RayCluster, demo_pair: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    path = f"{tmp_path}:{ray_cluster.environment['PYTHONPATH']}"
    with ray_cluster.node("--num-cpus=1", PYTHONPATH=path):
        code, report = found(ray_cluster, demo_pair / "drafter")
    assert code == 1
    (lacking,) = (n for n, has in report["nodes"].items() if has["vllm-hetero-spec"] is None)
    assert len(report["nodes"]) == 2
    (sentence,) = report["faults"]
    assert sentence.startswith(f"vllm-hetero-spec is missing on {lacking}; pip install")


def test_no_cluster(ray_cluster: RayCluster) -> None:
    process = ray_cluster.popen("-c", DOCTOR, "doctor", "--ray", RAY_ADDRESS="127.0.0.1:1")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert errors.splitlines()[-1].startswith("error: no Ray cluster was found")
