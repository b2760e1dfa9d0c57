# SPDX-License-Identifier: Apache-2.0
"""Special tokens by role: what a target's control token is for the drafter, and the way back."""

from collections.abc import Sequence

from vllm_hetero_spec.text.tokenizer import TextTokenizer

# Stands in a target sequence for an id outside the target's vocabulary.
UNKNOWN_ID = -1


class SpecialTokens:
    """The two tokenizers' control tokens.

    target_control: target ids that are no text (special tokens, EOS, UNKNOWN_ID); never proposed.
    drafter_control: drafter ids that end the text of a draft.
    drafter_eos: the subset of drafter_control that means "the text ends here".
    target_eos: the target id proposed where the drafter drafts EOS, or None.
    """

    def __init__(
        self,
        target: TextTokenizer,
        drafter: TextTokenizer,
        target_eos: Sequence[int] | None,
        drafter_eos: Sequence[int] | None,
    ) -> None:
        self._target, self._drafter = target, drafter
        target_ends = _ends(target, target_eos)
        drafter_ends = _ends(drafter, drafter_eos)
        self._target_ends = frozenset(target_ends)
        self.drafter_eos = frozenset(drafter_ends)
        self.target_eos = target_ends[0] if target_ends else None
        self._drafter_eos_first = drafter_ends[0] if drafter_ends else None
        self.target_control = target.special_ids | self._target_ends | {UNKNOWN_ID}
        self.drafter_control = drafter.special_ids | self.drafter_eos

    def to_drafter(self, target_id: int) -> int | bytes:
        """A control token of the target as one drafter id or, failing that, as literal text.

        EOS becomes EOS; any other token the drafter's special token of the same content; BOS the
        drafter's BOS, or nothing where it has none.
        """
        content = self._content(target_id)
        twin = self._drafter.special_id_of.get(content)
        if target_id in self._target_ends:
            if twin in self.drafter_eos:
                return twin
            if self._drafter_eos_first is not None:
                return self._drafter_eos_first
        if twin is not None:
            return twin
        if target_id == self._target.bos_id:
            return b"" if self._drafter.bos_id is None else self._drafter.bos_id
        return content.encode("utf-8", "surrogateescape")

    def _content(self, target_id: int) -> str:
        if target_id == UNKNOWN_ID:
            return ""
        literal = self._target.token_bytes[target_id].decode("utf-8", "surrogateescape")
        return self._target.special_text.get(target_id, literal)


def _ends(tokenizer: TextTokenizer, given: Sequence[int] | None) -> list[int]:
    if given is not None:
        return list(given)
    return [] if tokenizer.eos_id is None else [tokenizer.eos_id]
