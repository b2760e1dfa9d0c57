# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` on Model Runner V2 serves requests that V1 refuses while it speculates."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from _server import wait_until_healthy
from harness import v2_environment
from serving import Server, launched
from test_server import PROMPTS, complete, counters, speculative
from transformers import AutoTokenizer

pytestmark = [pytest.mark.full, pytest.mark.server]


@pytest.fixture(scope="module")
def servers(
    demo_pair: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server]]:
    """The target with the drafter on V2, and alone on V1; both start at the same time."""
    pytest.importorskip("triton")
    logs, target = tmp_path_factory.mktemp("logs"), demo_pair / "target"
    flags = ("--speculative-config", speculative(demo_pair / "drafter"))
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                launched(target, logs / "v2.log", *flags, environment=v2_environment())
            ),
            stack.enter_context(launched(target, logs / "alone.log")),
        ]
        for server, log in zip(started, ("v2.log", "alone.log"), strict=True):
            wait_until_healthy(server.url, server.process, logs / log)
        yield started[0], started[1]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_tokens_are_banned_in_drafts_too(
    servers: tuple[Server, Server], demo_pair: Path, prompt: str
) -> None:
    """The banned tokens are those with which the target's own text begins.

    The drafter does not receive `logit_bias`, so it still drafts them.
    """
    server, alone = servers
    plain = complete(alone, prompt).choices[0].text
    ids = AutoTokenizer.from_pretrained(demo_pair / "target").encode(plain)
    bias = {str(token): -100 for token in ids[:6]}
    before = counters(server)
    found, expected = (
        complete(each, prompt, logit_bias=bias).choices[0].text for each in (server, alone)
    )
    assert found == expected != plain
    assert counters(server)["drafts"] > before["drafts"]


def test_no_token_is_drawn_but_the_likeliest(servers: tuple[Server, Server]) -> None:
    """With min_p = 1 only the likeliest token may be sampled, also if it was drafted."""
    server, alone = servers
    before = counters(server)
    for prompt in PROMPTS:
        hot = {"temperature": 1.0, "extra_body": {"min_p": 1.0}}
        found = complete(server, prompt, **hot).choices[0].text
        assert found == complete(alone, prompt).choices[0].text
    assert counters(server)["drafts"] > before["drafts"]
