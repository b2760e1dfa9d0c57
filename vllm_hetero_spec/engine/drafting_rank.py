# SPDX-License-Identifier: Apache-2.0
"""Drafting on one rank: from a step of the target to drafts in target tokens.

A rank has one `RequestState` per request. Invariant: `kv_ids` of a request's sequence are exactly
the ids in its KV blocks. The next round keeps the longest common prefix of `kv_ids` and the
drafter's ids of the current text. So an accepted draft keeps its KV, and a rejected one is rolled
back by the same rule.
"""

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.config import ModelConfig, VllmConfig

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.draft.token_map import most_rows
from vllm_hetero_spec.engine.ahead.client import ProcessSource
from vllm_hetero_spec.engine.ahead.control import PrecomputedDrafts
from vllm_hetero_spec.engine.ahead.deployment import Deployment
from vllm_hetero_spec.engine.ahead.sampled_records import SampledRecordDecoder
from vllm_hetero_spec.engine.copies.policy import Copies
from vllm_hetero_spec.engine.draft_source import DraftSource
from vllm_hetero_spec.engine.drafter.inline_source import InlineSource
from vllm_hetero_spec.engine.drafter.requests import Requests
from vllm_hetero_spec.engine.drafter.tasks import DraftTask
from vllm_hetero_spec.engine.lookahead_control import LookaheadControl, PlanPolicy, StepPlan
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.pair_file import PairFile
from vllm_hetero_spec.engine.seam.drafter_model import parallel_mask
from vllm_hetero_spec.engine.seam.runner import Runner
from vllm_hetero_spec.engine.seam.step_view import StepView
from vllm_hetero_spec.engine.seam.tokenizers import load_pair
from vllm_hetero_spec.engine.trees.control import TreePolicy
from vllm_hetero_spec.engine.trees.forks import TreeBranches
from vllm_hetero_spec.lookahead.controllers import ConfidenceStop, Controller, Fixed
from vllm_hetero_spec.lookahead.costs import CostModel
from vllm_hetero_spec.lookahead.estimates import DraftSteps, Estimates, Parts
from vllm_hetero_spec.lookahead.goodput import Goodput
from vllm_hetero_spec.options import ConfidenceOptions, HeteroOptions
from vllm_hetero_spec.trees.policy import TreeChoice
from vllm_hetero_spec.trees.values import TREE_PARTS, TreeValues

if TYPE_CHECKING:
    import numpy as np
    from vllm.distributed.parallel_state import GroupCoordinator

logger = logging.getLogger("vllm.hetero_spec")

# Steps; after failures the drafter pauses for 1, 2, 4, ... steps, so that it costs almost nothing.
_LONGEST_REST = 1024
_STEPS_BETWEEN_GAUGES = 16
_UNSEEN = 1.0  # seconds; longest time without reading a step while the drafter is idle


