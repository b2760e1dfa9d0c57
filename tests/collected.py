# SPDX-License-Identifier: Apache-2.0
"""Collect tests in a process of its own: `python collected.py OUT FILE...` writes OUT as JSON.

It maps each node id to whether the test is marked `full`.
"""

import json
import sys
from pathlib import Path

import pytest


class Lister:
    """Keeps what a session has collected."""

    def __init__(self) -> None:
        self.found: dict[str, bool] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self.found[item.nodeid] = item.get_closest_marker("full") is not None


if __name__ == "__main__":
    out, *files = sys.argv[1:]
    lister = Lister()
    code = pytest.main(["--collect-only", "-q", "-n", "0", *files], plugins=[lister])
    Path(out).write_text(json.dumps(lister.found))
    sys.exit(code)
