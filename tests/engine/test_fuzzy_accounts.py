# SPDX-License-Identifier: Apache-2.0
"""Fuzzy verification in the engine: lossy as asked for, announced, and accounted for."""

import logging
import re
from pathlib import Path

import pytest
from harness import engine, metrics_of, profile, slem
from target_law import Setting, counted, follows, law_of, load
from vllm import SamplingParams

from vllm_hetero_spec.engine.metrics.counters import read_stats

pytestmark = pytest.mark.engine

SETTING = Setting(0.8, top_k=3)
SAMPLES = 2000


@pytest.mark.parametrize(("threshold", "lossless"), [(0.0, True), (0.6, False)])
def test_the_threshold_decides_what_is_lost(
    demo_pair: Path,
    code_prompts: list[str],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    threshold: float,
    lossless: bool,
) -> None:
    """At 0 the target's law is kept; at 0.6 nearly every draft passes. Every request tells."""
    prompt = code_prompts[0][:200]
    model, start = load(demo_pair / "target", prompt)
    law = law_of(model, start, SETTING)
    params = SamplingParams(temperature=0.8, top_k=3, max_tokens=5, ignore_eos=True)
    spec = slem(demo_pair / "drafter", 3, method="tli", verification="fuzzy", threshold=threshold)
    room = {"max_num_seqs": 128, "max_num_batched_tokens": 32768}
    with engine(demo_pair / "target", spec, **room) as llm:
        said = capfd.readouterr()  # where vLLM logs to; pytest's own streams in a later engine
        assert "LOSSY" in said.out + said.err + caplog.text
        logger = logging.getLogger("vllm.hetero_spec")  # vLLM has set it up by now
        monkeypatch.setattr(logger, "handlers", [*logger.handlers, caplog.handler])
        profile(llm)
        caplog.set_level(logging.INFO, logger.name)
        outputs = llm.generate([prompt] * SAMPLES, params, use_tqdm=False)
        llm.generate([prompt], params, use_tqdm=False)  # the step that reports those before it
        stats, gained = read_stats(llm), metrics_of(llm)
    found = counted(output.outputs[0].token_ids for output in outputs)
    assert follows(found, law) is lossless
    assert gained["num_accepted_tokens"] < gained["num_draft_tokens"]
    assert (stats["fuzzy_tokens"] == 0) is lossless
    assert stats["fuzzy_tokens"] <= gained["num_accepted_tokens"]
    told = [m for m in caplog.messages if m.startswith("Lossy request")]
    shares = [float(re.search(r": ([\d.]+)% of \d+ tokens", m)[1]) for m in told]  # type: ignore[index]
    assert len(told) >= SAMPLES
    assert (max(shares) == 0) is lossless
