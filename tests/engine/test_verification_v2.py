# SPDX-License-Identifier: Apache-2.0
"""Verification in V2's sampler, beside stand-ins for Triton: V1's verdicts, without a read."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from goodness import follows
from test_no_reads import sent
from test_verification import (
    CPU,
    IDS,
    LENGTHS,
    RULES,
    TEMPERATURE,
    VIEW,
    WIDTH,
    Engine,
    Recorder,
    Tables,
    arguments,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_hetero_spec.draft.draft import DraftProbs
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.seam.step_view import BatchView
from vllm_hetero_spec.engine.verifier import rejection_sampler_v2
from vllm_hetero_spec.engine.verifier.draft_probs import PendingDraftProbs
from vllm_hetero_spec.engine.verifier.race_sampler_v1 import RaceSamplerV1
from vllm_hetero_spec.engine.verifier.race_sampler_v2 import RaceSamplerV2
from vllm_hetero_spec.engine.verifier.rejection_sampler_v2 import HeteroRejectionSamplerV2
from vllm_hetero_spec.staging import on_host
from vllm_hetero_spec.verify.drafts import FILLER
from vllm_hetero_spec.verify.rules import Rule, block_rule, race_rule, token_rule

STEPS = 5  # num_speculative_tokens; output rows have STEPS + 1 places for every draft length
PROMPTS = [3, 8, 2, 6, 4]
Verified = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class States:
    """Request states of vLLM's sampler. Their order is not that of the batch."""

    def __init__(
        self,
        temperature: Sequence[float],
        seeds: Sequence[int],
        top_k: torch.Tensor | None = None,
        top_p: torch.Tensor | None = None,
    ) -> None:
        heat = np.array(temperature, np.float32)
        self.temperature = SimpleNamespace(np=heat, gpu=torch.from_numpy(heat))
        known = np.array(seeds, np.int64)
        self.seeds = SimpleNamespace(np=known, gpu=torch.from_numpy(known))
        self.top_k, self.top_p = top_k, top_p

    def apply_top_k_top_p(
        self, logits: torch.Tensor, requests: torch.Tensor, requests_np: np.ndarray
    ) -> torch.Tensor:
        k, p = (None if x is None else x[requests] for x in (self.top_k, self.top_p))
        return apply_top_k_top_p_pytorch(logits, k, p)


class Sampler:
    """Stand-in for vLLM's sampler."""

    return_sampling_mask = False
    use_fp64_gumbel = False

    def __init__(self, states: States, logprobs_mode: str = "raw_logprobs") -> None:
        self.sampling_states, self.logprobs_mode = states, logprobs_mode

    def apply_sampling_params(
        self, logits: torch.Tensor, requests: torch.Tensor, *args: Any
    ) -> torch.Tensor:
        heat = self.sampling_states.temperature.gpu[requests, None]
        warm = logits.float() / torch.where(heat == 0, 1.0, heat)
        return self.sampling_states.apply_top_k_top_p(warm, requests, args[1])


