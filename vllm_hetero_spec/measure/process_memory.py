# SPDX-License-Identifier: Apache-2.0
"""Resident memory of all processes of a session, as Linux counts it.

The peak is the sum of every process's own, an upper bound where they do not peak together; pages
that several of them share count in each.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path


def processes(session: int) -> Iterator[Path]:
    """`/proc` folders of the session's processes; those that have ended but linger are left out."""
    for folder in Path("/proc").glob("[0-9]*"):
        # The name before the last parenthesis may hold anything; state, parent, group, session.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, _, leader, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(leader) == session and state != "Z":
                yield folder


def reset_peaks(session: int) -> None:
    """Let the peaks count from now on. Without effect where the kernel does not offer it."""
    for folder in processes(session):
        with contextlib.suppress(OSError):
            (folder / "clear_refs").write_text("5")


def peak_bytes(session: int) -> int:
    """The highest resident memory since `reset_peaks`, in bytes."""
    total = 0
    for folder in processes(session):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if found := re.search(r"^VmHWM:\s+(\d+) kB", (folder / "status").read_text(), re.M):
                total += 1024 * int(found[1])
    return total
