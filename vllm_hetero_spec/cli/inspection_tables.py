# SPDX-License-Identifier: Apache-2.0
"""What `inspect` found out about a pair of tokenizers, for people."""

from collections import Counter

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_hetero_spec.cli.inspection import TEMPERATURES, ControlToken, Inspection, Side
from vllm_hetero_spec.config import METHODS
from vllm_hetero_spec.inputs.tokenizer_source import ROLES

# Control tokens without a role that are named one by one.
_NAMED = 6
_EXCERPT = 24  # characters
_MAPPED = {"special": "the drafter's own token", "text": "plain text", "nothing": "nothing"}


def show(found: Inspection, console: Console) -> None:
    """Print all findings."""
    console.print(f"target   {found.target.opened.name}", highlight=False, soft_wrap=True)
    console.print(f"drafter  {found.drafter.opened.name}", highlight=False, soft_wrap=True)
    for table in (_vocabularies(found), _intersection(found), _text(found)):
        console.print(table)
    if found.segmentations is not None:
        console.print(_segmentations(found))
    for line in _bridge(found):
        console.print(line, highlight=False)
    console.print(_control(found))
    for temperature in TEMPERATURES:
        console.print(_methods(found, temperature))


def _table(title: str, *columns: str, numbers: bool = True) -> Table:
    table = Table(*columns, title=title, title_justify="left", title_style="bold")
    for column in table.columns[1:] if numbers else ():
        column.justify = "right"
    return table


def _vocabularies(found: Inspection) -> Table:
    table = _table("vocabularies", "", "target", "drafter")
    sides = found.target, found.drafter
    for name, value in (
        ("get_vocab()", lambda side: len(side.opened.strings)),
        ("ids", lambda side: side.counts.ids),
        ("  text", lambda side: side.counts.text),
        ("  special", lambda side: side.counts.special),
        ("  holes", lambda side: side.counts.holes),
        ("ids that share their bytes", lambda side: side.counts.duplicates),
        ("tokens not valid UTF-8 alone", lambda side: side.counts.not_utf8),
    ):
        table.add_row(name, *(f"{value(side):,}" for side in sides))
    for role in ROLES:
        table.add_row(role.upper(), *(_role(side, role) for side in sides))
    table.add_row("ends a generation", *(_ends(side) for side in sides))
    table.add_row("adds BOS", *("yes" if side.opened.text.adds_bos else "no" for side in sides))
    table.add_row("puts a space before text", *(_leading_space(side) for side in sides))
    table.add_row("rewrites text by", *(_normalizers(side) for side in sides))
    table.add_row("loses of text", *(side.opened.text.lossy_reason or "-" for side in sides))
    return table


def _role(side: Side, role: str) -> str:
    token_id = side.opened.roles.get(role)
    return "-" if token_id is None else _token(side.opened.content(token_id), token_id)


def _ends(side: Side) -> str:
    ids = side.opened.eos_ids
    if ids is None:
        return "the EOS"
    return "\n".join(_token(side.opened.content(token_id), token_id) for token_id in ids) or "-"


def _token(content: str, token_id: int) -> str:
    return f"{escape(content)} ({token_id})"


def _leading_space(side: Side) -> str:
    scope = side.opened.text.leading_space.scope
    return {"none": "no", "first": "the first", "always": "every"}[scope]


def _normalizers(side: Side) -> str:
    return ", ".join(side.opened.normalizers) or "-"


def _intersection(found: Inspection) -> Table:
    table = _table("tokens of both", "compared by", "tokens", "of target", "of drafter")
    overlap = found.overlap
    sizes = [len(side.opened.strings) for side in (found.target, found.drafter)]
    for name, shared in (
        ("get_vocab() strings", overlap.strings),
        ("strings, leading spaces normalised", overlap.space_normalised),
        ("true bytes", overlap.true_bytes),
        ("true bytes of text tokens alone", overlap.text_bytes),
    ):
        table.add_row(name, f"{shared:,}", *(f"{shared / size:.1%}" for size in sizes))
    return table