def likeliest(logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Return the argmax instead of a sampled token, like the stand-in for V1's sampler."""
    return logits.argmax(-1)


class Batch:
    """A batch in V2's layout: each request's last token is followed by its draft."""

    def __init__(self, lengths: Sequence[int], requests: Sequence[int], written: list[int]) -> None:
        self.written = written
        self.ends = np.cumsum(np.array(lengths) + 1)
        self.cu = torch.tensor([0, *self.ends], dtype=torch.int32)
        self.idx = torch.tensor(requests)
        self.idx_np = np.array(requests)
        counts = torch.tensor(lengths) + 1
        self.expanded = self.idx.repeat_interleave(counts)
        local = [place for length in lengths for place in range(length + 1)]
        self.local = torch.tensor(local, dtype=torch.int32)
        # The first row of a request belongs to the last token of its text.
        self.pos = torch.tensor(written).repeat_interleave(counts) - 1 + self.local

    def run(
        self,
        sampler: HeteroRejectionSamplerV2,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        parts: Sequence[tuple[int, int]],
    ) -> list[Verified]:
        """Verify like vLLM: get the view once, then verify each part."""
        found = []
        view = sampler._batch(None)  # type: ignore[arg-type]
        sampler._view = dataclasses.replace(view, first_rows=np.array([0, *self.ends], np.int32))
        sampler._verified = 0
        for start, stop in parts:
            lo, hi = (0 if not i else int(self.ends[i - 1]) for i in (start, stop))
            found.append(
                sampler._verify(
                    logits[lo:hi],
                    None,
                    tokens[lo:hi],
                    self.pos[lo:hi],
                    self.cu[start : stop + 1] - lo,
                    self.idx[start:stop],
                    self.idx_np[start:stop],
                    self.expanded[lo:hi],
                    self.local[lo:hi],
                    np.zeros(stop - start),
                    tokens[lo:hi],
                )
            )
        return found


def made(
    rule: Rule,
    pending: PendingDraftProbs,
    sampler: Sampler,
    view: BatchView,
    prompts: torch.Tensor,
    *,
    races: bool,
) -> HeteroRejectionSamplerV2:
    def places(requests: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return positions + 1 - prompts[requests]

    spec = SimpleNamespace(
        num_speculative_tokens=STEPS,
        enable_adaptive_verification=False,
        rejection_sample_method="strict",
    )
    return HeteroRejectionSamplerV2(
        rule,
        pending,
        RaceSamplerV2(sampler.sampling_states, places) if races else None,  # type: ignore[arg-type]
        lambda batch: view,
        on_host,
        DraftStats(),
        sampler,
        spec,
        CPU,
    )


class Mixed:
    """The batch of V1's tests on V2's sampler, and V1's sampler with the same pending drafts."""

    def __init__(self, rule: str, logprobs_mode: str = "raw_logprobs", **engine: Any) -> None:
        self.old = Engine(rule, **engine)
        self.given = metadata, _, self.logits, sampling = arguments()
        order = [4, 2, 0, 1, 3]  # state index of each request

        def by_state(values: Any) -> list:
            return [values[order.index(place)] for place in range(len(order))]

        states = States(
            by_state(TEMPERATURE),
            by_state(VIEW.noise_seeds),
            sampling.top_k[torch.tensor(by_state(range(5)))],
            sampling.top_p[torch.tensor(by_state(range(5)))],
        )
        written = [a + b for a, b in zip(PROMPTS, VIEW.num_output_tokens, strict=True)]
        self.batch = Batch(LENGTHS, order, written)
        self.tokens = torch.zeros(len(self.logits), dtype=torch.int32)
        self.tokens[metadata.target_logits_indices + 1] = metadata.draft_token_ids
        self.sampler = made(
            self.old.sampler._rule,
            self.old.sampler._pending,
            Sampler(states, logprobs_mode),
            BatchView(IDS, num_output_tokens=VIEW.num_output_tokens, lengths=LENGTHS),
            torch.tensor(by_state(PROMPTS)),
            races=rule == "race",
        )

    def run(self, parts: Sequence[tuple[int, int]] = ((0, 5),)) -> list[Verified]:
        return self.batch.run(self.sampler, self.logits.clone(), self.tokens, parts)


@pytest.fixture(autouse=True)
def _no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection_sampler_v2, "gumbel_sample", likeliest)


def mixed(rule: str, **more: Any) -> Mixed:
    torch.manual_seed(8)
    return Mixed(rule, **more)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("parts", [((0, 5),), ((0, 2), (2, 4), (4, 5))])
def test_verdicts_are_those_of_v1(rule: str, parts: Sequence[tuple[int, int]]) -> None:
    """V2's verdicts equal V1's for a request of each kind, in one part or in several."""
    batch = mixed(rule)
    found = batch.run(parts)
    assert len(found) == len(parts)
    tokens, counts = (torch.cat([part[i] for part in found]) for i in (1, 2))
    assert tokens.shape == (len(IDS), STEPS + 1)
    assert (tokens.dtype, counts.dtype) == (torch.int64, torch.int32)
    old = mixed(rule)
    expected = old.old.sampler(*old.given).sampled_token_ids
    assert torch.equal(tokens[:, : expected.shape[1]].int(), expected)
    assert torch.equal(counts.long(), (expected != FILLER).sum(1))


@pytest.mark.parametrize("rule", RULES)
def test_a_part_sends_one_packet_and_reads_nothing(rule: str) -> None:
    batch, recorder = mixed(rule), Recorder()
    with recorder:
        batch.run(((0, 3), (3, 5)))
    assert (batch.old.packets, recorder.copies, recorder.reads) == (2, [], [])


@pytest.mark.parametrize("rule", RULES)
def test_a_verification_needs_no_number_of_the_device(rule: str) -> None:
    """Fake tensors raise an exception at a read."""
    batch = mixed(rule, send=sent)
    states = batch.sampler.sampler.sampling_states
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        for owner in (batch, batch.batch, states, states.temperature, states.seeds):
            for name, value in list(vars(owner).items()):
                if isinstance(value, torch.Tensor):
                    setattr(owner, name, fake.from_tensor(value))
        ((_, tokens, counts),) = batch.run()
    assert tokens.shape == (len(IDS), STEPS + 1)
    assert counts.shape == (len(IDS),)


@pytest.mark.parametrize("rule", RULES)
def test_drafts_that_were_filled_up_have_the_same_verdicts(rule: str) -> None:
    """With asynchronous scheduling drafts have equally many rows. The view has their lengths."""
    ((_, *expected),) = mixed(rule).run()
    batch = mixed(rule)
    plain = batch.batch
    even = batch.batch = Batch([STEPS] * len(IDS), list(plain.idx_np), plain.written)
    rows = [
        int(even.cu[i]) + place for i, length in enumerate(LENGTHS) for place in range(length + 1)
    ]
    logits, tokens = torch.randn(int(even.cu[-1]), WIDTH), torch.ones(int(even.cu[-1]))
    logits[rows], tokens[rows] = batch.logits, batch.tokens.float()
    batch.logits, batch.tokens = logits, tokens.int()
    ((_, *found),) = batch.run()
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("rows", [LENGTHS, [4] * 5, [STEPS] * 5], ids=["own", "even", "most"])
@pytest.mark.parametrize("parts", [((0, 5),), ((0, 1), (1, 3), (3, 5))])
def test_greedy_requests_emit_the_likeliest_tokens(
    rows: list[int], parts: Sequence[tuple[int, int]]
) -> None:
    """Drafts may have more rows than tokens, and -1 in the place of a token."""
    torch.manual_seed(8)
    batch = Batch(rows, range(5), [4] * 5)
    logits, states = torch.randn(int(batch.ends[-1]), WIDTH), States([0.0] * 5, range(5))
    best = logits.argmax(-1)
    tokens = torch.cat([torch.zeros(1), best[:-1]]).int()  # all agree, padding as well
    starts = batch.cu[:-1].tolist()
    tokens[starts[2] + 2] = -1
    tokens[starts[3] + 3] += 1
    view = BatchView(IDS, lengths=LENGTHS)
    sampler = made(
        token_rule, PendingDraftProbs(), Sampler(states), view, torch.full((5,), 4), races=False
    )
    found = batch.run(sampler, logits, tokens, parts)
    emitted, counts = (torch.cat([part[i] for part in found]) for i in (1, 2))
    assert (emitted.shape, emitted.dtype, counts.dtype) == ((5, STEPS + 1), best.dtype, torch.int32)
    assert counts.tolist() == [3, 1, 2, 3, 3]
    for line, start, count in zip(emitted, starts, counts.tolist(), strict=True):
        assert torch.equal(line[:count], best[start : start + count])


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_logits_are_kept_where_they_are_asked_for(mode: str) -> None:
    """`target_probs` overwrite only processed logits, and only if logprobs do not need them."""
    batch = mixed("token", logprobs_mode=mode)
    logits = batch.logits.clone()
    ((processed, *_),) = batch.batch.run(batch.sampler, logits, batch.tokens, [(0, 5)])
    assert torch.equal(logits, batch.logits)
    sampler = batch.sampler.sampler
    fresh = sampler.apply_sampling_params(
        batch.logits, batch.batch.expanded, None, batch.batch.idx.numpy()
    )
    assert torch.equal(processed, fresh) is (mode == "processed_logprobs")


def test_logits_without_parameters_are_left_alone() -> None:
    """vLLM then makes no copy of the logits, and computes logprobs from them."""
    batch = mixed("token")
    batch.sampler.sampler.apply_sampling_params = lambda logits, *_: logits  # type: ignore[method-assign]
    logits = batch.logits.clone().bfloat16()
    before = logits.clone()
    ((processed, tokens, _),) = batch.batch.run(batch.sampler, logits, batch.tokens, [(0, 5)])
    assert processed is not None
    assert torch.equal(logits, before)
    assert (tokens[:, 0] >= 0).all()


# ----------------------------------------------------------------------------------- distributions

COPIES = 20_000
P = torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.1, 0.6, 0.2, 0.1], [0.3, 0.3, 0.3, 0.1]])
Q = torch.tensor([[0.2, 0.5, 0.1, 0.2], [0.4, 0.1, 0.4, 0.1]])


