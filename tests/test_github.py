# SPDX-License-Identifier: Apache-2.0
"""Files in `.github`: the workflow runs on all supported vLLM releases, and forms ask for facts."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from vllm_hetero_spec.engine.compat.releases import SUPPORTED

REPO = Path(__file__).resolve().parent.parent
GITHUB = REPO / ".github"
SERIES = [f"{major}.{minor}" for major, minor in SUPPORTED]
FORMS = sorted(file for file in GITHUB.glob("ISSUE_TEMPLATE/*.yml") if file.stem != "config")


def jobs() -> dict[str, Any]:
    text = (GITHUB / "workflows" / "checks.yml").read_text()
    found: dict[str, Any] = yaml.safe_load(text)["jobs"]
    return found


def commands(job: str) -> list[str]:
    return [step["run"] for step in jobs()[job]["steps"] if "run" in step]


def test_the_ledger_is_checked_on_each_supported_release() -> None:
    assert jobs()["ledger"]["strategy"]["matrix"]["vllm"] == SERIES
    for job in ("ledger", "newest"):
        assert commands(job)[-1] == "vllm-hetero-spec doctor --wheel wheels/vllm-*.whl"


def test_all_tests_run_on_each_supported_release() -> None:
    """Series with a CPU build are installed. `test_release_*.py` runs the others on it."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    (cpu,) = map(Requirement, project["optional-dependencies"]["cpu"])
    installed = [series for series in SERIES if cpu.specifier.contains(f"{series}.0")]
    assert jobs()["tests"]["strategy"]["matrix"]["vllm"] == installed
    assert commands("tests")[-1] == "bash .ci/run"
    for series in set(SERIES) - set(installed):
        name = f"test_release_{series.replace('.', '')}.py"
        assert (REPO / "tests" / "engine" / name).is_file()


@pytest.mark.parametrize("form", FORMS, ids=lambda file: file.stem)
def test_forms_are_complete(form: Path) -> None:
    described = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} <= described.keys()
    names = [each["id"] for each in described["body"] if each["type"] != "markdown"]
    assert len(set(names)) == len(names) > 0
    for each in described["body"]:
        text = each["attributes"]["value" if each["type"] == "markdown" else "label"]
        assert text.strip()


def test_a_bug_comes_with_the_findings_of_doctor() -> None:
    body = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / "bug.yml").read_text())["body"]
    (doctor,) = (each for each in body if each.get("id") == "doctor")
    assert "`vllm-hetero-spec doctor`" in doctor["attributes"]["label"]
    assert doctor["validations"]["required"]
