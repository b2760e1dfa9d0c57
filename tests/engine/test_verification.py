# SPDX-License-Identifier: Apache-2.0
"""Tests of verification in Model Runner V1's sampler: one packet to the device, and no read."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from test_no_reads import sent
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_hetero_spec.draft.draft import DraftProbs
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.seam.step_view import BatchView
from vllm_hetero_spec.engine.verifier import race_sampler_v1, rejection_sampler_v1
from vllm_hetero_spec.engine.verifier.draft_probs import PendingDraftProbs
from vllm_hetero_spec.engine.verifier.fuzzy_report import FuzzyRule
from vllm_hetero_spec.engine.verifier.race_sampler_v1 import RaceSamplerV1
from vllm_hetero_spec.engine.verifier.rejection_sampler_v1 import HeteroRejectionSamplerV1
from vllm_hetero_spec.engine.verifier.requested_logprobs import flat
from vllm_hetero_spec.staging import Fetched, Receiver, Sender, on_host
from vllm_hetero_spec.verify.drafts import FILLER, DraftBatch
from vllm_hetero_spec.verify.rules import block_rule, race_rule, token_rule

CPU = torch.device("cpu")
WIDTH = 40
# A greedy request, a sampled one without a draft, one with a sampled draft, one whose draft is
# sampled at some positions only, and one whose draft tokens are certain.
IDS = ["greedy", "idle", "drew", "drew at first", "certain"]
LENGTHS = [2, 0, 3, 4, 2]
TEMPERATURE = [0.0, 0.7, 1.0, 0.8, 1.2]
VIEW = BatchView(IDS, [11, 12, 13, 14, 15], [5, 0, 3, 9, 1])
RULES = ["token", "block", "race", "fuzzy"]
READS = {"item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__"}
MAKERS = {"tensor", "as_tensor", "from_numpy"}


class Recorder(TorchFunctionMode):
    """Records copies to the device and reads from it."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.copies: list[str] = []

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        index = args[1] if name in ("__getitem__", "__setitem__") else ()
        index = index if isinstance(index, tuple) else (index,)
        masks = [i for i in index if isinstance(i, torch.Tensor) and i.dtype == torch.bool]
        if name in READS or masks:
            self.reads.append(name)
        moved = name == "to" and any(isinstance(arg, torch.device) for arg in args)
        if name in MAKERS or moved or (name == "to" and "device" in kwargs):
            self.copies.append(name)
        return func(*args, **kwargs)


class Sampler(torch.nn.Module):
    """Stand-in for vLLM's sampler, whose reads do not count. `racing` chooses bonus tokens."""

    logprobs_mode = "raw_logprobs"

    def __init__(self, racing: RaceSamplerV1 | None) -> None:
        super().__init__()
        self.racing = racing

    def forward(
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata, **_: Any
    ) -> SamplerOutput:
        tokens = logits.argmax(-1)
        if self.racing is not None:
            is_greedy = sampling_metadata.temperature == 0
            warm = (
                logits.float() / sampling_metadata.temperature.masked_fill(is_greedy, 1.0)[:, None]
            )
            won, _ = self.racing(warm, {}, sampling_metadata.top_k, sampling_metadata.top_p)
            tokens = torch.where(is_greedy, tokens, won)
        if sampling_metadata.logprob_token_ids:  # vLLM's sampler then returns only these
            logits = logits[:, : max(map(len, sampling_metadata.logprob_token_ids.values()))]
        kept = LogprobsTensors(None, logits, None)
        return SamplerOutput(tokens[:, None].to(torch.int32), logprobs_tensors=kept)

    @staticmethod
    def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(-1, dtype=torch.float32)

    @staticmethod
    def gather_logprobs(logprobs: torch.Tensor, count: int, tokens: torch.Tensor) -> Any:
        ids = torch.cat([tokens[:, None], logprobs.topk(count, -1).indices], 1)
        return LogprobsTensors(ids.int(), logprobs.gather(1, ids), tokens)


