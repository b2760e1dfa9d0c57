# SPDX-License-Identifier: Apache-2.0
"""The drafter fails at random: no request fails, and drafts return after the last fault."""

import random
import time
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import engine, metrics_of, proposer_of, slem
from scenarios import Outputs, generate, greedy
from vllm import SamplingParams

from vllm_hetero_spec import read_stats
from vllm_hetero_spec.engine.seam.request_params import LOOKAHEAD_ARG

pytestmark = [pytest.mark.full, pytest.mark.engine]

REQUESTS = 60
BACK_WITHIN = 40  # steps with a request that may have a draft, once faults have ended
PACKAGE = "vllm_hetero_spec"
NAME = "request-called-"  # prefix of the request ids; vLLM appends a suffix


def _parts(thing: object) -> Iterator[tuple[str, object]]:
    if isinstance(thing, Mapping):
        yield from (("{keys}", key) for key in thing)
        yield from ((f"[{key!r}]", value) for key, value in thing.items())
    elif isinstance(thing, list | tuple | Set):
        yield from ((f"[{index}]", value) for index, value in enumerate(thing))
    elif type(thing).__module__.startswith(PACKAGE):
        yield from ((f".{name}", value) for name, value in getattr(thing, "__dict__", {}).items())
        for slots in (getattr(kind, "__slots__", ()) for kind in type(thing).__mro__):
            yield from ((f".{name}", getattr(thing, name, None)) for name in slots)


def remains(root: Any) -> list[str]:
    """Return the attribute paths from `root` to strings that begin with `NAME`."""
    found: list[str] = []
    seen: set[int] = set()
    todo: list[tuple[str, object]] = [("", root)]
    while todo:
        path, thing = todo.pop()
        if isinstance(thing, str):
            if thing.startswith(NAME):
                found.append(path)
            continue
        if id(thing) not in seen:
            seen.add(id(thing))
            todo += [(path + step, part) for step, part in _parts(thing)]
    return found


def limits(index: int) -> SamplingParams:
    return greedy(max_tokens=12 + 5 * (index % 8), ignore_eos=True)


def serve(llm: Any, prompts: list[str], between: Any = lambda: None) -> Outputs:
    """Start a request in each step, at most eight at a time. Call `between` after each step."""
    core, found, joined = llm.llm_engine, {}, 0
    while joined < len(prompts) or core.has_unfinished_requests():
        if joined < len(prompts) and joined - len(found) < 8:
            core.add_request(f"{NAME}{joined}", prompts[joined], limits(joined))
            joined += 1
        for output in core.step():
            if output.finished:
                found[output.request_id.removeprefix(NAME)] = list(output.outputs[0].token_ids)
        between()
    return found


@pytest.fixture(scope="module")
def prompts(code_prompts: list[str]) -> list[str]:
    """Prompts, some with common prefixes, so that requests share the drafter's KV."""
    return [code_prompts[n % 7][: 60 + 37 * (n % 11)] for n in range(REQUESTS)]


@pytest.fixture(scope="module")
def alone(demo_pair: Path, prompts: list[str]) -> Outputs:
    with engine(demo_pair / "target") as llm:
        return serve(llm, prompts)


class Faults:
    """Random faults, each of which lasts for 1 to 6 steps."""

    def __init__(self, llm: Any, seed: int) -> None:
        self.rng, self.on, self.left = random.Random(seed), "", 0
        self.met: set[str] = set()
        drafting = proposer_of(llm).drafting
        model, pool = drafting.source.drafter.model, drafting.source.pool
        forward, grow = model.forward, pool.grow

        def faulty_forward(*args: Any) -> torch.Tensor:
            self.met.add(self.on)
            if self.on == "raises":
                raise RuntimeError("out of order")
            if self.on == "slow":
                time.sleep(0.02)
            logits = forward(*args)
            return logits * float("nan") if self.on == "nan" else logits

        def faulty_grow(*args: Any) -> bool:
            self.met.add(self.on)
            return self.on != "full" and grow(*args)

        model.forward, pool.grow = faulty_forward, faulty_grow

    def __call__(self) -> None:
        self.left -= 1
        if self.left <= 0:
            self.on = self.rng.choice(["raises", "nan", "full", "slow", "", "", ""])
            self.left = self.rng.randint(1, 6)


@pytest.fixture(scope="module")
def llm(demo_pair: Path, alone: Outputs) -> Iterator[Any]:
    spec = slem(demo_pair / "drafter", method="hetero", context=128)
    with engine(demo_pair / "target", spec, max_num_seqs=6) as llm:
        yield llm


def test_no_request_fails_and_drafts_come_back(
    llm: Any, prompts: list[str], alone: Outputs
) -> None:
    faults = Faults(llm, seed=5)
    assert serve(llm, prompts, faults) == alone
    assert faults.met == {"raises", "nan", "full", "slow", ""}
    skipped = read_stats(llm)["skipped"]
    assert min(skipped[r] for r in ("drafter_error", "nan_logits", "no_blocks")) > 0
    drafting = proposer_of(llm).drafting

    faults.on, faults.left = "", 1 << 30
    before = metrics_of(llm)["num_drafts"]
    steps, named = 0, set()

    def counted() -> None:
        nonlocal steps
        if metrics_of(llm)["num_drafts"] == before:
            steps += 1
        named.update(remains(proposer_of(llm)))

    assert serve(llm, prompts[:8], counted) == {str(n): alone[str(n)] for n in range(8)}
    assert steps < BACK_WITHIN

    # The last request disables drafts. Nothing of the others is left.
    generate(llm, ["x"], greedy(max_tokens=4, extra_args={LOOKAHEAD_ARG: 0}))
    assert (len(drafting.requests), drafting.source.pool.held) == (0, 0)
    assert drafting.source.pool.available == drafting.source.pool.capacity
    assert named
    assert not remains(proposer_of(llm))
