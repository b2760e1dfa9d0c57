# SPDX-License-Identifier: Apache-2.0
"""Run several tests in one child process, and return a result for each test."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from harness import HERE


def run_in_child(
    tests: Sequence[str], environment: Mapping[str, str], folder: Path
) -> dict[str, str]:
    """Run tests of this folder in one process.

    Args:
        tests: Node ids, such as "laws_v2.py::test_samples[tli]".
        environment: Environment variables of the process.
        folder: Folder for the report.

    Returns:
        Error text by node id; "" for a test that passed.
    """
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", f"--junitxml={report}"]
    done = subprocess.run(
        [*command, *(str(HERE / test) for test in tests)],
        env=dict(environment),
        capture_output=True,
        text=True,
    )
    found = dict.fromkeys(tests, f"did not run: {done.stdout[-3000:]}{done.stderr[-3000:]}")
    cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
    for case in cases:
        file = case.get("classname", "").rpartition(".")[2]
        problems = [f"{part.tag}: {part.text}" for part in case if part.tag in PROBLEMS]
        found[f"{file}.py::{case.get('name')}"] = "\n".join(problems)
    return found


PROBLEMS = ("failure", "error", "skipped")
