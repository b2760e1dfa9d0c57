# SPDX-License-Identifier: Apache-2.0
"""Random requests of every kind against a live server, with and without a drafter.

    python scripts/soak.py --requests 2000          # the demo pair, on Model Runner V1 on a CPU
    python scripts/soak.py --target DIR --drafter DIR --prompts FILE.jsonl -- --max-model-len 4096

The same requests go to `vllm serve` with the drafter and to the target alone, one server after the
other, 16 at a time. Nothing may fail that does not fail without the drafter, greedy answers are
compared word by word, and at the end nothing may be left: no KV blocks of the drafter, no
requests, no threads, files or processes, and no more memory than the target alone takes. What
follows `--` goes to both servers. The exit code is 1 where something is wrong.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
from _server import launched, metrics, wait_until_healthy
from _soak_calls import COMPLETIONS, Call, Texts, calls
from rich.console import Console
from rich.table import Table

from vllm_hetero_spec.paths import demo_folder

AT_ONCE = 16
_SECONDS = 300.0  # for one answer, at most
_SETTLE_SECONDS = 60.0  # for requests whose clients went away to end
_METRIC = r"^vllm:hetero_spec_(\w+)\{(.*)\} (\S+)$"
_SPARE = 2  # threads, files and processes that begin late, of a library; a leak grows on
_PER_REQUESTS = 250  # growth of memory is told for so many
_TELLS_GROWTH = 1000  # requests; with fewer, memos that are still filling look like a leak
_SPARE_MEBIBYTES = 4.0  # of growth, beyond the target alone's
# Memory that grows is held then: not what glibc keeps after it was freed, nor the CPU's kernels for
# shapes of batches that have come by.
_TELLING = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "MALLOC_ARENA_MAX": "2",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}

# What is held is told after a step: of a request that wants no drafts.
_LAST = Call(
    "last",
    COMPLETIONS,
    {
        "prompt": "x",
        "temperature": 0,
        "max_tokens": 4,
        "vllm_xargs": {"hetero_spec_lookahead": 0},
    },
)


class Answer(NamedTuple):
    """What came of a call.

    Attributes:
        status: Of HTTP; 0 where there was none.
        texts: Of each choice, with why it ended.
    """

    status: int
    texts: tuple[tuple[str, str | None], ...] = ()


class Holdings(NamedTuple):
    """What a server's processes hold."""

    mebibytes: float
    threads: int
    files: int
    processes: int


class Soaked(NamedTuple):
    """One server's soak.

    Attributes:
        answers: Of all calls, in turn.
        seconds: For all of them.
        early: Held after the first tenth.
        late: Held at the end.
        left: Of the drafter's, at the end: KV blocks and requests; empty without a drafter.
        counters: The drafter's, at the end.
    """

    answers: list[Answer]
    seconds: float
    early: Holdings
    late: Holdings
    left: dict[str, float]
    counters: dict[str, float]

    def growth(self, requests: int) -> float:
        """MiB for each 250 requests, after the first tenth."""
        after = max(1, requests - requests // 10)
        return (self.late.mebibytes - self.early.mebibytes) * _PER_REQUESTS / after


def holdings(pid: int) -> Holdings:
    """Of a process and all its children."""
    root = psutil.Process(pid)
    family = [root, *root.children(recursive=True)]
    return Holdings(
        sum(member.memory_info().rss for member in family) / (1 << 20),
        sum(member.num_threads() for member in family),
        sum(member.num_fds() for member in family),
        len(family),
    )


def drafter_metrics(url: str) -> dict[str, float]:
    """The drafter's metrics; those with a label of their own as "name label"."""
    found: defaultdict[str, float] = defaultdict(float)
    for name, labels, value in re.findall(_METRIC, metrics(url), re.M):
        if not name.endswith(("_bucket", "_created")):
            own = re.search(r'(?:reason|position|length)="(\w+)"', labels)
            found[f"{name} {own[1]}" if own else name] += float(value)
    return dict(found)


def ask(client: httpx.Client, model: str, call: Call) -> Answer:
    """Send one call; never raises."""
    body = {"model": model, **call.body}
    try:
        if not body.get("stream"):
            reply = client.post(call.path, json=body)
            choices = reply.json().get("choices", []) if reply.status_code == 200 else []
            return Answer(reply.status_code, tuple(_text_of(choice) for choice in choices))
        with client.stream("POST", call.path, json=body) as reply:
            text, reason = "", None
            for number, line in enumerate(reply.iter_lines()):
                if call.drop_after is not None and number >= call.drop_after:
                    break
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:]).get("choices", []):
                        text += choice["text"]
                        reason = choice["finish_reason"]
            return Answer(reply.status_code, ((text, reason),))
    except (httpx.HTTPError, ValueError):
        return Answer(0)


def _text_of(choice: dict[str, Any]) -> tuple[str, str | None]:
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return text or "", choice["finish_reason"]


