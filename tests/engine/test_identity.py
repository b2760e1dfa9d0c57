# SPDX-License-Identifier: Apache-2.0
"""Greedy output equals the target's own, token by token, in each scenario."""

from collections import defaultdict
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from pathlib import Path

import pytest
from harness import slem
from scenarios import ROOMY, TIGHT, Run, run_all
from tokenizers import Tokenizer

from vllm_hetero_spec.text.loading import load_tokenizer
from vllm_hetero_spec.text.tokenizer import TextTokenizer

pytestmark = pytest.mark.engine

LOOKAHEAD = 4
# Lowest acceptance rates if the drafter is the target. If drafts are translated through text, each
# token that the target's own tokenizer would not produce costs at most one draft. THROUGH_TEXT is
# the rate of all scenarios together, THROUGH_TEXT_EACH the rate of one scenario.
IDENTITY = 0.995
THROUGH_TEXT, THROUGH_TEXT_EACH = 0.97, 0.85
ALL = [*ROOMY, *TIGHT]
FAST = {  # scenarios of the fast tier, by way of speculation
    "pair": {
        "batch 8",
        "joining and aborting",
        "mixed parameters",
        "structured output",
        "preemption",
    },
    "identity": {"batch 8", "mixed parameters"},
    "parallel": {"mixed parameters", "preemption"},
}


def of_each_scenario(*ways: str) -> pytest.MarkDecorator:
    """Parametrize a test by way of speculation and scenario, each with its tier."""
    marks = {True: (), False: pytest.mark.full}
    return pytest.mark.parametrize(
        ("way", "scenario"),
        [
            pytest.param(way, scenario, marks=marks[scenario in FAST.get(way, ())])
            for way in ways
            for scenario in ALL
        ],
    )


def selected(request: pytest.FixtureRequest) -> dict[str, set[str]]:
    """Return the scenarios that the selected tests of this file compare, by way of speculation."""
    found = defaultdict[str, set[str]](set)
    for item in request.session.items:
        if item.path == request.path:
            given = item.callspec.params if hasattr(item, "callspec") else {}
            if not given:  # it compares all scenarios
                return defaultdict(lambda: set(ALL))
            for way in (given["way"], "alone on code" if "text" in given["way"] else "alone"):
                found[way].add(given["scenario"])
    return found


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, demo_pair: Path, prompts: list[str], code_prompts: list[str]
) -> Callable[[str], Run]:
    """Return a function: way -> scenario -> token ids and growth. A way's engine runs once."""
    scenarios = selected(request)
    target, drafter = demo_pair / "target", demo_pair / "drafter"
    ways: dict[str, tuple[dict | None, list[str]]] = {
        "alone": (None, prompts),
        "alone on code": (None, code_prompts),
        "pair": (slem(drafter), prompts),
        "identity": (slem(target), prompts),
        "forced text": (slem(target, debug={"translation": "text"}), code_prompts),
        "parallel": (slem(demo_pair / "parallel"), prompts),
        "process": (slem(drafter, draft_ahead=True), prompts),
    }

    def run(way: str) -> Run:
        roomy, tight = (
            {name: run for name, run in some.items() if name in scenarios[way]}
            for some in (ROOMY, TIGHT)
        )
        return run_all(target, *ways[way], roomy, tight)

    return cache(run)


@of_each_scenario("pair", "identity", "forced text", "parallel")
def test_same_tokens_as_the_target_alone(runs: Callable, way: str, scenario: str) -> None:
    alone, counted = runs("alone on code" if way == "forced text" else "alone")[scenario]
    found, gained = runs(way)[scenario]
    assert found == alone
    if scenario == "preemption" and way == "pair":
        assert min(gained["num_preemptions"], counted["num_preemptions"]) > 0
    assert gained["num_drafts"] > 0
    assert gained["num_accepted_tokens"] > 0
    assert gained["num_draft_tokens"] <= 4 * gained["num_drafts"]
    assert "drafter_error" not in gained["skipped"]


@pytest.mark.full
def test_same_tokens_beside_a_drafter_in_its_own_process(runs: Callable) -> None:
    """The output does not depend on which drafts are ready in time."""
    for scenario, (alone, _) in runs("alone").items():
        found, gained = runs("process")[scenario]
        assert found == alone, scenario
        assert gained["skipped"].keys().isdisjoint(("drafter_error", "drafter_down")), scenario
    assert sum(gained["num_accepted_tokens"] for _, gained in runs("process").values()) > 0


@of_each_scenario("identity")
def test_drafter_equal_to_the_target_is_accepted(runs: Callable, way: str, scenario: str) -> None:
    assert _accepted(runs(way)[scenario]) >= IDENTITY


@pytest.fixture(scope="module")
def tokenizer(demo_pair: Path) -> TextTokenizer:
    file = demo_pair / "target" / "tokenizer.json"
    return load_tokenizer(Tokenizer.from_file(str(file)), "target")


@pytest.mark.full
def test_the_same_through_text(runs: Callable, tokenizer: TextTokenizer) -> None:
    rejected, allowed, spoilt, written = [], [], 0, 0
    for scenario, (outputs, gained) in runs("forced text").items():
        proposed = gained["num_draft_tokens"]
        each = [(_uncanonical(ids, tokenizer), len(ids)) for ids in outputs.values()]
        uncanonical = sum(count for count, _ in each)
        rejected.append(proposed - gained["num_accepted_tokens"])
        costs = uncanonical
        if scenario == "penalties":  # drafter and target count different tokens from there on
            costs = sum(length for count, length in each if count)
        allowed.append(LOOKAHEAD * costs)
        assert rejected[-1] <= (1 - THROUGH_TEXT_EACH) * proposed + allowed[-1], scenario
        spoilt, written = spoilt + uncanonical, written + sum(map(len, outputs.values()))
    proposed = sum(gained["num_draft_tokens"] for _, gained in runs("forced text").values())
    assert sum(rejected) <= (1 - THROUGH_TEXT) * proposed + sum(allowed)
    assert spoilt < written / 4  # otherwise the bound above allows all rejections


def _uncanonical(ids: list[int], tokenizer: TextTokenizer) -> int:
    """Return the number of tokens that the tokenizer would not produce at their place."""

    def spans(tokens: list[int]) -> set[tuple[int, int]]:
        ends = list(accumulate(len(tokenizer.token_bytes[t]) for t in tokens))
        return set(zip([0, *ends], ends, strict=False))

    return len(spans(ids) - spans(tokenizer.encode_bytes(tokenizer.decode_bytes(ids))))


def _accepted(run: tuple) -> float:
    _, gained = run
    return gained["num_accepted_tokens"] / gained["num_draft_tokens"]
