# SPDX-License-Identifier: Apache-2.0
"""The demo corpus: Python's standard library on this machine, and conversations cut from it.

Code is regular enough that a small model continues it plausibly after minutes of training. In a
conversation the user sends the head of a function, and the reply is its body.
"""

import ast
import hashlib
import sysconfig
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

Messages = list[dict[str, str]]

# Repetitive data, or sources of other packages.
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)
_SHORTEST_BYTES = 2_000
_SHARE = 0.15  # share of all characters; small, because turns are learnt quickly
_TURNS = (1, 2, 3)  # functions per conversation, in turn
_LONGEST = 1_000  # characters per body


@dataclass(frozen=True)
class Corpus:
    """Training texts, and held-out texts by file name."""

    train: tuple[str, ...]
    heldout: dict[str, str]


def standard_library(heldout: int = 20) -> Corpus:
    """Read the interpreter's standard library; `heldout` files are the same on every machine."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _SKIPPED_FOLDERS.isdisjoint(relative.parts) and path.stat().st_size >= _SHORTEST_BYTES:
            try:
                texts[relative.as_posix()] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # a few old files declare another encoding
    if len(texts) <= heldout:
        raise FileNotFoundError(f"{root} holds {len(texts)} Python sources; the demo needs more")
    names = sorted(texts, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    return Corpus(
        train=tuple(texts[name] for name in names[heldout:]),
        heldout={name: texts[name] for name in names[:heldout]},
    )


def conversations(texts: Sequence[str], share: float = _SHARE) -> list[Messages]:
    """Make conversations about functions of the first texts, up to `share` of all characters."""
    wanted = share * sum(map(len, texts))
    found: list[Messages] = []
    for text in texts:
        if wanted <= 0:
            break
        for messages in _about(text):
            wanted -= sum(len(message["content"]) for message in messages)
            found.append(messages)
    return found


def _about(text: str) -> Iterator[Messages]:
    functions = _functions(text)
    for count in cycle(_TURNS):
        messages = [
            {"role": role, "content": content}
            for function in islice(functions, count)
            for role, content in zip(("user", "assistant"), function, strict=True)
        ]
        if not messages:
            return
        yield messages


def _functions(text: str) -> Iterator[tuple[str, str]]:
    """Yield head (signature and docstring's first line) and body of each documented function."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return  # a file for another Python
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
            continue
        documented, first = node.body[0], node.body[1]
        summary = (ast.get_docstring(node) or "").partition("\n")[0]
        if not summary or documented.lineno == node.lineno:
            continue
        signature = textwrap.dedent("\n".join(lines[node.lineno - 1 : documented.lineno - 1]))
        body = textwrap.dedent("\n".join(lines[first.lineno - 1 : node.end_lineno]))
        if len(body) <= _LONGEST:
            yield f'{signature}\n    """{summary}"""', body
