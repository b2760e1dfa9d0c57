# SPDX-License-Identifier: Apache-2.0
"""What `inspect` finds out about a pair of tokenizers, for people."""

from collections import Counter
from collections.abc import Sequence
from functools import partial

from rich.console import Console
from rich.table import Table

from vllm_hetero_spec.bench.tables import (
    NONE,
    Column,
    count,
    number,
    percent,
    side_by_side,
    terminal_table,
)
from vllm_hetero_spec.cli.pair_report import TEMPERATURES, ControlToken, PairReport, Side
from vllm_hetero_spec.inputs.tokenizer_source import ROLES

# Control tokens without a role that are named one by one.
_NAMED = 6
_EXAMPLES = 5
_MAPPED = {"special": "the drafter's own token", "text": "plain text", "nothing": "nothing"}
_SPACES = {"none": "no", "first": "the first", "always": "every"}


def show(report: PairReport, console: Console) -> None:
    """Print all findings."""
    sides = {"target": report.target, "drafter": report.drafter}
    for name, side in sides.items():
        console.print(
            f"{name:8} {side.opened.text.name}", highlight=False, soft_wrap=True, markup=False
        )
    console.print(side_by_side(_VOCABULARY, sides, "vocabularies"))
    console.print(_intersection(report))
    text = (
        f"on the text: {report.text} ({count(report.documents)} documents, "
        f"{count(report.pair.lines)} lines, {count(report.pair.text_bytes)} bytes)"
    )
    console.print(side_by_side(_ON_TEXT, sides, text))
    console.print(_shares(report))
    for line in _bridge(report):
        console.print(line, highlight=False, markup=False)
    console.print(_control(report))
    for temperature in TEMPERATURES:
        console.print(_methods(report, temperature))


def _token(content: str, token_id: int) -> str:
    return f"{content} ({token_id})"


def _role(role: str, side: Side) -> str:
    token_id = side.opened.roles.get(role)
    return NONE if token_id is None else _token(side.opened.content(token_id), token_id)


def _ends(side: Side) -> str:
    ids = side.opened.eos_ids
    if ids is None:
        return "the EOS"
    return "\n".join(_token(side.opened.content(token_id), token_id) for token_id in ids) or NONE


def _unspelled(side: Side) -> str:
    if not side.unspelled:
        return NONE
    shown = " ".join(character for character, _ in side.unspelled.most_common(_EXAMPLES))
    return f"{count(side.unspelled.total())}: {shown}{' ...' * (len(side.unspelled) > _EXAMPLES)}"


_VOCABULARY: list[Column[Side]] = [
    Column("get_vocab()", lambda side: count(len(side.opened.strings))),
    Column("ids", lambda side: count(side.counts.ids)),
    Column("  text", lambda side: count(side.counts.text)),
    Column("  special", lambda side: count(side.counts.special)),
    Column("  holes", lambda side: count(side.counts.holes)),
    Column("ids that share their bytes", lambda side: count(side.counts.duplicates)),
    Column("tokens not valid UTF-8 alone", lambda side: count(side.counts.not_utf8)),
    *(Column(role.upper(), partial(_role, role)) for role in ROLES),
    Column("ends a generation", _ends),
    Column("adds BOS", lambda side: "yes" if side.opened.text.adds_bos else "no"),
    Column("puts a space before text", lambda side: _SPACES[side.opened.text.leading_space.scope]),
    Column("rewrites text by", lambda side: ", ".join(side.opened.normalizers) or NONE),
    Column("loses of text", lambda side: side.opened.text.lossy_reason or NONE),
]
_ON_TEXT: list[Column[Side]] = [
    Column("tokens", lambda side: count(side.tokens)),
    Column("tokens per byte", lambda side: number(side.tokens_per_byte, 3)),
    Column("tokens with the other's boundary inside", lambda side: percent(side.straddle)),
    Column("lines that come back changed", lambda side: count(side.changed_lines)),
    Column(
        "documents changed, special tokens added and kept",
        lambda side: count(side.changed_documents),
    ),
    Column("characters without a token", _unspelled),
]


def _intersection(report: PairReport) -> Table:
    overlap = report.overlap
    sizes = [len(side.opened.strings) for side in (report.target, report.drafter)]
    columns: list[Column[tuple[str, int]]] = [
        Column("compared by", lambda row: row[0]),
        Column("tokens", lambda row: count(row[1])),
        Column("of target", lambda row: percent(row[1] / sizes[0])),
        Column("of drafter", lambda row: percent(row[1] / sizes[1])),
    ]
    rows = [
        ("get_vocab() strings", overlap.get_vocab),
        ("strings, leading spaces normalised", overlap.space_normalised),
        ("true bytes", overlap.true_bytes),
        ("true bytes of text tokens alone", overlap.text_bytes),
    ]
    return terminal_table(columns, rows, "tokens of both")


def _shares(report: PairReport) -> Table:
    rows = [
        ("target tokens that the drafter has (omega_T)", percent(report.pair.omega_t)),
        ("target tokens that some drafter token begins (omega_K)", percent(report.pair.omega_k)),
        ("drafter tokens per target token", number(report.pair.tokens_ratio)),
    ]
    return _listed(("of the text", "share"), rows)


def _listed(names: tuple[str, ...], rows: Sequence[tuple[str, ...]], title: str = "") -> Table:
    columns: list[Column[tuple[str, ...]]] = [
        Column(name, lambda row, at=at: row[at])  # type: ignore[misc]
        for at, name in enumerate(names)
    ]
    return terminal_table(columns, rows, title or None)


def _bridge(report: PairReport) -> list[str]:
    if report.identity:
        return ["bridge  identity: the tokenizers are the same, ids pass as they are"]
    reason = report.chat_template
    chat = f"turn markers as plain text: {reason}" if reason else "the drafter's turns"
    return ["bridge  text: ids are translated through their bytes", f"chat    {chat}"]


def _control(report: PairReport) -> Table:
    roles = {*report.target.opened.roles.values(), *(report.target.opened.eos_ids or ())}
    named = [token for token in report.control if token.id in roles]
    others = [token for token in report.control if token.id not in roles]
    named += others[:_NAMED]
    rest = Counter(token.becomes for token in others[_NAMED:])
    rows = [(_token(token.content, token.id), _becomes(token, report)) for token in named]
    rows += [(f"{number:,} more", _MAPPED[kind]) for kind, number in rest.items()]
    return _listed(("token", "becomes"), rows, "target's control tokens for the drafter")


def _becomes(token: ControlToken, report: PairReport) -> str:
    if token.drafter_id is not None:
        return _token(report.drafter.opened.content(token.drafter_id), token.drafter_id)
    return f"text {token.text}" if token.text else "nothing"


def _methods(report: PairReport, temperature: float) -> Table:
    title = "methods at temperature 0" if temperature == 0 else "methods at higher temperatures"
    rows = [
        (str(place), method, reason)
        for place, (method, reason) in enumerate(report.methods(temperature), 1)
    ]
    return _listed(("", "method", "why"), rows, title)