class DraftingRank:
    """The drafter of one worker, and the state of its requests.

    Args:
        seam: The target's model runner.
        likeliest: Number of most likely tokens that drafts are sampled from; None for all.

    Raises:
        ConfigError: The drafter's KV cache cannot be built.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        drafter_config: ModelConfig,
        options: HeteroOptions,
        seam: Runner,
        stats: DraftStats,
        group: "GroupCoordinator",
        likeliest: int | None,
    ) -> None:
        split = group.world_size > 1 and options.tensor_parallel == "sharded"
        self._options, self._stats = options, stats
        self._planning = group if split else None  # ranks that draft together
        self._device = device = seam.device
        self._races = options.verification == "race"
        self._num_ids = vllm_config.model_config.get_vocab_size()
        self._most_rows = most_rows(self._num_ids)
        self._failures = 0
        self._rest = 0
        self._step: StepView | None = None  # between `begin` and `finish`
        self._looked = 0.0  # time when a step was read last
        self._gauges_due = 1  # number of the step that updates them next
        pair = load_pair(vllm_config.model_config, drafter_config, options)
        self.source: DraftSource
        if options.draft_ahead:
            drawn = SampledRecordDecoder.of(options, pair, self._num_ids, device)
            tokens = None if drawn is None else drawn.tokens
            deployment = Deployment.of(vllm_config, drafter_config, options, pair, tokens, device)
            longest = drafter_config.max_model_len
            self.source = ProcessSource(deployment, pair, stats, longest, drawn)
        else:
            self.source = source = InlineSource(
                vllm_config, drafter_config, options, pair, device, stats, group, likeliest
            )
            if options.tree_nodes:
                drafter, chances = source.drafter, self._race_chances
                trees = TreeBranches(drafter, source.pool, pair.bridge, stats, chances)
                drafter.extensions.append(trees)
        self.bridge = bridge = pair.bridge
        stats.untranslated = bridge.failures
        pool, length = self.source.pool, self.source.max_length
        longest = length - min(self.source.most_steps, length // 2)  # room for drafts
        self.requests = Requests(bridge, pool, stats, longest)
        self._parallel = parallel_mask(drafter_config, options) is not None
        self._trees: TreePolicy | None
        self.observer: LookaheadControl | PrecomputedDrafts  # of steps and of rounds
        self.control = self._controlled(self.unknown(CostModel()))
        self._file: PairFile | None = None  # keeps the estimates
        self.parts: Parts = TREE_PARTS if options.tree_nodes else {}  # of these estimates
        stats.kv_blocks = pool.capacity
        logger.info(
            "Drafter %s ready: %s, %d KV blocks of %d tokens.",
            options.model,
            "same tokenizer" if bridge.identity else "translating through text",
            pool.capacity,
            pool.block_size,
        )

    def unknown(self, costs: CostModel) -> Estimates:
        """Return the estimates before any draft."""
        steps = DraftSteps()
        if self._options.draft_ahead:
            steps = DraftSteps(each=0.0)  # the target waits for none of them
        elif self._parallel:
            steps = DraftSteps(extra=1.0, each=0.0)  # one forward drafts all tokens
        return Estimates.of(costs, self._options.num_speculative_tokens, steps)

    def start_control(self, known: Estimates, file: PairFile) -> None:
        """Start a new controller with these estimates, and save what it learns to `file`."""
        self.control = self._controlled(known)
        self._file = file
        file.save_on_exit(known, self)

    def begin(self, step: StepView) -> None:
        """Begin to draft after a step, without waiting for the device. `finish` has to follow."""
        self._step = step
        if self.source.early:
            try:
                self._begin(step)
            except Exception as error:
                self._failed(step, error)

    def finish(self) -> list[Draft]:
        """Return the drafts of the step. Empty after a failure, and in a pause."""
        step, self._step = self._step, None
        if step is None:
            return []
        try:
            if not self.source.early:
                self._begin(step)
            return self._finish(step)
        except Exception as error:
            self._failed(step, error)
            return []

    @property
    def is_idle(self) -> bool:
        """True if reading a step would most likely change nothing."""
        lately = time.monotonic() - self._looked < _UNSEEN
        return self.control.is_idle and lately and not self._rest

    def count_skipped_step(self, num_requests: int) -> None:
        """Count a step that is not read, without drafts for `num_requests` requests."""
        self._stats.steps += 1
        self._stats.off_steps += 1
        self._stats.skip("not_worth_it", times=num_requests)

    def look_back(self, step: StepView) -> None:
        """Report a skipped step to the controller, and plan the next ones.

        Ranks that draft together may read different steps, so this changes no state of requests.
        """
        self.observer.observe(step)
        self.control.plan(step, self.requests.num_unread(step))
        self.control.learn()
        self._show_gauges()

    def reset(self) -> None:
        """Forget all requests and all KV. Contexts are read anew in the next step."""
        self._step = None
        self.requests.clear()
        self.source.reset()

    def show(self) -> None:
        """Update the counters that are kept elsewhere."""
        self._stats.requests_held = len(self.requests)
        if self._trees is not None:
            self._stats.side_tokens_accepted = self._trees.side_tokens_accepted
        self.source.export_to(self._stats)

    def _failed(self, step: StepView, error: Exception) -> None:
        """Reset and pause the drafter, so that a broken drafter fails no request."""
        logger.debug("drafter failed", exc_info=True)
        # All of its state may be wrong.
        self._stats.skip("drafter_error", f"{type(error).__name__}: {error}", sum(step.going_on))
        self.reset()
        self._rest = min(2**self._failures, _LONGEST_REST)
        self._failures += 1

    def _begin(self, step: StepView) -> None:
        self._looked = time.monotonic()
        self._stats.steps += 1
        self.requests.forget(step)
        self.observer.observe(step)
        plan = self._agreed(self.control.plan(step, self.requests.num_unread(step)))
        self._stats.off_steps += not (any(plan.lookahead) or plan.copied)
        began, known = time.perf_counter(), not step.started
        tasks = self._tasks(step, plan)
        # A new prompt is read once. The new tokens of other requests are a cost of each draft.
        self.control.prepared = time.perf_counter() - began if known else 0.0
        self.source.begin(tasks, self.requests.outside(step), self.observer)
        self._show_gauges()  # the device works by now

    def _finish(self, step: StepView) -> list[Draft]:
        self.control.learn()  # while a device drafts
        drafts = self.source.finish()
        if drafts:
            self._failures = 0
        drafts = self.control.trim(drafts)
        for place, draft in enumerate(drafts):
            request = step.requests[step.index_of[draft.req_id]]
            # A cut that depends on the tokens is lossless only for drafts without `draft_probs`.
            if request.params.restricted and draft.draft_probs is None:
                output = request.token_ids[request.num_prompt_tokens :]
                drafts[place] = draft.first(request.params.acceptable(draft.tokens, output))
        self._stats.drafted([len(draft.tokens) for draft in drafts if draft.rows is None])
        for draft in drafts:
            if draft.rows is not None:
                self._stats.drafted_tree(draft.depth, len(draft.tokens))
        return drafts

    def _controlled(self, known: Estimates) -> LookaheadControl:
        """Compose the controller with the policies of optional features."""
        options, asked = self._options, self._options.controller
        longest = options.num_speculative_tokens
        width = options.debug.tree_width if options.tree_nodes else 0
        # On a GPU, reading confidences between drafter steps would synchronize with the device.
        # Reading them one step late would gain about 2 % (replay at the costs of an H200).
        quick = asked == "goodput" and self._device.type == "cpu"
        can_stop = isinstance(asked, ConfidenceOptions) or quick
        # Neither several ranks nor the drafter process can be stopped early.
        can_stop = can_stop and self._planning is None and not options.draft_ahead
        controller: Controller
        choice = self._trees = None
        policy: PlanPolicy | None = None
        if isinstance(asked, ConfidenceOptions):
            controller = ConfidenceStop(asked.threshold, longest, width)
        elif asked == "fixed":
            controller = Fixed(longest, width)
        else:
            choice = TreeChoice(known, width, free=self._parallel) if width else None
            controller = Goodput(known, can_stop_early=can_stop, choice=choice)
            # Ranks that draft together would each choose copies, by their own estimates.
            if options.debug.copies and self._planning is None and not options.draft_ahead:
                policy = Copies(known, controller, self._stats, self._num_ids)
        if width:
            values = TreeValues.of(known)
            branches = None if choice is None else choice.branches
            policy = self._trees = TreePolicy(values, branches, self._stats)
        control = LookaheadControl(controller, can_stop_early=can_stop, policy=policy)
        ahead = options.draft_ahead
        self.observer = PrecomputedDrafts(control, parallel=self._parallel) if ahead else control
        return control

    def _race_chances(self, *children: "np.ndarray") -> "np.ndarray":
        """Value children of races by the policy of the present controller."""
        assert self._trees is not None
        return self._trees.race_chances(*children)

    def _agreed(self, plan: StepPlan) -> StepPlan:
        """Broadcast the plan of the first rank to all ranks that draft together."""
        if self._planning is None:
            return plan
        agreed: StepPlan = self._planning.broadcast_object(plan, src=0)
        return agreed

    def _show_gauges(self) -> None:
        if self._stats.steps >= self._gauges_due:
            self._gauges_due = self._stats.steps + _STEPS_BETWEEN_GAUGES
            self._stats.show(self.control.controller.gauges())
            if self._file is not None:
                self._file.write_if_due()

    def _tasks(self, step: StepView, plan: StepPlan) -> Sequence[DraftTask]:
        """Read new tokens, align the KV, and apply the limits of each request."""
        if self._rest:
            self._rest -= 1
            self._stats.skip("backing_off", times=sum(step.going_on))
            return []
        wanted = [index for index, reads in enumerate(plan.reads) if reads]
        self._stats.skip("catching_up", times=plan.num_waiting)
        others = len({*wanted, *plan.copied}) + plan.num_waiting
        others += self.requests.skip_retired(step, plan.copied)
        self._stats.skip("not_worth_it", times=sum(step.going_on) - others)
        if not wanted:
            return []
        tasks, draws = [], self.source.draws
        # A sampled token needs a row over the target's vocabulary.
        longest = max(1, self._most_rows // (len(wanted) * max(1, plan.paths)))
        for index, state in self.requests.read(step, wanted):
            request = step.requests[index]
            params = request.params
            useful = min(plan.lookahead[index], step.room[index])
            if params.min_tokens and step.early_bonus:
                useful = min(useful, params.before_stops(request.num_output_tokens))
            draw = state.draw_of(request, races=self._races) if draws and useful else None
            if draw is not None:
                useful = min(useful, longest)
            task = DraftTask(state, useful, params.penalty, draw)
            if self._trees is not None:
                task = task._replace(paths=self._trees.paths_of(task, plan.paths))
            tasks.append(task)
        return tasks
