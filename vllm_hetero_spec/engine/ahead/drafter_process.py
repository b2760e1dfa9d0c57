# SPDX-License-Identifier: Apache-2.0
"""The drafter's own process, as the engine sees it: started, told, and ended.

Nothing here waits for it but the start of the engine. Messages go through a pair of sockets that
have no name, whole or not at all; drafts are read from a table in memory. The process ends when the
engine's end of the sockets closes, however that comes about.
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
# Seconds that loading the drafter may take.
LONGEST_START = 600.0
# Seconds that its end is waited for: by itself, and once it is killed.
_LONGEST_END = 1.0
# Of drafters that run. A fork of this process must not hold one: the end of it tells them to end.
_SOCKETS: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def _let_go() -> None:
    for each in _SOCKETS:
        each.close()


os.register_at_fork(after_in_child=_let_go)


class DrafterProcess:
    """A drafter process, from its start on.

    Args:
        deployment: What it is to run.

    Attributes:
        table: What it drafts.
    """

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
        """Wait until the drafter is loaded.

        Raises:
            ConfigError: It cannot be.
        """
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
        """What it has said, if anything.

        Raises:
            ConnectionError: The process is gone.
        """
        try:
            message = self._socket.recv(LONGEST)
        except BlockingIOError:
            return None
        except ConnectionResetError:  # it has not read all; what it said stands behind this
            message = self._socket.recv(LONGEST)
        if not message:
            raise ConnectionError("the drafter's process has ended")
        return answer_of(message)

    def send(self, commit: UpdateBatch) -> bool:
        """Send a commit; False where it does not read what was sent before, or is gone.

        `answer` says then why.
        """
        try:
            self._socket.send(encode(commit))
        except (BlockingIOError, ConnectionError):
            return False
        return True


def _environment(cores: Sequence[int]) -> dict[str, str]:
    """Of the child: what this process can import, and a thread on each of its cores."""
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if cores:
        variables["OMP_NUM_THREADS"] = str(len(cores))
        variables["OMP_PLACES"] = ",".join(f"{{{core}}}" for core in cores)
        variables["OMP_PROC_BIND"] = "true"
        variables.pop("KMP_AFFINITY", None)  # libiomp prefers it, and it names the target's cores
    return variables


def _end(messages: socket.socket, child: subprocess.Popen[bytes]) -> None:
    """Let it end by itself, so that nothing of it is left behind; kill it where it does not."""
    with contextlib.suppress(OSError):
        messages.shutdown(socket.SHUT_RDWR)  # also where a fork of this process has it too
    messages.close()
    try:
        child.wait(_LONGEST_END)
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_LONGEST_END)
