# SPDX-License-Identifier: Apache-2.0
"""Send random requests of every kind to a live server, with and without a drafter.

    python scripts/soak.py --requests 2000          # the demo pair, on Model Runner V1 on a CPU
    python scripts/soak.py --target DIR --drafter DIR --prompts FILE.jsonl -- --max-model-len 4096

The same requests are sent to `vllm serve` with the target alone and then with the drafter, 16 at a
time. Statuses and greedy answers must be equal. At the end the drafter must hold no KV blocks.
Threads, files, processes and memory must not grow more than those of the target alone. Arguments
after `--` are passed to both servers. The exit code is 1 if something is wrong.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
from _server import launched, metrics, wait_until_healthy
from _soak_calls import COMPLETIONS, Call, Texts, calls

from vllm_hetero_spec.paths import demo_folder

AT_ONCE = 16
_SECONDS = 300.0  # limit for one answer
_SETTLE_SECONDS = 60.0  # limit for the end of requests whose clients disconnected
_METRIC = r"^vllm:hetero_spec_(\w+)\{.*\} (\S+)$"
_SPARE = 2  # threads, files and processes that a library starts late
_TELLS_GROWTH = 1000  # requests; with fewer, caches that still fill up look like a leak
_SPARE_GROWTH = 16.0  # KiB per request, beyond the target alone
# Limit memory that glibc keeps after it was freed, and kernels cached for shapes of batches, so
# that growth shows leaks.
_TELLING = {
    "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072",
    "MALLOC_ARENA_MAX": "2", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}  # fmt: skip
# Gauges are updated after a step, so the last request has no drafts.
_QUIET = {"hetero_spec_lookahead": 0}
_LAST = Call(
    "last", COMPLETIONS, {"prompt": "x", "temperature": 0, "max_tokens": 4, "vllm_xargs": _QUIET}
)


class Answer(NamedTuple):
    """Answer to a call."""

    status: int  # HTTP status; 0 if there was none
    texts: tuple[tuple[str, str | None], ...] = ()  # text and finish reason of each choice


class Soaked(NamedTuple):
    """Results of one server."""

    answers: list[Answer]
    early: dict[str, float]  # `holdings` after the first tenth of the calls
    late: dict[str, float]  # `holdings` at the end
    counters: dict[str, float]  # the drafter's metrics at the end

    @property
    def grown(self) -> dict[str, float]:
        """Growth after the first tenth of the calls; memory in KiB per request."""
        found = {name: self.late[name] - self.early[name] for name in self.late}
        found["KiB per request"] = found.pop("KiB") / max(1, len(self.answers) * 9 // 10)
        return found


def holdings(pid: int) -> dict[str, float]:
    """Resident memory, threads, files and processes of a process and all its children."""
    root = psutil.Process(pid)
    family = [root, *root.children(recursive=True)]
    return {
        "KiB": sum(member.memory_info().rss for member in family) / 1024,
        "threads": sum(member.num_threads() for member in family),
        "files": sum(member.num_fds() for member in family),
        "processes": len(family),
    }


def ask(client: httpx.Client, model: str, call: Call) -> Answer:
    """Send one call; a failure becomes status 0."""
    body, texts = {"model": model, **call.body}, list[tuple[str, str | None]]()
    try:
        with client.stream("POST", call.path, json=body) as reply:
            if body.get("stream"):
                text, reason = "", None
                for line in islice(reply.iter_lines(), call.drop_after):
                    if line.startswith("data: {"):
                        for choice in json.loads(line[6:]).get("choices", []):
                            text, reason = text + choice["text"], choice["finish_reason"]
                texts.append((text, reason))
            elif reply.status_code == 200:
                for choice in json.loads(reply.read())["choices"]:
                    text = choice["text"] if "text" in choice else choice["message"]["content"]
                    texts.append((text or "", choice["finish_reason"]))
            return Answer(reply.status_code, tuple(texts))
    except (httpx.HTTPError, ValueError):
        return Answer(0)


def soak(url: str, model: str, pid: int, todo: Sequence[Call]) -> Soaked:
    """Send all calls to a server that is up."""
    first = max(len(todo) // 10, 2 * AT_ONCE)  # includes each kind, so lazy parts are loaded
    answers = _send(url, model, todo[:first])
    early = holdings(pid)
    answers += _send(url, model, todo[first:])
    _send(url, model, [_LAST])
    time.sleep(1)
    counters = {name: float(value) for name, value in re.findall(_METRIC, metrics(url), re.M)}
    return Soaked(answers, early, holdings(pid), counters)


def _send(url: str, model: str, some: Sequence[Call]) -> list[Answer]:
    """Send calls; return when all connections are closed and no request runs."""
    with (
        httpx.Client(base_url=url, timeout=_SECONDS) as client,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        answers = list(pool.map(lambda call: ask(client, model, call), some))
    deadline = time.monotonic() + _SETTLE_SECONDS
    pattern = r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$"
    while time.monotonic() < deadline and any(map(float, re.findall(pattern, metrics(url), re.M))):
        time.sleep(0.5)
    return answers


def complaints(todo: Sequence[Call], drafted: Soaked, alone: Soaked) -> list[str]:
    """Faults that a soak showed, one sentence each."""
    wrong = []
    answers = zip(todo, drafted.answers, alone.answers, strict=True)
    for number, (call, ours, theirs) in enumerate(answers):
        what = f"request {number} ({call.kind})"
        if not 0 < ours.status < 500 or ours.status != theirs.status:
            wrong.append(f"{what}: HTTP status {ours.status}, alone {theirs.status}")
        elif call.settled and ours.texts != theirs.texts:
            wrong.append(f"{what}: {ours.texts}, alone {theirs.texts}")
    left = {name: count for name, count in drafted.counters.items() if name.endswith("_held")}
    if not left:
        wrong.append("the drafter's metrics are absent")
    wrong += [f"{name} is {count:g} at the end" for name, count in left.items() if count]
    spare = dict.fromkeys(("threads", "files", "processes"), float(_SPARE))
    if len(todo) >= _TELLS_GROWTH:
        spare["KiB per request"] = _SPARE_GROWTH
    for name, most in spare.items():
        grown, usual = drafted.grown[name], max(0.0, alone.grown[name])
        if grown > most + usual:
            wrong.append(f"{grown:.1f} new {name} after the first tenth, alone {usual:.1f}")
    if not drafted.counters.get("drafts_total"):
        wrong.append("nothing was drafted")
    return wrong


def texts_of(target: Path, prompts: Path, chats: Path) -> Texts:
    """Read texts of requests from JSON lines with the keys "prompt" and "messages"."""
    config = json.loads((target / "config.json").read_text())
    return Texts(
        [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()],
        [json.loads(line)["messages"] for line in chats.read_text().splitlines()],
        config["vocab_size"],
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("target", "drafter", "prompts.jsonl", "chats.jsonl"):
        option = f"--{name.partition('.')[0]}"
        parser.add_argument(option, type=Path, default=demo_folder() / name)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speculative", type=json.loads, default={}, help="further keys, JSON")
    parser.add_argument("flags", nargs="*", help="of vllm serve")
    given = parser.parse_args()
    todo = calls(texts_of(given.target, given.prompts, given.chats), given.requests, given.seed)
    keys = {"method": "hetero", "num_speculative_tokens": 4, "controller": "fixed"}
    config = json.dumps({"model": str(given.drafter), **keys, **given.speculative})
    for name, value in _TELLING.items():
        os.environ.setdefault(name, value)  # for the servers
    soaks = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, flags in (("alone", []), ("drafter", ["--speculative-config", config])):
            log = Path(folder) / f"{name}.log"
            with launched(given.target, log, [*flags, *given.flags]) as (url, process):
                wait_until_healthy(url, process, log)
                try:
                    soaks[name] = soak(url, str(given.target), process.pid, todo)
                except OSError:
                    sys.exit(f"The server ({name}) ended. Its log:\n{log.read_text()}")
            done = soaks[name]
            statuses = sorted(Counter(answer.status for answer in done.answers).items())
            told = [f"{count} x HTTP {status}" for status, count in statuses]
            told += [f"{grown:.1f} new {what}" for what, grown in done.grown.items()]
            drafts = done.counters.get("drafts_total", 0)
            print(f"{name}: {', '.join(told)}, {drafts:.0f} drafts", flush=True)
    wrong = complaints(todo, soaks["drafter"], soaks["alone"])
    print(*wrong[:20], f"{len(wrong)} things are wrong.", sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
