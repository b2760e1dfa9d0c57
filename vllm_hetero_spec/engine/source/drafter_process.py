# SPDX-License-Identifier: Apache-2.0
"""The drafter's own process, as the engine sees it: started, told, and ended.

Nothing here waits for it but the start of the engine. Messages go through a pair of sockets that
have no name, whole or not at all; drafts are read from a table in memory. The process ends when the
engine's end of the sockets closes, however that comes about. It has the drafter itself, or carries
all of that to an actor of Ray's which has it: here there is no difference.
"""

import contextlib
import hashlib
import os
import pickle
import select
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from vllm.config import ModelConfig, VllmConfig

from vllm_hetero_spec.config import ConfigError, HeteroOptions
from vllm_hetero_spec.draft.token_map import TokenMap
from vllm_hetero_spec.engine.seam.tokenizers import Pair
from vllm_hetero_spec.engine.source.answers import Failed, Ready, answer_of, encode
from vllm_hetero_spec.engine.source.messages import Commit
from vllm_hetero_spec.engine.source.ray_joining import Errand
from vllm_hetero_spec.engine.source.table import DraftTable, make_file
from vllm_hetero_spec.ray_session import own_address

# Seconds that loading the drafter may take.
_LONGEST_START = 600.0
# Seconds that its end is waited for.
_LONGEST_END = 1.0
_BUFFER = 1 << 20
# Texts for each request of the largest batch: those of waiting requests are kept as long.
_SLOTS = 2
# Guesses of what the target writes instead of the drafter's chain.
_SIDES = 8
# Drafter tokens that may stand behind a text for each target token that can be drafted.
_STEPS_PER_TOKEN = 8
# Of an actor, see `Errand`.
PATIENCE, SILENCE, IDLE_EXIT = 60.0, 10.0, 60.0
# Modules that such a process runs.
_DRAFTER, _RELAY = (f"vllm_hetero_spec.engine.source.{of}" for of in ("drafter_main", "ray_relay"))


@dataclass(frozen=True)
class Deployment:
    """What a drafter process is to run. Pickled, by the engine for its own child.

    Attributes:
        vllm_config: The target's.
        drafter_config: The drafter's model.
        options: The user's.
        banned: Ids that are never drafted.
        vocab_size: Ids of the drafter's tokenizer.
        ends: Ids after which nothing is drafted.
        device: Of torch; None for the target's.
        cores: Of the CPU that it runs on; none for those of the engine.
        slots: Texts.
        longest: Most drafter tokens of a line behind a text.
        tokenizer: Of the drafter, its fingerprint.
        tokens: Which target tokens are proposed, where drafts are drawn; on the host.
        sides: Lines beside the chain of a text.
    """

    vllm_config: VllmConfig
    drafter_config: ModelConfig
    options: HeteroOptions
    banned: frozenset[int]
    vocab_size: int
    ends: frozenset[int]
    device: str | None
    cores: Sequence[int]
    slots: int
    longest: int
    tokenizer: str
    tokens: TokenMap | None = None
    sides: int = _SIDES

    def program(self, lost: int | None) -> "tuple[str, Deployment | Errand]":
        """The module that the process runs, and what it is told.

        Args:
            lost: See `Errand`.
        """
        if self.options.parallel == "process":
            return _DRAFTER, self
        wanted, gpu = self.options.ray_drafter, self.vllm_config.device_config.device_type != "cpu"
        num_gpus = float(gpu) if wanted.num_gpus is None else wanted.num_gpus
        return _RELAY, Errand(
            actor=f"hetero_spec:{self._fingerprint}:{wanted.share}",
            resources={"num_gpus": num_gpus, "num_cpus": wanted.num_cpus},
            deployment=pickle.dumps(self),
            shape=self.table_shape,
            address=own_address(),
            patience=PATIENCE,
            silence=SILENCE,
            idle_exit=IDLE_EXIT,
            lost=lost,
        )

    @property
    def _fingerprint(self) -> str:
        """Of all that is the same for engines that share a drafter."""
        model = self.drafter_config
        weights = str(model.dtype), model.max_model_len, model.hf_config.to_json_string()
        ids = self.vocab_size, sorted(self.banned), sorted(self.ends)
        proposed = self.tokens and self.tokens.first.numpy().tobytes()
        same = self.options, weights, self.tokenizer, ids, self.longest, self.sides, proposed
        return hashlib.sha256(repr(same).encode()).hexdigest()[:16]

    @property
    def most_rows(self) -> int:
        """Lines of a forward."""
        return int(self.vllm_config.scheduler_config.max_num_seqs) + self.sides

    @property
    def table_shape(self) -> tuple[int, int, int, int]:
        """Texts, most tokens of a line, lines beside a chain, and most drawn tokens of a line."""
        # Each is a target token or more: of two drafts, and of the tokens between and behind them.
        drawn = 2 * (self.options.num_speculative_tokens + 1) * (self.tokens is not None)
        return self.slots, self.longest, self.sides, drawn

    @classmethod
    def of(
        cls,
        vllm_config: VllmConfig,
        drafter_config: ModelConfig,
        options: HeteroOptions,
        pair: Pair,
        tokens: TokenMap | None = None,
    ) -> "Deployment":
        """What the drafter process of an engine runs.

        Args:
            vllm_config: The worker's configuration.
            drafter_config: The drafter's model.
            options: The user's.
            pair: The two tokenizers.
            tokens: Which target tokens are proposed, where drafts are drawn.
        """
        where = options.drafter_device or ""
        on_cores = where[:1].isdigit()
        return cls(
            vllm_config=vllm_config,
            drafter_config=drafter_config,
            options=options,
            banned=pair.bridge.banned,
            vocab_size=pair.drafter.vocab_size,
            ends=pair.bridge.drafter_eos,
            device=None if on_cores else options.drafter_device,
            cores=cores_of(where) if on_cores else (),
            slots=_SLOTS * vllm_config.scheduler_config.max_num_seqs,
            longest=_STEPS_PER_TOKEN * (options.num_speculative_tokens + 1),
            tokenizer=pair.drafter.fingerprint,
            tokens=tokens,
        )