def _text(found: Inspection) -> Table:
    pair = found.pair
    documents = f"{found.documents:,} document{'s' * (found.documents != 1)}"
    title = f"on the text: {found.text} ({documents}, {pair.text_bytes:,} bytes)"
    table = _table(escape(title), "", "target", "drafter")
    sides = found.target, found.drafter
    tokens = pair.target_tokens, pair.drafter_tokens
    table.add_row("tokens", *(f"{count:,}" for count in tokens))
    table.add_row("tokens per byte", *(f"{count / pair.text_bytes:.3f}" for count in tokens))
    ratio = found.tokens_ratio
    table.add_row("drafter tokens per target token", "", "-" if ratio is None else f"{ratio:.2f}")
    table.add_row("tokens the other one has (omega_T)", f"{pair.omega_t:.1%}", "")
    table.add_row("tokens some drafter token begins (omega_K)", f"{pair.omega_k:.1%}", "")
    straddles = pair.target_straddle, pair.drafter_straddle
    table.add_row("tokens with the other's boundary inside", *(f"{s:.1%}" for s in straddles))
    failures = pair.target_failures, pair.drafter_failures
    table.add_row(
        "lines that come back changed", *(f"{count} of {pair.lines:,}" for count in failures)
    )
    table.add_row(
        "documents changed, special tokens added and kept",
        *(f"{side.changed_documents} of {found.documents:,}" for side in sides),
    )
    table.add_row("characters without a token", *(_unspelled(side.unspelled) for side in sides))
    return table


def _unspelled(characters: Counter[str]) -> str:
    if not characters:
        return "none"
    shown = " ".join(character for character, _ in characters.most_common(5))
    return f"{characters.total():,}: {escape(shown)}{' ...' * (len(characters) > 5)}"


def _segmentations(found: Inspection) -> Table:
    ways = found.segmentations
    assert ways is not None
    table = _table("ways to spell a target token with drafter tokens", "", "ways")
    for name, count in (
        ("median", ways.median),
        ("mean", ways.mean),
        ("90 % have at most", ways.p90),
        ("99 % have at most", ways.p99),
        ("most", ways.max),
    ):
        table.add_row(name, _number(count))
    hardest = repr(ways.hardest.decode("utf-8", "replace"))
    shown = hardest if len(hardest) <= _EXCERPT else f"{hardest[:_EXCERPT]}..."
    table.add_row("of", f"{escape(shown)} ({len(ways.hardest)} bytes)")
    table.add_row("tokens without any", f"{ways.without:,} of {ways.tokens:,}")
    shortest = f"{ways.shortest_mean:.2f} on average, at most {ways.shortest_max}"
    table.add_row("drafter tokens in the shortest", shortest)
    return table


def _number(count: float) -> str:
    if count >= 1e9:
        return f"{count:.2e}" if count < 1e300 else "more than 1e300"
    return f"{count:,}" if isinstance(count, int) else f"{count:,.1f}"


def _bridge(found: Inspection) -> list[str]:
    if found.identity:
        return ["[bold]bridge[/]  identity: the tokenizers are the same, ids pass as they are"]
    reason = found.chat_template
    chat = f"turn markers as plain text: {escape(reason)}" if reason else "the drafter's turns"
    return [
        "[bold]bridge[/]  text: ids are translated through their bytes",
        f"[bold]chat[/]    {chat}",
    ]


def _control(found: Inspection) -> Table:
    table = _table("target's control tokens for the drafter", "token", "becomes", numbers=False)
    roles = {*found.target.opened.roles.values(), *(found.target.opened.eos_ids or ())}
    named = [token for token in found.control if token.id in roles]
    others = [token for token in found.control if token.id not in roles]
    named += others[:_NAMED]
    for token in named:
        table.add_row(_token(token.content, token.id), _becomes(token, found))
    rest = Counter(token.becomes for token in others[_NAMED:])
    for kind, count in rest.items():
        table.add_row(f"{count:,} more", _MAPPED[kind])
    return table


def _becomes(token: ControlToken, found: Inspection) -> str:
    if token.drafter_id is not None:
        return _token(found.drafter.opened.content(token.drafter_id), token.drafter_id)
    return f"text {escape(token.text)}" if token.text else "nothing"


def _methods(found: Inspection, temperature: float) -> Table:
    title = "methods at temperature 0" if temperature == 0 else "methods at higher temperatures"
    table = _table(title, "", "method", "why", numbers=False)
    for place, (method, reason) in enumerate(found.methods(temperature), 1):
        known = "" if method in METHODS else "\n[dim]not in this version[/]"
        table.add_row(str(place), f"{method}{known}", escape(reason))
    return table
