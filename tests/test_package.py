# SPDX-License-Identifier: Apache-2.0
"""The version, and a wheel and a source package that work without the repository."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

import vllm_hetero_spec

REPO = Path(__file__).resolve().parent.parent
# What the packages are built from. Other files at the top level are not needed.
SOURCES = ("vllm_hetero_spec", "pyproject.toml", "README.md", "LICENSE")


def test_one_place_has_the_version() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    place = project["tool"]["setuptools"]["dynamic"]["version"]["attr"]
    assert place == "vllm_hetero_spec.__version__"
    changes = (REPO / "vllm_hetero_spec" / "CHANGES.md").read_text()
    newest = re.search(r"^## ([\d.]+)", changes, flags=re.MULTILINE)
    assert newest is not None
    assert newest[1] == vllm_hetero_spec.__version__


def run(*command: str | Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command outside of the repository; its modules are not on PYTHONPATH."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=variables | environment,
        capture_output=True,
        text=True,
    )


def built(python: Path, out: Path, source: Path) -> Path:
    """Build a wheel from a folder or a source package, isolated from installed packages."""
    command = (python, "-m", "pip", "wheel", "--no-deps", "-w", out, source)
    done = run(*command, folder=out.parent)
    if "No matching distribution found for setuptools" in done.stdout + done.stderr:
        pytest.skip("pip reaches no index with the setuptools that builds the packages")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `python` of a new environment with the installed vLLM, but without this package."""
    folder = tmp_path_factory.mktemp("clean")
    made = run(sys.executable, "-m", "venv", folder / "venv", folder=folder)
    assert made.returncode == 0, made.stdout + made.stderr
    # Packages of the tests' environment come after those of the new one. Its .pth files, one of
    # which may name the repository, are not read.
    environment = {"base": str(folder / "venv"), "platbase": str(folder / "venv")}
    site = Path(sysconfig.get_path("purelib", "venv", vars=environment))
    (site / "behind.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "venv" / "bin" / "python"


@pytest.fixture(scope="module")
def wheel(clean: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that was built from the source package."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        copied = shutil.copytree if (REPO / name).is_dir() else shutil.copy
        copied(REPO / name, source / name)
    direct = built(clean, folder / "direct", source)
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    done = run(sys.executable, "-c", code, folder=source)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (package,) = folder.glob("*.tar.gz")
    assert package.name == f"vllm_hetero_spec-{vllm_hetero_spec.__version__}.tar.gz"
    wheel = built(clean, folder / "wheel", package)
    files, others = (set(zipfile.ZipFile(each).namelist()) for each in (wheel, direct))
    assert files == others
    return wheel


@pytest.fixture(scope="module")
def installed(clean: Path, wheel: Path) -> Path:
    """The `vllm-hetero-spec` of an environment in which the wheel is installed."""
    done = run(clean, "-m", "pip", "install", "--no-deps", wheel, folder=wheel.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    return clean.parent / "vllm-hetero-spec"


@pytest.mark.full
def test_the_wheel_contains_the_package_only(wheel: Path) -> None:
    assert wheel.name == f"vllm_hetero_spec-{vllm_hetero_spec.__version__}-py3-none-any.whl"
    files = set(zipfile.ZipFile(wheel).namelist())
    package = REPO / "vllm_hetero_spec"
    needed = [file for file in package.rglob("*") if file.suffix not in (".md", ".pyc")]
    needed = [file for file in needed if file.is_file()]
    assert {file for file in files if ".dist-info/" not in file} == {
        str(file.relative_to(REPO)) for file in needed
    }


@pytest.mark.full
def test_an_installed_package_is_sound(clean: Path, installed: Path, tmp_path: Path) -> None:
    code = "import vllm_hetero_spec as package; print(package.__file__, package.__version__)"
    where, version = run(clean, "-c", code, folder=tmp_path).stdout.split()
    assert Path(where).is_relative_to(clean.parent.parent)
    assert version == vllm_hetero_spec.__version__
    done = run(installed, "doctor", "--no-run", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["good"]


COMPARE = ("compare", "demo:target", "demo:drafter", "--num-prompts", "1", "--max-tokens", "8")


@pytest.mark.full
@pytest.mark.engine
def test_an_installed_package_compares_the_demo_pair(
    installed: Path, demo_pair: Path, tmp_path: Path
) -> None:
    command = (installed, *COMPARE, "--json")
    engine = ("--engine-args", '{"dtype": "float32", "kv_cache_memory_bytes": 67108864}')
    done = run(*command, *engine, folder=tmp_path, HETERO_SPEC_DEMO=str(demo_pair))
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["identical"] == 1


@pytest.mark.full
def test_an_installed_package_names_the_way_to_the_demo_pair(
    installed: Path, tmp_path: Path
) -> None:
    done = run(installed, *COMPARE, folder=tmp_path, HETERO_SPEC_DEMO=str(tmp_path / "none"))
    assert done.returncode == 2
    assert done.stderr == (
        f"error: {tmp_path}/none/drafter does not exist: the demo pair is not part of the "
        "installed package; make it with `python scripts/make_demo.py` of a checkout.\n"
    )
