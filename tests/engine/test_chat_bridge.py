# SPDX-License-Identifier: Apache-2.0
"""Chat prompts: the drafter reads its own turn markers, and the target's output does not change."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from harness import BASE, engine, metrics_of, proposer_of, slem
from scenarios import Outputs, greedy
from transformers import AutoTokenizer

pytestmark = pytest.mark.engine

Messages = list[dict[str, str]]


@pytest.fixture(scope="module")
def chats(demo_pair: Path) -> list[Messages]:
    """Held-out conversations with and without a system turn; the last turn is the user's."""
    lines = (demo_pair / "chats.jsonl").read_text().splitlines()[:6]
    found = [json.loads(line)["messages"] for line in lines]
    return found + [[{"role": "system", "content": "Write code."}, *m] for m in found[:2]]


def answers(llm: Any, chats: list[Messages]) -> Outputs:
    outputs = llm.chat(chats, greedy(max_tokens=32), use_tqdm=False)
    return {str(i): list(output.outputs[0].token_ids) for i, output in enumerate(outputs)}


@pytest.fixture(scope="module")
def run(demo_pair: Path, chats: list[Messages]) -> dict[str, Any]:
    """Answers of the target alone and with the drafter, and the drafter's contexts."""
    found: dict[str, Any] = {"contexts": []}
    with engine(demo_pair / "target") as llm:
        found["alone"] = answers(llm, chats)
    with engine(demo_pair / "target", slem(demo_pair / "drafter")) as llm:
        bridge = proposer_of(llm).drafting.bridge
        real = bridge.open

        def recording(*args: Any) -> Any:
            found["contexts"].append(real(*args))
            return found["contexts"][-1]

        bridge.open = recording
        found["bridge"] = bridge.chat
        found["with drafter"] = answers(llm, chats)
        found["metrics"] = metrics_of(llm)
    return found


@pytest.mark.full
def test_greedy_chat_is_the_targets_own(run: dict[str, Any]) -> None:
    assert run["with drafter"] == run["alone"]
    assert run["metrics"]["num_drafts"] > 0
    assert run["metrics"]["num_accepted_tokens"] > 0


@pytest.mark.full
def test_the_drafter_reads_its_own_template(
    run: dict[str, Any], chats: list[Messages], demo_pair: Path
) -> None:
    assert run["bridge"].roles == ("system", "user", "assistant")
    assert len(run["contexts"]) == len(chats)
    drafter = AutoTokenizer.from_pretrained(demo_pair / "drafter")
    own = [
        drafter.encode(  # with the BOS that the tokenizer puts before every text
            drafter.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        )
        for messages in chats
    ]
    for context in run["contexts"]:
        # The header's last token, a new line, may have merged with the first token of the reply.
        own.remove(next(ids for ids in own if context.ids[: len(ids) - 1] == ids[:-1]))
    assert not own


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({}, "turn markers are bridged (system, user, assistant)."),
        ({"debug": {"chat_template": "off"}}, "turn markers are not bridged: switched off."),
    ],
)
def test_one_line_says_what_becomes_of_markers(
    demo_pair: Path, option: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    import vllm_hetero_spec

    vllm_hetero_spec.register()
    caplog.set_level(logging.INFO, "vllm.hetero_spec")
    limits = {key: value for key, value in BASE.items() if key != "disable_log_stats"}
    spec = slem(demo_pair / "drafter", **option)
    EngineArgs(str(demo_pair / "target"), **limits, speculative_config=spec).create_engine_config()
    lines = [message for message in caplog.messages if "turn markers" in message]
    assert lines == [f"Chat templates of target and drafter: {said}"]