def many(rule: str, draft: torch.Tensor, heat: float = 1.0) -> Counter:
    """Count the emitted tokens of requests with these drafts, int64 [n, 2], padded with -1."""
    count = len(draft)
    pending = PendingDraftProbs()
    ids = [str(i) for i in range(count)]
    for i, line in enumerate(draft.tolist()):
        pending.put(ids[i], DraftProbs(Q, [j for j in (0, 1) if line[j] >= 0]))
    sampler = Sampler(States([heat] * count, range(count)))
    rules: dict[str, Rule] = {"token": token_rule, "block": block_rule, "race": race_rule}
    verifier = made(
        rules[rule],
        pending,
        sampler,
        BatchView(ids, num_output_tokens=[0] * count, lengths=[2] * count),
        torch.full((count,), 4),
        races=True,  # so that bonus tokens are sampled
    )
    batch = Batch([2] * count, range(count), [4] * count)
    tokens = torch.zeros(count, 3, dtype=torch.int64)
    tokens[:, 1:] = draft
    logits = (P.log() * heat).repeat(count, 1)
    ((_, sampled, _),) = batch.run(verifier, logits, tokens.view(-1), [(0, count)])
    return Counter(tuple(t for t in line if t >= 0) for line in sampled.tolist())


def drafts(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.stack(
        [torch.multinomial(row, count, replacement=True, generator=generator) for row in Q], 1
    )


def firsts(found: Counter) -> Counter:
    return Counter(line[0] for line in found.elements())


def behind(found: Counter, accepted: int) -> Counter:
    """Count the tokens that follow `accepted` tokens."""
    return Counter(line[accepted] for line in found.elements() if len(line) > accepted)


@pytest.mark.parametrize("rule", ["token", "block", "race"])
@pytest.mark.parametrize("heat", [1.0, 0.6])
def test_the_law_is_the_targets(rule: str, heat: float) -> None:
    found = many(rule, drafts(COPIES), heat)
    assert {len(line) for line in found} == {1, 2, 3}
    assert follows(firsts(found), dict(enumerate(P[0].tolist())))
    assert follows(behind(found, 2), dict(enumerate(P[2].tolist())))


@pytest.mark.parametrize("rule", ["token", "block", "race"])
@pytest.mark.parametrize("valid", [0, 1])
def test_a_place_without_a_token_is_the_targets_own(rule: str, valid: int) -> None:
    """Padding of -1 is never accepted, and the output follows the target's distribution."""
    draft = drafts(COPIES)
    draft[:, valid:] = -1
    found = many(rule, draft)
    assert {len(line) for line in found} == set(range(1, valid + 2))
    assert follows(firsts(found), dict(enumerate(P[0].tolist())))
    assert follows(behind(found, valid), dict(enumerate(P[valid].tolist())))


def test_races_without_drafts_are_those_of_v1() -> None:
    """A seed has the same tokens on both runners. Temperature 0 chooses the most likely token."""
    logits = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(2))
    top_k = torch.tensor([WIDTH, 4, 9, 3, WIDTH])
    top_p = torch.tensor([1.0, 0.9, 1.0, 0.7, 0.8])
    racing = RaceSamplerV1(lambda: VIEW, "processed_logits")
    expected, kept = racing(logits.clone(), {}, top_k, top_p)
    states = States([1.0] * 5, VIEW.noise_seeds, top_k, top_p)
    races = RaceSamplerV2(states, lambda requests, positions: positions + 1 - torch.tensor(PROMPTS))  # type: ignore[arg-type]
    positions = torch.tensor(PROMPTS) + torch.tensor(VIEW.num_output_tokens) - 1
    index = torch.arange(5)
    tokens, processed = races(logits.clone(), index, index.numpy(), positions, top_k, top_p, False)
    assert torch.equal(tokens, expected)
    assert torch.equal(processed, kept)
    states.temperature.gpu[1] = 0
    tokens, _ = races(logits.clone(), index, index.numpy(), positions, None, None, False)
    assert tokens[1] == logits[1].argmax()


def test_the_batch_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch also begins again at its first request."""
    batch = mixed("token")
    asked: list[Any] = []
    batch.sampler._batch = lambda given: asked.append(given) or BatchView(IDS, lengths=LENGTHS)  # type: ignore[func-returns-value, return-value]
    monkeypatch.setattr(RejectionSampler, "__call__", lambda self, *_: self._verified)
    batch.sampler._verified = 3
    assert batch.sampler(batch.logits, "a batch") == 0  # type: ignore[arg-type, comparison-overlap]
    assert asked == ["a batch"]
    assert batch.sampler._stats.verify_seconds > 0


def test_target_probs_take_one_table_beside_the_logits() -> None:
    logits = torch.randn(6, WIDTH)
    rows = torch.arange(6)
    expected = logits.softmax(-1)
    with Tables(logits) as tables:
        found = rejection_sampler_v2._target_probs(logits, rows, kept=False)
    assert torch.equal(found, expected)
    assert found.data_ptr() == logits.data_ptr()
    assert tables.made == 1
