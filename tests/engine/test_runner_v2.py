# SPDX-License-Identifier: Apache-2.0
"""Engines on Model Runner V2 of each release: output, counters and choice of the runner.

On a CPU, vLLM uses V2 only with Triton's interpreter as a backend (`v2_on_cpu`), in a separate
process. These tests compare the results of that process.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from child_tests import passed
from harness import HERE, v2_environment
from scenarios import Run
from test_identity import IDENTITY
from v2_runs import SOME, WAYS, run_way

pytestmark = [pytest.mark.full, pytest.mark.engine, pytest.mark.usefixtures("demo_pair")]

# Scenarios in which some drafts are shorter on V1.
ENDED_SOONER = {"min_tokens", "stops behind min_tokens", "mixed parameters"}

Factory = pytest.TempPathFactory
Found = tuple[dict[str, Run], str]


@pytest.fixture(scope="module")
def few(code_prompts: list[str]) -> list[str]:
    return code_prompts[:8]


def found_by(release: str, folder: Path, demo: Path, few: list[str], *paths: Path) -> Found:
    """Return results of a V2 process (way -> scenario -> token ids and counters), and its log."""
    environment = v2_environment(*paths) | {
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",  # for two pipeline stages
        "XDG_CACHE_HOME": str(folder),  # without estimates of earlier starts
    }
    out = folder / "found.json"
    told = [release, str(demo), json.dumps(few), str(out)]
    command = [sys.executable, str(HERE / "v2_runs.py"), *told]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-8000:]
    return json.loads(out.read_text()), log


# These are two fixtures, because pytest's order would run a release twice with parameters.
@pytest.fixture(scope="module")
def on_installed(demo_pair: Path, few: list[str], tmp_path_factory: Factory) -> Found:
    pytest.importorskip("triton")
    return found_by("installed", tmp_path_factory.mktemp("v2"), demo_pair, few)


@pytest.fixture(scope="module")
def on_033(demo_pair: Path, few: list[str], tmp_path_factory: Factory, runs_033: Path) -> Found:
    pytest.importorskip("triton")
    return found_by("0.33", tmp_path_factory.mktemp("v2"), demo_pair, few, runs_033)


@pytest.fixture(params=WAYS)
def on_v2(request: pytest.FixtureRequest) -> Found:
    found: Found = request.getfixturevalue(f"on_{request.param.replace('.', '')}")
    return found


def test_v2_is_chosen_without_being_asked_for(on_v2: tuple) -> None:
    _, log = on_v2
    assert "Drafting for Model Runner V2 (vLLM's default)" in log
    assert "V1 model runner" not in log
    assert "Model Runner V1" not in log
    assert "does not yet support" not in log


def of_releases(*left_out: str) -> pytest.MarkDecorator:
    """Parametrize a test by release and its ways of drafting."""
    every = [(on, way) for on, ways in WAYS.items() for way in ways if way not in left_out]
    return pytest.mark.parametrize(("on_v2", "way"), every, indirect=["on_v2"])


@pytest.mark.parametrize("scenario", SOME)
@of_releases("alone")
def test_same_tokens_as_the_target_alone(on_v2: tuple, way: str, scenario: str) -> None:
    runs, _ = on_v2
    ids, gained = runs[way][scenario]
    assert ids == runs["alone"][scenario][0]
    assert gained["num_drafts"] > 0
    assert "drafter_error" not in gained["skipped"]


@pytest.mark.parametrize("scenario", SOME)
@of_releases("alone", "pair", "pair, ahead", "parallel, ahead")
def test_drafter_equal_to_the_target_is_accepted(on_v2: tuple, way: str, scenario: str) -> None:
    """Padding is not counted: with asynchronous scheduling all drafts have one length."""
    _, gained = on_v2[0][way][scenario]
    assert gained["num_accepted_tokens"] >= IDENTITY * gained["num_draft_tokens"]


def test_preemption_was_forced(on_v2: tuple) -> None:
    pair = on_v2[0]["pair, ahead"]
    assert sum(gained["num_preemptions"] for _, gained in pair.values()) > 0


def test_both_models_are_timed(on_v2: tuple) -> None:
    runs, log = on_v2
    assert "Timed target and drafter in" in log
    assert "could not be timed" not in log
    ids, alone = (runs[way]["batch 8"][0] for way in ("calibrated", "alone"))
    assert list(ids.values()) == list(alone.values())


@pytest.mark.parametrize("on_v2", ["installed"], indirect=True)
def test_counts_are_those_of_v1(on_v2: tuple, on_v1: Run) -> None:
    """In at most one scenario, the counters may differ by 10 %.

    Rounding may decide if two tokens of the drafter are almost equally likely, and CPUs round
    differently. Scenarios in which V1 shortens drafts are left out.
    """
    pair, others = on_v2[0]["pair"], {}
    for scenario in SOME.keys() - {"structured output"}:  # grammars take varying time
        ids, gained = pair[scenario]
        expected, counted = on_v1[scenario]
        assert ids == expected, scenario
        if scenario in ENDED_SOONER:
            continue
        metrics = counted.keys() - {"skipped"}  # this is a total of all scenarios so far
        if different := {m: (gained[m], counted[m]) for m in metrics if gained[m] != counted[m]}:
            others[scenario] = different
            close = {metric: pytest.approx(counted[metric], rel=0.1) for metric in different}
            assert {metric: gained[metric] for metric in different} == close, scenario
    assert len(others) <= 1, others


def test_kernels_do_what_triton_makes_of_them() -> None:
    """The other tests run V2's kernels in numpy: see `v2_on_cpu` and `lanes_v2.py`."""
    pytest.importorskip("triton")
    passed(["lanes_v2.py"], v2_environment() | {"V2_CHECK": "1"})


