# SPDX-License-Identifier: Apache-2.0
"""Transport of the drafter's counters into vLLM's metrics, part by part. No engine runs."""

import json
import logging
import pickle
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from harness import BASE, slem
from prometheus_client import REGISTRY
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.loggers import LoggingStatLogger, PrometheusStatLogger
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

import vllm_hetero_spec
from vllm_hetero_spec.engine.metrics import transport as metrics
from vllm_hetero_spec.engine.metrics.counters import (
    CHAINS,
    FAULTS,
    METRICS,
    REASONS,
    RPC,
    DraftStats,
    Growth,
)
from vllm_hetero_spec.engine.metrics.sinks import PREFIX, Exporter
from vllm_hetero_spec.lookahead.controllers import Gauges

REPO = Path(__file__).resolve().parents[2]


# ---- growth of the counters in a step ----------------------------------------------------------


def test_growth_is_what_came_since_the_last_time() -> None:
    stats, growing = DraftStats(), Growth()
    held = {name for name, metric in METRICS.items() if metric.kind == "gauge"}
    assert growing.take(stats) == {}  # a trial at start-up, which is not sent
    stats.steps += 1
    assert set(growing.take(stats)) == (held - {"acceptance"}) | {"steps"}
    stats.drafted([4, 2, 4, 0])
    stats.skip("catching_up")
    stats.forward_seconds += 0.5
    stats.kv_blocks, stats.kv_blocks_held = 9, 4
    moved = {"kv_blocks": 9, "kv_blocks_held": 4}
    first = {"drafts": 3, "draft_tokens": 10, "forward_seconds": 0.5}
    first |= {"lengths": {4: 2, 2: 1}, "skipped": {"catching_up": 1}}
    assert growing.take(stats) == first | moved
    assert growing.take(stats) == {}
    stats.gain = np.float64(1.5)
    stats.drafted([2])
    stats.skip("catching_up")
    stats.skip("not_worth_it")
    stats.acceptance = {0: 0.5}
    assert growing.take(stats) == {
        "drafts": 1,
        "draft_tokens": 2,
        "lengths": {2: 1},
        "skipped": {"catching_up": 1, "not_worth_it": 1},
        "gain": 1.5,
        "acceptance": {0: 0.5},
    }


def test_trees_count_their_nodes_and_their_depth() -> None:
    stats = DraftStats()
    stats.drafted_tree(3, 8)
    stats.drafted([2])
    assert (stats.drafts, stats.draft_tokens, stats.lengths) == (2, 10, {3: 1, 2: 1})
    assert (stats.trees, stats.tree_tokens) == (1, 8)


def test_drafts_that_are_mostly_not_ready_are_logged_once(caplog: Any) -> None:
    """Fewer drafts that are not ready, or as many others, cause no warning."""
    stats = DraftStats()
    stats.drafts = 600
    for others in (300, 0, 0):
        stats.skip("not_ready", times=450)
        stats.skip("not_guessed", times=others)
    stats.skip("not_ready", times=450)
    (said,) = caplog.messages
    for word in ("1350 of 2250", "CPU cores", "drafter_device", "leave out"):
        assert word in said


def test_each_reason_for_a_chain_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    stats = DraftStats()
    with caplog.at_level(logging.INFO, "vllm.hetero_spec"):
        for because in ("drawn", "not_worth_it", "drawn", "grammar"):
            stats.keep_chain(because)
    logged = [message.split("(")[1].split(")")[0] for message in caplog.messages]
    assert logged == ["drawn", "grammar"]
    assert stats.as_dict()["chains"] == {"drawn": 2, "not_worth_it": 1, "grammar": 1}


def test_off_is_a_share_of_recent_steps() -> None:
    stats, gauges = DraftStats(), Gauges(0)
    shares = []
    for off in (0, 16, 16, 0):
        stats.steps += 16
        stats.off_steps += off
        stats.show(gauges)
        shares.append(stats.off_fraction)
    assert shares == pytest.approx([0.0, 0.3, 0.51, 0.357])
    stats.show(gauges)  # no step since
    assert stats.off_fraction == shares[-1]


def test_counters_that_were_set_back_count_from_zero() -> None:
    stats, growing = DraftStats(steps=1, reused_tokens=7, skipped=Counter(catching_up=8)), Growth()
    growing.take(stats)
    stats.reused_tokens = 3
    stats.skipped = Counter(catching_up=2, no_text=1)
    grown = growing.take(stats)
    assert grown["reused_tokens"] == 3
    assert grown["skipped"] == {"catching_up": 2, "no_text": 1}


