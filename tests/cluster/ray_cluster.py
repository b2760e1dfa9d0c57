# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of this machine alone, whose nodes have "GPUs" that are CPUs, and programs in it.

vLLM's CPU platform has no name for Ray to count devices by. A platform plugin that gives it one is
written into a folder, which stands first in PYTHONPATH of every process: of the cluster, of its
workers and of the programs. Nothing is installed, and no process of the tests themselves sees it.
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
SECONDS = 600  # bound on a program
_START = 120  # bound on the start of a node, which a busy machine takes a minute for
_TRIES = 3  # at that: a port that was free may be taken by when the node wants it
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
    """A plugin of vLLM: its CPU platform, with devices that Ray can count."""
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
    """A node of a cluster ended, or was not there in time; it says what it printed."""


def _entered(
    stack: contextlib.ExitStack, node: Callable[[], AbstractContextManager[Started]]
) -> Started:
    """What a node's start gives, until `stack` ends it; with other ports where it fails."""
    for _ in range(_TRIES - 1):
        try:
            return stack.enter_context(node())
        except NotStarted as failure:
            warnings.warn(f"{failure}\nIt is tried again.", stacklevel=2)
    return stack.enter_context(node())


def processes(address: str, name: str) -> list[psutil.Process]:
    """Those of a cluster, by a part of their name."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if name in process.name() and process.environ().get("RAY_ADDRESS") == address:
                found.append(process)
    return found


@dataclass(frozen=True)
class RayCluster:
    """A running cluster.

    Attributes:
        address: Of its head, host and port.
        folder: All its files; short, since sockets have long names in it.
        environment: Of the processes in it and of programs that use it.
        metrics_port: Where its head shows the metrics of all that runs there.
    """

    address: str
    folder: Path
    environment: dict[str, str]
    metrics_port: int = field(default_factory=free_port)

    def popen(
        self, *command: str, output: Any = subprocess.PIPE, **environment: str
    ) -> subprocess.Popen:
        """A Python program of `command` that finds this cluster, in a session of its own."""
        return subprocess.Popen(
            [sys.executable, *command],
            env=self.environment | environment,
            stdout=output,
            stderr=subprocess.PIPE if output is subprocess.PIPE else subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *command: str, **environment: str) -> str:
        """What such a program prints; it must succeed.

        Args:
            command: Its file and arguments.
            environment: What it has beside the cluster's.
        """
        program = self.popen(*command, **environment)
        try:
            said, errors = program.communicate(timeout=SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
        assert program.returncode == 0, said[-3000:] + errors[-9000:]
        return said

    def answer(self, *command: str, **environment: str) -> Any:
        """The JSON object that such a program prints as a line; Ray may print others after it."""
        said = self.run(*command, **environment)
        answers = [line for line in said.splitlines() if line.startswith("{")]
        assert answers, said[-3000:]
        return json.loads(answers[-1])

    @contextlib.contextmanager
    def node(self, *options: str, **environment: str) -> Iterator[None]:
        """One more node of this cluster.

        Args:
            options: Of `ray start`.
            environment: What its processes have beside, or instead of, the cluster's.
        """
        other = replace(self, environment=self.environment | environment)
        with contextlib.ExitStack() as stack:
            _entered(stack, lambda: other._started(f"--address={self.address}", *options))
            yield

    @contextlib.contextmanager
    def _started(self, *options: str) -> Iterator[None]:
        ray = Path(sys.executable).with_name("ray")
        command = [str(ray), "start", "--block", "--object-store-memory=100000000", *options]
        command += ["--min-worker-port=0", "--max-worker-port=0"]  # any that are free
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
    """A node and all that it has started, and no other."""
    try:
        first = psutil.Process(process.pid)
        family = [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:  # it has failed, and says why
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
    """A cluster of one node with eight CPUs and two "GPUs"; it is gone afterwards."""
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
        # Its own, and none in the home folder: nobody else comes in.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Others may use this machine's memory.
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
