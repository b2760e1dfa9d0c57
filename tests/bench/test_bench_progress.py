# SPDX-License-Identifier: Apache-2.0
"""Progress messages of a benchmark, and its description of the machine."""

import io
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from bench_fakes import sample
from rich.console import Console

from vllm_hetero_spec import machine
from vllm_hetero_spec.bench.plan import Cell, EngineId, Measurement
from vllm_hetero_spec.bench.run import ProgressReporter, TimeLeft, _duration


def cell(method: str, batch_size: int = 1) -> Cell:
    return Cell(EngineId("t", method), "code", batch_size, 0.0)


def runs(*cells: Cell) -> list[Measurement]:
    return [Measurement(each, 0, 0) for each in cells]


def test_time_left_is_estimated_from_similar_runs() -> None:
    estimate = TimeLeft()
    assert estimate.seconds(runs(cell("alone")), starts=1) is None
    estimate.ran(cell("alone"), 4.0)
    estimate.ran(cell("slem"), 2.0)
    estimate.ran(cell("slem", 8), 10.0)
    estimate.started(30.0)
    assert estimate.seconds(runs(cell("alone")), starts=0) == 4.0
    assert estimate.seconds(runs(cell("other")), starts=0) == 3.0  # same load
    assert estimate.seconds(runs(cell("alone", 8)), starts=2) == 10.0 + 60.0
    elsewhere = Cell(EngineId("t", "alone"), "text", 1, 1.0)
    assert estimate.seconds(runs(elsewhere), starts=0) == 3.0  # same batch size
    assert estimate.seconds(runs(cell("alone", 2)), starts=0) == pytest.approx(16 / 3)
    estimate.ran(cell("alone"), 6.0)
    assert estimate.seconds(runs(cell("alone"), cell("alone")), starts=0) == 12.0


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "1 s"), (29, "29 s"), (100, "2 min"), (5000, "1 h 23 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert _duration(seconds) == text


def test_progress_messages() -> None:
    output = io.StringIO()
    first, second, third = runs(cell("alone"), cell("slem"), cell("alone", 8))
    reporter = ProgressReporter(Console(file=output, width=120))
    reporter.begin([first, second, third])
    reporter.starting(first.cell.engine)
    reporter.started(first.cell.engine, 1.0)
    reporter.measured(first, sample([[1, 2]], 0.5, drafts=2, accepted_tokens=1), 120.0)
    reporter.failed(second, "the engine\n  died")
    reporter.measured(third, sample([[1, 2]], 0.5), 1.0)
    assert output.getvalue().splitlines() == [
        "starting t/alone",
        "[1/3] t/alone/code/b1/t0, round 1: 4.0 tok/s, acceptance length 1.50; about 4 min left",
        "[2/3] t/slem/code/b1/t0, round 1: failed: the engine died; about 2 min left",
        "[3/3] t/alone/code/b8/t0, round 1: 4.0 tok/s",
    ]


def test_provenance_has_versions_and_machine() -> None:
    found = machine.provenance()
    assert {"vllm_hetero_spec", "vllm", "torch", "transformers", "python"} <= set(found["versions"])
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["memory_gib"] > 0
    assert found["machine"]["cpu"]
    gib = machine.available_memory_bytes() / (1 << 30)
    assert 0 < gib <= found["machine"]["memory_gib"] + 0.1


def test_sources_outside_of_a_checkout_have_no_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A package may be installed below another project's repository.
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    package = tmp_path / "site" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(machine, "_HERE", package)
    assert machine.source() == {}
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "x"], check=True)
    found = machine.source()
    assert re.fullmatch(r"[0-9a-f]{40}", found["revision"])
    assert found["dirty"] is False
    (package / "__init__.py").write_text("changed")
    assert machine.source()["dirty"] is True


@pytest.mark.parametrize(
    ("group", "files", "free"),
    [
        ("/", {}, 1024),
        ("/", {"memory.max": "max", "memory.current": "10"}, 1024),
        ("/", {"memory.max": "700", "memory.current": "100"}, 600),
        ("/", {"memory.max": "7000", "memory.current": "100"}, 1024),
        ("/", {"memory.max": "700", "memory.current": "800"}, 0),
        (
            "/",
            {
                "memory.max": "700",
                "memory.current": "500",
                "memory.stat": "anon 50\ninactive_file 300",
            },
            500,
        ),
        ("/a/b", {"a/b/memory.max": "max", "a/b/memory.current": "1"}, 1024),
        ("/a/b", {"a/memory.max": "90", "a/memory.current": "1"}, 89),
        ("/a", {"a/b/memory.max": "90", "a/b/memory.current": "1"}, 1024),
    ],
)
def test_available_memory_in_a_container(
    monkeypatch: pytest.MonkeyPatch, group: str, files: dict[str, str], free: int
) -> None:
    """Limits of the own cgroup and of its parents apply. Cached files count as free memory."""
    known = {f"/sys/fs/cgroup/{name}": text for name, text in files.items()}
    memory = SimpleNamespace(available=1024)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: memory)
    known["/proc/self/cgroup"] = f"4:memory:/elsewhere\n0::{group}"
    monkeypatch.setattr(machine, "_lines", lambda path: known.get(path, "").splitlines())
    assert machine.available_memory_bytes() == free