def test_counters_of_workers_are_summed() -> None:
    first, second = DraftStats(steps=2, verify_seconds=0.5), DraftStats(steps=1)
    for stats, lengths in ((first, (4, 2)), (second, (4,))):
        stats.skip("no_text", times=3)
        stats.drafted(lengths)
    workers = [stats.as_dict() for stats in (first, second, DraftStats())]
    llm = SimpleNamespace(collective_rpc=lambda method: {RPC: workers}[method])
    found = vllm_hetero_spec.read_stats(llm)
    assert set(found) == set(METRICS)
    assert (found["steps"], found["drafts"], found["verify_seconds"]) == (3, 3, 0.5)
    assert (found["skipped"], found["lengths"]) == ({"no_text": 6}, {4: 2, 2: 1})


def test_every_fault_of_a_translation_has_a_name() -> None:
    folder = Path(vllm_hetero_spec.__file__).parent / "text"
    code = "".join(file.read_text(encoding="utf-8") for file in folder.glob("*.py"))
    assert set(FAULTS) == set(re.findall(r'failures\["(\w+)"\]', code))


@pytest.mark.parametrize("names", [REASONS, CHAINS], ids=["reasons", "chains"])
def test_every_reason_is_counted_somewhere(names: dict[str, str]) -> None:
    code = "".join(p.read_text() for p in (REPO / "vllm_hetero_spec").rglob("*.py"))
    assert [name for name in names if code.count(f'"{name}"') < 2] == []


# ---- transport ----------------------------------------------------------------------------------


def test_vllms_own_serializer_carries_the_growth() -> None:
    vllm_hetero_spec.register()
    vllm_hetero_spec.register()
    stats, growing = DraftStats(steps=1), Growth()
    stats.catch_up_tokens += np.int64(3)  # a type that vLLM's serializer refuses
    stats.verify_seconds += np.float32(0.25)
    stats.drafted([4])
    stats.skip("no_text")
    grown = growing.take(stats)

    def sent(stats: Any) -> Any:
        wire = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
        return MsgpackDecoder(EngineCoreOutputs).decode(wire).scheduler_stats

    carrying = SchedulerStats(num_running_reqs=2)
    carrying.hetero_spec = grown
    assert sent(carrying).hetero_spec == grown
    assert sent(carrying).num_running_reqs == 2
    assert sent(SchedulerStats()).hetero_spec is None
    assert SchedulerStats().hetero_spec is None


def test_worker_puts_the_growth_on_the_steps_own_output() -> None:
    class Ours(metrics.Reporter):
        reports = 0

        def report(self) -> dict[str, int]:
            self.reports += 1
            return {"steps": self.reports}

        def attach_to_output(self, output: Any) -> None:
            pass

    drafter = Ours()
    run = metrics.sample_tokens
    fresh = partial(run, lambda self, grammar: ModelRunnerOutput(["a"], {"a": 0}))
    empty = partial(run, lambda self, grammar: EMPTY_MODEL_RUNNER_OUTPUT)
    runner = SimpleNamespace(drafter=drafter)
    output = pickle.loads(pickle.dumps(fresh(runner, None)))
    assert output.hetero_spec == {"steps": 1}
    assert empty(runner, None) is EMPTY_MODEL_RUNNER_OUTPUT
    assert not hasattr(EMPTY_MODEL_RUNNER_OUTPUT, "hetero_spec")
    assert drafter.reports == 1  # the growth waits for a new output
    assert not hasattr(fresh(SimpleNamespace(drafter=object()), None), "hetero_spec")
    assert not hasattr(fresh(SimpleNamespace(), None), "hetero_spec")


def test_scheduler_hands_the_growth_to_one_front_end_only() -> None:
    def update(*statistics: Any) -> dict[int, Any]:
        outputs = {i: SimpleNamespace(scheduler_stats=stats) for i, stats in enumerate(statistics)}
        wrapped = partial(metrics.update_from_output, lambda self, scheduled, output: outputs)
        scheduler = SimpleNamespace(spec_decode_metrics_level="none")
        return wrapped(scheduler, None, SimpleNamespace(hetero_spec={"steps": 1}))

    outputs = update(None, SimpleNamespace(), SimpleNamespace())
    carrying = [hasattr(o.scheduler_stats, "hetero_spec") for o in outputs.values()]
    assert carrying == [False, True, False]
    assert update() == {}
    assert update(None)[0].scheduler_stats is None  # statistics are off


