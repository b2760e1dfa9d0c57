# SPDX-License-Identifier: Apache-2.0
"""Shell scripts that install, with and without a GPU; fake programs replace the real ones."""

import os
import pwd
import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent

# Program for all commands of the virtual environment. It logs its call. Its pip installs a build of
# vLLM only if there is none, because pip accepts the packages of the other build too.
IN_VENV = """#!/bin/sh
echo "$0 $*" >>"$LOG"
build="$(dirname "$0")/build"
case "$*" in
    *"pip install"*cuda,dev*) [ -e "$build" ] || echo cuda >"$build" ;;
    *"pip install"*) [ -e "$build" ] || echo cpu >"$build" ;;
    *measure_gpu.py*) exit "${MEASURED:-0}" ;;
    *repair_vllm_metadata.py*--build*) test "$*" = "${*%--build*}--build $(cat "$build")" ;;
esac
"""
PYTHON = """#!/bin/sh
case "$1" in
    --version) echo "Python 3.13" ;;
    -m) mkdir -p "$3/bin"; for name in python pip ruff mypy vllm-hetero-spec; do
            cp "$FAKES/in_venv" "$3/bin/$name"
        done ;;
esac
"""


class Machine:
    """A copy of the scripts in an empty folder, and a PATH with a fake `nvidia-smi`."""

    def __init__(self, folder: Path) -> None:
        self.fakes, self.repo, self._log = folder / "fakes", folder / "repo", folder / "log"
        self.repo.mkdir()
        self.fakes.mkdir()
        shutil.copytree(REPO / "scripts", self.repo / "scripts")
        (self.repo / "pyproject.toml").touch()
        for name, text in {"in_venv": IN_VENV, "python3.13": PYTHON}.items():
            self._fake(name, text)

    def run(
        self, script: str, *, gpu: bool, **environment: str | None
    ) -> tuple[str, list[str], int]:
        """Run a script; return its stderr, the calls of installed commands, and its exit code.

        Environment variables with the value None are unset.
        """
        self._fake("nvidia-smi", f"#!/bin/sh\nexit {0 if gpu else 1}\n")
        self._log.write_text("")
        variables = {
            "PATH": f"{self.fakes}:/usr/bin:/bin",
            "LOG": str(self._log),
            "FAKES": str(self.fakes),
            "HOME": str(self.repo),
            **environment,
        }
        done = subprocess.run(
            ["bash", str(self.repo / "scripts" / script)],
            env={name: value for name, value in variables.items() if value is not None},
            capture_output=True,
            text=True,
        )
        return done.stderr, self._log.read_text().splitlines(), done.returncode

    def built(self, venv: str = ".venv") -> str:
        """Return the build of vLLM in a virtual environment."""
        return (self.repo / venv / "bin" / "build").read_text().strip()

    def _fake(self, name: str, text: str) -> None:
        (self.fakes / name).write_text(text)
        os.chmod(self.fakes / name, 0o755)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def served(machine: Machine, *, gpu: bool, **environment: str | None) -> tuple[str, str, int]:
    """Install, and run serve.sh; return its stderr, its only call, and its exit code."""
    shutil.copytree(REPO / "examples", machine.repo / "examples")
    machine.run("setup.sh", gpu=gpu)
    shutil.copy(machine.repo / ".venv/bin/python", machine.fakes / "vllm")
    said, (call,), code = machine.run("../examples/serve.sh", gpu=gpu, **environment)
    return said, call, code


@pytest.mark.parametrize("gpu", [False, True])
def test_an_environment_is_made_once(machine: Machine, gpu: bool) -> None:
    assert machine.run("setup.sh", gpu=gpu)[2] == 0
    assert machine.built() == ("cuda" if gpu else "cpu")
    assert machine.run("setup.sh", gpu=gpu) == ("", [], 0)


def test_an_environment_of_the_other_build_is_made_again(machine: Machine) -> None:
    machine.run("setup.sh", gpu=False)
    said, _, code = machine.run("setup.sh", gpu=True)
    assert code == 0
    assert "was made for vLLM's cpu build, and the cuda build is needed: creating it again" in said
    assert machine.built() == "cuda"


