# SPDX-License-Identifier: Apache-2.0
"""Folders of this package on a user's machine."""

import os
from pathlib import Path


def cache_folder() -> Path | None:
    """Where things are kept between runs; None for a user without a home."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(root):
        root = os.path.expanduser("~/.cache")
    return Path(root, "vllm_hetero_spec") if os.path.isabs(root) else None


def demo_folder() -> Path:
    """Where the demo pair lies, or would: target, target-wide, drafter and prompts."""
    if given := os.environ.get("HETERO_SPEC_DEMO"):
        return Path(given)
    return (cache_folder() or Path.cwd()) / "demo"
