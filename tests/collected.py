# SPDX-License-Identifier: Apache-2.0
"""Collect tests in a child process: `python collected.py OUT FILE...` writes OUT as JSON.

The JSON maps each node id to true if the test is marked `full`.
"""

import json
import sys
from pathlib import Path

import pytest


class Lister:
    """Records the tests that a session collects."""

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