def test_an_environment_that_stays_of_the_other_build_is_refused(machine: Machine) -> None:
    machine.run("setup.sh", gpu=False)
    stamp = machine.repo / ".venv" / "vllm-hetero-spec.stamp"
    stamp.unlink()  # as if the installation was interrupted
    said, _, code = machine.run("setup.sh", gpu=True)
    assert code == 1
    assert "does not have vLLM's cuda build; remove that folder" in said
    assert not stamp.exists()


def test_the_build_can_be_given(machine: Machine) -> None:
    assert machine.run("setup.sh", gpu=True, HETERO_SPEC_BUILD="cpu")[2] == 0
    assert machine.built() == "cpu"
    said, _, code = machine.run("setup.sh", gpu=True, HETERO_SPEC_BUILD="gpu")
    assert code == 1
    assert said == "error: HETERO_SPEC_BUILD is 'gpu'; it may be cpu or cuda, or unset\n"


@pytest.mark.parametrize(
    ("gpu", "given", "venv"),
    [
        (False, {}, ".venv"),
        (True, {}, ".venv-cpu"),
        (True, {"VENV": "mine"}, "mine-cpu"),
        (True, {"HETERO_SPEC_BUILD": "cpu", "VENV": "mine"}, "mine"),
    ],
)
def test_tests_use_the_cpu_build(
    machine: Machine, gpu: bool, given: dict[str, str], venv: str
) -> None:
    places = {name: str(machine.repo / x) for name, x in given.items() if name == "VENV"}
    said, calls, code = machine.run("test.sh", gpu=gpu, **{**given, **places})
    assert code == 0
    assert machine.built(venv) == "cpu"
    assert any(call.startswith(f"{machine.repo / venv}/bin/python -m pytest") for call in calls)
    assert ("the tests use vLLM's CPU build, in" in said) == (venv in (".venv-cpu", "mine-cpu"))


def test_the_quickstart_prints_the_next_command(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "pair").mkdir()
    demo = {"HETERO_SPEC_DEMO": str(tmp_path / "pair")}
    said, calls, code = machine.run("quickstart.sh", gpu=False, **demo)
    assert code == 0
    assert said.startswith("==> This installs vLLM")
    assert said.endswith(f" after: . {machine.repo}/.venv/bin/activate\n")
    assert f"--out {tmp_path}/pair" in calls[-2]
    assert f"compare {tmp_path}/pair/target-wide {tmp_path}/pair/drafter" in calls[-1]
    assert (machine.repo / ".cache" / "demo").samefile(tmp_path / "pair")


@pytest.mark.parametrize(("measured", "told"), [(0, ""), (3, "time limit"), (1, "is wrong")])
def test_the_quickstart_reports_slow_and_wrong_parts(
    machine: Machine, tmp_path: Path, measured: int, told: str
) -> None:
    (tmp_path / "pair").mkdir()
    given = {"HETERO_SPEC_DEMO": str(tmp_path / "pair"), "MEASURED": str(measured)}
    said, calls, code = machine.run("quickstart.sh", gpu=True, **given)
    assert code == 0
    assert "measure_gpu.py --parts 0 A" in calls[-2]
    for sentence in ("time limit", "is wrong"):
        assert (sentence in said) == (sentence == told)


@pytest.mark.parametrize("gpu", [False, True])
def test_the_server_has_the_flags_of_the_machine(machine: Machine, gpu: bool) -> None:
    _, call, code = served(machine, gpu=gpu, HETERO_SPEC_DEMO="/pair")
    assert code == 0
    assert "serve /pair/target-wide " in call
    assert '"model": "/pair/drafter"' in call
    assert ("--dtype float32 --enforce-eager" in call) != gpu


def test_the_server_starts_without_home(machine: Machine) -> None:
    """Some service managers do not set HOME."""
    said, call, code = served(machine, gpu=False, HOME=None)
    assert (said, code) == ("", 0)
    home = pwd.getpwuid(os.getuid()).pw_dir
    assert f"serve {home}/.cache/vllm_hetero_spec/demo/target-wide " in call
