# SPDX-License-Identifier: Apache-2.0
"""Conversations for the demo: the user gives a function's head, the reply is its body.

They are cut from the corpus itself, so that a chat needs no more data than code does.
"""

import ast
import textwrap
from collections.abc import Iterator, Sequence
from itertools import cycle, islice

Messages = list[dict[str, str]]

# A small share: code is what the demo is about, and turns are learnt quickly.
_SHARE = 0.15  # of the texts' characters
_TURNS = (1, 2, 3)  # functions of a conversation, in turn
_LONGEST = 1_000  # characters of a body


def conversations(texts: Sequence[str], share: float = _SHARE) -> list[Messages]:
    """Conversations about the functions of the first texts, up to `share` of all characters."""
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
    """Head (signature and first line of the docstring) and body of each documented function."""
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