class DrafterProcess:
    """A drafter process, from its start on.

    Args:
        deployment: What it is to run.
        lost: Number of the actor that the process before had; None where it was none.

    Attributes:
        table: What it drafts.
    """

    def __init__(self, deployment: Deployment, lost: int | None = None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        shape = deployment.table_shape
        memory = make_file(*shape)
        try:
            self.table = DraftTable(memory, *shape)
            with tempfile.TemporaryFile() as start, theirs:
                module, told = deployment.program(lost)
                pickle.dump(told, start)
                start.seek(0)
                arguments = theirs.fileno(), memory, *deployment.cores
                child = subprocess.Popen(
                    [sys.executable, "-m", module, *map(str, arguments)],
                    stdin=start,
                    pass_fds=(theirs.fileno(), memory),
                    env=_environment(deployment.cores),
                )
        finally:
            os.close(memory)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        ours.setblocking(False)
        self._socket, self._child = ours, child
        self.pid = child.pid
        self.close = weakref.finalize(self, _end, ours, child)

    def wait(self) -> Ready:
        """Wait until the drafter is loaded.

        Raises:
            ConfigError: It cannot be.
        """
        select.select([self._socket], [], [], _LONGEST_START)
        why = f"nothing was heard of it for {_LONGEST_START:.0f} s"
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
            'leave out "parallel".'
        )

    def answer(self) -> Ready | Failed | None:
        """What it has said, if anything.

        Raises:
            ConnectionError: The process is gone.
        """
        try:
            message = self._socket.recv(_BUFFER)
        except BlockingIOError:
            return None
        if not message:
            raise ConnectionError("the drafter's process has ended")
        return answer_of(message)

    def send(self, commit: Commit) -> bool:
        """Send a commit; False where it does not read what was sent before.

        Raises:
            ConnectionError: The process is gone.
        """
        try:
            self._socket.send(encode(commit))
        except BlockingIOError:
            return False
        return True


def cores_of(text: str) -> list[int]:
    """The cores of a list like "0-2,5"."""
    cores: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def _environment(cores: Sequence[int]) -> dict[str, str]:
    """Of the child: what this process can import, and a thread on each of its cores."""
    changes = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if cores:
        changes["OMP_NUM_THREADS"] = str(len(cores))
        changes["OMP_PLACES"] = ",".join(f"{{{core}}}" for core in cores)
        changes["OMP_PROC_BIND"] = "true"
    return os.environ | changes


def _end(messages: socket.socket, child: subprocess.Popen[bytes]) -> None:
    messages.close()
    child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_LONGEST_END)
