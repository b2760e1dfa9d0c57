# SPDX-License-Identifier: Apache-2.0
"""Print the findings of `inspect` about a pair of tokenizers as tables."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_hetero_spec.bench.tables import (
    NONE,
    Column,
    count,
    drawn,
    number,
    percent,
    say,
    side_by_side,
)
from vllm_hetero_spec.inputs.tokenizer_source import ROLES, OpenTokenizer

Findings = Mapping[str, Any]
Opened = Mapping[str, OpenTokenizer]

_NAMED = 6  # control tokens without a role that are listed; others are only counted
_EXAMPLES = 5
_MAPPED = {"special": "the drafter's own token", "text": "plain text", "nothing": "nothing"}
_SPACES = {"none": "no", "first": "the first", "always": "every"}


def show(found: Findings, opened: Opened, console: Console) -> None:
    sides = {
        name: {**found[name], "straddle": found["pair"][f"{name}_straddle"], "ends": _ends(each)}
        for name, each in opened.items()
    }
    for name, side in sides.items():
        say(console, f"{name:8} {side['name']}")
    if (mask := found["drafter"]["mask_token"]) is not None:
        say(console, f"         parallel: one forward writes a draft, by mask token {mask}")
    console.print(side_by_side(_VOCABULARY, sides, "vocabularies"))
    console.print(_intersection(found))
    text = found["text"]
    title = (
        f"on the text: {text['source']} ({count(text['documents'])} documents, "
        f"{count(text['lines'])} lines, {count(text['bytes'])} bytes)"
    )
    console.print(side_by_side(_ON_TEXT, sides, title))
    console.print(_shares(found["pair"]))
    for line in (*_bridge(found["bridge"]), *_draft_model(found)):
        console.print(line, highlight=False, markup=False, emoji=False)
    control = list(_control(found["bridge"]["control_tokens"], opened))
    console.print(drawn(("token", "becomes"), control, "target's control tokens for the drafter"))
    for name, methods in found["methods"].items():
        when = "temperature 0" if name == "temperature_0" else "higher temperatures"
        rows = [(str(place), *each) for place, each in enumerate(methods, 1)]
        console.print(drawn(("", "method", "why"), rows, f"methods at {when}"))


def _token(content: str, token_id: int) -> str:
    return f"{content} ({token_id})"


def _role(role: str, side: Findings) -> str:
    token = side["roles"][role]
    return NONE if token is None else _token(token["content"], token["id"])


def _ends(opened: OpenTokenizer) -> str:
    if opened.eos_ids is None:
        return "the EOS"
    return "\n".join(_token(opened.text.content(each), each) for each in opened.eos_ids) or NONE


def _unspelled(side: Findings) -> str:
    found = side["unspelled"]
    if not found["characters"]:
        return NONE
    shown = " ".join(found["examples"][:_EXAMPLES])
    return f"{count(found['characters'])}: {shown}{' ...' * (found['distinct'] > _EXAMPLES)}"


def _ids(name: str, kind: str) -> Column[Findings]:
    return Column(name, lambda side: count(side["vocabulary"][kind]))


_VOCABULARY: list[Column[Findings]] = [
    _ids("get_vocab()", "get_vocab"),
    _ids("ids", "ids"),
    _ids("  text", "text"),
    _ids("  special", "special"),
    _ids("  holes", "holes"),
    _ids("ids that share their bytes", "duplicates"),
    _ids("tokens not valid UTF-8 alone", "not_utf8"),
    *(Column(role.upper(), partial(_role, role)) for role in ROLES),
    Column("ends a generation", lambda side: side["ends"]),
    Column("adds BOS", lambda side: "yes" if side["adds_bos"] else "no"),
    Column("puts a space before text", lambda side: _SPACES[side["leading_space"]]),
    Column("rewrites text by", lambda side: ", ".join(side["normalizers"]) or NONE),
    Column("loses of text", lambda side: side["lossy_reason"] or NONE),
]
_ON_TEXT: list[Column[Findings]] = [
    Column("tokens", lambda side: count(side["tokens"])),
    Column("tokens per byte", lambda side: number(side["tokens_per_byte"], 3)),
    Column("tokens with the other's boundary inside", lambda side: percent(side["straddle"])),
    Column("lines that come back changed", lambda side: count(side["changed_lines"])),
    Column(
        "documents changed, special tokens added and kept",
        lambda side: count(side["changed_documents_with_special_tokens"]),
    ),
    Column("characters without a token", _unspelled),
]


def _intersection(found: Findings) -> Table:
    overlap = found["intersection"]
    sizes = [found[side]["vocabulary"]["get_vocab"] for side in ("target", "drafter")]
    named = {
        "get_vocab() strings": overlap["get_vocab"],
        "strings, leading spaces normalised": overlap["space_normalised"],
        "true bytes": overlap["true_bytes"],
        "true bytes of text tokens alone": overlap["text_bytes"],
    }
    rows = [
        (name, count(tokens), *(percent(tokens / size) for size in sizes))
        for name, tokens in named.items()
    ]
    heads = ("compared by", "tokens", "of target", "of drafter")
    return drawn(heads, rows, "tokens of both")


def _shares(pair: Findings) -> Table:
    rows = [
        ("target tokens that the drafter has (omega_T)", percent(pair["omega_t"])),
        ("target tokens that some drafter token begins (omega_K)", percent(pair["omega_k"])),
        ("drafter tokens per target token", number(pair["drafter_tokens_per_target_token"])),
    ]
    return drawn(("of the text", "share"), rows)


def _bridge(bridge: Findings) -> list[str]:
    if bridge["kind"] == "identity":
        return ["bridge  identity: the tokenizers are the same, ids pass as they are"]
    reason = bridge["chat_template"]["reason"]
    chat = f"turn markers as plain text: {reason}" if reason else "the drafter's turns"
    return ["bridge  text: ids are translated through their bytes", f"chat    {chat}"]


def _draft_model(found: Findings) -> list[str]:
    """Return a line about vLLM's own `draft_model`; none if the tokenizers differ."""
    sizes = found["target"]["output_rows"], found["drafter"]["output_rows"]
    if found["bridge"]["kind"] != "identity" or None in sizes:
        return []
    if sizes[0] == sizes[1]:
        return ["vLLM    its own draft_model serves this pair, too"]
    rows = " and ".join(map(count, sizes))
    return [f"vLLM    its own draft_model refuses this pair: {rows} output rows"]


def _control(tokens: Sequence[Findings], opened: Opened) -> Iterator[tuple[str, str]]:
    target = opened["target"]
    roles = {*target.roles.values(), *(target.eos_ids or ())}
    named = [token for token in tokens if token["id"] in roles]
    others = [token for token in tokens if token["id"] not in roles]
    for token in [*named, *others[:_NAMED]]:
        becomes = f"text {token['text']}" if token["text"] else "nothing"
        if (drafter_id := token["drafter_id"]) is not None:
            becomes = _token(opened["drafter"].text.content(drafter_id), drafter_id)
        yield _token(token["content"], token["id"]), becomes
    for kind, more in Counter(token["becomes"] for token in others[_NAMED:]).items():
        yield f"{more:,} more", _MAPPED[kind]
