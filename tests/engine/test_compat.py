# SPDX-License-Identifier: Apache-2.0
"""Compatibility with vLLM: version check, patches, and the ledger against the installed vLLM."""

import ast
import subprocess
import sys
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_docs import quoted, tables

import vllm_hetero_spec
from vllm_hetero_spec.engine.compat import patching
from vllm_hetero_spec.engine.compat.ledger import LEDGER, changes
from vllm_hetero_spec.engine.compat.releases import series_of
from vllm_hetero_spec.engine.metrics import transport as metrics
from vllm_hetero_spec.engine.seam import cache_salt as salt
from vllm_hetero_spec.engine.seam import frontend, worker_hooks
from vllm_hetero_spec.errors import ConfigError


@pytest.mark.parametrize(
    ("found", "minor"), [("0.32.0", 32), ("0.32.1+cpu", 32), ("0.33.0", 33), ("0.33.1rc1", 33)]
)
def test_supported_releases(found: str, minor: int) -> None:
    assert series_of(found) == (0, minor)


@pytest.mark.parametrize("found", ["0.31.0", "0.34.0", "1.0", "dev"])
def test_other_releases_are_refused_with_the_way_out(found: str) -> None:
    with pytest.raises(ConfigError) as refused:
        series_of(found)
    for word in ("0.32", "0.33", found, "HETERO_SPEC_ALLOW_VLLM"):
        assert word in str(refused.value)


def test_override_takes_the_nearest_older_release() -> None:
    assert series_of("0.34.0", override="0.34.0") == (0, 33)
    assert series_of("0.31.2", override="0.31") == (0, 32)
    with pytest.raises(ConfigError):
        series_of("0.35.0", override="0.34.0")


class Target:
    def method(self) -> str:
        return "old"

    @staticmethod
    def static() -> str:
        return "old static"

    @classmethod
    def of_class(cls) -> str:
        return f"old {cls.__name__}"

    @property
    def read(self) -> str:
        return "old property"


def test_replace_keeps_kind_and_refuses_doubles() -> None:
    class Derived(Target):
        pass

    def prefix(original):
        return lambda *args: "new " + original(*args)

    for name in ("method", "static", "of_class", "read"):
        assert patching.replace(Target, name, "ours", prefix)
        assert not patching.replace(Target, name, "ours", prefix)
        with pytest.raises(patching.PatchError, match="held by 'ours'"):
            patching.replace(Target, name, "another", prefix)
    assert Target().method() == "new old"
    assert Target.static() == "new old static"
    assert Derived.of_class() == "new old Derived"
    assert Target().read == "new old property"
    assert patching.standing(Target, "read") == "ours"
    with pytest.raises(patching.PatchError, match="does not exist"):
        patching.replace(Derived, "method", "ours", prefix)


def test_wrap_passes_the_original_and_the_arguments() -> None:
    class Own:
        @classmethod
        def of_class(cls, word: str) -> str:
            return f"old {word}"

    def around(original, cls, word):
        return "new " + original(cls, word)

    for first in (True, False):
        assert patching.wrap(Own, "of_class", "ours", around) is first
    assert Own.of_class(word="x") == "new old x"
    assert Own.of_class.__name__ == "of_class"


def test_added_fields_are_fields_and_never_replace_one() -> None:
    @dataclass
    class Theirs:
        count: int
        name: str = "x"

    @dataclass
    class Ours:
        extra: int | None = None

    @dataclass
    class Clashing:
        name: int = 0

    earlier = Theirs(1)
    for _ in range(2):
        patching.add_fields(Theirs, Ours)
    assert [f.name for f in fields(Theirs)] == ["count", "name", "extra"]
    assert (earlier.extra, Theirs(2, "y").extra) == (None, None)
    with pytest.raises(patching.PatchError, match="'name' already"):
        patching.add_fields(Theirs, Clashing)
    assert Theirs(3).name == "x"
    with pytest.raises(patching.PatchError, match="no dataclass"):
        patching.add_fields(Target, Ours)


def test_installing_twice_wraps_once() -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.stats import SchedulerStats

    vllm_hetero_spec.register()
    once = EngineArgs.create_speculative_config, Scheduler.update_from_output
    assert [f.name for f in fields(SchedulerStats)].count("hetero_spec") == 1
    frontend.install()
    metrics.install()
    vllm_hetero_spec.register()
    assert (EngineArgs.create_speculative_config, Scheduler.update_from_output) == once
    assert [f.name for f in fields(SchedulerStats)].count("hetero_spec") == 1


def test_a_vllm_that_cannot_be_hooked_still_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.worker_base import WorkerBase

    monkeypatch.delattr(EngineArgs, "create_speculative_config")
    monkeypatch.delattr(WorkerBase, "__init__")
    vllm_hetero_spec.register()
    (said,) = caplog.messages
    assert "EngineArgs.create_speculative_config does not exist" in said


