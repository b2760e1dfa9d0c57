# SPDX-License-Identifier: Apache-2.0
"""Control tokens by string and role: what a target's one is for the drafter, and the way back."""

from collections.abc import Sequence

from vllm_hetero_spec.text.tokenizer import TextTokenizer

# Stands in a target sequence for an id outside the target's vocabulary.
UNKNOWN_ID = -1


class SpecialTokens:
    """The two tokenizers' control tokens.

    Between equal tokenizers every control token is itself. Between different ones the token that
    ends an assistant's turn is the other's; any other EOS is an EOS, where it can be of the same
    content; and any other control token is the one of the same content.

    Args:
        target: Its tokenizer.
        drafter: Its tokenizer.
        target_eos: All ids that end a generation, the preferred one first; None takes the
            tokenizer's own.
        drafter_eos: The same of the drafter.
        turn_end: With what the chat templates of target and drafter end an assistant's turn.

    Attributes:
        target_control: Target ids that are no text: special tokens, EOS, UNKNOWN_ID.
        drafter_control: Drafter ids that are no text.
        drafter_eos: Those of them that end a draft.
        proposed: Drafter control id -> target id that a draft with it proposes.
        banned: Drafter ids that are never drafted: control tokens that propose nothing, but for EOS
            (which ends a draft all the same).
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
        """What the drafter reads in the place of a control token of the target.

        Returns:
            One drafter id, see above; BOS for a BOS that has no other. Where there is none, the
            token's content as text; nothing for BOS.
        """
        if self._equal and target_id != UNKNOWN_ID:
            return target_id
        if target_id == self._turn_end[0] and self._turn_end[1] is not None:
            return self._turn_end[1]
        content = _content(self._target, target_id)
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
        if drafter_id == self._drafter.unknown_id:  # text that a vocabulary lacks is not a role
            return None
        twin = self._target.special_id_of.get(_content(self._drafter, drafter_id))
        if drafter_id in self.drafter_eos and twin not in self._target_ends:
            return self._target_ends[0] if self._target_ends else None
        return twin


def _content(tokenizer: TextTokenizer, token_id: int) -> str:
    if not 0 <= token_id < tokenizer.vocab_size:
        return ""
    literal = tokenizer.token_bytes[token_id].decode("utf-8", "surrogateescape")
    return tokenizer.special_text.get(token_id, literal)


def _ends(tokenizer: TextTokenizer, given: Sequence[int] | None) -> list[int]:
    if given is not None:
        return list(given)
    return [] if tokenizer.eos_id is None else [tokenizer.eos_id]
