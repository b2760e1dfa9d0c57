# SPDX-License-Identifier: Apache-2.0
"""Engines in child processes: answers, failures, and that no process remains."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from vllm_hetero_spec.bench.child_process import EngineProcess, causes, processes
from vllm_hetero_spec.bench.load import Load, MeasurementError
from vllm_hetero_spec.errors import ConfigError

LOAD = Load(["a", "b"], max_tokens=1)


@pytest.fixture(autouse=True)
def toy_engine_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))


class Toy(EngineProcess):
    program = "toy_engine"


def start(spec: str, **options: float) -> EngineProcess:
    return Toy(spec, **options)  # type: ignore[arg-type]


def later(seconds: float, pid: int, number: int) -> None:
    threading.Timer(seconds, os.kill, (pid, number)).start()


def test_an_engine_answers_load_after_load_and_is_gone_when_closed() -> None:
    with start("work") as engine:
        for _ in range(2):
            sample = engine.run(LOAD)
            assert [trace.text for trace in sample.traces] == ["a", "b"]
            # A Python process takes at least some MiB.
            assert sample.peak_memory_bytes > 1 << 20
        assert list(processes(engine.pid))
        assert engine.pid != os.getsid(0)
    assert list(processes(engine.pid)) == []
    engine.close()
    with pytest.raises(MeasurementError, match="the engine has ended"):
        engine.run(LOAD)


def test_descendants_of_an_engine_end_with_it() -> None:
    with start("leave a process") as engine:
        assert len(list(processes(engine.pid))) == 2
    assert list(processes(engine.pid)) == []


def test_a_process_has_ended_with_its_last_thread() -> None:
    """Its first thread may be a zombie while another thread still uses the devices."""
    program = (
        "import ctypes, threading\n"
        "libc = ctypes.PyDLL(None)\n"  # PyDLL keeps the GIL; the other thread does not need it
        "other = threading.Thread(target=ctypes.CDLL(None).sleep, args=(600,), daemon=True)\n"
        "other.start()\n"
        "libc.syscall(60 if hasattr(libc, 'arch_prctl') else 93, 0)\n"  # ends only this thread
    )
    with subprocess.Popen([sys.executable, "-c", program], start_new_session=True) as process:
        state = Path("/proc", str(process.pid), "stat")
        while state.read_text().rpartition(")")[2].split()[0] != "Z":  # ends, or the test times out
            time.sleep(0.1)
        found = [folder.name for folder in processes(process.pid)]
        process.kill()
    assert found == [str(process.pid)]
    assert list(processes(process.pid)) == []


def test_a_refused_specification() -> None:
    with pytest.raises(ConfigError, match=r"^the toy refuses this\.$"):
        start("refuse")


def test_a_refused_load_leaves_the_engine_up() -> None:
    with start("work") as engine:
        with pytest.raises(ConfigError, match=r"^the toy refuses this load\.$"):
            engine.run(Load(["refuse"], max_tokens=1))
        assert engine.run(LOAD).tokens == 2


def test_a_failed_start_has_its_cause() -> None:
    with pytest.raises(MeasurementError, match="exit code 1\n  RuntimeError: the toy broke\n"):
        start("fail")


def test_a_failed_load_has_its_cause_and_closes_the_engine() -> None:
    with start("work") as engine:
        with pytest.raises(MeasurementError, match="exit code 1\n  RuntimeError: the toy broke at"):
            engine.run(Load(["fail"], max_tokens=1))
        with pytest.raises(MeasurementError, match="the engine has ended"):
            engine.run(LOAD)
    assert list(processes(engine.pid)) == []


def test_an_engine_that_is_killed_at_work() -> None:
    with start("work") as engine:
        later(0.5, engine.pid, signal.SIGKILL)
        with pytest.raises(MeasurementError, match="exit code -9"):
            engine.run(Load(["sleep"], max_tokens=1))


def test_engines_that_take_too_long() -> None:
    with pytest.raises(MeasurementError, match=r"no answer within 0\.5 seconds"):
        start("sleep", start_timeout=0.5)
    with (
        start("work", run_timeout=0.5) as engine,
        pytest.raises(MeasurementError, match=r"no answer within 0\.5 seconds"),
    ):
        engine.run(Load(["sleep"], max_tokens=1))
    assert list(processes(engine.pid)) == []


def test_an_interrupt_ends_the_engine(request: pytest.FixtureRequest) -> None:
    # In a background job of a shell, SIGINT is ignored at first.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with start("work") as engine:
        later(0.5, os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            engine.run(Load(["sleep"], max_tokens=1))
        assert list(processes(engine.pid)) == []


def test_an_engine_ends_when_its_parent_is_killed() -> None:
    program = (
        "from vllm_hetero_spec.bench.child_process import EngineProcess\n"
        "from vllm_hetero_spec.bench.load import Load\n"
        "EngineProcess.program = 'toy_engine'\n"
        "engine = EngineProcess('leave a process')\n"
        "print(engine.pid, flush=True)\n"
        "engine.run(Load(['sleep'], max_tokens=1))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        session = int(parent.stdout.readline())
        assert len(list(processes(session))) == 2
        parent.kill()
    while list(processes(session)):  # the engine polls its parent; else the test times out
        time.sleep(0.1)


def test_causes_are_found_in_printed_text() -> None:
    printed = """(Worker pid=1) ERROR 11-20 12:57:00 [executor.py:9] Traceback (most recent):
(Worker pid=1) ERROR 11-20 12:57:00 [executor.py:9]     raise ConfigError(
(Worker pid=1) ERROR 11-20 12:57:00 [executor.py:9] pack.config.ConfigError: too little memory
    raise RuntimeError(
RuntimeError: initialization failed
RuntimeError: initialization failed
"""
    lines = [line.strip() for line in causes(printed).strip().splitlines()]
    assert lines[:-1] == ["ConfigError: too little memory", "RuntimeError: initialization failed"]
