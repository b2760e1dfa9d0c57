# SPDX-License-Identifier: Apache-2.0
"""Handle of the drafter process in the engine: starting it, sending to it, ending it.

Only the start of the engine waits for the process. Messages pass through an unnamed pair of
sockets, each one whole or not at all. Drafts are read from a table in shared memory. The process
ends when the engine's socket closes, for whatever reason.
"""

import contextlib
import os
import select
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence

from vllm_hetero_spec.engine.ahead.answers import LONGEST, Failed, Ready, answer_of, encode
from vllm_hetero_spec.engine.ahead.deployment import Deployment, packed
from vllm_hetero_spec.engine.ahead.messages import UpdateBatch
from vllm_hetero_spec.engine.ahead.table import DraftTable, make_file
from vllm_hetero_spec.errors import ConfigError

# Module that the process runs.
_PROGRAM = "vllm_hetero_spec.engine.ahead.drafter_main"
# Seconds; the longest time to load the drafter.
LONGEST_START = 600.0
# Seconds; the longest wait for the process to end by itself, and again after it is killed.
_LONGEST_END = 1.0
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
        self.pid = child.pid
        self.close = weakref.finalize(self, _end, ours, child)

    def wait(self) -> Ready:
        """Wait until the drafter is loaded. Raises `ConfigError` if it cannot be."""
        select.select([self._socket], [], [], LONGEST_START)
        why = f"nothing was heard of it for {LONGEST_START:.0f} s"
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
