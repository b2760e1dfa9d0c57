# SPDX-License-Identifier: Apache-2.0
"""What vLLM's worker holds as its drafter: built as a `custom_class` proposer, asked every step.

No fault of the drafter reaches a request: whatever goes wrong, it is counted, said once, and the
request goes on undrafted.
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
from vllm_hetero_spec.engine.looks import Looks
from vllm_hetero_spec.engine.metrics.counters import DraftStats, Growth
from vllm_hetero_spec.engine.seam import nodes, runner_choice
from vllm_hetero_spec.engine.seam.runner import Runner
from vllm_hetero_spec.engine.seam.sleep_mode import kept_in_sleep
from vllm_hetero_spec.engine.seam.spec_config import HeteroSpeculativeConfig
from vllm_hetero_spec.engine.seam.step_view import StepView, trees_of
from vllm_hetero_spec.engine.seam.worker_hooks import Proposer, install_worker_hooks
from vllm_hetero_spec.engine.step_timing import known_of_pair, pair_file
from vllm_hetero_spec.engine.verifier.install import Verifier
from vllm_hetero_spec.lookahead.controllers import Controller
from vllm_hetero_spec.trees.layout import TreeRows

logger = logging.getLogger("vllm.hetero_spec")


def build(vllm_config: VllmConfig) -> "HeteroProposer":
    """Build the proposer; vLLM calls this, which `spec_config.PROPOSER` names, in every worker."""
    logger.info("Drafting for %s.", runner_choice.describe(vllm_config))
    install_worker_hooks(v2=vllm_config.use_v2_model_runner)
    return HeteroProposer(vllm_config)


class HeteroProposer(Proposer):
    """Drafts for a whole batch.

    Args:
        vllm_config: The worker's configuration.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        spec = vllm_config.speculative_config
        assert isinstance(spec, HeteroSpeculativeConfig)
        self.vllm_config = vllm_config
        self.options = spec.hetero
        self.stats = DraftStats()
        self._drafter_config = spec.drafter_model_config
        self._growth = Growth()
        self._step: StepView | None = None  # whose drafts have not been asked for yet
        self._drafts: list[list[int]] = []
        self._beginning = 0.0  # seconds that it took to begin them
        self._seam: Runner | None = None  # from `bind` on, as the verifier
        self._verifier: Verifier | None = None
        self._drafting: DraftingRank | None = None  # from `load_model` on, where this rank drafts
        self._first_rank = self._alone = True  # in the tensor parallel group
        self._looks = Looks()
        self.warm = False  # from `calibrate` on

    @property
    def seam(self) -> Runner:
        """The model runner that this proposer is bound to."""
        assert self._seam is not None, "not bound to a model runner yet"
        return self._seam

    @property
    def drafting(self) -> DraftingRank | None:
        """The drafter; None on ranks that do not draft."""
        return self._drafting

    @property
    def controller(self) -> Controller | None:
        """Who decides how far to draft; may be exchanged between steps. None on other ranks."""
        return None if self._drafting is None else self._drafting.control.controller

    @controller.setter
    def controller(self, controller: Controller) -> None:
        assert self._drafting is not None, "this rank does not draft"
        self._drafting.control.controller = controller

    def bind(self, seam: Runner) -> None:
        """Called before `load_model`: take our place in the model runner."""
        self._seam = seam
        self._verifier = Verifier(self.options, seam, self.stats)

    def load_model(self, target_model: Any) -> None:
        """Build the drafter beside the loaded target, where this rank is to draft.

        Raises:
            ConfigError: The drafter's weights are not whole, or its KV cache cannot be built.
        """
        group = get_tp_group()
        self._first_rank, self._alone = group.rank_in_group == 0, group.world_size == 1
        assert self._verifier is not None
        likeliest = nodes.likeliest_between(group)
        if group.world_size > 1 and self.options.method != "slem":
            self._verifier.share_among(group, likeliest)
        if group.world_size == 1 or self._first_rank or self.options.tensor_parallel == "sharded":
            with kept_in_sleep(self.vllm_config), faults_named(self._drafter_config):
                self._drafting = DraftingRank(
                    self.vllm_config,
                    self._drafter_config,
                    self.options,
                    self.seam,
                    self.stats,
                    group,
                    likeliest,
                )

    def record(self) -> int:
        """Record the drafter's CUDA graphs, after the target's; the bytes that they take."""
        return 0 if self._drafting is None else self._drafting.source.record()

    def calibrate(self) -> None:
        """Time target and drafter where the controller wants to know; every rank takes part."""
        before = self.warm
        if not before:
            self.seam.check_trees()
        self.warm = True
        if before or self.options.controller != "goodput" or not self.options.debug.calibrate:
            return
        file = pair_file(self.seam, self.vllm_config, self.options)
        try:
            known = known_of_pair(file, self.seam, self._drafting, self.vllm_config, self.options)
        except Exception as error:  # the first steps will teach the same, more slowly
            logger.warning("Target and drafter could not be timed at start-up: %s", error)
            return
        if known is not None and self._drafting is not None:
            self._drafting.start_control(known, file)

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """vLLM's own entry, without request ids: reached only if the runner hook is missing."""
        raise RuntimeError("vllm_hetero_spec: the model runner hook is not installed")

    def after_step(self, view: Callable[[], StepView], num_requests: int) -> list[list[int]]:
        """Begin to draft for every request that has just sampled; vLLM's runner calls this.

        Args:
            view: Makes the step's view.
            num_requests: Of the step.

        Returns:
            One list for each request, which `finish` fills.
        """
        began = time.perf_counter()
        if self._step is not None:  # nobody has asked for the drafts of the step before
            self.finish()
        self._drafts = [[] for _ in range(num_requests)]
        try:
            self._step = view()
            if self._drafting is not None:
                self._drafting.begin(self._step)
        except Exception as error:
            self._failed(error)
        self._beginning = time.perf_counter() - began
        return self._drafts

    def skip_step(self, num_requests: int, without_drafts: bool | None, begun: bool) -> bool:
        """See `Proposer`: where looks do not wait, steps go by as long as the drafter rests."""
        if without_drafts:
            passes = True
        elif without_drafts is None:
            rests = self._alone and self._drafting is not None and self._drafting.is_idle
            passes = self._looks.passes(rests, num_requests) and not begun
        else:
            passes = self._looks.passes(False, num_requests)
        if not passes:
            return False
        if self._step is not None:  # nobody has asked for the drafts of the step before
            self.finish()
        if self._drafting is not None:
            self._drafting.count_skipped_step(num_requests)
        return True

    def look_back(self, view: Callable[[], StepView], num_requests: int, *, hurried: bool) -> None:
        """Report a skipped step to the controller; few of them if the device may be idle."""
        if self._drafting is None or (hurried and self._looks.passes(True, num_requests)):
            return
        began = time.perf_counter()
        try:
            self._drafting.look_back(view())
        except Exception as error:
            self._failed(error)
        self.stats.propose_seconds += time.perf_counter() - began

    @torch.inference_mode()
    def finish(self) -> None:
        """Fill the lists of the last step, when the scheduler asks, or the next step begins.

        With at most `num_speculative_tokens` target ids each, never padded. The scheduler asks
        outside of inference mode, when the step's own tokens are on their way to the user.
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
        """Drafts for the step that was begun, in target tokens, a list for each of its requests."""
        assert self._verifier is not None
        drafts = [] if self._drafting is None else self._drafting.finish()
        trees = self._agreed(trees_of(drafts))  # before what may fail on one rank alone
        self._verifier.expect(step, drafts)
        self.seam.expect_trees(trees)
        return step.in_order(drafts)

    def _agreed(self, trees: dict[str, TreeRows]) -> dict[str, TreeRows]:
        """The trees of the first rank, on all ranks: they verify alike."""
        group = get_tp_group()
        if group.world_size == 1 or not self.options.tree_nodes:
            return trees
        agreed: dict[str, TreeRows] = group.broadcast_object(trees, src=0)
        return agreed

    def _failed(self, error: Exception) -> None:
        logger.debug("proposing failed", exc_info=True)
        text = f"{type(error).__name__}: {error}"
        self.stats.skip("drafter_error", text, len(self._drafts))

    def snapshot(self) -> DraftStats:
        """The counters as they stand; zeros on other than the first rank, which drafts alike."""
        if not self._first_rank:
            return DraftStats()
        if self._drafting is not None:
            self._drafting.show()
        return self.stats

    def report(self) -> dict[str, Any]:
        """What was counted since the last report, for the front end's metrics."""
        return self._growth.take(self.snapshot())

    def attach_to_output(self, output: object) -> None:
        """Put on a step's output what the scheduler has to know of it."""
        if self._drafting is not None:
            self.seam.attach_to_output(output, self._drafting.control.requested_length)

    def sleep(self, level: int) -> None:
        """The worker falls asleep: what is in its process is vLLM's to keep, the rest is ours.

        Args:
            level: 2 where no memory is to be held on devices.
        """
        if self._drafting is not None:
            self._drafting.reset()
            self._drafting.source.sleep(level)

    def wake(self) -> None:
        """The worker is awake again."""
        if self._drafting is not None:
            self._drafting.source.wake()

    def close(self) -> None:
        """The worker ends: the drafter and its memory are gone, the counters stay."""
        if self._drafting is not None:
            self._drafting.show()
            self._drafting.source.close()
        self._drafting = self._step = None

    def reset(self) -> None:
        """Forget every request and all KV; texts are read afresh in the next step."""
        if self._drafting is not None:
            self._drafting.reset()
