# SPDX-License-Identifier: Apache-2.0
"""The proposer: from what the target sampled to drafts in the target's tokens.

vLLM builds it as a `custom_class` proposer. It owns one `RequestState` per request and keeps this
invariant: `kv_ids` of a request's sequence is exactly what its KV blocks hold, and the next round
keeps the longest common prefix of that with the drafter's ids of the text so far. A draft that is
accepted thus keeps its KV; one that is rejected is rolled back by the same rule.

No fault of the drafter reaches a request: whatever goes wrong, it is counted, said once, and the
request goes on undrafted.
"""

import logging
import time
from typing import Any

import torch
from vllm.config import VllmConfig

from vllm_hetero_spec.engine.drafter.decode_loop import Drafter
from vllm_hetero_spec.engine.drafter.draft_batch import Job, Rounds
from vllm_hetero_spec.engine.drafter.kv_pool import KVPool
from vllm_hetero_spec.engine.drafter.method import DRAFT_STREAM, draw_of, sampling_of
from vllm_hetero_spec.engine.drafter.model import DrafterModel
from vllm_hetero_spec.engine.drafter.request_limits import acceptable, penalty_of, useful_lookahead
from vllm_hetero_spec.engine.drafter.request_state import Requests, RequestState
from vllm_hetero_spec.engine.lookahead_control import Pace, RoundMeter, controller_of
from vllm_hetero_spec.engine.metrics.counters import DraftStats, Growth
from vllm_hetero_spec.engine.seam import runner_hooks
from vllm_hetero_spec.engine.seam.cache_salt import salt_of
from vllm_hetero_spec.engine.seam.drafter_config import drafter_vllm_config, kv_budget
from vllm_hetero_spec.engine.seam.spec_config import HeteroSpeculativeConfig
from vllm_hetero_spec.engine.seam.tensor_parallel import solo_group, tensor_parallel
from vllm_hetero_spec.engine.seam.tokenizers import load_pair
from vllm_hetero_spec.engine.step_timing import measure
from vllm_hetero_spec.engine.verifier.draft_probs import DraftProbs, PendingDraftProbs, shared
from vllm_hetero_spec.engine.verifier.install import Verifier
from vllm_hetero_spec.lookahead.costs import CostModel

logger = logging.getLogger("vllm.hetero_spec")

# After a failure the drafter rests 1, 2, 4, ... steps, so that a broken one costs next to nothing.
_LONGEST_REST = 1024
_STEPS_BETWEEN_GAUGES = 16


