# SPDX-License-Identifier: Apache-2.0
"""Random requests of every kind that a server may meet, the same for the same seed."""

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"type": "string", "enum": ["red", "green", "blue"]},
        "ready": {"type": "boolean"},
    },
    "required": ["colour", "ready"],
    "additionalProperties": False,
}
_STOPS = ("\n\n", "def ", "return", "self", ")\n", "é")
_BAD = (
    {"temperature": -1},
    {"top_p": 2},
    {"max_tokens": 0},
    {"n": 0},
    {"min_tokens": 99, "max_tokens": 9},
    {"structured_outputs": {"regex": "(["}},
)


class Call(NamedTuple):
    """One request.

    Attributes:
        kind: What is special about it.
        path: Of the endpoint.
        body: JSON, but for the model's name.
        drop_after: Chunks of its stream after which the client goes away; None to stay.
    """

    kind: str
    path: str
    body: dict[str, Any]
    drop_after: int | None = None

    @property
    def settled(self) -> bool:
        """Whether its answer must be the same whatever the server does to give it."""
        return self.drop_after is None and self.body.get("temperature") == 0


class Texts(NamedTuple):
    """What requests are made of.

    Attributes:
        prompts: Texts to go on with.
        chats: Conversations, as messages.
        vocab_size: Ids of the target.
    """

    prompts: Sequence[str]
    chats: Sequence[list[dict[str, str]]]
    vocab_size: int


def calls(texts: Texts, count: int, seed: int) -> list[Call]:
    """So many requests, each in its own way: one of each kind, then all kinds mixed."""
    rng = random.Random(seed)
    kinds = sorted(_KINDS)
    order = [kinds[number % len(kinds)] for number in range(count)]
    first, rest = order[: len(kinds)], order[len(kinds) :]
    rng.shuffle(rest)
    return [_call(kind, texts, rng) for kind in first + rest]


def _call(kind: str, texts: Texts, rng: random.Random) -> Call:
    body: dict[str, Any] = {"temperature": 0, "max_tokens": rng.choice((1, 4, 16, 40, 90))}
    if rng.random() < 0.2:
        body["ignore_eos"] = True
    if kind == "chat" or (kind == "grammar" and rng.random() < 0.5):
        body["messages"] = rng.choice(texts.chats)
    else:
        prompt = rng.choice(texts.prompts)
        start = rng.randrange(len(prompt) // 2)
        body["prompt"] = prompt[start : start + rng.choice((8, 100, 400, 1200))]
    body |= _KINDS[kind](texts, rng)
    drop_after = rng.randint(1, 12) if kind == "dropped" else None
    return Call(kind, CHAT if "messages" in body else COMPLETIONS, body, drop_after)


def _sampled(texts: Texts, rng: random.Random) -> dict[str, Any]:
    return {
        "temperature": rng.uniform(0.2, 1.4),
        "top_p": rng.choice((1.0, 0.95, 0.6)),
        "top_k": rng.choice((-1, 1, 5, 50)),
    }


def _penalties(texts: Texts, rng: random.Random) -> dict[str, Any]:
    return {
        "presence_penalty": rng.uniform(-1, 1),
        "frequency_penalty": rng.uniform(-0.5, 1),
        "repetition_penalty": rng.uniform(0.9, 1.4),
    }


def _token_ids(texts: Texts, rng: random.Random) -> dict[str, Any]:
    return {"prompt": [rng.randrange(3, texts.vocab_size) for _ in range(rng.randint(1, 300))]}


def _named_tokens(texts: Texts, rng: random.Random) -> dict[str, Any]:
    return {"logprob_token_ids": rng.sample(range(texts.vocab_size), rng.randint(1, 20))}


def _grammar(texts: Texts, rng: random.Random) -> dict[str, Any]:
    grammar = rng.choice(({"json": SCHEMA}, {"regex": "[a-z]{3,9}\\([0-9]+\\)"}))
    sampled = rng.choice(({}, _sampled(texts, rng)))
    return {"structured_outputs": grammar, "max_tokens": 60, "ignore_eos": False, **sampled}


def _ids_only(texts: Texts, rng: random.Random) -> dict[str, Any]:
    # More than 1,024 of them end an engine on vLLM's Model Runner V2, with a drafter and without.
    return {"allowed_token_ids": rng.sample(range(texts.vocab_size), min(1000, texts.vocab_size))}


_KINDS: dict[str, Callable[[Texts, random.Random], dict[str, Any]]] = {
    "greedy": lambda texts, rng: {},
    "chat": lambda texts, rng: {},
    "sampled": _sampled,
    "seeded": lambda texts, rng: {**_sampled(texts, rng), "seed": rng.randrange(1 << 40)},
    "penalties": _penalties,
    "sampled penalties": lambda texts, rng: _sampled(texts, rng) | _penalties(texts, rng),
    "several": lambda texts, rng: {"n": rng.randint(2, 3), "temperature": 0.8},
    "logprobs": lambda texts, rng: {"logprobs": rng.randint(0, 5)},
    "echo": lambda texts, rng: {"echo": True, "logprobs": rng.choice((None, 2))},
    "named tokens": _named_tokens,
    "prompt logprobs": lambda texts, rng: {"prompt_logprobs": rng.randint(0, 3)},
    "beams": lambda texts, rng: {"use_beam_search": True, "n": 2, "max_tokens": 6},
    "truncated": lambda texts, rng: {"truncate_prompt_tokens": rng.randint(1, 40)},
    "stop strings": lambda texts, rng: {"stop": rng.sample(_STOPS, rng.randint(1, 3))},
    "stop ids": lambda texts, rng: {"stop_token_ids": rng.sample(range(texts.vocab_size), 100)},
    "least length": lambda texts, rng: {"min_tokens": 20, "max_tokens": 40},
    "bad words": lambda texts, rng: {"bad_words": ["self", " return", "x"]},
    "allowed ids": _ids_only,
    "token ids": _token_ids,
    "grammar": _grammar,
    "stream": lambda texts, rng: {"stream": True},
    "dropped": lambda texts, rng: {"stream": True, "max_tokens": 200, "ignore_eos": True},
    "lookahead": lambda texts, rng: {
        "vllm_xargs": {"hetero_spec_lookahead": rng.choice((0, 1, 2, 9, 99))}
    },
    "odd lookahead": lambda texts, rng: {
        "vllm_xargs": {"hetero_spec_lookahead": rng.choice(("2", True, False))}
    },
    "salt": lambda texts, rng: {"prompt": texts.prompts[0], "cache_salt": rng.choice("ab")},
    "unknown ids": lambda texts, rng: {"prompt": [5, texts.vocab_size + rng.randrange(1 << 20)]},
    "too long": lambda texts, rng: {"prompt": "x y " * 20_000},
    "nothing": lambda texts, rng: {"prompt": ""},
    "wrong values": lambda texts, rng: dict(rng.choice(_BAD)),
}
