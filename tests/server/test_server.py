# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with a drafter, tested with an OpenAI client and the text of /metrics."""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from _server import serve_command, wait_until_healthy
from _soak_calls import SCHEMA, calls
from prometheus_client.parser import text_string_to_metric_families
from serving import Server, launched
from soak import Answer, complaints, soak, texts_of

pytestmark = pytest.mark.server

LOOKAHEAD = 4
PROMPTS = (
    "def main():\n    parser = argparse.ArgumentParser(",
    "class Node:\n    def __init__(self, value):\n        self.value",
    "import os\nimport sys\n\n\ndef read_lines(path):\n    with open(",
)
CHAT = [{"role": "user", "content": "Write a function that reads a file."}]


def speculative(drafter: Path, **changes: Any) -> str:
    """Return the value of --speculative-config; a change to None removes the key."""
    config = {
        "method": "slem",
        "model": str(drafter),
        "num_speculative_tokens": LOOKAHEAD,
        "controller": "fixed",
    }
    kept = {key: value for key, value in {**config, **changes}.items() if value is not None}
    return json.dumps(kept)


@pytest.fixture(scope="module")
def servers(
    request: pytest.FixtureRequest, demo_pair: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Server]]:
    """The target served with the drafter, and alone if a test uses it.

    Both servers start at the same time.
    """
    logs = tmp_path_factory.mktemp("logs")
    flags = {
        "drafter": (
            *("--speculative-config", speculative(demo_pair / "drafter")),
            *("--per-request-spec-decode-metrics", "summary"),
        ),
        "alone": (),
    }
    used = {
        name
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path
        for name in item.fixturenames
    }
    with contextlib.ExitStack() as stack:
        started = {}
        for name, extra in flags.items():
            if name == "drafter" or name in used:
                manager = launched(demo_pair / "target", logs / f"{name}.log", *extra)
                started[name] = stack.enter_context(manager)
        for name, server in started.items():
            wait_until_healthy(server.url, server.process, logs / f"{name}.log")
        yield started


@pytest.fixture(scope="module")
def server(servers: dict[str, Server]) -> Server:
    return servers["drafter"]


@pytest.fixture(scope="module")
def alone(servers: dict[str, Server]) -> Server:
    return servers["alone"]


def complete(server: Server, prompt: str, **options: Any) -> Any:
    """Return a greedy completion of 48 tokens, unless `options` differ."""
    asked = {"max_tokens": 48, "temperature": 0, **options}
    return server.client.completions.create(model=server.model, prompt=prompt, **asked)


def counters(server: Server) -> dict[str, float]:
    """Return vLLM's speculation counters; accepted tokens by position are `accepted[0]`, ..."""
    found = {}
    for family in text_string_to_metric_families(server.metrics()):
        for sample in family.samples:
            name = sample.name.removeprefix("vllm:spec_decode_num_").removesuffix("_total")
            if name == "accepted_tokens_per_pos":
                found[f"accepted[{sample.labels['position']}]"] = sample.value
            elif sample.name.startswith("vllm:spec_decode_num_") and "created" not in name:
                found[name] = sample.value
    return found


def drafter_counters(server: Server) -> dict[str, float]:
    """Return the drafter's metrics without buckets; labels are appended: `skipped[no_blocks]`."""
    found = {}
    for family in text_string_to_metric_families(server.metrics()):
        for sample in family.samples:
            of = [v for k, v in sample.labels.items() if k not in ("model_name", "engine")]
            name = sample.name.removeprefix("vllm:hetero_spec_").removesuffix("_total")
            if sample.name.startswith("vllm:hetero_spec_") and "le" not in sample.labels:
                found[f"{name}[{of[0]}]" if of else name] = sample.value
    return found


@pytest.mark.parametrize("prompt", PROMPTS)
def test_drafts_change_no_greedy_completion(server: Server, prompt: str) -> None:
    """A request without drafts has the same text."""
    before = counters(server)
    undrafted = {"vllm_xargs": {"hetero_spec_lookahead": 0}}
    own = complete(server, prompt, extra_body=undrafted).choices[0].text
    assert counters(server) == before
    assert complete(server, prompt).choices[0].text == own
    assert counters(server)["accepted_tokens"] > before["accepted_tokens"]


@pytest.mark.full
def test_greedy_chat_is_the_targets_own(server: Server, alone: Server) -> None:
    replies = [
        s.client.chat.completions.create(model=s.model, messages=CHAT, max_tokens=32, temperature=0)
        for s in (server, alone)
    ]
    assert replies[0].choices[0].message.content == replies[1].choices[0].message.content
    assert replies[0].usage == replies[1].usage


