# SPDX-License-Identifier: Apache-2.0
"""Checks of the nodes of a Ray cluster."""

import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vllm_hetero_spec.errors import ConfigError, first_line

Node = Mapping[str, str | None]  # version or device by `COLUMNS`; None: missing

PLUGIN, KEY, DRAFTER = "vllm-hetero-spec", "Ray device", "drafter"
COLUMNS = (PLUGIN, "vLLM", "Ray", "Python", KEY, DRAFTER)
_SECONDS = 300  # limit for the answers of all nodes


def join_cluster() -> Any:
    """Connect to the cluster that RAY_ADDRESS names, or to this machine's; or raise ConfigError."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "Ray is not installed here; pip install 'vllm-hetero-spec[ray]' on every node."
        ) from error
    try:
        head = re.fullmatch(r"([^/]+):(\d+)", os.environ.get("RAY_ADDRESS", ""))
        if head:  # Ray itself would retry for many minutes
            socket.create_connection((head[1], int(head[2])), timeout=10).close()
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster was found ({first_line(error)}); run this on one of its nodes, or "
            "set RAY_ADDRESS to its head, as host:port."
        ) from error
    return ray


def ask_nodes(drafter: str | None) -> dict[str, Node | str]:
    """Return the versions of each living node, or the reason why it did not answer.

    Keys are the address and the start of the id. Raises as `join_cluster`.
    """
    ray = join_cluster()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

    try:
        task = ray.remote(num_cpus=0, max_retries=0)(_asked())
        asked = {
            f"{node['NodeManagerAddress']} {node['NodeID'][:6]}": task.options(
                scheduling_strategy=On(node["NodeID"], soft=False)
            ).remote(drafter)
            for node in ray.nodes()
            if node["Alive"]
        }
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=_SECONDS)
        return {name: _answer(ray, reference) for name, reference in asked.items()}
    finally:
        ray.shutdown()


def _answer(ray: Any, reference: Any) -> Node | str:
    try:
        found: Node = ray.get(reference, timeout=0)
        return found
    except Exception as error:  # raised by Ray, or by any package on the node
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {lines[-1].strip() if lines else 'no answer'}"


def _asked() -> Callable[[str | None], Node]:
    """Build the task. Ray pickles an inner function by value, so a node may lack this package."""

    def look(drafter: str | None) -> Node:
        import importlib.metadata
        import importlib.util
        import platform
        from pathlib import Path

        def version(package: str) -> str | None:
            if importlib.util.find_spec(package) is None:
                return None
            return str(getattr(importlib.import_module(package), "__version__", None))

        def plugin() -> str | None:
            points = importlib.metadata.entry_points(group="vllm.general_plugins")
            seen = any(point.name == "hetero_spec" for point in points)
            return version("vllm_hetero_spec") if seen else None

        def device() -> str | None:
            if importlib.util.find_spec("vllm") is None:
                return None
            from vllm.platforms import current_platform

            return current_platform.ray_device_key or "none"

        def resolved() -> str | None:
            if drafter is None or (Path(drafter) / "config.json").is_file():
                return drafter and "there"
            if Path(drafter).is_dir():
                return None
            try:
                from huggingface_hub import hf_hub_download

                hf_hub_download(drafter, "config.json")
            except Exception:
                return None
            return "there"

        return {
            "vllm-hetero-spec": plugin(),
            "vLLM": version("vllm"),
            "Ray": version("ray"),
            "Python": platform.python_version(),
            "Ray device": device(),
            "drafter": resolved(),
        }

    return look


def faults(nodes: Mapping[str, Node | str], drafter: str | None) -> Iterator[str]:
    """Yield a sentence with the fix for each missing or differing item."""
    answers: dict[str, Node] = {}
    for name, answer in nodes.items():
        if isinstance(answer, str):
            yield f"{name} did not answer ({answer}); see Ray's log of that node."
        else:
            answers[name] = answer
    for column in COLUMNS[:-1]:
        having = {name: node[column] for name, node in answers.items() if node[column]}
        lacking = [name for name in answers if name not in having]
        # Without vLLM the device is missing too, so it is not reported.
        if lacking and column != KEY:
            yield f"{column} is missing on {', '.join(lacking)}; {_FIX[column]}."
        if len(set(having.values())) > 1:
            found = ", ".join(f"{value} on {name}" for name, value in having.items())
            yield f"{column} differs: {found}; {_FIX[column]}."
    lacking = [name for name, node in answers.items() if not node[DRAFTER]]
    if drafter is not None and lacking:
        yield (
            f"the drafter {drafter!r} is not there on {', '.join(lacking)}; copy its folder to the "
            "same path, or download it there with `hf download`."
        )


_FIX = {
    PLUGIN: "pip install the same version of vllm-hetero-spec into vLLM's environment on all nodes",
    "vLLM": "install the same release of vLLM on all nodes",
    "Ray": "install the same version of Ray on all nodes",
    "Python": "use the same Python on all nodes",
    KEY: "install the same build of vLLM, for the same kind of device, on all nodes",
}
