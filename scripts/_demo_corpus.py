# SPDX-License-Identifier: Apache-2.0
"""The demo corpus: Python's standard library, as it lies on the machine that runs this.

It needs no network, every machine that can run the project has it, and it is code: text regular
enough for a model of a few million parameters to continue plausibly after minutes of training.
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

# Tests, tables and third-party packages: repetitive data, or not the library's own sources.
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)
_SHORTEST_BYTES = 2_000


@dataclass(frozen=True)
class Corpus:
    """Texts to train on, and named texts no model or tokenizer sees."""

    train: tuple[str, ...]
    heldout: dict[str, str]


def _order(name: str) -> str:
    """A stable pseudo-random key: the same files are held out on every machine and run."""
    return hashlib.sha256(name.encode()).hexdigest()


def standard_library(heldout: int = 20) -> Corpus:
    """Read the running interpreter's standard library, `heldout` of its files set aside.

    Raises FileNotFoundError where the interpreter comes without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _SKIPPED_FOLDERS.isdisjoint(relative.parts) and path.stat().st_size >= _SHORTEST_BYTES:
            try:
                texts[relative.as_posix()] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # a few old sources declare another encoding
    if len(texts) <= heldout:
        raise FileNotFoundError(f"{root} holds {len(texts)} Python sources; the demo needs more")
    names = sorted(texts, key=_order)
    return Corpus(
        train=tuple(texts[name] for name in names[heldout:]),
        heldout={name: texts[name] for name in names[:heldout]},
    )