def test_streamed_text_is_the_whole_text(server: Server) -> None:
    whole = complete(server, PROMPTS[0]).choices[0].text
    pieces = [chunk.choices[0].text for chunk in complete(server, PROMPTS[0], stream=True)]
    assert "".join(pieces) == whole


def test_several_sampled_completions(server: Server) -> None:
    completion = complete(server, PROMPTS[0], n=2, temperature=0.8)
    assert [choice.index for choice in completion.choices] == [0, 1]
    assert completion.choices[0].text != completion.choices[1].text
    assert completion.usage.completion_tokens <= 2 * 48


def test_completion_ends_before_a_stop_string(server: Server) -> None:
    whole = complete(server, PROMPTS[1]).choices[0].text
    stop = whole[len(whole) // 2 :][:4]
    choice = complete(server, PROMPTS[1], stop=[stop]).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.text == whole[: whole.index(stop)]


@pytest.mark.full
def test_logprobs_are_the_targets_own(server: Server, alone: Server) -> None:
    found, expected = (
        complete(s, PROMPTS[2], logprobs=2).choices[0].logprobs for s in (server, alone)
    )
    assert found.tokens == expected.tokens
    assert found.token_logprobs == pytest.approx(expected.token_logprobs, abs=1e-3)
    for token, value, top in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert len(top) == 2
        assert max(top.values()) == pytest.approx(value, abs=1e-6), token


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_json_schema_is_kept(server: Server, temperature: float) -> None:
    reply = server.client.chat.completions.create(
        model=server.model,
        messages=CHAT,
        max_tokens=200,
        temperature=temperature,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
        },
    )
    assert reply.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(reply.choices[0].message.content), SCHEMA)


@pytest.mark.parametrize(
    "asked",
    [{"logit_bias": {"7": 1}}, {"temperature": 1, "extra_body": {"min_p": 0.1}}],
    ids=lambda asked: "min_p" if "extra_body" in asked else "logit_bias",
)
def test_what_v1_leaves_out_of_drafts_is_refused(server: Server, asked: dict[str, Any]) -> None:
    """Model Runner V2 serves such a request: see `test_server_v2.py`."""
    with pytest.raises(openai.BadRequestError, match="min_p and logit_bias"):
        complete(server, PROMPTS[0], **asked)


def test_a_request_sets_its_own_lookahead(server: Server) -> None:
    """The value may also be text or a boolean.

    A wrong value is answered with HTTP 400, for a stream too.
    """

    def ask(streams: bool = False, **xargs: Any) -> None:
        complete(server, PROMPTS[0], stream=streams, extra_body={"vllm_xargs": xargs})

    before = counters(server)
    ask(hetero_spec_lookahead=False)
    ask(hetero_spec_lookahead="0")
    assert counters(server) == before
    ask(hetero_spec_lookahead=True)
    assert counters(server)["accepted[1]"] > before["accepted[1]"]
    for streams in (False, True):
        for value in (2.5, -1, "many"):
            with pytest.raises(openai.BadRequestError, match=f"lookahead is {value!r}; it must be"):
                ask(streams, hetero_spec_lookahead=value)
        with pytest.raises(openai.BadRequestError, match=r"did you mean 'hetero_spec_lookahead'\?"):
            ask(streams, hetero_spec_lookahed=1)
    with pytest.raises(openai.BadRequestError, match="hetero_spec_lookahead is -1; it must be"):
        server.client.chat.completions.create(
            model=server.model,
            messages=CHAT,
            extra_body={"vllm_xargs": {"hetero_spec_lookahead": -1}},
        )


def test_metrics_agree_with_each_other(server: Server) -> None:
    for prompt in PROMPTS:
        complete(server, prompt)
    found = counters(server)
    assert 0 < found["accepted_tokens"] <= found["draft_tokens"] <= found["drafts"] * LOOKAHEAD
    by_position = [found[f"accepted[{position}]"] for position in range(LOOKAHEAD)]
    assert by_position == sorted(by_position, reverse=True)
    assert by_position[0] <= found["drafts"]
    assert sum(by_position) == found["accepted_tokens"]


def test_only_tokens_proposed_are_counted(server: Server) -> None:
    """A completion of three tokens has room for one draft token, after its first token."""
    before = counters(server)
    for prompt in PROMPTS:
        complete(server, prompt, max_tokens=3)
    after = counters(server)
    drafts = after["drafts"] - before["drafts"]
    assert drafts > 0
    assert after["draft_tokens"] - before["draft_tokens"] == drafts


