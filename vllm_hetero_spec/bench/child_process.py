# SPDX-License-Identifier: Apache-2.0
"""An engine in a child process.

The parent sends the specification of the engine, then loads. The child answers each load with a
`Sample`. The child leads a session of its own, so that Ctrl-C reaches only the parent, which then
ends all processes of that session.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, Self

from vllm_hetero_spec.bench.load import Load, MeasurementError, Sample
from vllm_hetero_spec.errors import ConfigError

_TICK = 0.1  # seconds between checks that the child still runs
_GRACE = 10.0  # seconds until an engine that should end is killed
# Seconds before a load. vLLM's workers poll for a second after a request, and occupy a core.
REST = 1.2
_ENDED = ("Z", "X")  # states of threads in /proc


class EngineProcess:
    """An engine in a child process; as a context manager it closes the engine.

    Subclasses set `program`, a module whose main calls `serve`. With `verbose` the child writes to
    stderr; otherwise errors quote its output. Timeouts are in seconds; a run includes its warm-up.

    Raises:
        ConfigError: The engine refused the specification.
        MeasurementError: The engine did not start for another reason.
    """

    program: ClassVar[str]

    def __init__(
        self,
        spec: Any,
        *,
        verbose: bool = False,
        start_timeout: float = 1800.0,
        run_timeout: float = 3600.0,
    ) -> None:
        self._run_timeout = run_timeout
        self._closed = False
        self._log = None if verbose else tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        output = self._log or sys.stderr
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.program, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={"VLLM_LOGGING_LEVEL": "INFO" if verbose else "WARNING", **os.environ},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        try:
            self._ask(spec, start_timeout)
        except ConfigError:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id of the child, which is also the id of its session."""
        return self._process.pid

    def run(self, load: Load) -> Sample:
        """Generate a load; no prompt is taken from the prefix cache of an earlier load.

        Raises:
            ConfigError: The engine refused the load; it stays up.
            MeasurementError: The engine has ended, or it failed now and is closed.
        """
        if self._closed:
            raise MeasurementError("the engine has ended")
        for folder in processes(self.pid):
            with contextlib.suppress(OSError):  # a kernel without clear_refs
                (folder / "clear_refs").write_text("5")
        sample: Sample = self._ask(load, self._run_timeout)
        if sample.peak_memory_bytes:  # memory of a device, which only the engine can read
            return sample
        return replace(sample, peak_memory_bytes=_peak_bytes(self.pid))

    def close(self) -> None:
        """End the engine and free its memory; a second call does nothing."""
        self._end(_GRACE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._end(_GRACE if kind is None else 0)

    def _ask(self, question: Any, timeout: float) -> Any:
        try:
            self._connection.send(question)
            answer = self._answer(timeout)
        except TimeoutError:
            self._end(0)
            raise MeasurementError(
                f"the engine gave no answer within {timeout:g} seconds{self._told}"
            ) from None
        except (EOFError, OSError):
            code = self._end(_GRACE)
            raise MeasurementError(f"the engine ended with exit code {code}{self._told}") from None
        except BaseException:
            self._end(0)
            raise
        if isinstance(answer, ConfigError):
            raise answer
        return answer

    def _answer(self, timeout: float) -> Any:
        """The child's next message; EOFError after its end, even if others hold the pipe."""
        deadline = time.monotonic() + timeout
        while not self._connection.poll(_TICK):
            if self._ended():
                raise EOFError
            if time.monotonic() > deadline:
                raise TimeoutError
        return self._connection.recv()

    def _ended(self) -> bool:
        # Without reaping: otherwise another session could get the number before `_end`.
        state = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, state) is not None

    def _end(self, grace: float) -> int:
        """Close the pipe, wait, kill the rest of the session; return the child's exit code."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(OSError):
                self._connection.send(None)
            self._connection.close()
            deadline = time.monotonic() + grace
            try:
                while not self._ended() and time.monotonic() < deadline:
                    time.sleep(_TICK / 2)
            finally:  # even if Ctrl-C interrupts the wait
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
            # Killed processes free their memory after a moment, and the next engine needs it.
            deadline = time.monotonic() + _GRACE
            while any(processes(self.pid)) and time.monotonic() < deadline:
                time.sleep(_TICK / 2)
        return self._process.wait()

    @property
    def _told(self) -> str:
        if self._log is None:
            return ""
        self._log.seek(0)
        return causes(self._log.read())


def processes(session: int) -> Iterator[Path]:
    """Yield the `/proc` folders of a session's processes that still hold memory and devices.

    A process holds them until its last thread ends; /proc/PID/stat only shows the first thread.
    """
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            _, leader = _state_and_session(folder)
            threads = (folder / "task").iterdir() if leader == session else ()
            if any(_state_and_session(thread)[0] not in _ENDED for thread in threads):
                yield folder


def _state_and_session(folder: Path) -> tuple[str, int]:
    # Fields after the name in parentheses: state, parent, group, session.
    state, _, _, session, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
    return state, int(session)


def _peak_bytes(session: int) -> int:
    """Sum of the highest resident memory of each process; shared pages count in each process."""
    total = 0
    for folder in processes(session):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if found := re.search(r"^VmHWM:\s+(\d+) kB", (folder / "status").read_text(), re.M):
                total += 1024 * int(found[1])
    return total


def causes(printed: str) -> str:
    """Distinct errors in an engine's output, the cause first."""
    found = dict.fromkeys(
        re.findall(r"(?:^|\] )(?:\w+\.)*(\w+(?:Error|Exception): .+)", printed, re.M)
    )
    return "".join(f"\n  {line}" for line in found) + "\n  (--verbose shows its full output)"


def serve(build: Callable[[Any], Callable[[Load], Sample]]) -> None:
    """Run the child: `build` the engine of a specification, then run loads until None arrives.

    A ConfigError is sent to the parent; any other exception ends the process.
    """
    parent = Connection(int(sys.argv[1]))
    os.set_inheritable(parent.fileno(), False)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        run = build(parent.recv())
    except ConfigError as refusal:
        parent.send(refusal)
        return
    parent.send(None)
    try:
        while (load := parent.recv()) is not None:
            try:
                parent.send(run(load))
            except ConfigError as refusal:
                parent.send(refusal)
    except EOFError:  # the parent ended without sending None
        os.killpg(0, signal.SIGKILL)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)
