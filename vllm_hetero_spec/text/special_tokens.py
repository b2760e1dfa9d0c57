# SPDX-License-Identifier: Apache-2.0
"""Translation of control tokens between target and drafter, by content and role."""

from collections.abc import Sequence

from vllm_hetero_spec.text.tokenizer import TextTokenizer

UNKNOWN_ID = -1  # replaces an id outside the target's vocabulary


class SpecialTokens:
    """Control tokens of a pair, for the lifetime of its bridge.

    Between equal tokenizers ids stay the same. Otherwise the token that ends an assistant's turn
    becomes the other tokenizer's. Another EOS becomes an EOS, if possible of the same content. Any
    other control token becomes the one of the same content.

    Args:
        target_eos: All ids that end a generation. The tokenizer's is preferred, then the first one.
        drafter_eos: The same for the drafter.
        turn_end: Tokens of (target, drafter) that end an assistant's turn in the chat templates.

    Attributes:
        target_control: Target ids that are not text: special tokens, EOS and UNKNOWN_ID.
        drafter_control: Drafter ids that are not text.
        drafter_eos: Drafter ids that end a draft.
        proposed: Target id that a drafter control id proposes.
        banned: Control ids of the drafter that propose nothing and are not EOS. Never drafted.
    """

    def __init__(
        self,
        target: TextTokenizer,
        drafter: TextTokenizer,
        target_eos: Sequence[int] | None,
        drafter_eos: Sequence[int] | None,
        turn_end: tuple[int, int] | None = None,
    ) -> None:
        self._target, self._drafter = target, drafter
        self._equal = target.fingerprint == drafter.fingerprint
        self._turn_end = turn_end or (None, None)
        self._target_ends = _ends(target, target_eos)
        self._drafter_ends = _ends(drafter, drafter_eos)
        self.drafter_eos = frozenset(self._drafter_ends)
        self.target_control = target.special_ids | {*self._target_ends, UNKNOWN_ID}
        self.drafter_control = drafter.special_ids | self.drafter_eos
        of_target = {drafter_id: self._to_target(drafter_id) for drafter_id in self.drafter_control}
        self.proposed = {d: t for d, t in of_target.items() if t is not None}
        self.banned = self.drafter_control - self.drafter_eos - self.proposed.keys()

    def to_drafter(self, target_id: int) -> int | bytes:
        """Translate a control token of the target by the rules of the class.

        Without a counterpart, BOS becomes the drafter's BOS or b"", and other tokens their content.
        """
        if self._equal and target_id != UNKNOWN_ID:
            return target_id
        if target_id == self._turn_end[0] and self._turn_end[1] is not None:
            return self._turn_end[1]
        content = self._target.content(target_id, "surrogateescape")
        twin = self._drafter.special_id_of.get(content)
        if target_id in self._target_ends and twin not in self.drafter_eos and self.drafter_eos:
            return self._drafter_ends[0]
        if twin is not None:
            return twin
        if target_id == self._target.bos_id:
            return b"" if self._drafter.bos_id is None else self._drafter.bos_id
        return content.encode("utf-8", "surrogateescape")

    def _to_target(self, drafter_id: int) -> int | None:
        if self._equal:
            return drafter_id
        if drafter_id == self._turn_end[1]:
            return self._turn_end[0]
        if drafter_id == self._drafter.unknown_id:  # it stands for text, not for a control token
            return None
        twin = self._target.special_id_of.get(self._drafter.content(drafter_id, "surrogateescape"))
        if drafter_id in self.drafter_eos and twin not in self._target_ends:
            return self._target_ends[0] if self._target_ends else None
        return twin


def _ends(tokenizer: TextTokenizer, given: Sequence[int] | None) -> list[int]:
    if given is not None:
        return sorted(given, key=lambda token_id: token_id != tokenizer.eos_id)
    return [] if tokenizer.eos_id is None else [tokenizer.eos_id]
