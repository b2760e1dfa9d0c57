# SPDX-License-Identifier: Apache-2.0
"""Tables of `tests/README.md`: promises have fast tests, and faults can be injected."""

import json
import subprocess
import sys
from collections.abc import Iterable

import pytest
from inject_faults import FAULTS, REPO, Fault, rows
from test_docs import quoted, tables

TESTS = REPO / "tests"
PROMISES = list(tables(TESTS / "README.md", "promise"))


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bool]:
    """Collected tests of the files in the tables: node id below `tests/` -> marked `full`."""
    out = tmp_path_factory.mktemp("collected") / "tests.json"
    cells = [cell for _, fast, full in PROMISES for cell in (fast, full)]
    names = [*quoted(" ".join(cells)), *(test for fault in FAULTS for test in fault.caught_by)]
    files = sorted({str(TESTS / name.partition("::")[0]) for name in names})
    command = [sys.executable, str(TESTS / "collected.py"), str(out), *files]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    found: dict[str, bool] = json.loads(out.read_text())
    return {node.removeprefix("tests/"): full for node, full in found.items()}


def tiers(collected: dict[str, bool], name: str) -> set[bool]:
    """Return the tiers of the tests of a file or node id: True for `full`; empty without tests."""
    return {
        full
        for node, full in collected.items()
        if node == name or node.startswith((f"{name}::", f"{name}["))
    }


@pytest.mark.parametrize("row", PROMISES, ids=lambda row: row[0])
def test_every_promise_has_a_fast_test(collected: dict[str, bool], row: list[str]) -> None:
    _, fast, full = row
    assert quoted(fast)
    for name in quoted(fast):
        assert False in tiers(collected, name), name
    for name in quoted(full):
        assert tiers(collected, name), name


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_every_fault_can_be_injected(collected: dict[str, bool], fault: Fault) -> None:
    """Its text occurs exactly once in its file, and each of its tests includes a fast one."""
    assert (REPO / fault.file).read_text(encoding="utf-8").count(fault.right) == 1
    assert fault.right != fault.wrong
    assert all(False in tiers(collected, test) for test in fault.caught_by)


def test_the_table_of_faults_is_the_list() -> None:
    assert list(tables(TESTS / "README.md", "broken promise")) == rows()


def test_every_promise_has_a_fault() -> None:
    assert unique(row[0] for row in rows()) == [promise for promise, _, _ in PROMISES]


def unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))
