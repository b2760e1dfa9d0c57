# SPDX-License-Identifier: Apache-2.0
"""A drafter of single bytes drafts whole target tokens; both sides have real tokenizers."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
import recipes
import torch
from goodness import MISSED, follows, missed

from vllm_hetero_spec.draft.methods import LONG_SPAN, SHORT_SPAN, span
from vllm_hetero_spec.draft.token_map import TokenMap
from vllm_hetero_spec.slrs.merges import Merges
from vllm_hetero_spec.slrs.slrs import Slrs, SlrsPath
from vllm_hetero_spec.text.loading import load_tokenizer
from vllm_hetero_spec.text.tokenizer import TextTokenizer
from vllm_hetero_spec.text.vocabulary import VocabularyMaps, build_maps

CPU = torch.device("cpu")
REACH = 5  # context bytes of the drafter
CONTEXTS = [b"    def get_", b"        return", b"import os\nimport", b"if not isinst"]
END = b""


class ByteDrafter:
    """Tokens are bytes and an end of text; rows count the next byte after the last REACH bytes."""

    def __init__(self) -> None:
        backend = recipes.build_bytes()
        backend.add_special_tokens(["</s>"])
        self.tokenizer: TextTokenizer = load_tokenizer(backend, "bytes")
        self.end = self.tokenizer.token_bytes.index(END)
        self._follow: dict[bytes, np.ndarray] = defaultdict(self._nothing)
        text = "".join(recipes.corpus()[:25]).encode()
        for place in range(REACH, len(text)):
            row = self._follow[text[place - REACH : place]]
            row[self.tokenizer.byte_ids[text[place]]] += 1

    def _nothing(self) -> np.ndarray:
        row = np.zeros(self.tokenizer.vocab_size, np.float32)
        row[self.end] = 0.01
        return row

    def row(self, text: bytes) -> torch.Tensor:
        row = torch.from_numpy(self._follow[text[-REACH:]])
        return row / row.sum()


class Drafts:
    """Drafts after given texts; the drafter keeps the KV of everything that was fed."""

    def __init__(
        self,
        target: TextTokenizer,
        drafter: ByteDrafter,
        texts: Sequence[bytes],
        span: int,
        wanted: int,
    ) -> None:
        self._drafter, self._texts = drafter, texts
        tokenizer = drafter.tokenizer
        maps: VocabularyMaps = build_maps(target, tokenizer)
        self.paths = [SlrsPath(wanted * span, wanted, seed=i) for i, _ in enumerate(texts)]
        self._kv: list[list[int]] = [[] for _ in texts]
        tokens = TokenMap(torch.from_numpy(maps.kappa_first.astype(np.int64)), target.vocab_size)
        merging = Merges(target, tokenizer, maps, CPU)
        slrs = Slrs(tokens, merging, frozenset({drafter.end}), span)
        self.draft_probs = slrs.draft(self._rows(range(len(texts))), self.paths, self._feed)

    def _feed(
        self, indices: Sequence[int], ids: Sequence[Sequence[int]], side_branches: int = 0
    ) -> torch.Tensor:
        assert not side_branches
        for index, tokens in zip(indices, ids, strict=True):
            self._kv[index][self.paths[index].written :] = tokens
        return self._rows(indices)

    def _rows(self, indices: Sequence[int]) -> torch.Tensor:
        spell = self._drafter.tokenizer.decode_bytes
        rows = torch.stack(
            [self._drafter.row(self._texts[i] + spell(self._kv[i])) for i in indices]
        )
        rows[:, self._drafter.end] = 0  # no target token corresponds to it here
        return rows / rows.sum(-1, keepdim=True)


@pytest.fixture(scope="module")
def target() -> TextTokenizer:
    return load_tokenizer(recipes.train_byte_level(1500), "target")


@pytest.fixture(scope="module")
def drafter() -> ByteDrafter:
    return ByteDrafter()


def test_the_span_is_that_of_the_vocabulary(drafter: ByteDrafter) -> None:
    assert span(drafter.tokenizer.vocab_size) == LONG_SPAN
    assert span(32_000) == SHORT_SPAN


def test_whole_target_tokens_are_drafted(target: TextTokenizer, drafter: ByteDrafter) -> None:
    texts = CONTEXTS * 20
    lengths = {}
    for merge_span in (1, SHORT_SPAN, LONG_SPAN):
        drafts = Drafts(target, drafter, texts, merge_span, 3)
        for path in drafts.paths:
            spelled = target.decode_bytes(path.proposal)
            assert spelled == drafter.tokenizer.decode_bytes(path.drafted)
            assert len(path.proposal) >= 3
        pieces = [len(target.token_bytes[t]) for path in drafts.paths for t in path.proposal[:3]]
        lengths[merge_span] = np.mean(pieces)
        assert max(pieces) == merge_span
    assert lengths[1] == 1
    assert lengths[SHORT_SPAN] > 1.2
    assert lengths[LONG_SPAN] > 1.5


@pytest.mark.parametrize("text", CONTEXTS)
def test_proposals_follow_their_rows(
    target: TextTokenizer, drafter: ByteDrafter, text: bytes
) -> None:
    copies = 2500
    drafts = Drafts(target, drafter, [text] * copies, LONG_SPAN, 1)
    found = Counter(path.proposal[0] for path in drafts.paths)
    probs = drafts.draft_probs[0]
    assert torch.equal(drafts.draft_probs, probs.expand(copies, -1))
    assert float(probs.sum()) == pytest.approx(1.0, abs=1e-5)
    expected = {t: x for t, x in enumerate(probs.tolist()) if x}
    assert follows(found, expected)
    # The test must detect a distribution of single bytes.
    plain = Drafts(target, drafter, [text], 1, 1).draft_probs[0].tolist()
    assert missed(expected, dict(enumerate(plain)), copies) < MISSED
    assert any(len(target.token_bytes[t]) > 1 for t in found)
