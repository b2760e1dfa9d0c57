# SPDX-License-Identifier: Apache-2.0
"""Metrics of real engines contain each of the drafter's counters exactly once, in any process.

The program `test_metrics_engine.py DEMO ANSWER` writes the counters and the exported metrics.
"""

import copy
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import engine, metrics_of, proposer_of, slem
from scenarios import generate, greedy

from vllm_hetero_spec import read_stats
from vllm_hetero_spec.engine.metrics.counters import METRICS
from vllm_hetero_spec.engine.metrics.sinks import PREFIX

pytestmark = pytest.mark.engine

LABELS = {metric.shown or name: metric.label for name, metric in METRICS.items() if metric.label}
GAUGES = [n for n, metric in METRICS.items() if metric.kind == "gauge" and not metric.label]


def exported(llm: Any) -> dict[str, Any]:
    """Return the plugin's metrics of an engine: numbers, or dictionaries if they have a label."""
    found: dict[str, Any] = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix(PREFIX)
        if name == metric.name:
            continue
        value = metric.sum if hasattr(metric, "sum") else metric.value
        if label := LABELS.get(name):
            found.setdefault(name, {})[metric.labels[label]] = value
        else:
            found[name] = value
    return found


def growth(before: Any, after: Any) -> Any:
    if isinstance(after, dict):
        return {key: growth(before.get(key, 0), after[key]) for key in after}
    return after - (before or 0)


def run(llm: Any, prompts: list[str], **params: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Serve a batch. Return the growth of the worker's counters and of the front end's metrics."""
    worker, front = settled(llm)
    generate(llm, prompts, greedy(**params))
    counted, shown = settled(llm)
    gauges = [{name: of[name] for name in GAUGES} for of in (counted, shown)]
    return growth(worker, counted) | gauges[0], growth(front, shown) | gauges[1]


def settled(llm: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the worker's counters, and the front end's metrics after they have arrived.

    The counters of a step are sent with the next step, because its drafts are finished after its
    tokens were sent.
    """
    counted = read_stats(llm)
    generate(llm, ["a"], greedy(max_tokens=1))
    return counted, exported(llm)


def agree(counted: dict[str, Any], shown: dict[str, Any]) -> None:
    """Check that the front end's metrics equal the worker's counters."""
    by_length = {int(length): count for length, count in shown["drafts_by_length"].items()}
    assert sum(by_length.values()) == counted["drafts"]
    assert sum(length * count for length, count in by_length.items()) == counted["draft_tokens"]
    assert {k: v for k, v in shown["skipped"].items() if v} == {
        k: v for k, v in counted["skipped"].items() if v
    }
    for name, metric in METRICS.items():
        if not metric.label:
            assert shown[name] == pytest.approx(counted[name], rel=1e-12, abs=1e-9), name


@pytest.fixture(scope="module")
def limited(demo_pair: Path) -> Iterator[Any]:
    """An engine with few KV blocks and a short context of the drafter. It counts by request."""
    spec = slem(demo_pair / "drafter", kv_cache_memory_bytes=6 << 18, context=200)
    changes = {"per_request_spec_decode_metrics": "detailed"}
    with engine(demo_pair / "target", spec, **changes) as llm:
        yield llm


def test_metrics_are_exactly_what_the_worker_counted(limited: Any, code_prompts: list) -> None:
    long, short = code_prompts[:8], [text[:300] for text in code_prompts[:16]]
    reasons: Counter[str] = Counter()
    for prompts in (long, short, short):
        counted, shown = run(limited, prompts)
        agree(counted, shown)
        reasons.update(shown["skipped"])
    assert reasons["no_blocks"] > 0
    shown = exported(limited)
    assert shown["drafts"] > 0
    assert 0 < shown["kv_blocks"] < 12
    assert shown["translate_seconds"] + shown["forward_seconds"] <= shown["propose_seconds"]
    assert shown["verify_seconds"] > 0


def test_a_step_counted_twice_is_noticed(
    limited: Any, code_prompts: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer = proposer_of(limited)
    real = proposer.report
    kept: list[dict[str, Any]] = []

    def again() -> dict[str, Any]:
        kept.append(real())
        return copy.deepcopy(kept[-2] if len(kept) == 3 else kept[-1])

    monkeypatch.setattr(proposer, "report", again)
    counted, shown = run(limited, [text[:300] for text in code_prompts[:4]])
    assert len(kept) > 3
    with pytest.raises(AssertionError):
        agree(counted, shown)


def test_figures_of_one_request(limited: Any, code_prompts: list) -> None:
    """The sum of vLLM's figures of each request equals its counters."""
    before = metrics_of(limited)
    outputs = limited.generate([t[:300] for t in code_prompts[:4]], greedy(), use_tqdm=False)
    after = metrics_of(limited)
    found = [output.outputs[0].spec_decode_metrics.to_dict() for output in outputs]
    for name, key in (
        ("num_drafts", "num_spec_steps"),
        ("num_draft_tokens", "num_draft_tokens"),
        ("num_accepted_tokens", "num_accepted_draft_tokens"),
    ):
        assert sum(one[key] for one in found) == after[name] - before[name]
    for output, one in zip(outputs, found, strict=True):
        assert sum(one["per_step_drafted"]) == one["num_draft_tokens"]
        assert one["num_accepted_draft_tokens"] < len(output.outputs[0].token_ids)
    assert any(one["mean_acceptance_length"] > 1 for one in found)


def test_figures_of_a_request_that_ends_at_a_stop_string(limited: Any, code_prompts: list) -> None:
    """The front end ends it before the scheduler does."""
    prompt, before = code_prompts[0][:300], metrics_of(limited)
    whole = limited.generate(prompt, greedy(), use_tqdm=False)[0].outputs[0]
    among = metrics_of(limited)
    stop = whole.text[len(whole.text) // 2 :][:3]
    ended = limited.generate(prompt, greedy(stop=stop), use_tqdm=False)[0].outputs[0]
    after = metrics_of(limited)
    assert ended.stop_reason == stop
    for of, first, then in ((whole, before, among), (ended, among, after)):
        steps = of.spec_decode_metrics.to_dict()["num_spec_steps"]
        assert steps == then["num_drafts"] - first["num_drafts"] > 0


@pytest.mark.full
def test_counts_reach_the_front_end_from_other_processes(demo_pair: Path, tmp_path: Path) -> None:
    answer = tmp_path / "answer.json"
    several = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    done = subprocess.run(
        [sys.executable, __file__, str(demo_pair), str(answer)],
        env=several,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (in_process, counted, shown), other = json.loads(answer.read_text())
    assert not in_process
    assert counted["drafts"] > 0
    agree(counted, shown)
    assert other == {}


def _main(demo: Path, answer: Path) -> None:
    prompts = [json.loads(line)["prompt"] for line in (demo / "prompts.jsonl").open()][:4]
    # First an engine without a drafter, in the same front end. The plugin must work after it.
    with engine(demo / "target") as llm:
        generate(llm, prompts, greedy())
        other = exported(llm)
    with engine(demo / "target", slem(demo / "drafter")) as llm:
        found = hasattr(llm.llm_engine.engine_core, "engine_core"), *run(llm, prompts)
    answer.write_text(json.dumps([found, other]))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