def test_drafter_metrics_grow_and_agree_with_vllms(server: Server) -> None:
    before, vllm_before = drafter_counters(server), counters(server)
    for prompt in PROMPTS:
        # If only the last token ends a request, every draft token is verified.
        complete(server, prompt, extra_body={"ignore_eos": True})
    after, vllm_after = drafter_counters(server), counters(server)
    grown = {name: value - before[name] for name, value in after.items()}
    for name in ("drafts", "draft_tokens"):
        assert grown[name] == vllm_after[name] - vllm_before[name] > 0
    lengths = {length: grown[f"drafts_by_length[{length}]"] for length in range(1, LOOKAHEAD + 1)}
    assert sum(lengths.values()) == grown["drafts"]
    assert sum(length * count for length, count in lengths.items()) == grown["draft_tokens"]
    assert grown["drafter_tokens"] > 0
    assert grown["catch_up_tokens"] > 0
    assert not any(grown[f"skipped[{reason}]"] for reason in ("drafter_error", "no_blocks"))
    assert grown["drafts"] <= grown["steps"] == grown["propose_seconds_count"]
    assert grown["verify_seconds_count"] <= grown["steps"]
    assert grown["verify_seconds_sum"] > 0
    inside = grown["translate_seconds_sum"] + grown["forward_seconds_sum"]
    assert 0 < inside <= grown["propose_seconds_sum"]
    assert 0 < after["kv_blocks_held"] < after["kv_blocks"]


@pytest.mark.full
def test_server_without_a_drafter_has_none_of_its_metrics(alone: Server) -> None:
    complete(alone, PROMPTS[0])
    assert "vllm:generation_tokens_total" in alone.metrics()
    assert drafter_counters(alone) == {}


def test_figures_of_one_request_are_in_its_answer(server: Server) -> None:
    before = counters(server)
    completion = complete(server, PROMPTS[0])
    figures = completion.model_extra["metrics"]["speculative_decoding"]
    after = counters(server)
    assert figures["num_spec_tokens"] == LOOKAHEAD
    assert figures["num_draft_tokens"] == after["draft_tokens"] - before["draft_tokens"] > 0
    accepted = after["accepted_tokens"] - before["accepted_tokens"]
    assert figures["num_accepted_draft_tokens"] == accepted


@pytest.mark.full
def test_wrong_configurations_stop_the_server_with_one_sentence(
    demo_pair: Path, tmp_path: Path
) -> None:
    drafter = demo_pair / "drafter"
    wrong = {
        speculative(drafter, method="slemm"): "'slemm' does not exist; did you mean 'slem'?",
        speculative(drafter, model=None): "speculative method 'slem' needs a drafter",
        speculative(tmp_path / "absent"): f"the drafter '{tmp_path / 'absent'}' cannot be used",
    }
    processes = [
        subprocess.Popen(
            serve_command(demo_pair / "target", "--speculative-config", config),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for config in wrong
    ]
    for process, sentence in zip(processes, wrong.values(), strict=True):
        try:
            printed, _ = process.communicate(timeout=180)
        finally:
            process.kill()
        assert process.returncode not in (0, None)
        assert sentence in printed.splitlines()[-1]


@pytest.mark.full
def test_a_soak_of_requests_of_all_kinds(
    server: Server, alone: Server, demo_pair: Path, tmp_path: Path
) -> None:
    """No call fails, greedy answers are the target's own, and no state of a request remains."""
    todo = calls(
        texts_of(demo_pair / "target", demo_pair / "prompts.jsonl", demo_pair / "chats.jsonl"),
        count=200,
        seed=3,
    )
    done = [soak(each.url, each.model, each.process.pid, todo) for each in (server, alone)]
    assert complaints(todo, *done) == []
    assert {answer.status for answer in done[0].answers} == {200, 400}
    free = {call.kind for call in todo} - {call.kind for call in todo if call.settled}
    assert free == {"sampled", "seeded", "sampled penalties", "several", "dropped"}
    # Injected faults must be reported.
    late = done[0].late | {"files": done[0].late["files"] + 9}
    number = next(i for i, call in enumerate(todo) if call.settled and done[0].answers[i].texts)
    answers = list(done[0].answers)
    answers[number] = Answer(200, (("something else", "stop"),))
    answers[-1] = Answer(500)
    counters = done[0].counters | {"kv_blocks_held": 3.0, "requests_held": 1.0}
    spoilt = done[0]._replace(answers=answers, late=late, counters=counters)
    assert len(complaints(todo, spoilt, done[1])) == 5
