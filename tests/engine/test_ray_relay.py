# SPDX-License-Identifier: Apache-2.0
"""What a relay leaves of a cluster when its engine ends; `tests/cluster` has the rest."""

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_hetero_spec.engine.source import ray_joining, ray_relay


class Pending:
    """An actor that no node has room for."""

    def __init__(self, asked: asyncio.Event) -> None:
        self.join = SimpleNamespace(remote=self._join)
        self._asked = asked

    def _join(self, *args: Any) -> asyncio.Future[int]:
        self._asked.set()
        return asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("speaks", [True, False])
def test_an_actor_that_nobody_waits_for_is_taken_back(
    started: bool, speaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was started here, that is: another engine may wait for one that was not."""
    killed: list[Any] = []
    ray = SimpleNamespace(kill=killed.append, exceptions=SimpleNamespace(RayActorError=OSError))
    engine, messages = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    messages.setblocking(False)
    errand: Any = SimpleNamespace(
        address="", actor="a", lost=None, patience=60.0, shape=(8,), idle_exit=1.0
    )
    pending: list[Pending] = []

    async def run() -> None:
        pending.append(Pending(asked := asyncio.Event()))
        monkeypatch.setattr(ray_joining, "_actor", lambda *of: (pending[0], started))
        relay = asyncio.create_task(ray_relay._relay(errand, messages, None))  # type: ignore[arg-type]
        await asked.wait()
        if speaks:
            engine.send(b"a commit")
        await asyncio.sleep(2 * ray_relay._GLANCE)
        assert not relay.done()
        engine.close()
        await asyncio.wait_for(relay, 30.0)

    monkeypatch.setattr(ray_joining, "newest", lambda *of: None)
    monkeypatch.setattr(ray_relay, "join_cluster", lambda: ray)
    with pytest.raises(EOFError):
        asyncio.run(run())
    assert killed == pending * started
