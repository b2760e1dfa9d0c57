# SPDX-License-Identifier: Apache-2.0
"""The drafter of vLLM's worker: a `custom_class` proposer that is called in each step.

An exception of the drafter never reaches a request. It is counted and logged once, and the request
continues without drafts.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group

from vllm_hetero_spec.engine.drafter.loading import faults_named
from vllm_hetero_spec.engine.drafting_rank import DraftingRank
from vllm_hetero_spec.engine.metrics.counters import DraftStats, Growth
from vllm_hetero_spec.engine.seam import runner_choice
from vllm_hetero_spec.engine.seam.runner import Runner
from vllm_hetero_spec.engine.seam.sleep_mode import kept_in_sleep
from vllm_hetero_spec.engine.seam.spec_config import HeteroSpeculativeConfig
from vllm_hetero_spec.engine.seam.step_view import StepView
from vllm_hetero_spec.engine.seam.worker_hooks import Proposer, install_worker_hooks
from vllm_hetero_spec.engine.step_timing import known_of_pair, pair_file
from vllm_hetero_spec.engine.verifier.draft_probs import likeliest_between
from vllm_hetero_spec.engine.verifier.install import Verifier
from vllm_hetero_spec.lookahead.prober import UnreadSteps

logger = logging.getLogger("vllm.hetero_spec")


def build(vllm_config: VllmConfig) -> "HeteroProposer":
    """Build the proposer. vLLM calls this in each worker through `spec_config.PROPOSER`."""
    logger.info("Drafting for %s.", runner_choice.describe(vllm_config))
    install_worker_hooks(v2=vllm_config.use_v2_model_runner)
    return HeteroProposer(vllm_config)


class HeteroProposer(Proposer):
    """Drafts for a whole batch."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        spec = vllm_config.speculative_config
        assert isinstance(spec, HeteroSpeculativeConfig)
        self.vllm_config = vllm_config
        self.options = spec.hetero
        self.stats = DraftStats()
        self.drafting: DraftingRank | None = None  # set by `load_model` if this rank drafts
        self._drafter_config = spec.drafter_model_config
        self._growth = Growth()
        self._step: StepView | None = None  # between `after_step` and `finish`
        self._drafts: list[list[int]] = []
        self._beginning = 0.0  # seconds of the last `after_step`
        self._seam: Runner | None = None  # set by `bind`, like the verifier
        self._verifier: Verifier | None = None
        self._first_rank = self._alone = True  # in the tensor parallel group
        self._unread = UnreadSteps()
        self.warm = False  # set by `calibrate`

    @property
    def seam(self) -> Runner:
        assert self._seam is not None, "not bound to a model runner yet"
        return self._seam

    def bind(self, seam: Runner) -> None:
        self._seam = seam
        self._verifier = Verifier(self.options, seam, self.stats)

    def load_model(self, target_model: Any) -> None:
        """Build the drafter beside the loaded target, if this rank drafts.

        Raises:
            ConfigError: The drafter's weights are incomplete, or its KV cache cannot be built.
        """
        group = get_tp_group()
        self._first_rank, self._alone = group.rank_in_group == 0, group.world_size == 1
        assert self._verifier is not None
        likeliest = likeliest_between(group)
        races = self.options.verification == "race"  # does not read draft_probs
        if group.world_size > 1 and self.options.method != "slem" and not races:
            self._verifier.share_among(group, likeliest)
        if group.world_size == 1 or self._first_rank or self.options.tensor_parallel == "sharded":
            with kept_in_sleep(self.vllm_config), faults_named(self._drafter_config):
                self.drafting = DraftingRank(
                    self.vllm_config,
                    self._drafter_config,
                    self.options,
                    self.seam,
                    self.stats,
                    group,
                    likeliest,
                )

    def record(self) -> int:
        return 0 if self.drafting is None else self.drafting.source.record()

    def calibrate(self) -> None:
        """Time target and drafter if the controller needs it. Every rank takes part."""
        if self.warm:
            return
        self.seam.check_trees()
        self.warm = True
        if self.options.controller != "goodput" or not self.options.debug.calibrate:
            return
        file = pair_file(self.seam, self.vllm_config, self.options)
        try:
            known = known_of_pair(file, self.seam, self.drafting, self.vllm_config, self.options)
        except Exception as error:  # live timings will replace the estimates
            logger.warning("Target and drafter could not be timed at start-up: %s", error)
            return
        if known is not None and self.drafting is not None:
            self.drafting.start_control(known, file)

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """vLLM's own entry, without request ids. Reached only if the runner hook is missing."""
        raise RuntimeError("vllm_hetero_spec: the model runner hook is not installed")

    def after_step(self, view: Callable[[], StepView], num_requests: int) -> list[list[int]]:
        began = time.perf_counter()
        if self._step is not None:  # the drafts of the step before were not taken
            self.finish()
        self._drafts = [[] for _ in range(num_requests)]
        try:
            self._step = view()
            if self.drafting is not None:
                self.drafting.begin(self._step)
        except Exception as error:
            self._failed(error)
        self._beginning = time.perf_counter() - began
        return self._drafts

    def skip_step(self, num_requests: int, without_drafts: bool | None, begun: bool) -> bool:
        if without_drafts:
            passes = True
        elif without_drafts is None:
            rests = self._alone and self.drafting is not None and self.drafting.is_idle
            passes = self._unread.skips(rests, num_requests) and not begun
        else:
            passes = self._unread.skips(False, num_requests)
        if not passes:
            return False
        if self._step is not None:  # the drafts of the step before were not taken
            self.finish()
        if self.drafting is not None:
            self.drafting.count_skipped_step(num_requests)
        return True

    def look_back(self, view: Callable[[], StepView], num_requests: int, *, hurried: bool) -> None:
        """Reads only few of the skipped steps if the device may be idle (`hurried`)."""
        if self.drafting is None or (hurried and self._unread.skips(True, num_requests)):
            return
        began = time.perf_counter()
        try:
            self.drafting.look_back(view())
        except Exception as error:
            self._failed(error)
        self.stats.propose_seconds += time.perf_counter() - began

    @torch.inference_mode()
    def finish(self) -> None:
        """Fill the lists that `after_step` returned.

        Each gets at most `num_speculative_tokens` target ids. Called when the scheduler takes the
        drafts, outside inference mode and after the step's own tokens have been sent, or when the
        next step begins.
        """
        began = time.perf_counter()
        step, self._step = self._step, None
        if step is None:
            return
        try:
            for draft, tokens in zip(self._drafts, self.propose_batch(step), strict=True):
                draft[:] = tokens
        except Exception as error:
            self._failed(error)
        self.seam.on_drafts_taken()
        self.stats.propose_seconds += self._beginning + time.perf_counter() - began

    def propose_batch(self, step: StepView) -> list[list[int]]:
        """Return the drafts of the current step: target tokens, one list for each request."""
        assert self._verifier is not None
        drafts = [] if self.drafting is None else self.drafting.finish()
        self.seam.expect_trees(drafts)  # a collective, so before what may fail on one rank
        self._verifier.expect(step, drafts)
        return step.in_order(drafts)

    def _failed(self, error: Exception) -> None:
        logger.debug("proposing failed", exc_info=True)
        text = f"{type(error).__name__}: {error}"
        self.stats.skip("drafter_error", text, len(self._drafts))

    def snapshot(self) -> DraftStats:
        """Return the counters; zeros on other ranks than the first, which count the same drafts."""
        if not self._first_rank:
            return DraftStats()
        if self.drafting is not None:
            self.drafting.show()
        return self.stats

    def report(self) -> dict[str, Any]:
        return self._growth.take(self.snapshot())

    def attach_to_output(self, output: object) -> None:
        if self.drafting is not None:
            self.seam.attach_to_output(output, self.drafting.control.requested_length)

    def sleep(self, level: int) -> None:
        """vLLM frees the memory of this process, and the source that of other processes."""
        if self.drafting is not None:
            self.drafting.reset()
            self.drafting.source.sleep(level)

    def wake(self) -> None:
        if self.drafting is not None:
            self.drafting.source.wake()

    def close(self) -> None:
        """Free the drafter and its memory. The counters remain."""
        if self.drafting is not None:
            self.drafting.show()
            self.drafting.source.close()
        if self._verifier is not None:
            self._verifier.close()
        self.drafting = self._step = None

    def reset(self) -> None:
        if self.drafting is not None:
            self.drafting.reset()
