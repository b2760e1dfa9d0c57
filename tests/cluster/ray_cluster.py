# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster on this machine, with CPUs as "GPUs", and programs that run in it.

vLLM's CPU platform gives Ray no device name to count. A platform plugin with such a name is written
into a folder. This folder is first in PYTHONPATH of the cluster, its workers and the programs.
Nothing is installed, and the tests' own processes do not use it.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil

HERE = Path(__file__).parent
REPO = HERE.parent.parent
IMPORTED = (HERE.parent / "any_process", REPO, HERE.parent, HERE.parent / "engine", HERE)
SECONDS = 600  # limit of a program
_START = 120  # limit of a node's start; on a busy machine it takes a minute
_TRIES = 3  # tries to start a node; another process may have taken its free port
Started = TypeVar("Started")
_PLATFORM = """
def platform():
    return "ray_on_cpu.RayOnCpu"


def __getattr__(name):  # on first use: vllm.platforms is half imported before
    if name != "RayOnCpu":
        raise AttributeError(name)
    from vllm.platforms.cpu import CpuPlatform

    class RayOnCpu(CpuPlatform):
        ray_device_key = "GPU"  # one that Ray knows; needs no GPU

        @classmethod
        def device_control_id_to_physical_device_id(cls, device_id):
            return 0  # vLLM 0.33 takes these ids for NUMA nodes

    return globals().setdefault("RayOnCpu", RayOnCpu)
"""


def write_platform(folder: Path) -> None:
    """Write a vLLM plugin: the CPU platform, with a device name that Ray can count."""
    metadata = folder / "ray_on_cpu-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "ray_on_cpu.py").write_text(_PLATFORM)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ray-on-cpu\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.platform_plugins]\nray_on_cpu = ray_on_cpu:platform\n"
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class NotStarted(Exception):
    """A node of a cluster ended or did not start in time; the message contains its output."""


def _entered(
    stack: contextlib.ExitStack, node: Callable[[], AbstractContextManager[Started]]
) -> Started:
    """Enter the context of a node in `stack`; if its start fails, try again with other ports."""
    for _ in range(_TRIES - 1):
        try:
            return stack.enter_context(node())
        except NotStarted as failure:
            warnings.warn(f"{failure}\nIt is tried again.", stacklevel=2)
    return stack.enter_context(node())


def processes(address: str, name: str) -> list[psutil.Process]:
    """Return the processes of a cluster whose name contains `name`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if name in process.name() and process.environ().get("RAY_ADDRESS") == address:
                found.append(process)
    return found


@dataclass(frozen=True)
class RayCluster:
    """A running cluster."""

    address: str  # host and port of its head
    folder: Path  # of all its files; the path is short because socket names are long
    environment: dict[str, str]  # of its processes and of programs that use it
    metrics_port: int = field(default_factory=free_port)  # its head exports all metrics there

    def popen(
        self, *command: str, output: Any = subprocess.PIPE, **environment: str
    ) -> subprocess.Popen:
        """Start a Python program that finds this cluster, in a session of its own."""
        return subprocess.Popen(
            [sys.executable, *command],
            env=self.environment | environment,
            stdout=output,
            stderr=subprocess.PIPE if output is subprocess.PIPE else subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *command: str, **environment: str) -> str:
        """Run such a program, which must succeed, and return its output."""
        program = self.popen(*command, **environment)
        try:
            said, errors = program.communicate(timeout=SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
        assert program.returncode == 0, said[-3000:] + errors[-9000:]
        return said

    def answer(self, *command: str, **environment: str) -> Any:
        """Return the JSON object that such a program prints as a line; Ray may print more lines."""
        said = self.run(*command, **environment)
        answers = [line for line in said.splitlines() if line.startswith("{")]
        assert answers, said[-3000:]
        return json.loads(answers[-1])

    @contextlib.contextmanager
    def node(self, *options: str, **environment: str) -> Iterator[None]:
        """Add a node with options of `ray start` and variables that override the cluster's."""
        other = replace(self, environment=self.environment | environment)
        with contextlib.ExitStack() as stack:
            _entered(stack, lambda: other._started(f"--address={self.address}", *options))
            yield

    @contextlib.contextmanager
    def _started(self, *options: str) -> Iterator[None]:
        ray = Path(sys.executable).with_name("ray")
        command = [str(ray), "start", "--block", "--object-store-memory=100000000", *options]
        command += ["--min-worker-port=0", "--max-worker-port=0"]  # 0 means any free port
        for name in ("dashboard-agent-listen-port", "runtime-env-agent-port"):
            command.append(f"--{name}={free_port()}")
        log = self.folder / f"{free_port()}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            deadline = time.monotonic() + _START
            while "Ray runtime started" not in log.read_text():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise NotStarted(f"`ray start` failed:\n{log.read_text()[-3000:]}")
                time.sleep(0.1)
            yield
        finally:
            _end(process)


def _end(process: subprocess.Popen) -> None:
    """End a node and its child processes only."""
    try:
        first = psutil.Process(process.pid)
        family = [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:  # it has failed, and its output has the reason
        family = []
    process.terminate()
    _, alive = psutil.wait_procs(family, timeout=15)
    for each in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(alive, timeout=15)
    process.wait()


@contextlib.contextmanager
def started() -> Iterator[RayCluster]:
    """Yield a cluster of one node with eight CPUs and two "GPUs", and end it afterwards."""
    with contextlib.ExitStack() as stack:
        yield _entered(stack, _head)


@contextlib.contextmanager
def _head() -> Iterator[RayCluster]:
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    write_platform(folder / "platform")
    port = free_port()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {
        "PYTHONPATH": os.pathsep.join(map(str, [folder / "platform", *IMPORTED])),
        "RAY_ADDRESS": f"127.0.0.1:{port}",
        # A token of its own, not one in the home folder, so that no other process can connect.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Disabled, because other processes may use this machine's memory.
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_metrics_report_interval_ms": "1000",
        "RAY_raylet_start_wait_time_s": str(_START),
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }
    cluster = RayCluster(f"127.0.0.1:{port}", folder, environment)
    head = (
        *("--head", f"--port={port}", "--node-ip-address=127.0.0.1", f"--temp-dir={folder}"),
        *("--num-cpus=8", "--num-gpus=2", "--include-dashboard=false"),
        *(f"--dashboard-port={free_port()}", f"--ray-client-server-port={free_port()}"),
        f"--metrics-export-port={cluster.metrics_port}",
    )
    try:
        with cluster._started(*head):
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)
