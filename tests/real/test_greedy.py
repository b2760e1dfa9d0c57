# SPDX-License-Identifier: Apache-2.0
"""Greedy output of real pairs equals the target's own, and drafts are accepted.

The engines of this module run one after the other, because memory does not suffice for two.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from harness import engine, metrics_of
from real_models import MAX_TOKENS, hetero, lead_where_they_differ, scored
from scenarios import generate, greedy
from transformers import AutoTokenizer

from vllm_hetero_spec import read_stats

pytestmark = [pytest.mark.full, pytest.mark.real, pytest.mark.engine]

# Largest lead of a token, in nats, that rounding of other batch shapes may overturn.
TIES = {"float32": 1e-3, "bfloat16": 0.2}
PLAIN = [
    "The capital of France is Paris. The capital of Germany is",
    "import numpy as np\n\n\ndef softmax(x):\n",
    "Zürich, 東京 und “naïve” Café: 😀 1234567,\n\n   -",
]


class Run(NamedTuple):
    """Outputs of a target alone and with its drafter, and the counters of the second run."""

    alone: list[tuple[list[int], list[float]]]
    drafted: list[list[int]]
    acceptance: float
    stats: dict[str, Any]


def chats(model: Path, texts: list[str]) -> list[str]:
    """Return prompts in a model's chat template: one turn, a system prompt, several turns."""
    template = AutoTokenizer.from_pretrained(model).apply_chat_template
    user = [{"role": "user", "content": f"Complete this function:\n{text}"} for text in texts]
    system = {"role": "system", "content": "Answer with code only."}
    reply = {"role": "assistant", "content": "Sure. Which language?"}
    turns = [[user[0]], [system, user[1]], [user[2], reply, {"role": "user", "content": "Python."}]]
    return [template(each, tokenize=False, add_generation_prompt=True) for each in turns]


def run(
    target: Path, drafter: Path, prompts: list[str], dtype: str = "float32", **spec: Any
) -> Run:
    with engine(target, dtype=dtype) as llm:
        alone = scored(llm, prompts)
    with engine(target, hetero(drafter, **spec), dtype=dtype) as llm:
        outputs = generate(llm, prompts, greedy(max_tokens=MAX_TOKENS))
        counted, stats = metrics_of(llm), read_stats(llm)
    acceptance = 1 + counted["num_accepted_tokens"] / counted["num_drafts"]
    return Run(alone, list(outputs.values()), acceptance, stats)


@pytest.mark.parametrize("dtype", TIES)
def test_code_and_chat(qwen: Path, smollm: Path, functions: list[str], dtype: str) -> None:
    prompts = [*chats(qwen, functions), *functions[3:], *PLAIN]
    found = run(qwen, smollm, prompts, dtype)
    assert lead_where_they_differ(found.alone, found.drafted) < TIES[dtype]
    assert found.acceptance > 1.5
    assert set(found.stats["skipped"]) <= {"catching_up"}
    # The target has begun a character that the drafter would not complete.
    assert set(found.stats["untranslated"]) <= {"held_mismatch"}


def test_a_target_of_pieces(gemma: Path, smollm: Path, functions: list[str]) -> None:
    """The target is a base model: prompts have no chat template and begin with a control token."""
    added = AutoTokenizer.from_pretrained(gemma)("").input_ids
    prompts = [("" if added else "<bos>") + text for text in [*functions[3:], *PLAIN]]
    found = run(gemma, smollm, prompts)
    assert lead_where_they_differ(found.alone, found.drafted) < TIES["float32"]
    assert found.acceptance > 1.3
    assert set(found.stats["skipped"]) <= {"catching_up"}


@pytest.mark.parametrize(
    ("name", "translation", "share"),
    [("smollm", "identity", 0.99), ("smollm", "text", 0.9), ("gemma", "identity", 0.99)],
)
def test_a_drafter_that_is_the_target_is_accepted_whole(
    request: pytest.FixtureRequest, functions: list[str], name: str, translation: str, share: float
) -> None:
    """Gemma has sliding windows, 262,144 tokens and no chat template."""
    model: Path = request.getfixturevalue(name)
    prompts = functions[:3] if name == "gemma" else chats(model, functions)
    found = run(model, model, [*prompts, *PLAIN], debug={"translation": translation})
    assert lead_where_they_differ(found.alone, found.drafted) < TIES["float32"]
    accepted = (found.acceptance - 1) * found.stats["drafts"] / found.stats["draft_tokens"]
    assert accepted > share
