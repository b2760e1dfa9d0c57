# SPDX-License-Identifier: Apache-2.0
"""A client for each `vllm serve` process."""

import contextlib
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import _server
import openai


@dataclass(frozen=True)
class Server:
    """A running `vllm serve` and a client of it."""

    url: str
    model: str
    client: openai.OpenAI
    process: subprocess.Popen

    def metrics(self) -> str:
        """Return the text of /metrics."""
        return _server.metrics(self.url)


@contextlib.contextmanager
def launched(
    target: Path, log: Path, *flags: str, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Yield a server that may still be starting, and stop it at the end."""
    with _server.launched(target, log, flags, environment) as (url, process):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        yield Server(url, str(target), client, process)
