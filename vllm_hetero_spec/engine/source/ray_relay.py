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
import select
import signal
import socket
import sys
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_hetero_spec.engine.source.answers import LONGEST, Failed, answer_of, encode
from vllm_hetero_spec.engine.source.errand import Errand
from vllm_hetero_spec.engine.source.ray_joining import LOOK, Joined, join_actor, newest
from vllm_hetero_spec.errors import ConfigError, first_line
from vllm_hetero_spec.ray_session import join_cluster

if TYPE_CHECKING:
    from ray.actor import ActorHandle

_GLANCE = 0.2  # seconds between two looks whether the engine is there, while an actor is joined


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
    ray = join_cluster()
    joined = await _unless_left(messages, join_actor(ray, errand))
    await asyncio.gather(
        _tell(joined.actor, joined.engine, messages),
        _show(joined.actor, joined.engine, memory),
        _answer(joined, messages),
        _stay(ray, errand.actor, joined.number),
    )


async def _unless_left(messages: socket.socket, joins: Coroutine[Any, Any, Joined]) -> Joined:
    """Join, and give it up where the engine ends meanwhile: it may take as long as a node takes."""
    joining, ended = asyncio.ensure_future(joins), select.poll()
    ended.register(messages, 0)  # what hangs up is told of in any case
    while not ended.poll(0):
        await asyncio.wait({joining}, timeout=_GLANCE)
        if joining.done():
            return joining.result()
    joining.cancel()
    await asyncio.wait({joining})
    raise EOFError("the engine is gone")


async def _tell(actor: "ActorHandle", number: int, messages: socket.socket) -> None:
    """Carry commits; what comes while one is on its way waits in the socket, and goes together."""
    loop = asyncio.get_running_loop()
    while message := await loop.sock_recv(messages, LONGEST):
        waiting = [message]
        with contextlib.suppress(BlockingIOError):
            while message := messages.recv(LONGEST):
                waiting.append(message)
        await actor.take.remote(number, waiting)
    raise EOFError("the engine is gone")


async def _show(actor: "ActorHandle", number: int, memory: mmap.mmap) -> None:
    """Bring what is new in the actor's table into the engine's."""
    while True:
        for start, piece in await actor.news.remote(number):
            memory[start : start + len(piece)] = piece


async def _answer(joined: Joined, messages: socket.socket) -> None:
    said = answer_of(await joined.actor.ready.remote())
    if isinstance(said, Failed):
        raise ConfigError(said.sentence)
    messages.send(encode(msgspec.structs.replace(said, actor=joined.number)))


async def _stay(ray: Any, name: str, number: int) -> None:
    """Go on as long as no other actor has taken its place."""
    while (newest(ray, name) or number) <= number:
        await asyncio.sleep(LOOK)
    raise ConnectionError("another has taken its place")


if __name__ == "__main__":
    main()
