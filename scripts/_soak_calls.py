# SPDX-License-Identifier: Apache-2.0
"""Random requests of every kind that a server may receive, determined by a seed."""

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_PROPERTIES = {
    "colour": {"type": "string", "enum": ["red", "green", "blue"]},
    "ready": {"type": "boolean"},
}
SCHEMA = {
    "type": "object", "properties": _PROPERTIES, "required": [*_PROPERTIES],
    "additionalProperties": False,
}  # fmt: skip
_STOPS = ("\n\n", "def ", "return", "self", ")\n", "é")
_BAD = (
    {"temperature": -1}, {"top_p": 2}, {"max_tokens": 0}, {"n": 0},
    {"min_tokens": 99, "max_tokens": 9}, {"structured_outputs": {"regex": "(["}},
)  # fmt: skip


class Call(NamedTuple):
    """One request; its body does not contain the name of the model."""

    kind: str  # a key of `_KINDS`
    path: str
    body: dict[str, Any]
    drop_after: int | None = None  # stream chunks after which the client disconnects

    @property
    def settled(self) -> bool:
        """True if the answer must be equal with and without a drafter."""
        return self.drop_after is None and self.body.get("temperature") == 0


class Texts(NamedTuple):
    """Prompts and conversations of requests."""

    prompts: Sequence[str]
    chats: Sequence[list[dict[str, str]]]
    vocab_size: int


def calls(texts: Texts, count: int, seed: int) -> list[Call]:
    """Make `count` requests: first one of each kind, then all kinds in random order."""
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
    body |= _KINDS[kind](rng, texts)
    drop_after = rng.randint(1, 12) if kind == "dropped" else None
    return Call(kind, CHAT if "messages" in body else COMPLETIONS, body, drop_after)


def _ids(rng: random.Random, texts: Texts, count: int) -> list[int]:
    return rng.sample(range(texts.vocab_size), min(count, texts.vocab_size))


def _sampled(rng: random.Random, *_: Any) -> dict[str, Any]:
    top_p, top_k = rng.choice((1.0, 0.95, 0.6)), rng.choice((-1, 1, 5, 50))
    return {"temperature": rng.uniform(0.2, 1.4), "top_p": top_p, "top_k": top_k}


def _penalties(rng: random.Random, *_: Any) -> dict[str, Any]:
    ranges = {"presence": (-1, 1), "frequency": (-0.5, 1), "repetition": (0.9, 1.4)}
    return {f"{name}_penalty": rng.uniform(*bounds) for name, bounds in ranges.items()}


def _grammar(rng: random.Random, *_: Any) -> dict[str, Any]:
    grammar = rng.choice(({"json": SCHEMA}, {"regex": "[a-z]{3,9}\\([0-9]+\\)"}))
    sampled = rng.choice(({}, _sampled(rng)))
    return {"structured_outputs": grammar, "max_tokens": 60, "ignore_eos": False, **sampled}


def _lookahead(value: Any) -> dict[str, Any]:
    return {"vllm_xargs": {"hetero_spec_lookahead": value}}


_KINDS: dict[str, Callable[[random.Random, Texts], dict[str, Any]]] = {
    "greedy": lambda rng, texts: {},
    "chat": lambda rng, texts: {},
    "sampled": _sampled,
    "seeded": lambda rng, texts: {**_sampled(rng), "seed": rng.randrange(1 << 40)},
    "penalties": _penalties,
    "sampled penalties": lambda rng, texts: _sampled(rng) | _penalties(rng),
    "several": lambda rng, texts: {"n": rng.randint(2, 3), "temperature": 0.8},
    "logprobs": lambda rng, texts: {"logprobs": rng.randint(0, 5)},
    "echo": lambda rng, texts: {"echo": True, "logprobs": rng.choice((None, 2))},
    "named tokens": lambda rng, texts: {"logprob_token_ids": _ids(rng, texts, rng.randint(1, 20))},
    "prompt logprobs": lambda rng, texts: {"prompt_logprobs": rng.randint(0, 3)},
    "beams": lambda rng, texts: {"use_beam_search": True, "n": 2, "max_tokens": 6},
    "truncated": lambda rng, texts: {"truncate_prompt_tokens": rng.randint(1, 40)},
    "stop strings": lambda rng, texts: {"stop": rng.sample(_STOPS, rng.randint(1, 3))},
    "stop ids": lambda rng, texts: {"stop_token_ids": _ids(rng, texts, 100)},
    "least length": lambda rng, texts: {"min_tokens": 20, "max_tokens": 40},
    "bad words": lambda rng, texts: {"bad_words": ["self", " return", "x"]},
    # More than 1,024 ids crash vLLM's Model Runner V2, also without a drafter.
    "allowed ids": lambda rng, texts: {"allowed_token_ids": _ids(rng, texts, 1000)},
    "token ids": lambda rng, texts: {"prompt": _ids(rng, texts, rng.randint(1, 300))},
    "grammar": _grammar,
    "stream": lambda rng, texts: {"stream": True},
    "dropped": lambda rng, texts: {"stream": True, "max_tokens": 200, "ignore_eos": True},
    "lookahead": lambda rng, texts: _lookahead(rng.choice((0, 1, 2, 9, 99))),
    "odd lookahead": lambda rng, texts: _lookahead(rng.choice(("2", True, False))),
    "salt": lambda rng, texts: {"prompt": texts.prompts[0], "cache_salt": rng.choice("ab")},
    "unknown ids": lambda rng, texts: {"prompt": [5, texts.vocab_size + rng.randrange(1 << 20)]},
    "too long": lambda rng, texts: {"prompt": "x y " * 20_000},
    "nothing": lambda rng, texts: {"prompt": ""},
    "wrong values": lambda rng, texts: dict(rng.choice(_BAD)),
}
