# SPDX-License-Identifier: Apache-2.0
"""The supervised drafter process: restarts, counts and end, mostly on the test's own clock."""

import io
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_hetero_spec.engine.ahead import drafter_main, supervisor
from vllm_hetero_spec.engine.ahead.messages import Failed, Ready, UpdateBatch, encode
from vllm_hetero_spec.engine.ahead.supervisor import LONGEST_START, SILENCE, SupervisedProcess
from vllm_hetero_spec.engine.ahead.table import Counts, make_file
from vllm_hetero_spec.errors import ConfigError


class World:
    """A clock, and the times in seconds at which processes were started and ended."""

    def __init__(self) -> None:
        self.now, self.loads_in, self.lives = 0.0, 0.0, math.inf
        self.started: list[float] = []
        self.ended: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def begin(self, *_: Any) -> Any:
        """Return a process that is loaded after `loads_in` seconds, and ends after `lives` more."""
        began, loads_in = self.now, self.loads_in
        self.started.append(began)
        gone: list[bool] = []

        def answer() -> Ready | None:
            if self.now > began + loads_in + self.lives:
                raise ConnectionError("it has ended")
            return Ready(1, 1) if self.now >= began + loads_in else None

        def end() -> None:
            if not gone:
                gone.append(True)
                self.ended.append(self.now)

        return SimpleNamespace(
            answer=answer,
            wait=lambda: Ready(1, 1),
            send=lambda commit: True,
            close=end,
            kill=end,
            table=SimpleNamespace(counts=Counts()),
        )


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(supervisor, "time", world)
    monkeypatch.setattr(supervisor, "DrafterProcess", world.begin)
    return world


def started(world: World, loads_in: float) -> SupervisedProcess:
    """Return a supervisor that has ended its silent first process; others load in `loads_in` s."""
    deployment: Any = None
    kept = SupervisedProcess(deployment)
    kept.start()
    world.loads_in = loads_in
    kept.send(UpdateBatch(1, [], []))
    world.now += SILENCE + 1.0
    assert not kept.up
    return kept


def test_a_process_that_never_loads_is_ended_and_started_again(world: World) -> None:
    """Restarts continue without limit, with one process at a time."""
    kept = started(world, math.inf)
    for _ in range(24 * 60):
        world.now += 60.0
        assert not kept.up
        assert len(world.started) - len(world.ended) <= 1
    lives = [end - start for start, end in zip(world.started, world.ended, strict=False)]
    assert len(lives) > 24 * 60 * 60 / LONGEST_START / 2
    assert min(lives[1:]) > LONGEST_START
    world.loads_in = 0.0
    world.now += LONGEST_START + 1.0
    while not kept.up:
        world.now += 1.0
    assert len(world.started) == len(world.ended) + 1


def test_a_process_that_loads_for_long_is_waited_for(world: World) -> None:
    kept = started(world, LONGEST_START - 2.0)
    while not kept.up:
        world.now += 1.0
    world.now += 10 * LONGEST_START
    assert kept.up
    assert (len(world.started), len(world.ended), kept.restarts) == (2, 1, 1)


def test_rests_grow_if_each_process_ends_soon_after_it_has_loaded(world: World) -> None:
    """The time to load is no part of a healthy life."""
    kept = started(world, 70.0)
    world.lives = 1.0
    while len(world.started) < 6:
        _ = kept.up
        world.now += 0.5
    rests = [start - end for start, end in zip(world.started[2:], world.ended[1:], strict=False)]
    assert rests == [2.0, 4.0, 8.0, 16.0]


def test_what_was_done_is_not_forgotten_with_the_process_that_did_it(world: World) -> None:
    """Counters are sums over all processes. `blocks` is that of the current one."""
    deployment: Any = None
    kept = SupervisedProcess(deployment)
    kept.start()
    kept.table.counts = Counts(9, 7, 5, 3, 4, 3, 2, 1, 0.5)
    kept.rest()
    kept.rest()
    assert kept.done[1:] == (7, 5, 0, 4, 3, 2, 1, 0.5)
    kept.wake()
    kept.table.counts = Counts(9, 2, 1, 1, 1, 1, 1, 1, 0.25)
    assert kept.done[1:] == (9, 6, 1, 5, 4, 3, 2, 0.75)
    kept._lose(OSError("it ended"))
    assert kept.done[1:] == (9, 6, 0, 5, 4, 3, 2, 0.75)


# A process that makes a folder and reports it. `then` runs after its engine's socket is closed.
CHILD = """
import socket, sys, tempfile, time
messages = socket.socket(fileno=int(sys.argv[1]))
with tempfile.TemporaryDirectory(dir=sys.argv[2]):
    messages.send(b"there")
    messages.recv(1)
    {then}
"""


