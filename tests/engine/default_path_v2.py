# SPDX-License-Identifier: Apache-2.0
"""The code that runs in a step of the default configuration, on Model Runner V2.

A chain is drafted in the engine's process, with the defaults of all options but copies of earlier
text. The functions that run are what a reader of the default path has to read.
`test_fast_children.py` runs this in a child.
"""

import inspect
import sys
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType

import pytest
from harness import engine
from test_structure import ROOMS, named

import vllm_hetero_spec
from vllm_hetero_spec.engine.seam.request_params import LOOKAHEAD_ARG

PACKAGE = Path(vllm_hetero_spec.__file__).parent
LINES = 5000  # at most; timings decide which functions of the controller run
# Most of these lines are in few files. The other files contribute small helpers.
FILES, SHARE = 30, 0.8
# Files of each part of a round. If one did not run, nothing was drafted or verified.
PARTS = (
    "drafter/decode_loop",
    "drafter/draft_batch",
    "verifier/rejection_sampler_v2",
    "seam/runner_v2",
)

Lines = dict[str, set[int]]


@pytest.fixture(scope="module")
def ran(demo_pair: Path, code_prompts: list[str]) -> Lines:
    """Line numbers of the functions that ran, by file, without start-up."""
    from vllm import SamplingParams

    found: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            found.add(frame.f_code)

    spec = {"method": "hetero", "model": str(demo_pair / "drafter"), "num_speculative_tokens": 4}
    with engine(demo_pair / "target", spec | {"debug": {"copies": False}}, max_num_seqs=8) as llm:
        sys.setprofile(note)
        try:
            parameters = [
                SamplingParams(temperature=heat, max_tokens=32, extra_args=wish)
                for wish in (None, {LOOKAHEAD_ARG: 3})  # always drafts, on a slow machine too
                for heat in (0, 1)
            ]
            llm.generate(code_prompts[:8], parameters * 2, use_tqdm=False)
        finally:
            sys.setprofile(None)
    lines: Lines = defaultdict(set)
    for code in found:
        if not code.co_name.startswith("<"):  # a part of another function
            source, first = inspect.getsourcelines(code)
            lines[named(Path(code.co_filename))].update(range(first, first + len(source)))
    return lines


def test_the_default_path_is_short(ran: Lines) -> None:
    assert all(f"engine/{part}.py" in ran for part in PARTS)
    sizes = sorted(map(len, ran.values()), reverse=True)
    assert sum(sizes) <= LINES
    assert sum(sizes[:FILES]) >= SHARE * sum(sizes)


def test_no_optional_feature_runs(ran: Lines) -> None:
    rooms = tuple(f"{room.replace('.', '/')}/" for room in ROOMS)
    assert not [file for file in ran if file.startswith(rooms)]
