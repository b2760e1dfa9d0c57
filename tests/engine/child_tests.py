# SPDX-License-Identifier: Apache-2.0
"""Run tests of this folder in child processes."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
from harness import HERE, v2_environment

PYTEST = [sys.executable, "-m", "pytest", "-q", "-n", "0"]


def v1_environment() -> dict[str, str]:
    """Return the environment of a process whose engines run on Model Runner V1."""
    path = v2_environment()["PYTHONPATH"].partition(os.pathsep)[2]  # the first folder selects V2
    return os.environ | {"PYTHONPATH": path}


def environment_of(way: str, request: pytest.FixtureRequest) -> dict[str, str]:
    """Return the environment of "V1", or of V2, whose text may contain "ahead" and "0.33"."""
    if way == "V1":
        return v1_environment()
    pytest.importorskip("triton")
    folders = [request.getfixturevalue("runs_033")] if "0.33" in way else []
    return v2_environment(*folders) | {"V2_AHEAD": str(int("ahead" in way))}


def passed(files: Sequence[str], environment: Mapping[str, str], names: str = "") -> str:
    """Run the tests of these files that `names` selects. Return the output if all have passed."""
    command = [*PYTEST, "-x", "-k", names, *(str(HERE / file) for file in files)]
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def run_in_child(
    tests: Sequence[str], environment: Mapping[str, str], folder: Path
) -> dict[str, str]:
    """Run tests of this folder in one process; the report is written to `folder`.

    Return the error text by node id, such as "laws_v2.py::test_samples[tli]"; "" if it passed.
    """
    report = folder / "report.xml"
    done = subprocess.run(
        [*PYTEST, f"--junitxml={report}", *(str(HERE / test) for test in tests)],
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
