# SPDX-License-Identifier: Apache-2.0
"""What `inspect` finds out about a pair of tokenizers, for programs; the tables are elsewhere."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vllm_hetero_spec.draft.methods import Choice, order
from vllm_hetero_spec.inputs.tokenizer_source import ROLES, OpenTokenizer
from vllm_hetero_spec.text.special_tokens import SpecialTokens
from vllm_hetero_spec.text.statistics import Overlap, PairStatistics, VocabularyCounts

# The two temperatures for which the methods are put in order.
TEMPERATURES = (0.0, 1.0)
_EXAMPLES = 12


@dataclass(frozen=True)
class Side:
    """One tokenizer.

    Attributes:
        opened: The tokenizer.
        counts: Its ids by kind.
        tokens: Of the text.
        tokens_per_byte: The same by the text's bytes.
        straddle: Share of them that have a boundary of the other's strictly inside.
        changed_lines: Lines that its tokens do not spell byte by byte.
        changed_documents: Documents that decode(encode(document)) does not give back, with special
            tokens added by one and kept by the other; what adds a BOS changes all of them.
        unspelled: Characters of the text it has no token for, with their counts.
    """

    opened: OpenTokenizer
    counts: VocabularyCounts
    tokens: int
    tokens_per_byte: float
    straddle: float
    changed_lines: int
    changed_documents: int
    unspelled: Counter[str]

    def as_json(self) -> dict[str, Any]:
        """Every finding under stable names."""
        opened = self.opened
        return {
            "name": opened.text.name,
            "vocabulary": {"get_vocab": len(opened.strings), **asdict(self.counts)},
            "roles": {role: _token(opened, opened.roles.get(role)) for role in ROLES},
            "eos_ids": opened.eos_ids,
            "adds_bos": opened.text.adds_bos,
            "leading_space": opened.text.leading_space.scope,
            "normalizers": opened.normalizers,
            "lossy_reason": opened.text.lossy_reason,
            "tokens": self.tokens,
            "tokens_per_byte": self.tokens_per_byte,
            "changed_lines": self.changed_lines,
            "changed_documents_with_special_tokens": self.changed_documents,
            "unspelled": {
                "characters": self.unspelled.total(),
                "distinct": len(self.unspelled),
                "examples": [character for character, _ in self.unspelled.most_common(_EXAMPLES)],
            },
        }


@dataclass(frozen=True)
class ControlToken:
    """A target token that is no text, and what the drafter sees in its place.

    Attributes:
        id: In the target.
        content: Its content.
        drafter_id: The drafter's token it becomes, None where it becomes text or nothing.
        text: The text it becomes, "" for nothing and for a token.
    """

    id: int
    content: str
    drafter_id: int | None
    text: str

    @property
    def becomes(self) -> str:
        """ "special", "text" or "nothing"."""
        if self.drafter_id is not None:
            return "special"
        return "text" if self.text else "nothing"


def control_tokens(target: OpenTokenizer, special: SpecialTokens) -> list[ControlToken]:
    """The target's control tokens as the bridge maps them, by id; holes are left out."""
    known = special.target_control & {*target.text.special_text, *(target.eos_ids or ())}
    tokens = []
    for token_id in sorted(known):
        mapped = special.to_drafter(token_id)
        drafter_id, text = (mapped, "") if isinstance(mapped, int) else (None, mapped.decode())
        tokens.append(ControlToken(token_id, target.content(token_id), drafter_id, text))
    return tokens


@dataclass(frozen=True)
class PairReport:
    """All findings about a pair.

    Attributes:
        target: The target's tokenizer.
        drafter: The drafter's.
        overlap: What their vocabularies share.
        lengths: "target", "drafter", "shared" -> number of byte strings of 1, 2, ... bytes; longer
            ones are in the last number.
        text: Where the text comes from.
        documents: Documents in it.
        pair: What the text says of the two.
        identity: Both tokenizers are the same, so that ids pass as they are.
        control: The target's control tokens.
        chat_template: Why turn markers are not bridged; "" where they are.
    """

    target: Side
    drafter: Side
    overlap: Overlap
    lengths: Mapping[str, Sequence[int]]
    text: str
    documents: int
    pair: PairStatistics
    identity: bool
    control: Sequence[ControlToken]
    chat_template: str

    def methods(self, temperature: float) -> list[Choice]:
        """Methods for the pair, the most promising first."""
        return order(self.pair, temperature=temperature)

    def as_json(self) -> dict[str, Any]:
        """Every finding under stable names; shares are between 0 and 1."""
        pair = self.pair
        return {
            "target": self.target.as_json(),
            "drafter": self.drafter.as_json(),
            "intersection": {
                **asdict(self.overlap),
                "lengths": self.lengths,
            },
            "text": {
                "source": self.text,
                "documents": self.documents,
                "lines": pair.lines,
                "bytes": pair.text_bytes,
            },
            "pair": {
                "omega_t": pair.omega_t,
                "omega_k": pair.omega_k,
                "target_straddle": pair.target_straddle,
                "drafter_straddle": pair.drafter_straddle,
                "drafter_tokens_per_target_token": pair.tokens_ratio,
            },
            "bridge": {
                "kind": "identity" if self.identity else "text",
                "chat_template": {
                    "active": not self.chat_template,
                    "reason": self.chat_template,
                },
                "control_tokens": [
                    {**asdict(token), "becomes": token.becomes} for token in self.control
                ],
            },
            "methods": {
                f"temperature_{temperature:g}": self.methods(temperature)
                for temperature in TEMPERATURES
            },
        }


def _token(opened: OpenTokenizer, token_id: int | None) -> dict[str, Any] | None:
    return None if token_id is None else {"id": token_id, "content": opened.content(token_id)}