@pytest.mark.parametrize("level", ["none", "summary"])
def test_figures_of_a_request_with_stop_strings_go_with_each_step(level: str) -> None:
    """The front end ends such a request before the scheduler does, and needs the figures then."""
    requests = {
        name: SimpleNamespace(spec_decode_metrics=name, sampling_params=params)
        for name, params in {
            "stops": SimpleNamespace(stop=["."]),
            "runs": SimpleNamespace(stop=[]),
            "pools": None,
        }.items()
    }
    outputs = [
        SimpleNamespace(request_id=name, spec_decode_metrics=None) for name in (*requests, "gone")
    ]
    of = SimpleNamespace(scheduler_stats=None, outputs=outputs)
    scheduler = SimpleNamespace(spec_decode_metrics_level=level, requests=requests)
    wrapped = partial(metrics.update_from_output, lambda *_: {0: of})
    wrapped(scheduler, None, SimpleNamespace())  # of another drafter
    assert [output.spec_decode_metrics for output in outputs] == [None] * 4
    wrapped(scheduler, None, SimpleNamespace(hetero_spec={}))
    first = "stops" if level == "summary" else None
    assert [output.spec_decode_metrics for output in outputs] == [first, None, None, None]


# ---- front end ----------------------------------------------------------------------------------


@pytest.fixture
def registered(demo_pair: Path) -> Iterator[Any]:
    """Return a function that builds vLLM's stat loggers without an engine."""
    vllm_hetero_spec.register()

    def build(logger: Any, spec: dict | None, *args: Any) -> Any:
        made = EngineArgs(str(demo_pair / "target"), **BASE, speculative_config=spec)
        return logger(made.create_engine_config(), *args)

    yield build
    unregister_vllm_metrics()


def _samples() -> dict[str, float]:
    return {
        f"{s.name}{[v for k, v in sorted(s.labels.items()) if k not in ('model_name', 'le')]}": (
            s.value
        )
        for metric in REGISTRY.collect()
        for s in metric.samples
        if s.name.startswith("vllm:")
    }


def test_engines_of_one_front_end_have_metrics_of_their_own(
    registered: Any, demo_pair: Path
) -> None:
    sink = registered(PrometheusStatLogger, slem(demo_pair / "drafter", lookahead=3), [0, 1])
    for index, steps in ((0, 1), (1, 5)):
        stats = SchedulerStats()
        stats.hetero_spec = {"steps": steps, "skipped": {"no_text": 2 * steps}, "lengths": {3: 1}}
        stats.hetero_spec |= {"untranslated": {"unencodable": steps}}
        sink.record(stats, None, engine_idx=index)
        sink.record(SchedulerStats(), None, engine_idx=index)  # no growth in this step
        sink.record(None, None, engine_idx=index)
    found = _samples()
    assert found[f"{PREFIX}steps_total['0']"] == 1
    assert found[f"{PREFIX}steps_total['1']"] == 5
    assert found[f"{PREFIX}skipped_total['1', 'no_text']"] == 10
    assert found[f"{PREFIX}untranslated_total['1', 'unencodable']"] == 5
    assert found[f"{PREFIX}drafts_by_length_total['0', '3']"] == 1
    # They start at zero, so that a rate includes the first event.
    shown = {name for name in found if name.startswith(f"{PREFIX}skipped_total['0'")}
    assert shown == {f"{PREFIX}skipped_total['0', '{reason}']" for reason in REASONS}


def test_engines_without_our_method_have_no_drafter_metrics(registered: Any) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    for spec in (None, ngram):
        registered(PrometheusStatLogger, spec, [0])
        assert not [name for name in _samples() if name.startswith(PREFIX)]
        assert registered(LoggingStatLogger, spec).hetero_spec is None