def passed_on_v2(files: Sequence[str], names: str) -> str:
    """Run these tests in one V2 process. Return pytest's output if all of them passed."""
    pytest.importorskip("triton")
    return passed(files, v2_environment(), names)


def test_what_holds_on_v1_holds_on_v2() -> None:
    """Rounds in two phases, drafters that fail, a target with an adapter, and a drafter process."""
    files = ("test_recorded_engine.py", "test_faults.py", "test_lora.py", "test_drafter_process.py")
    names = "as_on_a_device or drafter_that_raises or adapted or targets_own or sleeps"
    assert "5 passed" in passed_on_v2(files, names)


def test_what_requests_bring_holds_on_v2() -> None:
    """KV from another instance, images, prompts without text, and salts."""
    files = ("test_kv_transfer.py", "test_media.py", "test_prefix_reuse.py")
    assert "4 passed" in passed_on_v2(files, "")


V1 = """
import sys
from pathlib import Path

from harness import engine, proposer_of, slem

pair = Path(sys.argv[1])
with engine(pair / "target", slem(pair / "drafter")) as llm:
    print(type(proposer_of(llm).seam).__name__)
"""


def test_v1_serves_where_it_is_asked_for(demo_pair: Path) -> None:
    pytest.importorskip("triton")
    asked = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_LOGGING_LEVEL": "INFO"}
    done = subprocess.run(
        [sys.executable, "-c", V1, str(demo_pair)],
        env=v2_environment() | asked,
        capture_output=True,
        text=True,
    )
    log = done.stdout + done.stderr
    assert "RunnerV1" in done.stdout.splitlines(), log[-6000:]
    assert "Drafting for Model Runner V1 (VLLM_USE_V2_MODEL_RUNNER=0)" in log


@pytest.fixture(scope="module")
def on_v1(demo_pair: Path, few: list[str]) -> Run:
    """The results of `pair` on V1."""
    return run_way("pair", demo_pair, few)


def test_two_ranks_have_the_same_drafts() -> None:
    """Each rank writes drafts to its own runner. If they differed, the output would be wrong."""
    names = "same_tokens_on_two or trees_on_two or no_trees_where_one"
    assert "3 passed" in passed_on_v2(["test_tensor_parallel.py"], names)
