# SPDX-License-Identifier: Apache-2.0
"""Translation of contexts into drafter ids, and of drafts into target ids."""

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

from vllm_hetero_spec.text.chat_bridge import ChatTemplateBridge, align
from vllm_hetero_spec.text.context import Context, IdentityContext
from vllm_hetero_spec.text.drafts import DraftTranslator, FirstToken
from vllm_hetero_spec.text.retokenization import TextContext
from vllm_hetero_spec.text.sample_text import CALIBRATION_TEXT
from vllm_hetero_spec.text.special_tokens import SpecialTokens
from vllm_hetero_spec.text.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)


class Bridge(ABC):
    """Translation for all requests of one pair of tokenizers.

    Attributes:
        identity: True if both tokenizers are the same, so that ids pass through unchanged.
        drafter_eos: Drafter ids that end a draft.
        banned: Drafter ids that are never drafted.
        failures: Number of failed translations by reason.
        chat: Translation of the turn markers in prompts.
        tokens_ratio: Drafter ids per target id, in the calibration text.
    """

    identity: bool
    tokens_ratio: float = 1.0

    def __init__(self, special: SpecialTokens, chat: ChatTemplateBridge) -> None:
        self.special, self.chat = special, chat
        self.drafter_eos, self.banned = special.drafter_eos, special.banned
        self.failures: Counter[str] = Counter()

    @abstractmethod
    def open(self, longest: int | None = None) -> Context:
        """Return the context of a new request. It keeps at most `longest` drafter ids."""

    @abstractmethod
    def extend(self, contexts: Sequence[Context], new_ids: Sequence[Sequence[int]]) -> list[int]:
        """Append target ids to each context. Return the number of unchanged leading ids of each.

        A context that fails does not raise. It is marked broken and counted.
        """

    @abstractmethod
    def may_follow(self, context: Context, drafter_id: int, known: int = 0) -> bool:
        """Return True if the target, which has `known` bytes of this id, may continue with it.

        The target does not continue a token that it has ended. After the token "imp" it does not
        write "ort", because it would have written "import". An incomplete character of the target
        limits the next bytes, too. If both tokenizers are the same, the result is always True.
        """

    def longer_last(self, context: Context, candidates: Sequence[int]) -> FirstToken | None:
        """Return the longer token that the drafter prefers to the last token, if there is one.

        After "imp", a drafter with a token "import" gives "ort" a low probability. A useful draft
        must therefore begin with the whole token. `candidates` are the most likely ids at the
        position of the last id, best first.
        """
        return None

    def first_choice(
        self, context: Context, candidates: Sequence[int], last: Sequence[int] = ()
    ) -> FirstToken:
        """Return the first token of a draft, from the most likely next ids, best first.

        A result of `longer_last` for `last` comes first. Otherwise it is the first candidate that
        may follow, or the best one if none may.
        """
        if last and (longer := self.longer_last(context, last)):
            return longer
        fitting = (c for c in candidates if self.may_follow(context, c))
        return FirstToken(next(fitting, candidates[0]))

    def first_choices(self, context: Context, candidates: Sequence[int]) -> list[int]:
        """Return all candidates that may follow, or the best one if none may."""
        return [c for c in candidates if self.may_follow(context, c)] or [candidates[0]]

    @abstractmethod
    def to_target(
        self,
        contexts: Sequence[Context],
        drafts: Sequence[Sequence[int]],
        limits: Sequence[int],
        known: Sequence[int] = (),
    ) -> list[list[int]]:
        """Translate each draft into target ids that continue its context.

        If a draft cannot be translated, its list is empty and a failure is counted.

        Args:
            limits: Maximum number of target ids for each request.
            known: Number of leading bytes of each draft that the context already has. Default: 0.
        """

    @abstractmethod
    def ids_covering(
        self, draft: Sequence[int], proposal: Sequence[int], known: int = 0
    ) -> list[int]:
        """Return the number of leading draft ids that spell the proposal up to each of its ids.

        The proposal is the result of `to_target` for this draft and `known`.
        """


class IdentityBridge(Bridge):
    """Bridge between equal tokenizers. Ids pass through unchanged."""

    identity = True

    def __init__(self, special: SpecialTokens, bos_id: int | None = None) -> None:
        super().__init__(special, ChatTemplateBridge("both tokenizers are the same"))
        self._bos_id = bos_id

    def open(self, longest: int | None = None) -> IdentityContext:
        return IdentityContext(longest, self._bos_id)

    def extend(self, contexts: Sequence[Context], new_ids: Sequence[Sequence[int]]) -> list[int]:
        return [context.append(ids) for context, ids in zip(contexts, new_ids, strict=True)]

    def may_follow(self, context: Context, drafter_id: int, known: int = 0) -> bool:
        return True

    def to_target(
        self,
        contexts: Sequence[Context],
        drafts: Sequence[Sequence[int]],
        limits: Sequence[int],
        known: Sequence[int] = (),
    ) -> list[list[int]]:
        return [
            [] if cut else self._until_eos(draft)[: max(0, limit)]
            for draft, limit, cut in zip(drafts, limits, known or [0] * len(drafts), strict=True)
        ]

    def ids_covering(
        self, draft: Sequence[int], proposal: Sequence[int], known: int = 0
    ) -> list[int]:
        return list(range(1, len(proposal) + 1))

    def _until_eos(self, draft: Sequence[int]) -> list[int]:
        for index, token_id in enumerate(draft):
            if token_id in self.drafter_eos:
                return list(draft[: index + 1])
        return list(draft)