def test_importing_the_package_loads_nothing_large() -> None:
    assert set(vllm_hetero_spec.__all__) == {"__version__", "read_stats", "register"}
    code = "import sys, vllm_hetero_spec; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "vllm_hetero_spec" in loaded
    assert not {"numpy", "torch", "vllm"} & set(loaded)


def test_runner_hooks_leave_other_drafters_alone() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    worker_hooks.install_worker_hooks(v2=False)
    calls = []
    wrapped = partial(worker_hooks.propose_hook, lambda self, *args: calls.append(args) or "theirs")
    assert wrapped(SimpleNamespace(drafter=object()), "out", [[1]], 3) == "theirs"
    assert calls == [("out", [[1]], 3)]
    assert GPUModelRunner.propose_draft_token_ids.__wrapped__ is not None


def test_salt_rides_along_and_unsalted_requests_are_untouched() -> None:
    class Data:
        pass

    wrapped = partial(salt._keep_salt, lambda cls, request, *args: Data())
    same, again, other, long, odd = (
        salt.salt_of(wrapped(Data, SimpleNamespace(cache_salt=given)))
        for given in ("tenant", "tenant", "tenan", "tenant" * 10**6, "tenant\ud800")
    )
    plain = wrapped(Data, SimpleNamespace(cache_salt=None))
    assert same == again
    assert len({same, other, long, odd}) == 4
    assert all(found is not None and len(found) == 64 for found in (same, long, odd))
    assert salt.salt_of(plain) is None
    assert not vars(plain)


def _installed_vllm() -> Path:
    import vllm

    return Path(vllm.__file__).parent


def test_ledger_matches_the_installed_vllm() -> None:
    from vllm.version import __version__

    series = ".".join(__version__.split(".")[:2])
    assert [str(change) for change in changes(_installed_vllm(), series)] == []


def test_each_row_of_the_ledger_has_a_purpose_and_a_symptom() -> None:
    texts = {text for seam in LEDGER for text in (seam.why, seam.symptom, seam.remove)}
    assert not [text for text in texts if not text or "as above" in text]


def test_the_request_to_vllm_names_the_rows_that_it_makes_unnecessary() -> None:
    page = Path(vllm_hetero_spec.__file__).parent / "engine" / "seam" / "UPSTREAM.md"
    rows = list(tables(page, "condition"))
    assert rows
    for condition, symbols in rows:
        assert set(quoted(symbols)) == {s.name for s in LEDGER if s.remove == condition}, condition


def test_ledger_names_all_that_is_imported() -> None:
    listed = {(seam.file, seam.name.partition(".")[0]) for seam in LEDGER}
    absent = set()
    for file in (Path(vllm_hetero_spec.__file__).parent / "engine").rglob("*.py"):
        tree = ast.parse(file.read_text())
        for_checkers = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        ]
        skipped = {id(part) for node in for_checkers for part in ast.walk(node)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or id(node) in skipped:
                continue
            package, *folders = (node.module or "").split(".")
            if package == "vllm":
                absent |= {
                    a.name for a in node.names if not _listed("/".join(folders), a.name, listed)
                }
    # Two exceptions: the platform and the release have checks of their own.
    assert absent == {"current_platform", "__version__"}


def _listed(module: str, name: str, listed: set[tuple[str, str]]) -> bool:
    return any(
        file in (f"{module}/{name}.py", f"{module}/{name}/__init__.py")
        or (known == name and file.startswith(module))
        for file, known in listed
    )


def test_ledger_notices_a_changed_vllm(tmp_path: Path) -> None:
    (tmp_path / "forward_context.py").write_text("def set_forward_context(attn_metadata): ...\n")
    loggers = tmp_path / "v1" / "metrics" / "loggers.py"
    loggers.parent.mkdir(parents=True)
    loggers.write_text(
        "class PrometheusStatLogger:\n"
        "    _gauge_cls = Gauge\n"
        "    def __init__(self, vllm_config):\n"
        "        self.vllm_config = vllm_config\n"
        "        _counter_cls = Counter\n"
    )
    faults = [str(change) for change in changes(tmp_path, "0.33")]
    ours = [f.rpartition(" ")[2] for f in faults if "loggers.py:PrometheusStatLogger: no" in f]
    assert ours == ["'per_engine_labelvalues'", "'_counter_cls'", "'_histogram_cls'"]
    assert "forward_context.py:set_forward_context: no 'slot_mapping'" in faults
    assert any("config/model.py:ModelConfig: no file" in fault for fault in faults)
    assert len({seam.file for seam in LEDGER}) > 10
