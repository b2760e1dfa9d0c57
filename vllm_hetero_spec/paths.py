# SPDX-License-Identifier: Apache-2.0
"""Folders of this package on a user's machine."""

import os
from pathlib import Path


def cache_folder() -> Path | None:
    """Folder of files kept between runs; None for a user without a home folder."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(root):
        root = os.path.expanduser("~/.cache")
    return Path(root, "vllm_hetero_spec") if os.path.isabs(root) else None


def demo_folder() -> Path:
    """Folder of the demo pair: target, target-wide, drafter, prompts. It may not exist."""
    if given := os.environ.get("HETERO_SPEC_DEMO"):
        return Path(given)
    return (cache_folder() or Path.cwd()) / "demo"