class TextBridge(Bridge):
    """Bridge between different tokenizers. Translation goes through bytes."""

    identity = False

    def __init__(
        self,
        target: TextTokenizer,
        drafter: TextTokenizer,
        special: SpecialTokens,
        chat: ChatTemplateBridge,
    ) -> None:
        super().__init__(special, chat)
        self._target, self._drafter = target, drafter
        self._drafts = DraftTranslator(target, drafter, special, self.failures)
        self.tokens_ratio = _tokens_ratio(target, drafter)

    def open(self, longest: int | None = None) -> TextContext:
        special, failures = self.special, self.failures
        return TextContext(self._target, self._drafter, special, failures, self.chat, longest)

    def extend(self, contexts: Sequence[Context], new_ids: Sequence[Sequence[int]]) -> list[int]:
        texts = cast(Sequence[TextContext], contexts)
        news = zip(texts, new_ids, strict=True)
        kept = [self._guarded(context, context.take, ids) for context, ids in news]
        tails = zip(texts, self._encode_tails(texts), strict=True)
        settled = [self._guarded(context, context.commit_prefix, ids) for context, ids in tails]
        return [*map(min, kept, settled)]

    def may_follow(self, context: Context, drafter_id: int, known: int = 0) -> bool:
        try:
            return self._drafts.may_follow(cast(TextContext, context), drafter_id, known)
        except Exception:
            self._draft_failed("checking the first token of a draft failed")
            return True

    def longer_last(self, context: Context, candidates: Sequence[int]) -> FirstToken | None:
        try:
            return self._drafts.longer_last(cast(TextContext, context), candidates)
        except Exception:
            self._draft_failed("checking the last token of a request failed")
            return None

    def to_target(
        self,
        contexts: Sequence[Context],
        drafts: Sequence[Sequence[int]],
        limits: Sequence[int],
        known: Sequence[int] = (),
    ) -> list[list[int]]:
        try:
            texts = cast(Sequence[TextContext], contexts)
            return self._drafts.translate(texts, drafts, limits, known)
        except Exception:
            if len(contexts) == 1:
                self._draft_failed("a draft could not be translated")
                return [[]]
        # Translate one by one, so that only the draft that fails is lost.
        return [
            self.to_target([context], [draft], [limit], [cut])[0]
            for context, draft, limit, cut in zip(
                contexts, drafts, limits, known or [0] * len(drafts), strict=True
            )
        ]

    def ids_covering(
        self, draft: Sequence[int], proposal: Sequence[int], known: int = 0
    ) -> list[int]:
        return self._drafts.ids_covering(draft, proposal, known)

    def _draft_failed(self, what: str) -> None:
        self.failures["draft_error"] += 1
        logger.debug(what, exc_info=True)

    def _encode_tails(self, contexts: Sequence[TextContext]) -> list[list[int]]:
        tails = ["" if context.broken else context.tail for context in contexts]
        try:
            return self._drafter.encode_batch(tails)
        except Exception:
            encoded: list[list[int]] = []
            for context, tail in zip(contexts, tails, strict=True):
                try:
                    encoded.append(self._drafter.encode(tail))
                except Exception:
                    self._break(context)
                    encoded.append([])
            return encoded

    def _guarded(
        self,
        context: TextContext,
        step: Callable[[Sequence[int]], int],
        ids: Sequence[int],
    ) -> int:
        """Run one half of an append. A context that raises becomes broken and keeps no ids."""
        if context.broken:
            return 0
        try:
            return step(ids)
        except Exception:
            self._break(context)
            return 0

    def _break(self, context: TextContext) -> None:
        context.broken = True
        self.failures["context_error"] += 1
        logger.debug("text could not be translated", exc_info=True)


def _tokens_ratio(target: TextTokenizer, drafter: TextTokenizer) -> float:
    try:
        theirs, ours = (len(of.encode(CALIBRATION_TEXT)) for of in (target, drafter))
    except Exception:
        logger.debug("the calibration text could not be encoded", exc_info=True)
        return 1.0
    return ours / theirs if ours and theirs else 1.0


def make_bridge(
    target: TextTokenizer,
    drafter: TextTokenizer,
    *,
    mode: str = "auto",
    target_eos: Sequence[int] | None = None,
    drafter_eos: Sequence[int] | None = None,
    chats: tuple[Any, Any] | None = None,
) -> Bridge:
    """Build the bridge of a pair.

    Args:
        mode: "auto" passes ids through if the tokenizers are equal. "text" always translates.
            "identity" requires equal tokenizers.
        target_eos: As in `SpecialTokens`, like `drafter_eos`.
        chats: Tokenizer objects of target and drafter, with the methods of transformers for chat
            templates. None: turn markers are not translated.

    Raises:
        ValueError: The mode is "identity" and the tokenizers differ.
    """
    equal = target.fingerprint == drafter.fingerprint
    if mode == "identity" and not equal:
        raise ValueError(
            f"the tokenizers of target {target.name!r} and drafter {drafter.name!r} differ, so "
            'ids cannot be passed through: leave out "translation": "identity".'
        )
    special = SpecialTokens(target, drafter, target_eos, drafter_eos)
    if equal and mode != "text":
        return IdentityBridge(special, drafter.bos_id)
    if equal:
        chat = ChatTemplateBridge("both tokenizers are the same")
    elif chats is None:
        chat = ChatTemplateBridge("switched off")
    else:
        chat = align(target, drafter, *chats, special)
        special = SpecialTokens(target, drafter, target_eos, drafter_eos, chat.turn_end)
    return TextBridge(target, drafter, special, chat)
