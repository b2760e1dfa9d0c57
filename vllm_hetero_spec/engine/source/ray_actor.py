# SPDX-License-Identifier: Apache-2.0
"""One drafter for several engines: an actor of Ray's, which their relays call (`ray_relay.py`).

Calls are heard in the actor's event loop. A thread of its own, and no other, has the drafter: it
takes what the engines have said, and drafts for all of them in the same forwards.
"""

import asyncio
import contextlib
import os
import queue
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from vllm_hetero_spec import __version__
from vllm_hetero_spec.engine.source.answers import Failed, encode
from vllm_hetero_spec.errors import ConfigError

if TYPE_CHECKING:
    from vllm_hetero_spec.engine.source.messages import Commit
    from vllm_hetero_spec.engine.source.server import DraftingServer
    from vllm_hetero_spec.engine.source.sharing import Piece

# Seconds between two looks whether one is.
_LOOK = 1.0
# Seconds that a commit waits for the drafter at most: more than its longest forward takes.
_STUCK = 60.0
# Seconds in which it is still told why the drafter cannot be loaded.
_LAST_WORDS = 2.0
# Ray's own: with it, its workers see all GPUs of the node.
_SAYS_NOTHING = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


class DrafterActor:
    """A drafter that is shared. It ends by itself.

    Args:
        deployment: What it runs, pickled.
        shape: Of the tables, but for slots.
        silence: Seconds after which an engine that was not heard of is gone.
        idle_exit: Seconds without engines after which it ends.
    """

    def __init__(
        self, deployment: bytes, shape: Sequence[int], silence: float, idle_exit: float
    ) -> None:
        # Not at the head: a relay loads this module too, and neither torch nor numpy.
        from vllm_hetero_spec.engine.source.sharing import SharedTable

        _see_own_gpu()
        self._table = SharedTable(*shape)
        self._silence, self._idle_exit = silence, idle_exit
        self._loaded: Future[bytes] = Future()
        self._unread: queue.SimpleQueue[tuple[list[Commit], Future[None]]] = queue.SimpleQueue()
        threading.Thread(target=self._live, args=(deployment,), daemon=True).start()

    async def join(self, version: str, slots: int) -> int | str:
        """Take an engine in.

        Args:
            version: Of this package, where the engine runs.
            slots: Texts that it has at most.

        Returns:
            Its number, or why it is refused.
        """
        if version != __version__:
            return (
                f"the drafter's actor has vllm_hetero_spec {__version__}, and this engine "
                f'{version}; install one version on all nodes, or give another "share" in '
                '"ray_drafter".'
            )
        return self._table.join(slots)

    async def ready(self) -> bytes:
        """`Ready` once the drafter is loaded, or `Failed`."""
        return await asyncio.wrap_future(self._loaded)

    async def take(self, number: int, messages: Sequence[bytes]) -> None:
        """Take in the commits of an engine; back as soon as the drafter knows them."""
        engine = self._table.engine(number)
        taken: Future[None] = Future()
        self._unread.put(([engine.commit(message) for message in messages], taken))
        try:  # shielded: the drafter's thread answers also where nobody waits any more
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(taken)), _STUCK)
        except TimeoutError:
            os._exit(1)

    async def news(self, number: int) -> "list[Piece]":
        """What is new in the table of an engine; this is also the sign that it lives."""
        return await self._table.engine(number).news()

    def _live(self, deployment: bytes) -> None:
        """All that the thread of the drafter does; the actor ends with it."""
        try:
            self._draft(self._load(deployment))
        except ConfigError as error:
            self._loaded.set_result(encode(Failed(str(error))))
            time.sleep(_LAST_WORDS)
        except BaseException:
            traceback.print_exc()
        os._exit(1)

    def _load(self, deployment: bytes) -> "DraftingServer":
        from vllm_hetero_spec.engine.source.drafter_main import load

        server, ready = load(deployment, lambda _: self._table)
        self._loaded.set_result(encode(ready))
        return server

    def _draft(self, server: "DraftingServer") -> None:
        """Draft until no engine has been there for long."""
        used = looked = time.monotonic()
        while looked - used <= self._idle_exit:
            with contextlib.suppress(queue.Empty):
                commits, taken = self._unread.get(timeout=0 if server.busy else _LOOK)
                while True:
                    for commit in commits:
                        server.take(commit)
                    taken.set_result(None)
                    commits, taken = self._unread.get_nowait()
            if time.monotonic() - looked > _LOOK:
                looked = time.monotonic()
                for farewell in self._table.forget(self._silence):
                    server.take(farewell)
                used = looked if self._table else used
            server.advance()


def _see_own_gpu() -> None:
    """See the GPU that Ray has set aside alone, also on nodes where Ray is not to say which."""
    if os.environ.get(_SAYS_NOTHING, "").lower() not in ("1", "true"):
        return
    import ray

    gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU")
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
