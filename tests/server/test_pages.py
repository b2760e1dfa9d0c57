# SPDX-License-Identifier: Apache-2.0
"""The commands and the Python code of the pages for users run as they stand.

Each runs in an environment and a home folder of its own. Only TARGET, DRAFTER and files of prompts
are replaced, by those of the demo pair.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

REPO = Path(__file__).resolve().parent.parent.parent
PAGES = (
    REPO / "README.md",
    *sorted((REPO / "examples").rglob("*.md")),
    *sorted((REPO / ".github").rglob("*.md")),
)
LIMIT = 600  # seconds of a command
URL = "http://127.0.0.1:8000"  # the default of `vllm serve`

# Beginnings of commands that do not run here, and the reason.
ELSEWHERE = {
    "bash scripts/quickstart.sh": "installs; test_setup_script.py runs it with a recorded pip",
    "bash scripts/test.sh": "installs; test_setup_script.py runs it with a recorded pip",
    "vllm-hetero-spec bench examples/bench/demo.yaml": "takes 15 minutes; test_bench_cli.py runs"
    " a smaller suite",
    "VLLM_CPU_OMP_THREADS_BIND=0-1 vllm-hetero-spec bench": "needs models of a hub or hours",
    "HETERO_SPEC_SHARED=$SHARED": "needs real tokenizers; the full tier runs the test",
    "python scripts/bench_bridge.py": "needs real tokenizers; test_bench_bridge.py runs it",
    "python -m pytest": "a test of the full tier",
    "pip install": "installs",
    "pip download": "downloads vLLM",
    ". .venv/bin/activate": "the environment of `setup.sh`; tests run in one",
    "vllm-hetero-spec doctor --wheel": "needs a downloaded vLLM; test_compat.py runs it",
    "vllm-hetero-spec doctor --ray": "needs a Ray cluster; test_ray.py runs it",
    "python examples/parallel/adapt.py": "trains for hours; test_adapt.py runs a few steps",
}


class Block(NamedTuple):
    """A code block of a page; `language` is bash or python."""

    page: Path
    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The commands of a block in bash, without those that run elsewhere."""
        lines = self.text.replace("\\\n", " ").splitlines()
        found = [line.strip() for line in lines if shlex.split(line, comments=True)]
        return [line for line in found if not line.startswith(tuple(ELSEWHERE))]


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for language, code in re.findall(r"^```(bash|python)\n(.*?)^```", text, re.M | re.S):
            yield Block(page, language, code)
        for code in re.findall(r"^    ((?:vllm|python|pip|bash)\S* .*)$", text, re.M):
            yield Block(page, "bash", code)


SCRIPTS = [block for block in blocks() if block.language == "bash" and block.commands]
PROGRAMS = [block for block in blocks() if block.language == "python" and "import" in block.text]


def named(block: Block) -> str:
    return f"{block.page.relative_to(REPO)}: {block.text.split()[0]} {block.text.split()[1]}"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables of a fresh environment, whose `vllm` and `python` are those of this one."""
    home = tmp_path / "home"
    home.mkdir()
    return {
        "HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "HF_HUB_OFFLINE": "1",
        # A small machine that runs other tests, too.
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture
def folder(tmp_path: Path, demo_pair: Path) -> Path:
    """A working folder with the files of prompts that pages name."""
    folder = tmp_path / "work"
    folder.mkdir()
    for name in ("prompts.jsonl", "prompts_like_yours.jsonl"):
        shutil.copy(demo_pair / "prompts.jsonl", folder / name)
    return folder


def replaced(text: str, pair: Path) -> str:
    """Replace the models by those of the demo pair."""
    text = re.sub(r"\bTARGET\b", str(pair / "target"), text)
    return re.sub(r"\bDRAFTER\b(\.\.\.)?", str(pair / "drafter"), text)


def served(command: str, folder: Path, environment: Mapping[str, str]) -> subprocess.Popen:
    """Start a server with its default address. Return it when it is ready."""
    with pytest.raises(OSError, match="refused"):  # no other server has this address
        urllib.request.urlopen(f"{URL}/health", timeout=5)
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=folder, env=environment, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    ends = time.monotonic() + LIMIT
    while time.monotonic() < ends and server.poll() is None:
        try:
            urllib.request.urlopen(f"{URL}/health", timeout=5)
            return server
        except OSError:
            time.sleep(1)
    stop(server)
    raise AssertionError((folder / "server.log").read_text()[-3000:])


def stop(server: subprocess.Popen) -> None:
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=60)


def check_drafts(model: Path) -> None:
    """Send a request to the server, and find its drafts in the metrics."""
    body = {"model": str(model), "prompt": "def f(x):", "max_tokens": 16, "temperature": 0}
    body["vllm_xargs"] = {"hetero_spec_lookahead": 3}  # drafts on a slow machine, too
    sent = urllib.request.Request(
        f"{URL}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(sent, timeout=120).read()
    metrics = urllib.request.urlopen(f"{URL}/metrics", timeout=30).read().decode()
    drafts = re.search(r"^vllm:hetero_spec_drafts_total\{.*\} (\S+)", metrics, re.M)
    assert drafts is not None
    assert float(drafts[1]) > 0


def output_of(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str:
    """Run a command and return its output."""
    given = {"cwd": folder, "env": environment, "timeout": LIMIT}
    done = subprocess.run(command, capture_output=True, text=True, **given)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.full
@pytest.mark.server
@pytest.mark.parametrize("block", SCRIPTS, ids=named)
def test_commands_run(
    block: Block, folder: Path, environment: dict[str, str], demo_pair: Path
) -> None:
    server = None
    try:
        for command in block.commands:
            command = replaced(command, demo_pair)
            if command.startswith("vllm serve"):
                server = served(command, folder, environment)
                check_drafts(demo_pair / "target")
            else:
                output_of(["bash", "-c", command], folder, environment)
    finally:
        if server is not None:
            stop(server)


@pytest.mark.full
@pytest.mark.server
@pytest.mark.parametrize("block", PROGRAMS, ids=named)
def test_programs_run(
    block: Block, folder: Path, environment: dict[str, str], demo_pair: Path
) -> None:
    program = folder / "program.py"
    # Processes of an engine import the main module again.
    text = replaced(block.text, demo_pair).replace("\n", "\n    ")
    program.write_text(f"if __name__ == '__main__':\n    {text}\n")
    assert "RequestOutput" in output_of([sys.executable, str(program)], folder, environment)


def test_every_reason_names_a_command() -> None:
    lines = [line for block in blocks() for line in block.text.splitlines()]
    for beginning in ELSEWHERE:
        assert any(line.startswith(beginning) for line in lines), beginning


def test_pages_have_commands() -> None:
    assert len(SCRIPTS) >= 3
    assert PROGRAMS
