# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the engine tests: logging, and vLLM 0.33 beside the installed release."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def logging_of_vllm() -> None:
    """Configure vLLM's loggers now. The first engine would reset a level that a test set."""
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    configure_logging_if_needed(LoggingConfig())


@pytest.fixture(scope="session")
def vllm_033(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with the published vLLM 0.33, without its compiled libraries."""
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


@pytest.fixture(scope="session")
def runs_033(vllm_033: Path) -> Path:
    """The folder of `vllm_033` with the compiled libraries of the installed 0.32, for engines."""
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
    return vllm_033
