# SPDX-License-Identifier: Apache-2.0
"""Which actor an engine joins: of those with its name, the one with the largest number.

An actor that hangs cannot be told from one that only this engine does not reach, and others may use
it well. So it is not ended at once. An engine that has lost it, and that it does not answer, starts
one with the next number; the other engines see that, and go over to it. Then nobody uses the one
before: it is ended, if it has not done so by itself, as actors without engines do.
"""

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_hetero_spec import __version__
from vllm_hetero_spec.engine.source.errand import Errand
from vllm_hetero_spec.engine.source.ray_actor import DrafterActor
from vllm_hetero_spec.errors import ConfigError

if TYPE_CHECKING:
    from ray.actor import ActorHandle

# Of the actors' names, whatever job starts them.
NAMESPACE = "hetero_spec"
# Seconds between two looks whether another actor has taken the place of the one that is used.
LOOK = 5.0
_A_WHILE = 0.5  # seconds between two attempts
# Seconds that an actor is waited for that was lost: it has been there, so it has room.
_RECALL = 5.0
# Seconds after which nobody uses one any more that another has taken the place of.
_LEFT = 4 * LOOK


class Joined(NamedTuple):
    """An actor that an engine has joined.

    Attributes:
        actor: To be called.
        number: Of the actor.
        engine: Number of the engine there.
    """

    actor: "ActorHandle"
    number: int
    engine: int


def newest(ray: Any, name: str) -> int | None:
    """The largest number of the actors with that name; None where there is none."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = [of["name"].rpartition(":") for of in actors if of["namespace"] == NAMESPACE]
    numbers = (number for of, _, number in names if of == name and number.isdigit())
    return max(map(int, numbers), default=None)


async def join_actor(ray: Any, errand: Errand) -> Joined:
    """Join the newest actor; one is started where there is none, or where it is silent.

    Raises:
        ConfigError: There is no room for it, or it has another version of this package.
    """
    first = 0
    deadline = time.monotonic() + errand.patience
    while True:
        number = newest(ray, errand.actor)
        if number is None:
            number = 0 if errand.lost is None else errand.lost + 1
        number = max(number, first)
        actor, started = _actor(ray, errand, number)
        seconds = _RECALL if number == errand.lost else deadline - time.monotonic()
        answer = actor.join.remote(__version__, errand.shape[0])
        try:
            joined = await asyncio.wait_for(answer, max(seconds, _A_WHILE))
        except TimeoutError:
            if started:  # and nobody but us waits for room for it
                ray.kill(actor)
                raise ConfigError(_no_room(ray, errand)) from None
            asyncio.get_running_loop().call_later(_LEFT, _end, ray, errand.actor, number)
            first, deadline = number + 1, time.monotonic() + errand.patience
        except asyncio.CancelledError:  # the engine has ended
            if started:
                ray.kill(actor)
            raise
        except ray.exceptions.RayActorError:  # it was about to end
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(_A_WHILE)
        else:
            if isinstance(joined, str):
                raise ConfigError(joined)
            return Joined(actor, number, joined)


def _actor(ray: Any, errand: Errand, number: int) -> "tuple[ActorHandle, bool]":
    """The actor with that number, and whether it was started here."""
    name = f"{errand.actor}:{number}"
    with contextlib.suppress(ValueError):  # there is none
        return ray.get_actor(name, NAMESPACE), False
    options = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "max_restarts": 0,  # engines start it again, and each waits longer every time
        **errand.resources,
    }
    placed = ray.remote(DrafterActor).options(**options)
    made = errand.deployment, errand.shape[1:], errand.silence, errand.idle_exit
    try:
        return placed.remote(*made), True
    except ValueError as error:  # another engine was faster, or Ray does not take the options
        with contextlib.suppress(ValueError):
            return ray.get_actor(name, NAMESPACE), False
        raise error


def _end(ray: Any, name: str, number: int) -> None:
    """End an actor that nobody uses."""
    with contextlib.suppress(ValueError):  # it has ended
        ray.kill(ray.get_actor(f"{name}:{number}", NAMESPACE))


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
