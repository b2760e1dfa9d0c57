# SPDX-License-Identifier: Apache-2.0
"""`vllm-hetero-spec doctor`: no problem on this machine, and each problem comes with its fix."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform

from vllm_hetero_spec.bench import vllm_engine
from vllm_hetero_spec.bench.child_process import causes
from vllm_hetero_spec.bench.load import MeasurementError
from vllm_hetero_spec.cli import health
from vllm_hetero_spec.cli.health import Finding
from vllm_hetero_spec.cli.main import main
from vllm_hetero_spec.cli.nodes import COLUMNS, DRAFTER, KEY, PLUGIN, faults
from vllm_hetero_spec.engine.compat.ledger import LEDGER

Out = pytest.CaptureFixture[str]


def found_by(check: str) -> Finding:
    return next(finding for finding in health.examine(run=False) if finding.check == check)


def test_a_sound_installation(capsys: Out) -> None:
    assert main(["doctor", "--no-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["good"]
    assert len(found["findings"]) == 10


@pytest.mark.parametrize(
    ("asked", "triton", "said"),
    [
        ("0", True, "V1 (VLLM_USE_V2_MODEL_RUNNER=0)"),
        ("1", True, "V2 (VLLM_USE_V2_MODEL_RUNNER=1)"),
        (None, True, "V2 (vLLM's default)"),
        (None, False, "V1 (V2 needs Triton, which has no backend here)"),
    ],
)
def test_the_model_runner_is_named_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, triton: bool, said: str
) -> None:
    from vllm.triton_utils import importing

    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    monkeypatch.setattr(importing, "HAS_TRITON", triton)
    if asked is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", asked)
    assert found_by("model runner").found == said


def wheel_of(folder: Path, version: str, changed: dict[str, tuple[str, str] | None]) -> Path:
    """Write the installed vLLM's files in the ledger as a wheel.

    `changed` has a text to replace and its substitute by file, or None if the file is gone.
    """
    import vllm

    wheel = folder / f"vllm-{version}-cp38-abi3-any.whl"
    root = Path(vllm.__file__).parent
    with zipfile.ZipFile(wheel, "w") as files:
        files.writestr(f"vllm-{version}.dist-info/METADATA", f"Name: vllm\nVersion: {version}\n")
        for name in sorted({seam.file for seam in LEDGER}):
            if not (root / name).exists() or changed.get(name, ()) is None:
                continue
            old, new = changed.get(name) or ("", "")
            text = (root / name).read_text(encoding="utf-8")
            assert old in text
            files.writestr(f"vllm/{name}", text.replace(old, new))
    return wheel


def test_a_wheel_with_all_symbols(tmp_path: Path, capsys: Out) -> None:
    from vllm.version import __version__ as version

    wheel = wheel_of(tmp_path, version, {})
    assert main(["doctor", "--wheel", str(wheel)]) == 0
    assert capsys.readouterr().out.startswith(f"vLLM {version}: 0 of ")


def without_vllm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process that can import neither vLLM nor torch."""
    code = (
        "import sys; sys.modules |= dict.fromkeys(('torch', 'vllm'));"
        "from vllm_hetero_spec.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


def test_a_wheel_is_checked_without_vllm(tmp_path: Path) -> None:
    done = without_vllm("doctor", "--wheel", str(wheel_of(tmp_path, "0.32.9", {})))
    assert done.stdout.startswith("vLLM 0.32.9: 0 of "), done.stderr


def test_a_missing_vllm_is_one_finding_and_one_sentence(demo_pair: Path) -> None:
    done = without_vllm("doctor", "--json")
    (finding,) = json.loads(done.stdout)["findings"]
    assert (done.returncode, finding["found"]) == (1, "not installed")
    done = without_vllm("compare", str(demo_pair / "target"), str(demo_pair / "drafter"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"error: vLLM is not installed; {finding['fix']}."
    assert "Traceback" not in done.stderr


def test_changed_symbols_of_a_wheel_are_grouped(tmp_path: Path, capsys: Out) -> None:
    changed = {
        "v1/sample/ops/topk_topp_sampler.py": ("def apply_top_k_top_p(", "def top_k_top_p("),
        "entrypoints/openai/completion/protocol.py": None,
        "entrypoints/anthropic/protocol.py": ("vllm_xargs", "vllm_arguments"),
    }
    wheel = wheel_of(tmp_path, "0.32.9", changed)
    assert main(["doctor", "--wheel", str(wheel)]) == 1
    found = capsys.readouterr().out.splitlines()
    assert found[:-1] == [
        "BAD  our parameters of HTTP requests are checked",
        "     symptom: no engine with a drafter of ours starts",
        "     entrypoints/openai/completion/protocol.py:CompletionRequest: no file "
        "entrypoints/openai/completion/protocol.py",
        "     entrypoints/anthropic/protocol.py:AnthropicMessagesRequest: no 'vllm_xargs'",
        "BAD  target_probs of draft rows and of races",
        "     symptom: ImportError in the worker",
        "     v1/sample/ops/topk_topp_sampler.py:apply_top_k_top_p: not found",
    ]
    assert found[-1].startswith("vLLM 0.32.9: 3 of ")
    assert main(["doctor", "--wheel", str(wheel), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["good"], said["vllm"]) == (False, "0.32.9")
    assert [len(group["symbols"]) for group in said["changes"]] == [2, 1]


def test_a_later_release_is_checked_as_the_newest_supported_one(
    tmp_path: Path, capsys: Out
) -> None:
    """0.33 moved a module, and a release after it does not have the rows of 0.32."""
    assert main(["doctor", "--wheel", str(wheel_of(tmp_path, "0.99.0", {})), "--json"]) == 1
    changes = json.loads(capsys.readouterr().out)["changes"]
    symbols = [symbol for group in changes for symbol in group["symbols"]]
    assert {symbol.partition(":")[0] for symbol in symbols} == {"v1/core/kv_cache_planning.py"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "[Errno 2]"),
        (b"text", "is no wheel; name a wheel of vLLM.\n"),
        ({"torch-2.dist-info/METADATA": ""}, "contains another package; name a wheel of vLLM.\n"),
    ],
)
def test_other_files_are_refused(
    content: bytes | dict[str, str] | None, said: str, tmp_path: Path, capsys: Out
) -> None:
    file = tmp_path / "vllm-0.33.0-any.whl"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        with zipfile.ZipFile(file, "w") as files:
            for name, text in content.items():
                files.writestr(name, text)
    assert main(["doctor", "--wheel", str(file)]) in (1, 2)
    assert said in capsys.readouterr().err


@pytest.mark.engine
def test_a_tiny_pair() -> None:
    found = list(health.examine())[-1]
    assert found.good, found.found


PRINTED = """(EngineCore pid=1) ERROR [core.py:1] ValueError: Free memory is less than desired
RuntimeError: Engine core initialization failed.
"""


def test_a_failing_engine_has_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:

    class Failing:
        def __init__(self, spec: Any) -> None:
            raise MeasurementError(f"the engine ended with exit code 1{causes(PRINTED)}")

    monkeypatch.setattr(vllm_engine, "VllmEngine", Failing)
    found = list(health.examine())[-1]
    assert not found.good
    assert found.found == (
        "the engine ended with exit code 1: ValueError: Free memory is less than desired: "
        "RuntimeError: Engine core initialization failed."
    )


def test_the_tiny_pair_takes_little_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    class Noted:
        def __init__(self, spec: Any) -> None:
            given.append(spec.engine)
            raise MeasurementError("enough")

    monkeypatch.setattr(vllm_engine, "VllmEngine", Noted)
    monkeypatch.setattr(health, "_platform", lambda: "")
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(current_platform, "device_type", device)
        assert list(health.examine())[-1].found == "enough"
    on_cpu, on_gpu = given
    assert on_cpu == {}
    assert on_gpu["gpu_memory_utilization"] <= 0.1
    assert on_gpu["kv_cache_memory_bytes"] <= 1 << 28


def test_the_cpu_build_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's CPU build does not detect a GPU; the driver does."""
    monkeypatch.delenv("HETERO_SPEC_BUILD", raising=False)
    monkeypatch.setattr(health, "gpus", lambda: ["NVIDIA H100"])
    found = found_by("platform")
    assert not found.good
    assert found.found == "vLLM's CPU build on a machine with a GPU (NVIDIA H100)"
    assert "setup.sh" in found.fix
    monkeypatch.setenv("HETERO_SPEC_BUILD", "cpu")
    assert found_by("platform").good


def test_an_unusable_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, the driver is too old. Here PyTorch only claims to be a CUDA build."""
    assert found_by("CUDA").good
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = found_by("CUDA")
    assert not found.good
    assert found.found == "AssertionError: Torch not compiled with CUDA enabled"
    assert "an NVIDIA driver for CUDA 13.0 or newer" in found.fix


def test_missing_tools_of_triton(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert found_by("C compiler").good
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CC", "/usr/bin/gcc")
    monkeypatch.setattr(health, "_cuda", lambda: "")
    monkeypatch.setattr(health.sysconfig, "get_path", lambda name: str(tmp_path))
    found = found_by("C compiler")
    assert found.found == f"no {tmp_path}/Python.h, with which Triton compiles"
    assert "apt install gcc" in found.fix
    (tmp_path / "Python.h").touch()
    assert found_by("C compiler").good
    monkeypatch.delenv("CC")
    monkeypatch.setattr(health.shutil, "which", lambda name: None)
    assert found_by("C compiler").found.startswith("no C compiler (gcc, clang or $CC), with")


def test_a_disabled_plugin(capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    assert main(["doctor", "--no-run"]) == 1
    printed = capsys.readouterr().out
    assert "BAD  plugin          VLLM_PLUGINS=another keeps it out" in printed
    assert "fix: unset VLLM_PLUGINS or add hetero_spec to it" in printed


@pytest.mark.parametrize("given", ["x, hetero_spec", "x,hetero_spec ", "x,\thetero_spec"])
def test_a_space_in_the_list_of_plugins(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", given)
    found = found_by("plugin")
    assert not found.good
    assert found.found.startswith(f"VLLM_PLUGINS={given!r} keeps it out: vLLM reads the space")
    assert found.fix == "remove the space: VLLM_PLUGINS=x,hetero_spec"


def test_a_check_that_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Finding:
        raise RuntimeError("no such thing\nand more")

    monkeypatch.setattr(health, "_ledger", broken)
    found = found_by("vLLM's sources")
    assert not found.good
    assert found.found == "RuntimeError: no such thing"
    assert found.fix


def test_an_unsupported_release_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.version

    monkeypatch.setattr(vllm.version, "__version__", "0.19.1")
    found = found_by("vLLM release")
    assert not found.good
    assert "0.19.1" in found.fix


# ---- the nodes of a Ray cluster -----------------------------------------------------------------


SOUND = dict.fromkeys(COLUMNS, "1")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, []),
        ({PLUGIN: None}, [f"{PLUGIN} is missing on b; pip install the same version"]),
        ({PLUGIN: "2"}, [f"{PLUGIN} differs: 1 on a, 2 on b; pip install the same version"]),
        ({"vLLM": None, KEY: None}, ["vLLM is missing on b; install the same release"]),
        ({KEY: "none"}, [f"{KEY} differs: 1 on a, none on b; install the same build"]),
        ({DRAFTER: None}, ["the drafter 'small' is not there on b; copy its folder"]),
        ("ActorDiedError: gone", ["b did not answer (ActorDiedError: gone); see Ray's log"]),
    ],
)
def test_faults_of_a_node_have_a_fix(change: Any, said: list[str]) -> None:
    nodes = {"a": SOUND, "b": change if isinstance(change, str) else SOUND | change}
    found = list(faults(nodes, "small"))
    assert len(found) == len(said)
    for sentence, beginning in zip(found, said, strict=True):
        assert sentence.startswith(beginning)
        assert sentence.endswith(".")


def test_no_drafter_is_needed_without_its_name() -> None:
    assert not list(faults({"a": SOUND | {DRAFTER: None}}, None))
