# SPDX-License-Identifier: Apache-2.0
"""Parts of the sentences in which users are told what is wrong."""

import difflib
from collections.abc import Iterable
from typing import Any


class ConfigError(ValueError):
    """A speculative configuration that is refused at start-up, in one sentence."""


def first_line(error: object) -> str:
    """What an error says first, without the full stop: others' errors go on for pages."""
    return str(error).strip().split("\n")[0].rstrip(".")


def one_line(text: object) -> str:
    """All of a text in one line."""
    return " ".join(str(text).split())


def nearest(word: Any, choices: Iterable[str]) -> str:
    """ " (did you mean ...?)" where one of the choices is near, else nothing."""
    near = difflib.get_close_matches(str(word), list(choices), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