class HeteroProposer:
    """Drafts for a whole batch; named in `HeteroSpeculativeConfig.model`, built by vLLM.

    Args:
        vllm_config: The worker's configuration.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        spec = vllm_config.speculative_config
        assert isinstance(spec, HeteroSpeculativeConfig)
        self.vllm_config = vllm_config
        self.options = spec.hetero
        self.stats = DraftStats()
        self._growth = Growth()
        self._drafter_config = spec.drafter_model_config
        self._runner: Any = None
        self._drafter: Drafter | None = None
        self._first_rank = True
        self._verifying: Any = None  # the group of ranks that need the draft_probs
        self._failures = 0
        self._rest = 0
        self._draft_probs = PendingDraftProbs()
        self._pace: Pace | None = None
        self._calibrated = False
        self._planning: Any = None  # the group of ranks that draft together
        runner_hooks.install(type(self))

    def bind(self, runner: Any) -> None:
        """Called before the target's weights load: take our place in the model runner."""
        self._runner = runner
        verifier = Verifier(self.options, runner, self._draft_probs, self.stats)
        verifier.install()
        self._verifier = verifier
        # vLLM turns drafting off for the whole batch when one request nears the drafter's length;
        # we bound every request on its own.
        runner.effective_drafter_max_model_len = (
            runner.max_model_len + self.options.num_speculative_tokens + 1
        )

    def load_model(self, target_model: Any) -> None:
        """Build the drafter beside the loaded target, where this rank is to draft.

        Raises:
            ConfigError: The drafter's KV cache cannot be built.
        """
        from vllm.distributed.parallel_state import get_tp_group

        group = get_tp_group()
        self._first_rank = group.rank_in_group == 0
        if group.world_size > 1 and self.options.method != "slem":
            self._verifying = group
        solo = group.world_size > 1 and self.options.tensor_parallel == "rank0"
        if solo and group.rank_in_group != 0:
            return  # the scheduler hands the first rank's drafts to all
        self._group = solo_group() if solo else None
        if group.world_size > 1 and not solo:
            self._planning = group
        # Ranks verify with the same random numbers: building the drafter on one must not draw any.
        device = self._runner.device
        used = [device] if device.type != "cpu" else []
        with tensor_parallel(self._group), torch.random.fork_rng(used, device_type=device.type):
            model = DrafterModel(
                drafter_vllm_config(self.vllm_config, self._drafter_config, solo=solo),
                type(self._runner),
                device,
                lambda bytes_for: kv_budget(self.options, self.vllm_config, bytes_for),
            )
        target = self.vllm_config.model_config
        pair = load_pair(target, self._drafter_config, self.options)
        tokenizer, bridge = pair.drafter, pair.bridge
        drawing = 1 if solo else group.world_size
        self._sampling = sampling_of(
            self.options, pair, target.get_vocab_size(), model.device, drawing
        )
        self._drafter = Drafter(
            model,
            bridge.banned,
            tokenizer.vocab_size,
            self._sampling.method if self._sampling else None,
            target.seed ^ DRAFT_STREAM,
            bridge.drafter_eos,
            confidences=self.options.controller != "fixed",
        )
        self._set_pace(CostModel())
        self._pool = KVPool(model.num_blocks, model.block_size)
        self._requests = Requests(bridge, self._pool, self.stats)
        budget = self.vllm_config.scheduler_config.max_num_batched_tokens
        spell = self._sampling.spell if self._sampling else None
        self._rounds = Rounds(bridge, self._drafter, self._pool, self.stats, budget, spell)
        self.stats.kv_blocks = self._pool.capacity
        logger.info(
            "Drafter %s ready: %s, %d KV blocks of %d tokens.",
            self.options.model,
            "same tokenizer, ids taken as they are"
            if bridge.identity
            else "translating through text",
            self._pool.capacity,
            model.block_size,
        )

    def calibrate(self) -> None:
        """Time target and drafter where the controller wants to know; every rank takes part."""
        if self._calibrated or self.options.controller != "goodput" or not self.options.calibrate:
            return
        self._calibrated = True
        try:
            costs = measure(self._runner, self._drafter, self.vllm_config, self.options)
        except Exception as error:  # the first steps will teach the same, more slowly
            logger.warning("Target and drafter could not be timed at start-up: %s", error)
            return
        if costs is not None:
            self._set_pace(costs)

    def _set_pace(self, costs: CostModel) -> None:
        # On a GPU a look at the confidences between two steps would cost a wait for the device.
        name, cpu = self.options.controller, self._runner.device.type == "cpu"
        stops = self._planning is None and (name == "confidence" or (name == "goodput" and cpu))
        controller = controller_of(self.options, costs, stops=stops)
        self._pace = Pace(controller, stops)

    @property
    def regime(self) -> str:
        """What the controller does at present; empty where this rank does not draft."""
        return "" if self._pace is None else self._pace.controller.regime

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """vLLM's own entry, without request ids: reached only if the runner hook is missing."""
        raise RuntimeError("vllm_hetero_spec: the model runner hook is not installed")

    def propose_batch(self, scheduler_output: Any, sampled: list[list[int]]) -> list[list[int]]:
        """Draft for every request that has just sampled.

        Args:
            scheduler_output: The step's SchedulerOutput.
            sampled: Per request of the input batch, the target ids it sampled (empty in prefill).

        Returns:
            Per request at most `num_speculative_tokens` target ids; never padded.
        """
        began = time.perf_counter()
        drafts: list[list[int]] = [[] for _ in sampled]
        draft_probs: dict[str, DraftProbs] = {}
        self._verifier.keep(self._runner.requests.keys())
        if self._drafter is not None:
            self.stats.steps += 1
            try:
                lengths = self._plan(scheduler_output, sampled)
                drafts, draft_probs = self._propose(scheduler_output, sampled, lengths)
            except Exception as error:  # a broken drafter must not fail a request
                logger.debug("drafter failed", exc_info=True)
                self._recover(error, sampled)
        if self._verifying is not None:
            draft_probs = shared(draft_probs, self._verifying)
        for req_id in self._runner.input_batch.req_ids:
            self._draft_probs.put(req_id, draft_probs.get(req_id))
        if self._pace is not None:
            self._pace.end()
        self.stats.propose_seconds += time.perf_counter() - began
        return drafts

    def snapshot(self) -> DraftStats:
        """The counters as they stand; zeros on other than the first rank, which drafts alike."""
        if not self._first_rank:
            return DraftStats()
        if self._drafter is not None:
            self.stats.kv_blocks_held = self._pool.held
            self.stats.reused_tokens = self._pool.reused_tokens
            self.stats.forward_seconds = self._drafter.model.forward_seconds
        return self.stats

    def report(self) -> dict[str, Any]:
        """What was counted since the last report, for the front end's metrics."""
        return self._growth.take(self.snapshot())

    def reset(self) -> None:
        """Forget every request and all KV; texts are read afresh in the next step."""
        if self._drafter is not None:
            self._requests.clear()
            self._pool.reset()

    def _plan(self, scheduler_output: Any, sampled: list[list[int]]) -> list[int]:
        """Target tokens to draft for each request, the same on all ranks that draft."""
        runner, pace = self._runner, self._pace
        assert pace is not None
        salts = {new.req_id: salt_of(new) for new in scheduler_output.scheduled_new_reqs}
        self._requests.forget(runner.requests, salts)
        pace.begin(runner, scheduler_output, sampled)
        unread = self._requests.unread(runner.input_batch)
        lookahead = scheduler_output.num_spec_tokens_to_schedule
        lengths = pace.plan(sampled, unread, lookahead)
        if self._planning is not None:
            lengths = self._planning.broadcast_object(lengths, src=0)
        self.stats.off_steps += not any(lengths)
        if self.stats.steps % _STEPS_BETWEEN_GAUGES == 1:
            self.stats.show(pace.controller.gauges())
        return lengths

    def _propose(
        self, scheduler_output: Any, sampled: list[list[int]], lengths: list[int]
    ) -> tuple[list[list[int]], dict[str, DraftProbs]]:
        """Drafts of the lengths planned; by request, what sampled ones were drawn from."""
        runner, pace = self._runner, self._pace
        assert pace is not None
        drafts: list[list[int]] = [[] for _ in sampled]
        draft_probs: dict[str, DraftProbs] = {}
        if self._rest:
            self._rest -= 1
            self._skip_all(sampled, "backing_off")
            return drafts, draft_probs
        wanted = None
        if not pace.reads_all:
            wanted = {index for index, length in enumerate(lengths) if length}
            self.stats.skip("not_worth_it", times=sum(map(bool, sampled)) - len(wanted))
            if not wanted:
                return drafts, draft_probs
        jobs = [
            self._job(index, state, lengths[index])
            for index, state in self._requests.read(runner.input_batch, sampled, wanted)
        ]
        assert self._drafter is not None
        meter = RoundMeter(self.stats, self._drafter.model)
        with tensor_parallel(self._group):
            self._rounds.run(jobs, self._requests.outside(runner.input_batch), pace.proceed)
        pace.drafted(meter.read(), jobs)
        for job in jobs:
            if job.draft_probs is None:  # shortening by value is lossless for one-hot drafts alone
                request = runner.requests[runner.input_batch.req_ids[job.index]]
                job.proposal = acceptable(job.proposal, request)
        pace.trim(jobs)
        for job in jobs:
            if job.draft_probs is not None:
                draft_probs[runner.input_batch.req_ids[job.index]] = job.draft_probs
            drafts[job.index] = job.proposal
            self.stats.drafted(len(job.proposal))
        self._failures = 0
        return drafts, draft_probs

    def _job(self, index: int, state: RequestState, lookahead: int) -> Job:
        runner = self._runner
        batch = runner.input_batch
        request = runner.requests[batch.req_ids[index]]
        length = int(batch.num_tokens_no_spec[index])
        useful = useful_lookahead(request, length, runner.max_model_len, lookahead)
        draw = None
        if self._sampling is not None and useful:
            race_seed = self._verifier.race_seed(batch.req_ids[index])
            draw = draw_of(request, state, runner.device, race_seed)
        return Job(index, state, useful, penalty_of(request), draw)

    def _skip_all(self, sampled: list[list[int]], reason: str, detail: str = "") -> None:
        for tokens in sampled:
            if tokens:
                self.stats.skip(reason, detail)

    def _recover(self, error: Exception, sampled: list[list[int]]) -> None:
        """Drop all drafter state, of which no part can be trusted, and rest."""
        self._skip_all(sampled, "drafter_error", f"{type(error).__name__}: {error}")
        self.reset()
        self._rest = min(2**self._failures, _LONGEST_REST)
        self._failures += 1