class Engine:
    """A verifier between two steps; its drafts are pending."""

    def __init__(self, name: str, send: Callable | None = None) -> None:
        self.packets = 0
        self.send = Sender(CPU).send if send is None else send
        pending = PendingDraftProbs(self.counted)
        rows = torch.rand(6, WIDTH).softmax(-1)
        pending.put("drew", DraftProbs(rows, [0, 2, 4]))
        pending.put("drew at first", DraftProbs(rows, [1, -1, -1, 3]))
        racing = RaceSamplerV1(lambda: VIEW, "raw_logprobs", self.counted)
        racing = racing if name == "race" else None
        self.stats = DraftStats()
        self.fuzzy = FuzzyRule("js", 0.3, partial(Receiver, CPU, 1 << 10), self.stats)
        rules = {"token": token_rule, "block": block_rule, "race": race_rule, "fuzzy": self.fuzzy}
        self.sampler = HeteroRejectionSamplerV1(
            rules[name], pending, racing, lambda: VIEW, on_host, self.stats, Sampler(racing)
        )

    def counted(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        self.packets += 1
        with torch._C.DisableTorchFunction():
            return self.send(*arrays)


def arguments(logprobs: int | None = None) -> tuple:
    """Return the arguments of vLLM's call: 11 draft rows, and a bonus row after each draft."""
    drafts = sum(LENGTHS)
    ends = np.cumsum([length + 1 for length in LENGTHS]) - 1
    is_bonus = np.isin(np.arange(drafts + len(IDS)), ends)
    metadata = SpecDecodeMetadata(
        draft_token_ids=torch.randint(WIDTH, (drafts,), dtype=torch.int32),
        num_draft_tokens=LENGTHS,
        cu_num_draft_tokens=torch.tensor(np.cumsum(LENGTHS)),
        cu_num_sampled_tokens=torch.tensor(ends + 1),
        target_logits_indices=torch.tensor(np.flatnonzero(~is_bonus)),
        bonus_logits_indices=torch.tensor(ends),
        logits_indices=torch.arange(drafts + len(IDS)),
    )
    nothing = torch.zeros(len(IDS))
    sampling = SamplingMetadata(
        temperature=torch.tensor(TEMPERATURE),
        all_greedy=False,
        all_random=False,
        top_p=torch.tensor([1.0, 1.0, 0.9, 1.0, 0.8]),
        top_k=torch.tensor([WIDTH, 10, WIDTH, 20, 5], dtype=torch.int32),
        generators={2: torch.Generator().manual_seed(4)},
        max_num_logprobs=logprobs,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=nothing,
        presence_penalties=nothing,
        repetition_penalties=nothing,
        output_token_ids=[[] for _ in IDS],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    return metadata, None, torch.randn(drafts + len(IDS), WIDTH), sampling


@pytest.mark.parametrize("rule", RULES)
def test_a_verification_sends_one_packet_and_reads_nothing(rule: str) -> None:
    torch.manual_seed(0)
    engine, given, recorder = Engine(rule), arguments(), Recorder()
    with recorder:
        output = engine.sampler(*given)
    assert (engine.packets, recorder.copies, recorder.reads) == (1, [], [])
    assert output.sampled_token_ids.shape == (len(IDS), max(LENGTHS) + 1)
    counts = (output.sampled_token_ids != FILLER).sum(1)
    assert ((counts >= 1) & (counts <= torch.tensor(LENGTHS) + 1)).all()


def test_accounts_of_a_batch_in_parts_are_not_waited_for() -> None:
    """V2 verifies a large batch in parts. Their accounts arrive with the step's tokens."""
    waited: list[int] = []

    class Coming(Fetched):
        def wait(self) -> np.ndarray:
            waited.append(id(self))
            return super().wait()

    class Slow(Receiver):
        def fetch(self, tensor: torch.Tensor) -> Fetched:
            return Coming(super().fetch(tensor).tensor)

    fuzzy = FuzzyRule("js", 0.3, partial(Slow, CPU, 1 << 10), DraftStats())
    rows, target = torch.rand(6, WIDTH).softmax(-1), torch.rand(6, WIDTH).softmax(-1)
    bonus = torch.zeros(1, dtype=torch.int64)
    for name in "abc":
        tokens = torch.randint(WIDTH, (6,))
        fuzzy(DraftBatch.of(tokens, [6], [1], [0], [rows], range(6), [name]), target, bonus)
    assert not waited
    fuzzy.keep({"a", "b", "c"}, ())
    assert len(set(waited)) == 3
    assert fuzzy._accounts.keys() == {"a", "b", "c"}


def test_a_race_without_drafts_sends_one_packet_and_reads_nothing() -> None:
    engine, recorder = Engine("race"), Recorder()
    racing = engine.sampler.sampler.racing
    with recorder:
        tokens, _ = racing(torch.rand(len(IDS), WIDTH), {}, None, None)
    assert (engine.packets, recorder.copies, recorder.reads) == (1, [], [])
    assert tokens.shape == (len(IDS),)


@pytest.mark.parametrize("rule", RULES)
def test_a_verification_needs_no_number_of_the_device(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fake tensors raise an exception at a read. vLLM's top-k reads on a CPU only."""
    for module in (race_sampler_v1, rejection_sampler_v1):
        monkeypatch.setattr(module, "apply_top_k_top_p", apply_top_k_top_p_pytorch)
    given = arguments()
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        fakes = [_faked(fake, argument) for argument in given]
        output = Engine(rule, sent).sampler(*fakes)
    assert output.sampled_token_ids.shape == (len(IDS), max(LENGTHS) + 1)


def _faked(fake: FakeTensorMode, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return fake.from_tensor(value)
    if isinstance(value, SpecDecodeMetadata | SamplingMetadata):
        for name, field in vars(value).items():
            setattr(value, name, _faked(fake, field))
    return value


@pytest.mark.parametrize("processed", [False, True])
def test_logits_are_kept_where_they_are_asked_for(processed: bool) -> None:
    """`target_probs` overwrite the logits, unless logprobs are computed from them."""
    seen: dict[bool, list[torch.Tensor]] = {}
    for wanted in (False, True):
        torch.manual_seed(3)
        sampler = Engine("token").sampler
        sampler.is_processed_logprobs_mode = processed
        found: list[torch.Tensor] = []
        sampler._get_logprobs_tensors = lambda *args, into=found: into.append(args[3])  # type: ignore[method-assign, misc]
        output = sampler(*arguments(2 if wanted else None))
        seen[wanted] = [output.sampled_token_ids, *found]
    assert torch.equal(seen[True][0], seen[False][0])
    assert len(seen[False]) == 1
    logits = seen[True][1]
    assert (logits < 0).any()  # these are not probabilities
    assert bool(logits.isinf().any()) is processed  # top-k and top-p set -inf


class Tables(TorchDispatchMode):
    """Counts new tensors with as many elements as `like`, without in-place results."""

    def __init__(self, like: torch.Tensor) -> None:
        super().__init__()
        self._size, self._known, self.made = like.numel(), {like.data_ptr()}, 0

    def __torch_dispatch__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() == self._size:
            self.made += result.data_ptr() not in self._known
            self._known.add(result.data_ptr())
        return result


@pytest.mark.parametrize("kept", [False, True])
def test_target_probs_take_no_second_table(kept: bool) -> None:
    """A second table would be 34 MB for a step of 8 requests and a vocabulary of 262,144."""
    _, _, logits, sampling = arguments()
    of = torch.arange(len(logits)) % len(IDS)
    sampling.top_k = sampling.top_p = None
    temperature = torch.tensor(TEMPERATURE).masked_fill(torch.tensor(TEMPERATURE) == 0, 1.0)
    expected = (logits / temperature[of, None]).softmax(-1)
    with Tables(logits) as tables:
        found = rejection_sampler_v1._target_probs(logits, of, sampling, kept)
    assert torch.equal(found, expected)
    assert tables.made == kept


@pytest.mark.parametrize("likeliest", [None, 1, 4])
def test_named_tokens_have_their_log_probabilities(likeliest: int | None) -> None:
    """Other requests of the batch may have the most likely tokens, or none."""
    torch.manual_seed(3)
    plain = Engine("token").sampler(*arguments(likeliest))
    torch.manual_seed(3)
    asked = {0: [3, 7], 2: [9, 1, 5], 1: [8]}
    engine, given = Engine("token"), arguments(likeliest)
    given[3].logprob_token_ids = {**asked, 4: []}  # an empty list requests nothing
    output = engine.sampler(*given)
    assert torch.equal(output.sampled_token_ids, plain.sampled_token_ids)
    rows = given[2].log_softmax(-1)
    found = output.logprobs_tensors
    columns = max(3, likeliest or 0)
    each = output.sampled_token_ids.shape[1]
    for request, tokens in enumerate(output.sampled_token_ids.tolist()):
        start = sum(LENGTHS[:request]) + request
        for place, token in enumerate(tokens):
            if token == FILLER:
                continue
            ids = found.logprob_token_ids[request * each + place].tolist()
            told = found.logprobs[request * each + place].tolist()
            known = asked.get(request)
            if known is None:
                known = rows[start + place].topk(likeliest or 0).indices.tolist()
            assert ids == [token, *known, *[0] * (columns - len(known))]
            expected = rows[start + place, [token, *known]].tolist()
            assert told[: 1 + len(known)] == pytest.approx(expected)
            assert told[1 + len(known) :] == [-np.inf] * (columns - len(known))


def test_tokens_that_v2_emits_stand_at_the_rows_they_come_from() -> None:
    """`flat` returns the emitted token of each row of logits, and 0 for the other rows."""
    sampled = torch.tensor([[5, 6, -1], [7, -1, -1], [1, 2, 3]])
    cu, local = torch.tensor([0, 3, 4, 7]), torch.tensor([0, 1, 2, 0, 0, 1, 2], dtype=torch.int32)
    found = flat(sampled, torch.tensor([2, 1, 3]), cu, local)
    assert found.tolist() == [5, 6, 0, 7, 1, 2, 3]


def test_fuzzy_accounts_are_settled_when_tokens_are_on_the_host() -> None:
    torch.manual_seed(0)
    engine = Engine("fuzzy")
    output = engine.sampler(*arguments())
    assert engine.stats.fuzzy_variation == 0
    engine.fuzzy.keep(IDS, ["greedy"])
    accounts = engine.fuzzy._accounts
    assert accounts.keys() == {*IDS} - {"greedy"}
    assert accounts["drew"][0] <= (output.sampled_token_ids[2] != FILLER).sum()
    sums = sum(accounts.values())
    assert list(sums) == pytest.approx([engine.stats.fuzzy_tokens, engine.stats.fuzzy_variation])
    assert sums[1] > 0
    engine.fuzzy.keep([], ())
    assert not engine.fuzzy._accounts
