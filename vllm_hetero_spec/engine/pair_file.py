# SPDX-License-Identifier: Apache-2.0
"""Estimates of a pair on this machine, kept on disk between starts.

There is one file for each combination of everything that they depend on. Several engines may share
a file: each replaces all of it, and the last one wins.
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

from vllm_hetero_spec.lookahead.estimates import Estimates, Parts
from vllm_hetero_spec.machine import cpu_name

logger = logging.getLogger("vllm.hetero_spec")

# Seconds between writes, which take about a millisecond. Short at first, because most servers are
# killed before their workers could write anything at the end.
_APART = (5.0, 10.0, 20.0, 40.0, 60.0)


class PairFile:
    """The file of one pair. Without a folder, nothing is kept.

    Args:
        identity: Everything that the estimates depend on.
    """

    def __init__(self, folder: Path | None, *identity: Any) -> None:
        key = repr((identity, vllm_version, torch.__version__, machine()))
        name = f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
        self._path = None if folder is None else folder / name
        self._known: Estimates | None = None
        self._written = time.monotonic()
        self._due = 0  # number of writes by `write_if_due`
        self._failed = False  # a failed write was logged

    def read(self, positions: int, parts: Parts | None = None) -> Estimates | None:
        """Return the kept estimates for drafts of `positions` target tokens, if readable.

        Args:
            parts: As in `Estimates.from_dict`.
        """
        if self._path is None:
            return None
        try:
            saved = json.loads(self._path.read_text(encoding="utf-8"))
            return Estimates.from_dict(saved, positions, parts)
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
        """Write the estimates. A folder that is not writable is logged once."""
        self._written = time.monotonic()
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # A unique name. Engines in containers that share the folder may have equal process ids.
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
        """Save `known` in `write_if_due`, and when the owner or the process ends.

        `known` is updated in place. If the process is killed, the last file remains. Workers are
        killed when a server is stopped.
        """
        self._known = known
        # Not `atexit`, because forked workers do not run it.
        Finalize(owner, self.write, (known,), exitpriority=0)

    def write_if_due(self) -> None:
        """Write the estimates if the last time is long ago: 5 s at first, a minute in the end."""
        apart = _APART[min(self._due, len(_APART) - 1)]
        if self._known is not None and time.monotonic() - self._written >= apart:
            self.write(self._known)
            self._due += 1


def machine() -> tuple[Any, ...]:
    """Properties that distinguish faster machines from slower ones."""
    return (
        current_platform.get_device_name() if not current_platform.is_cpu() else "cpu",
        platform.machine(),
        cpu_name(),
        os.cpu_count(),
        torch.get_num_threads(),
    )
