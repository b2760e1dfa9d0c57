# SPDX-License-Identifier: Apache-2.0
"""Statistics of two vocabularies and of a text in both tokenizations, without any model.

Every figure is a count or a share of counts. Tokens are compared by bytes. Two counts of the
intersection compare display strings instead, to show how far they are from the true one.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_hetero_spec.text.token_bytes import SPACE_MARK
from vllm_hetero_spec.text.tokenizer import TextTokenizer
from vllm_hetero_spec.text.vocabulary import VocabularyMaps

_AFTER_BLANK_LINE = re.compile(r"(?<=\n\n)(?=\S)")


@dataclass(frozen=True)
class VocabularyCounts:
    """Number of ids of one tokenizer, by kind.

    Attributes:
        ids: Largest id + 1.
        text: Ids with bytes.
        holes: Ids without a token.
        duplicates: Text ids that share their bytes with another id.
        not_utf8: Text ids whose bytes alone are not valid UTF-8.
    """

    ids: int
    text: int
    special: int
    holes: int
    duplicates: int
    not_utf8: int


def count_vocabulary(tokenizer: TextTokenizer) -> VocabularyCounts:
    spelled = Counter(data for data in tokenizer.token_bytes if data)
    text = spelled.total()
    special = len(tokenizer.special_text)
    return VocabularyCounts(
        ids=tokenizer.vocab_size,
        text=text,
        special=special,
        holes=tokenizer.vocab_size - text - special,
        duplicates=sum(count for count in spelled.values() if count > 1),
        not_utf8=sum(
            count
            for data, count in spelled.items()
            if data.decode(errors="ignore").encode() != data
        ),
    )


@dataclass(frozen=True)
class Overlap:
    """Size of the intersection of two vocabularies, by several definitions of equal tokens.

    Attributes:
        get_vocab: Keys of `get_vocab()` in both, unchanged.
        space_normalised: The same keys with leading space marks replaced by spaces. vLLM's own map
            replaces only the first mark, so it misses tokens that start with several spaces.
        true_bytes: Distinct byte strings in both. A special token has the bytes of its content.
        text_bytes: Byte strings that are text tokens in both. Drafts can consist of these.
    """

    get_vocab: int
    space_normalised: int
    true_bytes: int
    text_bytes: int


def measure_overlap(
    target: TextTokenizer,
    drafter: TextTokenizer,
    target_strings: Iterable[str],
    drafter_strings: Iterable[str],
) -> Overlap:
    """Count the intersection by each definition. The strings are the keys of `get_vocab()`."""
    theirs, ours = set(target_strings), set(drafter_strings)
    return Overlap(
        get_vocab=len(theirs & ours),
        space_normalised=len({*map(_spaced, theirs)} & {*map(_spaced, ours)}),
        true_bytes=len(_all_bytes(target) & _all_bytes(drafter)),
        text_bytes=len(shared_text(target, drafter)),
    )


def shared_text(target: TextTokenizer, drafter: TextTokenizer) -> set[bytes]:
    """Return the byte strings that are a text token of both."""
    return (set(target.token_bytes) & set(drafter.token_bytes)) - {b""}


@dataclass(frozen=True)
class PairStatistics:
    """Statistics of a pair on a text. Every share is between 0 and 1.

    Attributes:
        omega_t: Share of the text's target tokens that the drafter has too. Upper bound of the
            acceptance rate if drafts are restricted to the intersection.
        omega_k: Share of the text's target tokens that are the first target token of some drafter
            token. The same bound for drafts that are mapped to the target's vocabulary.
        target_straddle: Share of target tokens with a drafter boundary strictly inside.
        drafter_straddle: Share of drafter tokens with a target boundary strictly inside.
        lines: Lines of the text that are not blank.
        target_failures: Lines whose target tokens have other bytes than the line.
        drafter_vocabulary: Distinct byte strings that are one drafter token.
    """

    omega_t: float
    omega_k: float
    target_straddle: float
    drafter_straddle: float
    target_tokens: int
    drafter_tokens: int
    text_bytes: int
    lines: int
    target_failures: int
    drafter_failures: int
    drafter_vocabulary: int

    @property
    def failure_share(self) -> float:
        """Share of lines with failures, of the tokenizer with more of them."""
        return _share(max(self.target_failures, self.drafter_failures), self.lines)

    @property
    def straddle(self) -> float:
        """Larger of `target_straddle` and `drafter_straddle`."""
        return max(self.target_straddle, self.drafter_straddle)

    @property
    def tokens_ratio(self) -> float | None:
        """Drafter tokens per target token. None for a text without target tokens."""
        return self.drafter_tokens / self.target_tokens if self.target_tokens else None


class PairMeter:
    """Accumulates `PairStatistics` over the documents of a text.

    Token counts and omega are those of whole documents. Boundaries can be compared only if both
    tokenizers spell the same bytes. A document that one of them changes is halved at its lines
    until the changed lines stand alone. These are counted as failures.
    """

    def __init__(self, target: TextTokenizer, drafter: TextTokenizer, maps: VocabularyMaps) -> None:
        self._target, self._drafter = target, drafter
        self._shared = _image(maps.d2t, target.vocab_size)
        self._reachable = _image(maps.kappa_first, target.vocab_size)
        self._lengths = _lengths(target), _lengths(drafter)
        self._counts: Counter[str] = Counter()

    def add(self, documents: Sequence[str]) -> None:
        """Add documents. They must not contain surrogates."""
        pairs = zip(
            documents,
            self._target.encode_batch(documents),
            self._drafter.encode_batch(documents),
            strict=True,
        )
        for document, target_ids, drafter_ids in pairs:
            self._counts["target_tokens"] += len(target_ids)
            self._counts["drafter_tokens"] += len(drafter_ids)
            self._counts["text_bytes"] += len(document.encode())
            self._counts["shared"] += int(self._shared[target_ids].sum())
            self._counts["reachable"] += int(self._reachable[target_ids].sum())
            lines = document.splitlines(keepends=True)
            self._counts["lines"] += sum(not line.isspace() for line in lines)
            self._compare(lines, target_ids, drafter_ids)

    def statistics(self) -> PairStatistics:
        """Return the statistics of all documents so far."""
        counts = self._counts
        return PairStatistics(
            omega_t=_share(counts["shared"], counts["target_tokens"]),
            omega_k=_share(counts["reachable"], counts["target_tokens"]),
            target_straddle=_share(counts["target_straddles"], counts["target_aligned"]),
            drafter_straddle=_share(counts["drafter_straddles"], counts["drafter_aligned"]),
            target_tokens=counts["target_tokens"],
            drafter_tokens=counts["drafter_tokens"],
            text_bytes=counts["text_bytes"],
            lines=counts["lines"],
            target_failures=counts["target_failures"],
            drafter_failures=counts["drafter_failures"],
            drafter_vocabulary=len(set(self._drafter.token_bytes) - {b""}),
        )

    def _compare(
        self, lines: Sequence[str], target_ids: Sequence[int], drafter_ids: Sequence[int]
    ) -> None:
        text = "".join(lines)
        data = text.encode()
        target_exact = self._target.decode_bytes(target_ids) == data
        drafter_exact = self._drafter.decode_bytes(drafter_ids) == data
        if target_exact and drafter_exact:
            self._straddles(target_ids, drafter_ids)
        elif len(lines) > 1:
            middle = len(lines) // 2
            for half in (lines[:middle], lines[middle:]):
                part = "".join(half)
                self._compare(half, self._target.encode(part), self._drafter.encode(part))
        elif not text.isspace():
            self._counts["target_failures"] += not target_exact
            self._counts["drafter_failures"] += not drafter_exact

    def _straddles(self, target_ids: Sequence[int], drafter_ids: Sequence[int]) -> None:
        target_ends = np.cumsum(self._lengths[0][target_ids])
        drafter_ends = np.cumsum(self._lengths[1][drafter_ids])
        self._counts["target_aligned"] += len(target_ids)
        self._counts["drafter_aligned"] += len(drafter_ids)
        self._counts["target_straddles"] += straddling(target_ends, drafter_ends)
        self._counts["drafter_straddles"] += straddling(drafter_ends, target_ends)


def straddling(ends: NDArray[np.int64], others: NDArray[np.int64]) -> int:
    """Count the tokens with a boundary of the other tokenization strictly inside.

    Args:
        ends: [n] byte offset of the end of each token, ascending.
        others: [m] the same for the other tokenization of the same bytes.
    """
    if not len(ends) or not len(others):
        return 0
    starts = np.concatenate([[0], ends[:-1]])
    first_inside = others[np.searchsorted(others, starts, side="right").clip(max=len(others) - 1)]
    return int(((starts < first_inside) & (first_inside < ends)).sum())


def unspelled_characters(tokenizer: TextTokenizer, characters: Counter[str]) -> Counter[str]:
    """Return the characters for which the tokenizer has no token at all, with their counts."""
    encoded = zip(characters, tokenizer.encode_batch(list(characters)), strict=True)
    lost = [character for character, ids in encoded if not tokenizer.decode_bytes(ids)]
    return Counter({character: characters[character] for character in lost})


def length_histogram(byte_strings: Iterable[bytes], longest: int) -> list[int]:
    """Count the byte strings of 1, 2, ... bytes. The last entry counts `longest` or more bytes."""
    lengths = Counter(min(len(data), longest) for data in byte_strings)
    return [lengths[length] for length in range(1, longest + 1)]


def _image(mapped: NDArray[np.int32], size: int) -> NDArray[np.bool_]:
    image = np.zeros(size, bool)
    image[mapped[mapped >= 0]] = True
    return image


def _lengths(tokenizer: TextTokenizer) -> NDArray[np.int64]:
    return np.array([len(data) for data in tokenizer.token_bytes], np.int64)


def _all_bytes(tokenizer: TextTokenizer) -> set[bytes]:
    content = (text.encode("utf-8", "surrogateescape") for text in tokenizer.special_text.values())
    return set(tokenizer.token_bytes).union(content) - {b""}


def _spaced(token: str) -> str:
    text = token.lstrip("\u0120" + SPACE_MARK)  # U+0120 is a space in byte-level BPE
    return " " * (len(token) - len(text)) + text


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def documents_of(text: str) -> list[str]:
    """Cut a text after blank lines, because tokens of ordinary text end there."""
    return _AFTER_BLANK_LINE.split(text)
