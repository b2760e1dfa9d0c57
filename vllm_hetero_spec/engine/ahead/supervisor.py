# SPDX-License-Identifier: Apache-2.0
"""The drafter process as the engine sees it: start, messages, restarts, end.

Only the start of the engine waits for the process. Messages pass through an unnamed pair of
sockets, each one whole or not at all. Drafts are read from a table in shared memory. The process
ends when the engine's socket closes, for whatever reason. A process that has ended, hangs or has
not loaded is replaced.
"""

import contextlib
import logging
import math
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence

from vllm_hetero_spec.engine.ahead.deployment import Deployment, packed
from vllm_hetero_spec.engine.ahead.messages import (
    LONGEST,
    Failed,
    Ready,
    UpdateBatch,
    answer_of,
    encode,
)
from vllm_hetero_spec.engine.ahead.table import Counts, DraftTable, make_file
from vllm_hetero_spec.errors import ConfigError

logger = logging.getLogger("vllm.hetero_spec")

# Module that the process runs.
_PROGRAM = "vllm_hetero_spec.engine.ahead.drafter_main"
# Seconds; the longest time to load the drafter.
LONGEST_START = 600.0
# Seconds; the longest wait for the process to end by itself, and again after it is killed.
_LONGEST_END = 1.0
# Seconds after which a process that was sent something and shows no sign of life is ended. Its
# longest forward takes less.
SILENCE = 30.0
# Seconds; the delay of a restart doubles from 1 up to this.
_LONGEST_REST = 60.0
# Seconds; if a loaded process lives so long, the delay begins at 1 again.
_HEALTHY = 60.0
# Sockets of running drafter processes. A fork of this process closes its copies, because a drafter
# process ends when the last copy is closed.
_SOCKETS: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def _let_go() -> None:
    for each in _SOCKETS:
        each.close()


os.register_at_fork(after_in_child=_let_go)


class DrafterProcess:
    """One drafter process, which the constructor starts. `table` contains its drafts."""

    def __init__(self, deployment: Deployment) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        shape = deployment.table_shape
        memory = make_file(*shape)
        try:
            self.table = DraftTable(memory, *shape)
            with tempfile.TemporaryFile() as start, theirs:
                start.write(packed(deployment))
                start.seek(0)
                arguments = theirs.fileno(), memory, *deployment.cores
                child = subprocess.Popen(
                    [sys.executable, "-m", _PROGRAM, *map(str, arguments)],
                    stdin=start,
                    pass_fds=(theirs.fileno(), memory),
                    env=_environment(deployment.cores),
                )
        finally:
            os.close(memory)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST)
        ours.setblocking(False)
        self._socket, self._child = ours, child
        _SOCKETS.add(ours)
        self.close = weakref.finalize(self, _end, ours, child)

    def wait(self) -> Ready:
        """Wait until the drafter is loaded. Raises `ConfigError` if it cannot be."""
        there = select.poll()  # `select` has a limit of 1,024 open files
        there.register(self._socket, select.POLLIN)
        there.poll(1e3 * LONGEST_START)
        why = f"no message from it in {LONGEST_START:.0f} s"
        try:
            answer = self.answer()
        except ConnectionError as error:
            answer, why = None, str(error)
        if isinstance(answer, Ready):
            return answer
        self.close()
        if answer is not None:
            raise ConfigError(answer.sentence)
        raise ConfigError(
            f"the drafter's own process could not be started ({why}); see its messages above, or "
            'leave out "draft_ahead".'
        )

    def kill(self) -> None:
        """End the process at once, and do not wait for that."""
        self.close.detach()
        self._socket.close()
        self._child.kill()

    def answer(self) -> Ready | Failed | None:
        """Return the next message, or None. Raises `ConnectionError` if the process has ended."""
        try:
            message = self._socket.recv(LONGEST)
        except BlockingIOError:
            return None
        except ConnectionResetError:  # it left messages unread; its own message comes next
            message = self._socket.recv(LONGEST)
        if not message:
            raise ConnectionError("the drafter's process has ended")
        return answer_of(message)

    def send(self, commit: UpdateBatch) -> bool:
        """Send an update. Return False if the process has ended, or has not read earlier updates.

        If it has ended, `answer` raises the cause.
        """
        try:
            self._socket.send(encode(commit))
        except (BlockingIOError, ConnectionError):
            return False
        return True


