# SPDX-License-Identifier: Apache-2.0
"""The examples for Ray's libraries, unchanged: answers, metrics, and the loss of a replica."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import psutil
import pytest
import vllm
from harness import engine
from prometheus_client.parser import text_string_to_metric_families
from ray_cluster import REPO, SECONDS, RayCluster, free_port, processes
from scenarios import generate, greedy

pytestmark = [pytest.mark.full, pytest.mark.engine, pytest.mark.ray]

# Ray exports a counter only after its first count. These prompts are too short to share KV, and
# trees are disabled.
COUNTLESS = {
    f"ray_vllm_hetero_spec_{name}"
    for name in (
        "reused_tokens_total",
        "trees_total",
        "tree_tokens_total",
        "side_tokens_accepted_total",
        "drafts_guessed_total",
        "drafts_waited_total",
        "wait_seconds_sum",
        "skipped_total",
        "untranslated_total",
    )
}
BOARD = REPO / "examples" / "grafana" / "hetero_spec.json"
PROMPTS = (
    "def main():\n    parser = argparse.ArgumentParser(",
    "class Node:\n    def __init__(self, value):\n        self.value",
)


def until(ready: Callable[[], bool], seconds: float = SECONDS) -> bool:
    """Return True if `ready` becomes true in time."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def shown(cluster: RayCluster) -> dict[str, float]:
    """Return the exported metrics of the first engine of each replica, summed by name."""
    url = f"http://127.0.0.1:{cluster.metrics_port}/metrics"
    with urllib.request.urlopen(url, timeout=30) as response:
        families = text_string_to_metric_families(response.read().decode())
    found: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples):
        if sample.labels.get("engine") == "0":
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def drafts(cluster: RayCluster) -> float:
    return shown(cluster).get("ray_vllm_hetero_spec_drafts_total", 0)


def test_ray_data(ray_cluster: RayCluster, demo_pair: Path, tmp_path: Path) -> None:
    target = demo_pair / "target-wide"  # the target of the example
    ray_cluster.run(str(REPO / "examples" / "ray_data.py"), "--out", str(tmp_path))
    rows = [json.loads(line) for part in tmp_path.iterdir() for line in part.open()]
    with engine(target) as llm:
        alone = generate(llm, [row["prompt"] for row in rows], greedy(max_tokens=64))
    assert [row["token_ids"] for row in rows] == list(alone.values())
    assert len(rows) > 3
    assert until(lambda: drafts(ray_cluster) > 0, 30)


@contextlib.contextmanager
def serving(cluster: RayCluster, *arguments: str) -> Iterator[openai.OpenAI]:
    """Run examples/ray_serve.py and yield a client of it once it is ready."""
    port = free_port()
    command = [str(REPO / "examples" / "ray_serve.py"), *arguments, "--port", str(port)]
    log = cluster.folder / "serve.log"
    with log.open("w") as output:
        process = cluster.popen(*command, output=output)
    try:
        ready = until(lambda: "serving at" in log.read_text() or process.poll() is not None)
        assert ready, log.read_text()[-6000:]
        assert process.poll() is None, log.read_text()[-6000:]
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=120)
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_ray_serve(ray_cluster: RayCluster, demo_pair: Path) -> None:
    """If one of two replicas is killed, requests are still answered, and it is replaced."""
    if not vllm.__version__.startswith("0.32."):
        pytest.skip("Ray 2.60's library for language models imports with vLLM 0.32 alone")
    with engine(demo_pair / "target-wide") as llm:
        outputs = llm.generate(list(PROMPTS), greedy(), use_tqdm=False)
        alone = [output.outputs[0].text for output in outputs]

    def ask(client: openai.OpenAI, prompt: str) -> str:
        asked = client.completions.create(
            model="target", prompt=prompt, max_tokens=24, temperature=0
        )
        return asked.choices[0].text

    before = drafts(ray_cluster)
    with serving(ray_cluster, "--replicas", "2") as client:
        for _ in range(3):
            assert [ask(client, prompt) for prompt in PROMPTS] == alone
        assert until(lambda: drafts(ray_cluster) > before, 30)
        missing = {f"ray_vllm_{n}" for n in re.findall(r"\$\{prefix\}(\w+)", BOARD.read_text())}

        def all_shown() -> bool:  # Ray soon drops the gauges of an idle engine
            ask(client, PROMPTS[0])
            missing.difference_update(shown(ray_cluster))
            return missing <= COUNTLESS

        assert until(all_shown), missing
        replicas = processes(ray_cluster.address, "LLMServer")
        assert len(replicas) == 2
        engines = replicas[0].children(recursive=True)
        replicas[0].kill()
        for _ in range(3):
            assert [ask(client, prompt) for prompt in PROMPTS] == alone
        _, alive = psutil.wait_procs(engines, timeout=60)
        assert not alive
        assert until(lambda: len(processes(ray_cluster.address, "LLMServer")) == 2)
