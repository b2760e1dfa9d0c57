# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` processes on the loopback interface."""

import contextlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

START_SECONDS = 240  # bound on a server's start
CPU_FLAGS = (
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "8"),
    *("--kv-cache-memory-bytes", "128M"),
    # A small model may fill all its tokens with the white space that a JSON grammar allows.
    *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
)


@dataclass(frozen=True)
class Server:
    """A running `vllm serve` and a client of it."""

    url: str
    model: str
    client: openai.OpenAI

    def metrics(self) -> str:
        """The text of /metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as response:
            return response.read().decode()


def serve_command(target: Path, *flags: str) -> list[str]:
    """The command line of a small server for `target`."""
    vllm = Path(sys.executable).with_name("vllm")
    return [str(vllm), "serve", str(target), "--host", "127.0.0.1", *CPU_FLAGS, *flags]


@contextlib.contextmanager
def launched(target: Path, log: Path, *flags: str) -> Iterator[tuple[Server, subprocess.Popen]]:
    """A server that may still be starting; it is stopped at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = serve_command(target, "--port", str(port), *flags)
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        yield Server(url, str(target), client), process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_healthy(server: Server, process: subprocess.Popen, log: Path) -> None:
    """Return once /health answers; fail with the end of the log where it does not."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"{server.url}/health", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    end = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
    pytest.fail(f"`vllm serve` did not start (exit code {process.poll()}):\n{end}")
