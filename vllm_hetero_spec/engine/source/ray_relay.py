# SPDX-License-Identifier: Apache-2.0
"""Between an engine and the actor that drafts for it: `python -m ... SOCKET MEMORY`, an `Errand`.

To the engine this process is its drafter: it sends what it has to say through the socket, and reads
drafts in the memory. Ray is here alone, so that whatever becomes of a cluster, or of the actor, the
engine waits for nothing. It ends with the engine, or with the actor, whichever ends first.
"""

import asyncio
import contextlib
import mmap
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_hetero_spec import __version__
from vllm_hetero_spec.engine.source.answers import Failed, answer_of, encode
from vllm_hetero_spec.engine.source.ray_actor import DrafterActor
from vllm_hetero_spec.errors import ConfigError, first_line
from vllm_hetero_spec.ray_session import join_cluster

if TYPE_CHECKING:
    from ray.actor import ActorHandle

# Of the actors' names, whatever job starts them.
NAMESPACE = "hetero_spec"
# See `Errand`.
PATIENCE = IDLE_EXIT = 60.0
_BUFFER = 1 << 20
_A_WHILE = 0.5  # seconds between two attempts


@dataclass(frozen=True)
class Errand:
    """What a relay is to do. Pickled.

    Attributes:
        actor: The name of the actor: all engines that give the same one share it.
        resources: Of Ray that it takes: `num_gpus`, `num_cpus`.
        deployment: What it runs, pickled.
        shape: Of the table: slots first.
        address: Of the cluster; None for the one that is found.
        patience: Seconds that a place for it is waited for.
        idle_exit: Seconds without engines after which it ends.
    """

    actor: str
    resources: Mapping[str, float]
    deployment: bytes
    shape: tuple[int, ...]
    address: str | None
    patience: float
    idle_exit: float


def main() -> None:
    """Find the actor, say that it is ready, and carry."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine ends, and closes the socket
    messages, memory = socket.socket(fileno=int(sys.argv[1])), mmap.mmap(int(sys.argv[2]), 0)
    messages.setblocking(False)
    errand: Errand = pickle.load(sys.stdin.buffer)
    try:
        asyncio.run(_relay(errand, messages, memory))
    except EOFError:
        pass
    except Exception as error:
        why = f"the drafter's actor is gone ({type(error).__name__}: {first_line(error)})"
        why = str(error) if isinstance(error, ConfigError) else why
        with contextlib.suppress(OSError):
            messages.send(encode(Failed(why)))
    os._exit(0)  # Ray's own end may take long


async def _relay(errand: Errand, messages: socket.socket, memory: mmap.mmap) -> None:
    if errand.address:
        os.environ["RAY_ADDRESS"] = errand.address
    actor, number = await join_actor(join_cluster(), errand)
    await asyncio.gather(
        _tell(actor, number, messages), _show(actor, number, memory), _answer(actor, messages)
    )


async def join_actor(ray: Any, errand: Errand) -> "tuple[ActorHandle, int]":
    """The actor, started if there is none, and the engine's number there.

    Raises:
        ConfigError: There is no room for it, or it has another version of this package.
    """
    options = {
        "name": errand.actor,
        "namespace": NAMESPACE,
        "get_if_exists": True,
        "lifetime": "detached",
        "max_restarts": 0,  # engines start it again, and each waits longer every time
        **errand.resources,
    }
    placed = ray.remote(DrafterActor).options(**options)
    deadline = time.monotonic() + errand.patience
    while True:
        actor = placed.remote(errand.deployment, errand.shape[1:], errand.idle_exit)
        answer = actor.join.remote(__version__, errand.shape[0])
        try:
            joined = await asyncio.wait_for(answer, max(deadline - time.monotonic(), _A_WHILE))
        except TimeoutError:
            ray.kill(actor)  # it waits for room, or hangs
            raise ConfigError(_no_room(ray, errand)) from None
        except ray.exceptions.RayActorError:  # it was about to end
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(_A_WHILE)
            continue
        if isinstance(joined, str):
            raise ConfigError(joined)
        return actor, joined


def _no_room(ray: Any, errand: Errand) -> str:
    asked = {name.removeprefix("num_")[:-1].upper(): n for name, n in errand.resources.items()}
    has, free = (
        ", ".join(f"{of.get(name, 0):g} {name}" for name in asked)
        for of in (ray.cluster_resources(), ray.available_resources())
    )
    wanted = ", ".join(f"{n:g} {name}" for name, n in asked.items())
    return (
        f"the drafter's actor asks for {wanted} on one node of the Ray cluster and got no room "
        f"within {errand.patience:.0f} s; all nodes together have {has}, of which {free} are "
        'free: ask for less in "ray_drafter", or add a node.'
    )


async def _tell(actor: "ActorHandle", number: int, messages: socket.socket) -> None:
    """Carry commits; what comes while one is on its way waits in the socket, and goes together."""
    loop = asyncio.get_running_loop()
    while message := await loop.sock_recv(messages, _BUFFER):
        waiting = [message]
        with contextlib.suppress(BlockingIOError):
            while message := messages.recv(_BUFFER):
                waiting.append(message)
        await actor.take.remote(number, waiting)
    raise EOFError("the engine is gone")


async def _show(actor: "ActorHandle", number: int, memory: mmap.mmap) -> None:
    """Bring what is new in the actor's table into the engine's."""
    while True:
        for start, piece in await actor.news.remote(number):
            memory[start : start + len(piece)] = piece


async def _answer(actor: "ActorHandle", messages: socket.socket) -> None:
    answer: bytes = await actor.ready.remote()
    if isinstance(said := answer_of(answer), Failed):
        raise ConfigError(said.sentence)
    messages.send(answer)


if __name__ == "__main__":
    main()
