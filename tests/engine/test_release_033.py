# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.33, beside whatever release is installed: its symbols, and engines of it on a CPU.

No CPU build of 0.33 is published. Its Python, from the published wheel, runs over the compiled
parts of vLLM's CPU build 0.32; a kernel whose interface changed would show as a missing operator.
"""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from vllm_hetero_spec.engine.compat.ledger import missing

HERE = Path(__file__).parent
SCENARIOS = (
    "test_identity.py",
    "test_cpu_repair.py",
    "test_drafter_config.py",
    "test_kv_transfer.py",
)


@pytest.fixture(scope="module")
def vllm_033(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with the published 0.33 in it, but for its compiled parts."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vllm_hetero_spec"
    wheels = list(cache.glob("vllm-0.33.*.whl"))
    if not wheels and not os.environ.get("CI"):
        pytest.skip(f"needs the vllm 0.33 wheel in {cache} (336 MB; with CI set it is fetched)")
    if not wheels:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(cache)]
        fetched = subprocess.run([*command, "vllm==0.33.0"], capture_output=True, text=True)
        if fetched.returncode:
            pytest.skip(f"pip cannot fetch vllm 0.33: {fetched.stderr.strip()[-200:]}")
        wheels = list(cache.glob("vllm-0.33.*.whl"))
    folder = tmp_path_factory.mktemp("vllm-0.33")
    with zipfile.ZipFile(wheels[0]) as wheel:
        parts = [n for n in wheel.namelist() if n.startswith("vllm/") and not n.endswith(".so")]
        wheel.extractall(folder, parts)
    return folder


def test_ledger_matches(vllm_033: Path) -> None:
    assert missing(vllm_033 / "vllm", "0.33") == []


@pytest.mark.engine
def test_scenarios_run_on_it(vllm_033: Path, demo_pair: Path) -> None:
    """The engine tests named above, in one process, on 0.33."""
    import vllm
    from vllm.platforms import current_platform

    if not vllm.__version__.startswith("0.32.") or not current_platform.is_cpu():
        pytest.skip("needs the compiled parts of vLLM's CPU build 0.32")
    installed = Path(vllm.__file__).parent
    for library in installed.rglob("*.so"):
        (vllm_033 / "vllm" / library.relative_to(installed)).symlink_to(library)
    metadata = vllm_033 / "vllm-0.33.0+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0+cpu\n")
    path = os.pathsep.join([str(vllm_033), os.environ.get("PYTHONPATH", str(HERE.parent.parent))])
    environment = os.environ | {"PYTHONPATH": path, "HETERO_SPEC_DEMO": str(demo_pair)}

    def python(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        return done.stdout

    assert python("-c", "from vllm.version import __version__ as v; print(v)").startswith("0.33.")
    files = [str(HERE / name) for name in SCENARIOS]
    said = python("-m", "pytest", "-q", "-p", "no:cacheprovider", *files)
    passed = re.search(r"(\d+) passed", said)
    assert passed is not None, said
    assert int(passed[1]) > 0
