# SPDX-License-Identifier: Apache-2.0
"""What is known of a pair on this machine, kept on disk between starts.

One file for everything that it depends on. Several engines may have the same one: each replaces it
as a whole, and the last wins.
"""

import hashlib
import json
import logging
import os
import platform
import time
from multiprocessing.util import Finalize
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from vllm import __version__ as vllm_version
from vllm.platforms import current_platform

from vllm_hetero_spec.lookahead.estimates import Estimates
from vllm_hetero_spec.machine import cpu_name

logger = logging.getLogger("vllm.hetero_spec")

# Seconds between writes, which take about a millisecond: short at first, as servers mostly
# end from outside, and their workers with them, before anything could be written at the end.
_APART = (5.0, 10.0, 20.0, 40.0, 60.0)


class PairFile:
    """The file of one pair.

    Args:
        folder: Where; None keeps nothing.
        identity: Everything that what is known depends on.
    """

    def __init__(self, folder: Path | None, *identity: Any) -> None:
        key = repr((identity, vllm_version, torch.__version__, machine()))
        name = f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
        self._path = None if folder is None else folder / name
        self._known: Estimates | None = None
        self._written = time.monotonic()
        self._due = 0  # of what is followed, writes so far that came by themselves
        self._failed = False  # a write has failed, and the log has it

    def read(self, positions: int) -> Estimates | None:
        """What was kept; None where nothing is, or nothing that can be read.

        Args:
            positions: Longest draft, in target tokens.
        """
        if self._path is None:
            return None
        try:
            return Estimates.from_dict(
                json.loads(self._path.read_text(encoding="utf-8")), positions
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning(
                "The estimates of this pair in %s cannot be read (%s); measuring again.",
                self._path,
                error,
            )
            return None

    def write(self, known: Estimates) -> None:
        """Keep what is known; a folder that cannot be written to is logged once."""
        self._written = time.monotonic()
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # A name that no other engine has: in containers with one folder, process ids are alike.
            with NamedTemporaryFile("w", dir=self._path.parent, delete=False) as partial:
                try:
                    partial.write(json.dumps(known.to_dict()))
                    partial.flush()
                    os.replace(partial.name, self._path)
                except OSError:
                    os.unlink(partial.name)
                    raise
        except OSError as error:
            if not self._failed:
                logger.warning(
                    "What is known of this pair cannot be kept in %s (%s), and the next start "
                    "measures it anew; set XDG_CACHE_HOME to a folder that can be written to.",
                    self._path.parent,
                    error.strerror,
                )
            self._failed = True

    def save_on_exit(self, known: Estimates, owner: object) -> None:
        """Write what becomes of it: in `write_if_due`, and once `owner` is gone.

        Or the process, where it ends by itself: one that is killed, as are workers of a server that
        is told to end, leaves what `write_if_due` wrote last.
        """
        self._known = known
        # Not `atexit`, which workers that are forked do not run.
        Finalize(owner, self.write, (known,), exitpriority=0)

    def write_if_due(self) -> None:
        """Write what is followed, if anything, where the last time is long ago.

        Long is 5 s at first and a minute in the end.
        """
        apart = _APART[min(self._due, len(_APART) - 1)]
        if self._known is not None and time.monotonic() - self._written >= apart:
            self.write(self._known)
            self._due += 1


def machine() -> tuple[Any, ...]:
    """What tells one machine from another that is faster or slower."""
    return (
        current_platform.get_device_name() if not current_platform.is_cpu() else "cpu",
        platform.machine(),
        cpu_name(),
        os.cpu_count(),
        torch.get_num_threads(),
    )
