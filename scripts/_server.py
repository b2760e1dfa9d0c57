# SPDX-License-Identifier: Apache-2.0
"""Run `vllm serve` on the loopback interface."""

import contextlib
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

CPU_FLAGS = (
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "8"),
    *("--kv-cache-memory-bytes", "128M"),
    # A small model may generate only the white space that a JSON grammar allows.
    *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
)
_START_SECONDS = 240  # limit for a server's start


def serve_command(target: Path, *flags: str) -> list[str]:
    """Command line of a small server for `target`."""
    vllm = Path(sys.executable).with_name("vllm")
    return [str(vllm), "serve", str(target), "--host", "127.0.0.1", *CPU_FLAGS, *flags]


@contextlib.contextmanager
def launched(
    target: Path, log: Path, flags: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start a server and yield its URL and process without waiting; stop it at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = serve_command(target, "--port", str(port), *flags)
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until /health answers; RuntimeError with the end of the log if it does not."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    end = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
    raise RuntimeError(f"`vllm serve` did not start (exit code {process.poll()}):\n{end}")


def metrics(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        text: str = response.read().decode()
        return text