def soak(url: str, model: str, pid: int, todo: Sequence[Call]) -> Soaked:
    """Send all calls to a server that is up."""
    first = max(len(todo) // 10, 2 * AT_ONCE)  # some of each kind, for what begins with the first
    began = time.perf_counter()
    answers = _send(url, model, todo[:first])
    early = holdings(pid)
    answers += _send(url, model, todo[first:])
    seconds = time.perf_counter() - began
    _send(url, model, [_LAST])
    time.sleep(1)
    late, counters = holdings(pid), drafter_metrics(url)
    left = {name: value for name, value in counters.items() if name.endswith("_held")}
    return Soaked(answers, seconds, early, late, left, counters)


def _send(url: str, model: str, some: Sequence[Call]) -> list[Answer]:
    """Answers to calls, all connections closed and nothing running any more."""
    with (
        httpx.Client(base_url=url, timeout=_SECONDS) as client,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        answers = list(pool.map(lambda call: ask(client, model, call), some))
    _settle(url)
    return answers


def _settle(url: str) -> None:
    """Wait until no request runs or waits."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    pattern = r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$"
    while time.monotonic() < deadline:
        if not any(float(value) for value in re.findall(pattern, metrics(url), re.M)):
            return
        time.sleep(0.5)


def complaints(todo: Sequence[Call], drafted: Soaked, alone: Soaked) -> list[str]:
    """What is wrong with a soak, but for memory; nothing where all is well."""
    wrong = []
    for number, (call, ours, theirs) in enumerate(
        zip(todo, drafted.answers, alone.answers, strict=True)
    ):
        what = f"request {number} ({call.kind})"
        if not 0 < ours.status < 500 or ours.status != theirs.status:
            wrong.append(f"{what}: HTTP status {ours.status}, alone {theirs.status}")
        elif call.settled and ours.texts != theirs.texts:
            wrong.append(f"{what}: {ours.texts}, alone {theirs.texts}")
    if not drafted.left:
        wrong.append("the drafter's metrics are absent")
    for name, value in drafted.left.items():
        if value:
            wrong.append(f"{name} is {value:g} at the end")
    for name in ("threads", "files", "processes"):
        grown, usual = (getattr(of.late, name) - getattr(of.early, name) for of in (drafted, alone))
        if grown > _SPARE + max(0, usual):
            wrong.append(f"{grown} new {name} since the first tenth of the requests, alone {usual}")
    if not drafted.counters.get("drafts_total"):
        wrong.append("nothing was drafted")
    return wrong


def report(todo: Sequence[Call], soaks: dict[str, Soaked]) -> Table:
    """A column for each server."""

    def counted(done: Soaked, prefix: str) -> str:
        named = {k.removeprefix(prefix): n for k, n in done.counters.items() if prefix in k and n}
        return ", ".join(f"{name} {count:,.0f}" for name, count in sorted(named.items()))

    def held(done: Soaked, name: str) -> str:
        return f"{getattr(done.early, name)}, {getattr(done.late, name)}"

    table = Table("", *soaks, title=f"{len(todo)} requests, {AT_ONCE} at a time")
    rows: dict[str, Callable[[Soaked], str]] = {
        "seconds": lambda done: f"{done.seconds:.0f}",
        "HTTP statuses": lambda done: ", ".join(
            f"{status}: {count}"
            for status, count in sorted(Counter(a.status for a in done.answers).items())
        ),
        "drafts": lambda done: f"{done.counters.get('drafts_total', 0):,.0f}",
        "left undrafted": lambda done: counted(done, "skipped_total "),
        f"MiB per {_PER_REQUESTS} requests": lambda done: f"{done.growth(len(todo)):+.1f}",
        **{
            f"{name} after a tenth, at the end": partial(held, name=name)
            for name in ("threads", "files", "processes")
        },
    }
    for heading, told in rows.items():
        table.add_row(heading, *map(told, soaks.values()))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    demo = demo_folder()
    parser.add_argument("--target", type=Path, default=demo / "target")
    parser.add_argument("--drafter", type=Path, default=demo / "drafter")
    parser.add_argument("--prompts", type=Path, default=demo / "prompts.jsonl")
    parser.add_argument("--chats", type=Path, default=demo / "chats.jsonl")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--speculative",
        type=json.loads,
        default={"method": "hetero", "num_speculative_tokens": 4, "controller": "fixed"},
        help="of the speculative configuration, JSON",
    )
    parser.add_argument("flags", nargs="*", help="of vllm serve")
    options = parser.parse_args()

    todo = calls(texts_of(options.target, options.prompts, options.chats), options.requests,
                 options.seed)  # fmt: skip
    config = json.dumps({"model": str(options.drafter), **options.speculative})
    for name, value in _TELLING.items():
        os.environ.setdefault(name, value)  # the servers have it from here
    soaks = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, flags in (("alone", []), ("drafter", ["--speculative-config", config])):
            log = Path(folder) / f"{name}.log"
            with launched(options.target, log, [*flags, *options.flags]) as (url, process):
                wait_until_healthy(url, process, log)
                try:
                    soaks[name] = soak(url, str(options.target), process.pid, todo)
                except OSError:
                    sys.exit(f"The server ({name}) ended. What it said:\n{log.read_text()}")
    wrong = complaints(todo, soaks["drafter"], soaks["alone"])
    more = soaks["drafter"].growth(len(todo)) - soaks["alone"].growth(len(todo))
    if len(todo) >= _TELLS_GROWTH and more > _SPARE_MEBIBYTES:
        wrong.append(f"memory grows by {more:.1f} MiB per {_PER_REQUESTS} requests more than alone")
    console = Console()
    console.print(report(todo, soaks))
    console.print(
        f"The drafter's server grew by {more:+.1f} MiB per {_PER_REQUESTS} requests more."
    )
    for line in wrong[:20]:
        console.print(f"WRONG: {line}", markup=False)
    console.print("Nothing is wrong." if not wrong else f"{len(wrong)} things are wrong.")
    sys.exit(bool(wrong))


def texts_of(target: Path, prompts: Path, chats: Path) -> Texts:
    """What requests are made of, from JSON lines with "prompt" and with "messages"."""
    config = json.loads((target / "config.json").read_text())
    return Texts(
        [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()],
        [json.loads(line)["messages"] for line in chats.read_text().splitlines()],
        config["vocab_size"],
    )


if __name__ == "__main__":
    main()
