# SPDX-License-Identifier: Apache-2.0
"""Fuzzy verification in the engine: its threshold sets the loss, which is logged and counted."""

import logging
import re
from pathlib import Path

import pytest
from chain_pair import PROMPT, unknown
from goodness import MISSED, follows, missed
from harness import engine, metrics_of, profile, slem
from target_law import Setting, counted, law_of, load, third_is_one_of, thirds
from vllm import SamplingParams

from vllm_hetero_spec import read_stats

pytestmark = [pytest.mark.full, pytest.mark.engine]

SAMPLES = 1000


@pytest.mark.parametrize(("threshold", "lossless"), [(0.0, True), (0.7, False)])
def test_the_threshold_decides_what_is_lost(
    chain_pair: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    threshold: float,
    lossless: bool,
) -> None:
    """At 0 samples follow the target's law; above log 2 every draft token is accepted."""
    (model, start), tokens = load(chain_pair / "target", PROMPT), unknown(chain_pair / "target")
    unwritten = third_is_one_of(model, start, Setting(1.0), tokens)
    assert missed(unwritten, {True: 0.0, False: 1.0}, SAMPLES) < MISSED
    params = SamplingParams(temperature=1.0, max_tokens=5, ignore_eos=True)
    verification = {"fuzzy": {"threshold": threshold}}
    spec = slem(chain_pair / "drafter", 3, method="tli", verification=verification)
    room = {"max_num_seqs": 128, "max_num_batched_tokens": 32768}
    with engine(chain_pair / "target", spec, **room) as llm:
        said = capfd.readouterr()  # vLLM's log; a later engine logs to pytest's own streams
        assert "LOSSY" in said.out + said.err + caplog.text
        logger = logging.getLogger("vllm.hetero_spec")  # vLLM has configured it before
        monkeypatch.setattr(logger, "handlers", [*logger.handlers, caplog.handler])
        profile(llm)
        caplog.set_level(logging.INFO, logger.name)
        outputs = llm.generate([PROMPT] * SAMPLES, params, use_tqdm=False)
        stats, gained = read_stats(llm), metrics_of(llm)
    drawn = [output.outputs[0].token_ids for output in outputs]
    assert follows(counted(drawn), law_of(model, start, Setting(1.0))) or not lossless
    assert follows(thirds(drawn, tokens), unwritten) is lossless
    assert (gained["num_accepted_tokens"] < gained["num_draft_tokens"]) is lossless
    assert (stats["fuzzy_tokens"] == 0) is lossless
    assert stats["fuzzy_tokens"] <= gained["num_accepted_tokens"]
    told = {m for m in caplog.messages if m.startswith("Lossy request")}  # by two handlers
    counts = [int(re.search(r": (\d+) tokens", m)[1]) for m in told]  # type: ignore[index]
    assert len(told) == SAMPLES
    assert sum(counts) >= stats["fuzzy_tokens"]  # the last ones are read at shutdown
    assert (max(counts) == 0) is lossless