def test_the_log_has_one_line_of_drafter_metrics(
    registered: Any, demo_pair: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = registered(LoggingStatLogger, slem(demo_pair / "drafter"))
    caplog.set_level(logging.INFO, "vllm.hetero_spec")  # after vLLM has configured logging
    monkeypatch.setattr(metrics.logger, "handlers", [caplog.handler])
    monkeypatch.setattr(metrics.logger, "propagate", False)
    sink.num_prompt_tokens = 1  # not idle
    stats = SchedulerStats()
    stats.hetero_spec = {"steps": 2, "drafts": 4, "draft_tokens": 10, "drafter_tokens": 25}
    stats.hetero_spec |= {"translate_seconds": 0.004, "skipped": {"no_blocks": 3}}
    stats.hetero_spec |= {"kv_blocks": 8, "kv_blocks_held": 2}
    sink.record(stats, None)
    sink.log()
    sink.log()
    lines = [m for m in caplog.messages if m.startswith("Drafter metrics")]
    assert len(lines) == 1  # nothing happened before the second call
    for figure in ("Drafts: 4", "2.50 tokens", "target token: 2.50", "2.00 ms/step", "25.0%"):
        assert figure in lines[0]
    assert lines[0].endswith("Undrafted: no_blocks 3")
    assert "trees" not in lines[0]
    stats.hetero_spec |= {"trees": 2, "tree_tokens": 8, "side_tokens_accepted": 3}
    sink.num_prompt_tokens = 1
    sink.record(stats, None)
    sink.log()
    assert "Drafts: 4 (trees: 2, 1.50 accepted branch tokens)" in caplog.messages[-1]


def test_a_fault_ends_the_metrics_and_nothing_else(
    registered: Any, demo_pair: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "_observe", metrics.harmless(metrics._observe.__wrapped__))
    sink = registered(PrometheusStatLogger, slem(demo_pair / "drafter"), [0])
    stats = SchedulerStats(num_running_reqs=3)
    stats.hetero_spec = {"unheard_of": 1}
    for _ in range(3):
        sink.record(stats, None)
    assert len([m for m in caplog.messages if "unheard_of" in m and "not affected" in m]) == 1
    assert _samples()["vllm:num_requests_running['0']"] == 3


def test_engines_start_without_metrics_if_vllm_lacks_a_hooked_function(
    registered: Any, demo_pair: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "require", metrics.harmless(metrics.install))
    monkeypatch.delattr(Scheduler, "update_from_output")
    vllm_hetero_spec.register()
    assert not caplog.messages  # the plugin is not used yet
    for _ in range(2):
        registered(lambda config: config, slem(demo_pair / "drafter"))
    said = [m for m in caplog.messages if "update_from_output" in m]
    assert len(said) == 1
    assert "requests are not affected" in said[0]


class RecordedMetric:
    """A stand-in for a metric of Ray."""

    def __init__(self, name: str, *_: Any, **__: Any) -> None:
        self.name, self.values = name.removeprefix(PREFIX), list[float]()
        made[self.name] = self

    def labels(self, *_: str) -> "RecordedMetric":
        return self

    def set(self, value: float) -> None:
        self.values.append(value)

    inc = observe = set


made: dict[str, RecordedMetric] = {}


def test_gauges_of_ray_are_set_again_in_each_step() -> None:
    """Ray drops gauges that are not set for some time, and the size of a pool never changes."""
    classes = dict.fromkeys(("_counter_cls", "_gauge_cls", "_histogram_cls"), RecordedMetric)
    logger: Any = SimpleNamespace(**classes, per_engine_labelvalues={0: ["m"]})
    exporter = Exporter(logger, 4)
    for growth in ({"kv_blocks": 9, "kv_blocks_held": 1, "steps": 1}, {"kv_blocks_held": 3}, {}):
        exporter.observe(growth, 0)
    found = {name: metric.values for name, metric in made.items() if metric.values}
    assert found == {"kv_blocks": [9, 9, 9], "kv_blocks_held": [1, 3, 3], "steps": [1]}


# ---- the dashboard ------------------------------------------------------------------------------


def test_the_dashboard_queries_only_metrics_that_exist(registered: Any, demo_pair: Path) -> None:
    """Its variable `prefix` selects vLLM's names or those of Ray."""
    from vllm.v1.metrics.ray_wrappers import RayPrometheusMetric

    board = json.loads((REPO / "examples" / "grafana" / "hetero_spec.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [v["definition"] for v in board["templating"]["list"] if "definition" in v]
    named = {name for query in queries for name in re.findall(r"\$\{prefix\}(\w+)", query)}
    registered(PrometheusStatLogger, slem(demo_pair / "drafter"), [0])
    existing = {sample.partition("[")[0] for sample in _samples()}
    in_ray = {f"ray_{RayPrometheusMetric._get_sanitized_opentelemetry_name(n)}" for n in existing}
    (prefix,) = (v for v in board["templating"]["list"] if v["name"] == "prefix")
    chosen = [option["value"] for option in prefix["options"]]
    for value, names in zip(chosen, (existing, in_ray), strict=True):
        assert f" : {value}" in prefix["query"]
        assert {value + name for name in named} - names == set()
    assert prefix["current"]["value"] == chosen[0]
    ours = {name.removeprefix("hetero_spec_") for name in named if name.startswith("hetero_spec_")}
    assert {"skipped_total", "drafter_tokens_total", "kv_blocks_held"} <= ours
    assert not re.search(r"vllm[:_]", json.dumps(board["panels"]))
    assert len(board["panels"]) == len({panel["id"] for panel in board["panels"]})