class SupervisedProcess:
    """Keeps a drafter process alive. Only `start` waits for it.

    Attributes:
        life: Number of the current process. What was sent to an earlier one is lost.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._process: DrafterProcess | None = None
        self._loaded = False
        self.life = 0
        self._past = Counts()  # sums over processes that have ended
        self._failures = 0
        self._began = self._loaded_at = self._again = self._heard = 0.0
        self._beats, self._sent = 0, False  # at the last check; True if something was sent since

    def start(self) -> Ready:
        """Start the first process, and wait until the drafter is loaded. Raises `ConfigError`."""
        ready = self._launch().wait()
        self._loaded, self._loaded_at = True, time.monotonic()
        return ready

    @property
    def restarts(self) -> int:
        return self.life - 1

    @property
    def table(self) -> DraftTable:
        """Drafts of the current process."""
        assert self._process is not None
        return self._process.table

    @property
    def counts(self) -> Counts:
        return Counts() if self._process is None else self._process.table.counts

    @property
    def done(self) -> Counts:
        """Sums over all processes; `blocks` is that of the current one."""
        sums = map(sum, zip(self._past, self.counts, strict=True))
        return Counts._make(sums)._replace(blocks=self.counts.blocks)

    @property
    def up(self) -> bool:
        """True if the process accepts updates. Reading it may begin a restart that is due."""
        now = time.monotonic()
        try:
            if self._process is None:
                if now >= self._again:
                    self._launch()
            else:
                self._watch(self._process, now)
        except OSError as error:
            self._lose(error)
        return self._loaded

    def send(self, commit: UpdateBatch) -> bool:
        """Send an update. Return False if it was not sent. A restart loses all earlier ones."""
        assert self._process is not None
        self._sent = True  # if this fails, earlier ones are still unread
        try:
            return self._process.send(commit)
        except OSError as error:
            self._lose(error)
            return False

    def rest(self) -> None:
        """End the process until `wake`."""
        self._end()
        self._again = math.inf

    def wake(self) -> None:
        """Begin to start the process again after `rest`."""
        if self._again == math.inf:
            self._again = 0.0
            _ = self.up

    def _launch(self) -> DrafterProcess:
        self._began = self._heard = time.monotonic()
        self._process, self._sent = DrafterProcess(self._deployment), False
        self.life += 1
        return self._process

    def _watch(self, process: DrafterProcess, now: float) -> None:
        answer = process.answer()
        if isinstance(answer, Failed):
            raise ConnectionError(answer.sentence)
        if answer is not None:
            self._loaded, self._loaded_at = True, now
        if not self._loaded and now - self._began > LONGEST_START:
            raise ConnectionError(f"the drafter's process did not load in {LONGEST_START:.0f} s")
        beats = process.table.counts.beats
        if beats != self._beats or not self._sent:
            self._beats, self._heard, self._sent = beats, now, False
        if now - self._heard > SILENCE:
            raise ConnectionError(f"the drafter's process was silent for {SILENCE:.0f} s")

    def _lose(self, error: OSError) -> None:
        if self._loaded and time.monotonic() - self._loaded_at > _HEALTHY:
            self._failures = 0
        rest = min(2.0**self._failures, _LONGEST_REST)
        logger.warning(
            "Drafter process failed (%s); restarting in %.0f s. Requests continue without drafts.",
            error,
            rest,
        )
        self._failures += 1
        self._again = time.monotonic() + rest
        if self._process is not None:
            self._process.kill()
        self._end()

    def _end(self) -> None:
        self._past = self.done
        if self._process is not None:
            self._process.close()
        self._process, self._loaded = None, False


def _environment(cores: Sequence[int]) -> dict[str, str]:
    """Environment of the child: this process's import path, and an OpenMP thread per core."""
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if cores:
        variables["OMP_NUM_THREADS"] = str(len(cores))
        variables["OMP_PLACES"] = ",".join(f"{{{core}}}" for core in cores)
        variables["OMP_PROC_BIND"] = "true"
        variables.pop("KMP_AFFINITY", None)  # names the target's cores, and libiomp prefers it
    return variables


def _end(messages: socket.socket, child: subprocess.Popen[bytes]) -> None:
    """End the process. It may clean up by itself for `_LONGEST_END`, and is killed after that."""
    with contextlib.suppress(OSError):
        messages.shutdown(socket.SHUT_RDWR)  # works even if a fork of this process has a copy
    messages.close()
    try:
        child.wait(_LONGEST_END)
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_LONGEST_END)
