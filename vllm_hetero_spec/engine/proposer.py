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

from vllm.config import VllmConfig

from vllm_hetero_spec.engine import runner as runner_hooks
from vllm_hetero_spec.engine.batch import Job, Rounds
from vllm_hetero_spec.engine.drafter import Drafter
from vllm_hetero_spec.engine.drafter_config import drafter_vllm_config, kv_budget
from vllm_hetero_spec.engine.drafter_model import DrafterModel
from vllm_hetero_spec.engine.kv_pool import KVPool
from vllm_hetero_spec.engine.laws import DraftLaws
from vllm_hetero_spec.engine.limits import acceptable, penalty_of, useful_lookahead
from vllm_hetero_spec.engine.parallel import solo_group, tensor_parallel
from vllm_hetero_spec.engine.requests import Requests, RequestState
from vllm_hetero_spec.engine.salt import salt_of
from vllm_hetero_spec.engine.sampling import DRAFT_STREAM, draw_of, sampling_of
from vllm_hetero_spec.engine.spec_config import HeteroSpeculativeConfig
from vllm_hetero_spec.engine.stats import DraftStats, Growth
from vllm_hetero_spec.engine.tokenizers import load_pair
from vllm_hetero_spec.engine.verifier import Verifier

logger = logging.getLogger("vllm.hetero_spec")

# After a failure the drafter rests 1, 2, 4, ... steps, so that a broken one costs next to nothing.
_LONGEST_REST = 1024


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
        self._failures = 0
        self._rest = 0
        self._laws = DraftLaws()
        runner_hooks.install(type(self))

    def bind(self, runner: Any) -> None:
        """Called before the target's weights load: take our place in the model runner."""
        self._runner = runner
        verifier = Verifier(self.options, runner, self._laws, self.stats)
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
        solo = group.world_size > 1 and self.options.tensor_parallel == "rank0"
        if solo and group.rank_in_group != 0:
            return  # the scheduler hands the first rank's drafts to all
        self._group = solo_group() if solo else None
        with tensor_parallel(self._group):
            model = DrafterModel(
                drafter_vllm_config(self.vllm_config, self._drafter_config, solo=solo),
                type(self._runner),
                self._runner.device,
                lambda bytes_for: kv_budget(self.options, self.vllm_config, bytes_for),
            )
        target = self.vllm_config.model_config
        pair = load_pair(target, self._drafter_config, self.options)
        tokenizer, bridge = pair.drafter, pair.bridge
        self._sampling = sampling_of(
            self.options, pair, target.get_vocab_size(), model.device, group.world_size
        )
        self._drafter = Drafter(
            model,
            tokenizer.special_ids - bridge.drafter_eos,
            tokenizer.vocab_size,
            self._sampling.method if self._sampling else None,
            target.seed ^ DRAFT_STREAM,
            bridge.drafter_eos,
        )
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
        if self._drafter is None:
            return [[] for _ in sampled]
        began = time.perf_counter()
        self.stats.steps += 1
        try:
            drafts = self._propose(scheduler_output, sampled)
        except Exception as error:  # a broken drafter must not fail a request
            logger.debug("drafter failed", exc_info=True)
            drafts = self._recover(error, sampled)
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

    def _propose(self, scheduler_output: Any, sampled: list[list[int]]) -> list[list[int]]:
        runner = self._runner
        salts = {new.req_id: salt_of(new) for new in scheduler_output.scheduled_new_reqs}
        self._requests.forget(runner.requests, salts)
        self._verifier.keep(runner.requests.keys())
        drafts: list[list[int]] = [[] for _ in sampled]
        if self._rest:
            self._rest -= 1
            self._skip_all(sampled, "backing_off")
            return drafts
        lookahead = scheduler_output.num_spec_tokens_to_schedule
        jobs = [
            self._job(index, state, lookahead if sampled[index] else 0)
            for index, state in self._requests.read(runner.input_batch, sampled)
        ]
        with tensor_parallel(self._group):
            self._rounds.run(jobs, self._requests.outside(runner.input_batch))
        for job in jobs:
            request = runner.requests[runner.input_batch.req_ids[job.index]]
            proposal = job.proposal
            if job.law is None:  # shortening is lossless for one-hot drafts alone
                proposal = acceptable(proposal, request)
            drafts[job.index] = proposal
            self._laws.put(runner.input_batch.req_ids[job.index], job.law)
            self.stats.drafted(len(proposal))
        self._failures = 0
        return drafts

    def _job(self, index: int, state: RequestState, lookahead: int) -> Job:
        runner = self._runner
        batch = runner.input_batch
        request = runner.requests[batch.req_ids[index]]
        length = int(batch.num_tokens_no_spec[index])
        useful = useful_lookahead(request, length, runner.max_model_len, lookahead)
        draw = None
        if self._sampling is not None and useful:
            clock = self._verifier.clock(batch.req_ids[index])
            draw = draw_of(request, state, runner.device, clock)
        return Job(index, state, useful, penalty_of(request), draw)

    def _skip_all(self, sampled: list[list[int]], reason: str, detail: str = "") -> None:
        for tokens in sampled:
            if tokens:
                self.stats.skip(reason, detail)

    def _recover(self, error: Exception, sampled: list[list[int]]) -> list[list[int]]:
        """Drop all drafter state, of which no part can be trusted, and rest."""
        self._skip_all(sampled, "drafter_error", f"{type(error).__name__}: {error}")
        self.reset()
        self._rest = min(2**self._failures, _LONGEST_REST)
        self._failures += 1
        return [[] for _ in sampled]
