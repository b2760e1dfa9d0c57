# SPDX-License-Identifier: Apache-2.0
"""`measure_host.py`: which time belongs to which section, and a run without checks of times."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from _host_sections import SECTIONS, OwnTime, found

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "measure_host.py"
ONLY_V2 = {"fill"}


def test_a_section_is_timed_without_those_inside_it() -> None:
    now = [0.0]
    spent = OwnTime(lambda: now[0])
    with spent("outer"):
        now[0] += 1
        with spent("inner"):
            now[0] += 10
            with spent("outer"):
                now[0] += 100
        now[0] += 1000
    now[0] += 10_000
    with spent("inner"):
        now[0] += 1
    assert spent.seconds == {"outer": 1101.0, "inner": 11.0}


def test_every_method_of_a_section_exists() -> None:
    for methods in SECTIONS.values():
        for method in methods:
            assert callable(found(method)[2])


@pytest.mark.full
@pytest.mark.engine
def test_a_round_is_timed_by_section(demo_pair: Path, tmp_path: Path) -> None:
    out = tmp_path / "times.json"
    given = ["--target", demo_pair / "target", "--drafter", demo_pair / "drafter"]
    given += ["--prompts", demo_pair / "prompts.jsonl", "--batches", "1", "2", "--json", out]
    done = subprocess.run(
        [sys.executable, SCRIPT, *given], env=dict(os.environ), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    measured = json.loads(out.read_text())
    assert list(measured) == ["1", "2"]
    for times in measured.values():
        assert times.pop("rounds") > 10
        assert {section for section, us in times.items() if us > 0} == SECTIONS.keys() - ONLY_V2
