# SPDX-License-Identifier: Apache-2.0
"""What an engine asks of the relay that carries its commits to an actor of Ray's."""

from collections.abc import Mapping
from dataclasses import dataclass


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
        silence: Seconds after which it takes an engine for gone that it does not hear of.
        idle_exit: Seconds without engines after which it ends.
        lost: The number of the one that the engine had before; None where it had none.
    """

    actor: str
    resources: Mapping[str, float]
    deployment: bytes
    shape: tuple[int, ...]
    address: str | None
    patience: float
    silence: float
    idle_exit: float
    lost: int | None = None