@pytest.mark.parametrize(
    ("then", "longest", "ends"),
    [("pass", 120.0, 0), ("time.sleep(1000)", 0.0, -signal.SIGKILL)],
    ids=["by itself", "hung"],
)
def test_a_process_is_killed_only_where_it_does_not_end(
    then: str, longest: float, ends: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ends by itself removes its folder, even if a fork has a copy of the socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    arguments = [sys.executable, "-c", CHILD.format(then=then), str(theirs.fileno()), str(tmp_path)]
    with theirs:
        child = subprocess.Popen(arguments, pass_fds=(theirs.fileno(),))
    assert ours.recv(8) == b"there"
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(supervisor, "_LONGEST_END", longest)
    with ours.dup():
        supervisor._end(ours, child)
    assert child.wait() == ends
    assert len(list(tmp_path.iterdir())) == (ends != 0)


def test_a_process_ends_with_its_engine_while_it_does_something_else() -> None:
    """It may load for minutes, or hang. The memory of its device is free at once."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = (
        "import socket, sys, threading, time\n"
        "from vllm_hetero_spec.engine.ahead.drafter_main import end_with\n"
        "messages = socket.socket(fileno=int(sys.argv[1]))\n"
        "threading.Thread(target=end_with, args=[messages], daemon=True).start()\n"
        "messages.send(b'there')\n"
        "time.sleep(1000)\n"
    )
    with theirs:
        command = [sys.executable, "-c", program, str(theirs.fileno())]
        child = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
    assert ours.recv(8) == b"there"
    ours.send(b"a message is no end")
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.5)
    ours.close()
    assert child.wait(100.0) == 0


def test_a_fork_does_not_hold_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would continue after its engine was killed, as long as a fork lives."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(supervisor, "_SOCKETS", {ours})
    with ours, theirs:
        child = os.fork()
        if not child:
            os._exit(ours.fileno() != -1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert ours.send(b"here") == 4


@pytest.mark.parametrize("loads", [True, False])
def test_an_engine_that_ends_while_its_drafter_loads_is_no_error(
    loads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a stack trace would appear long after the user has ended the engine."""

    def load(*_: Any) -> tuple[None, Ready]:
        if not loads:
            raise ConfigError("there is no room")
        return None, Ready(1, 1)

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    ended: list[int] = []
    monkeypatch.setattr(drafter_main, "load", load)
    monkeypatch.setattr(drafter_main, "end_with", lambda _: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["", str(theirs.detach()), "0"])
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO()))
    monkeypatch.setattr(os, "_exit", ended.append)
    drafter_main.main()
    assert ended == [0]


@pytest.mark.parametrize("says", ["there is no room", ""])
def test_what_ends_with_messages_unread_is_named(
    says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log contains the last message of the process instead of "Connection reset by peer"."""
    (tmp_path / "ending.py").write_text(
        "import select, socket, sys\n"
        "engine = socket.socket(fileno=int(sys.argv[1]))\n"
        f"engine.send({encode(Ready(1, 1))!r})\n"
        "select.select([engine], [], [])\n"
        f"if {says!r}:\n    engine.send({encode(Failed(says))!r})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(supervisor, "_PROGRAM", "ending")
    deployment: Any = SimpleNamespace(table_shape=(1, 1, 1, 0), cores=())
    kept = SupervisedProcess(deployment)
    kept.start()
    assert kept.up
    assert kept.send(UpdateBatch(1, [], []))
    assert kept._process is not None
    kept._process._child.wait()
    kept.send(UpdateBatch(2, [], []))
    assert not kept.up
    said = says or "the drafter's process has ended"
    assert f"Drafter process failed ({said}); restarting in 1 s" in caplog.text
    kept.rest()


def test_a_hung_process_is_killed_without_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's step would wait for it."""
    (tmp_path / "hanging.py").write_text(
        "import socket, sys, time\n"
        "engine = socket.socket(fileno=int(sys.argv[1]))\n"
        f"engine.send({encode(Ready(1, 1))!r})\n"
        "time.sleep(1000)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(supervisor, "_PROGRAM", "hanging")
    monkeypatch.setattr(supervisor, "_end", pytest.fail)
    deployment: Any = SimpleNamespace(table_shape=(1, 1, 1, 0), cores=())
    kept = SupervisedProcess(deployment)
    kept.start()
    assert kept._process is not None
    child = kept._process._child
    kept._lose(OSError("it was silent"))
    assert child.wait(100.0) == -signal.SIGKILL


def test_a_deployment_that_cannot_be_read_is_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"cannot be loaded .*No module named 'nobody_has'"):
        drafter_main.load(b"cnobody_has.this\nmodule\n.", 0)


def test_other_plugins_are_loaded_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deployment contains names of models that these plugins register."""
    import vllm.plugins

    def stop() -> None:
        raise RuntimeError("plugins first")

    monkeypatch.setattr(vllm.plugins, "load_general_plugins", stop)
    monkeypatch.setattr(drafter_main, "_load", pytest.fail)
    with pytest.raises(ConfigError, match="RuntimeError: plugins first"):
        drafter_main.load(b"", 0)


@pytest.mark.parametrize("device", [None, "1"])
def test_no_key_is_to_be_left_out_that_was_not_given(
    monkeypatch: pytest.MonkeyPatch, device: str | None
) -> None:
    """The remedy names `drafter_device` only if the user has set it."""
    shape = (1, 1, 1, 0)
    given = SimpleNamespace(
        options=SimpleNamespace(drafter_device=device),
        drafter_config=SimpleNamespace(model="drafter", quantization=None),
        table_shape=shape,
    )

    def fail(*_: Any) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(drafter_main, "_load", fail)
    with pytest.raises(
        ConfigError, match=r'RuntimeError: no room\); leave out "draft_ahead"'
    ) as said:
        drafter_main.load(pickle.dumps(given), make_file(*shape))
    assert ("drafter_device" in str(said.value)) is (device is not None)
