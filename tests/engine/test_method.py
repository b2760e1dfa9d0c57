# SPDX-License-Identifier: Apache-2.0
"""The method of a deployment: a row of the table, or the row that `hetero` stands for."""

import pytest
import recipes
import torch

from vllm_hetero_spec.draft import methods
from vllm_hetero_spec.draft.sampling import SampledMethod
from vllm_hetero_spec.engine.drafter.method import sampling_of
from vllm_hetero_spec.engine.seam.tokenizers import TokenizerPair
from vllm_hetero_spec.options import METHODS, HeteroOptions
from vllm_hetero_spec.slrs.slrs import SlrsMethod
from vllm_hetero_spec.text.bridge import make_bridge
from vllm_hetero_spec.text.loading import load_tokenizer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pair() -> TokenizerPair:
    """A pair whose drafter has single bytes as tokens, so target tokens consist of many of them."""
    target = load_tokenizer(recipes.train_byte_level(400), "target")
    drafter = load_tokenizer(recipes.build_bytes(), "drafter")
    return TokenizerPair(target, drafter, make_bridge(target, drafter))


def sampled(
    pair: TokenizerPair, method: str, ranks: int = 1, **options: object
) -> SampledMethod | None:
    width = pair.target.vocab_size + 8  # a padded vocabulary
    given = HeteroOptions(method, "drafter", 4, **options)
    return sampling_of(given, pair, width, CPU, ranks)


@pytest.mark.parametrize("method", [name for name in METHODS if name != methods.HETERO])
def test_a_method_samples_as_the_table_of_methods_describes(
    pair: TokenizerPair, method: str
) -> None:
    row, found = methods.METHODS[method], sampled(pair, method)
    assert (found is not None) is row.needs_probs
    if found is not None:
        assert found.tokens.renormalise is row.renormalise
        assert found.tokens.width == pair.target.vocab_size + 8
        assert isinstance(found, SlrsMethod) is row.merges
        for d, first in enumerate(found.tokens.first.tolist()):
            assert [*found.spell(d), -1][0] == first
            assert first < 0 or len(found.spell(d)) == found.lengths[d]


def test_between_nodes_rows_have_few_tokens(pair: TokenizerPair) -> None:
    """Rows of merges would have more tokens, so no method with merges is used."""
    for method in ("slrs", "hetero", "push_forward", "tli"):
        options, width = HeteroOptions(method, "drafter", 4), pair.target.vocab_size
        found = sampling_of(options, pair, width, CPU, 1, likeliest=64)
        assert found is not None
        assert found.likeliest == 64
        assert not isinstance(found, SlrsMethod)


def test_spans_of_merges_are_those_of_the_drafter(pair: TokenizerPair) -> None:
    found = sampled(pair, "slrs", merge_candidates=3)
    assert isinstance(found, SlrsMethod)
    assert found.merge_span == (methods.LONG_SPAN, 3)
    plain = sampled(pair, "slrs", merge_candidates=0)
    assert plain is not None
    assert not isinstance(plain, SlrsMethod)


def test_hetero_is_a_method_that_the_deployment_can_run(pair: TokenizerPair) -> None:
    """Races allow no merges. Several ranks must have equal drafts, so they do not sample."""
    best, raced = sampled(pair, "hetero"), sampled(pair, "hetero", verification="race")
    assert isinstance(best, SlrsMethod)
    assert raced is not None
    assert not isinstance(raced, SlrsMethod)
    assert sampled(pair, "hetero", ranks=2) is None


@pytest.mark.parametrize("method", ["hetero", "union", "slrs"])
def test_equal_tokenizers_keep_their_ids(pair: TokenizerPair, method: str) -> None:
    same = TokenizerPair(pair.target, pair.target, make_bridge(pair.target, pair.target))
    found = sampled(same, method)
    assert found is not None
    assert found.tokens.first.tolist() == list(range(pair.target.vocab_size))
    assert found.tokens.renormalise
    assert not isinstance(found, SlrsMethod)
