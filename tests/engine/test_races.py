# SPDX-License-Identifier: Apache-2.0
"""Races: a seed has one output, with any drafter, draft length and batch size."""

import os
from pathlib import Path
from typing import Any

import pytest
from chain_pair import PROMPT
from harness import engine, metrics_of, slem
from target_law import Setting, load, raced
from vllm import SamplingParams

from vllm_hetero_spec.engine.seam.request_params import LOOKAHEAD_ARG

pytestmark = pytest.mark.engine

full = pytest.mark.full
REQUESTS = int(os.environ.get("HETERO_SPEC_RACES", "60"))
VARIANTS = [
    pytest.param("drafter", 16, {"method": "slem", "lookahead": 4}, id="slem", marks=full),
    pytest.param("drafter", 1, {"method": "tli", "lookahead": 1}, id="one by one", marks=full),
    pytest.param("drafter", 16, {"method": "push_forward", "lookahead": 8}, id="long drafts"),
    pytest.param("target", 16, {"method": "tli", "lookahead": 4}, id="target", marks=full),
]


def outputs(
    pair: Path, drafter: str, batch: int, wish: int | None = None, **changes: Any
) -> tuple[list[list[int]], float]:
    """Return the outputs of seeded requests, and the accepted tokens per draft."""
    spec = slem(pair / drafter, verification="race", **changes)
    with engine(pair / "target", spec, max_num_seqs=batch) as llm:
        params = [
            SamplingParams(
                temperature=0.9,
                top_p=0.95,
                seed=s,
                max_tokens=24,
                ignore_eos=True,
                extra_args={LOOKAHEAD_ARG: wish},
            )
            for s in range(REQUESTS)
        ]
        texts = [PROMPT[s % 20 :] for s in range(REQUESTS)]
        found = [list(o.outputs[0].token_ids) for o in llm.generate(texts, params, use_tqdm=False)]
        gained = metrics_of(llm)
    return found, gained["num_accepted_tokens"] / max(1, gained["num_drafts"])


@pytest.fixture(scope="module")
def undrafted(chain_pair: Path) -> list[list[int]]:
    """Outputs of requests that disable drafts."""
    nothing, _ = outputs(chain_pair, "drafter", 16, method="slem", lookahead=1, wish=0)
    assert len({tuple(ids) for ids in nothing}) > REQUESTS // 2
    same = list(range(0, REQUESTS, 20))  # seeds of requests with the same prompt
    model, start = load(chain_pair / "target", PROMPT)
    setting = Setting(0.9, top_p=0.95)
    assert [nothing[seed] for seed in same] == raced(model, start, setting, same, 24)
    return nothing


@pytest.mark.parametrize(("drafter", "batch", "changes"), VARIANTS)
def test_drafters_change_nothing(
    chain_pair: Path, undrafted: list[list[int]], drafter: str, batch: int, changes: dict[str, Any]
) -> None:
    found, accepted = outputs(chain_pair, drafter, batch, **changes)
    assert found == undrafted
    assert accepted > (2.5 if drafter == "target" else 0)
