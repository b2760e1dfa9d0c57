# SPDX-License-Identifier: Apache-2.0
"""Whether a target computes the rows of draft trees, tried once on a warm engine.

A request that nobody has made verifies a tree, and each of its paths as a chain: the rows must be
the same but for rounding. A kernel that reads of a batch what we do not lay out would show here.
"""

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.parallel_state import get_tp_group

from vllm_hetero_spec.engine.seam.tree_scratch import block_sizes_of
from vllm_hetero_spec.staging import Receiver, Sender
from vllm_hetero_spec.verify.tree_rows import TreeRows, lay_out

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_hetero_spec.engine.seam.side_sequences import SideSequences

logger = logging.getLogger("vllm.hetero_spec")

_NAME = "_hetero_spec_trees_"
_ROUNDING = 0.1  # of a row's length; what a wrong key or position does is some times as much
# A tree of three paths of two or three tokens; two of them share the first.
_TOKENS, _PARENTS, _VALUES = (1, 2, 3, 4, 5, 6), (-1, 0, 1, -1, 3, 0), (6, 5, 4, 3, 2, 1)
_PATHS = ((1, 2, 3), (4, 5), (1, 6))


def agree(runner: Any, sides: "SideSequences", trial: "type[Trial]") -> bool:
    """Whether drafts may be trees; if not, it is said. Every rank of the target has to call it.

    Args:
        runner: vLLM's, warm, without requests.
        sides: Its trees.
        trial: For this runner.
    """
    reason = _why_not(runner, sides, trial)
    if reason:
        logger.warning("Drafts are chains, not trees: %s.", reason)
    right = _on_every_rank(not reason)
    mode = runner.vllm_config.compilation_config.cudagraph_mode
    if right and mode not in (None, CUDAGraphMode.NONE) and mode.mixed_mode() not in trial.graphs:
        logger.info(
            "Steps with draft trees run without CUDA graphs, since cudagraph_mode is %s; "
            "FULL_AND_PIECEWISE has some for them.",
            mode.name,
        )
    return right


def _on_every_rank(right: bool) -> bool:
    """Whether it is right on all ranks: one that took the others' trees for chains verifies wrong.

    Args:
        right: On this rank.
    """
    group = get_tp_group()
    if group.world_size == 1:
        return right
    said = torch.tensor([right], dtype=torch.int32)
    torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(said[0])


def _why_not(runner: Any, sides: "SideSequences", trial: "type[Trial]") -> str:
    """Why drafts cannot be trees, on this rank; empty where they can. Arguments as of `agree`."""
    rows = runner.speculative_config.num_speculative_tokens
    room = sides.room(1, rows)
    if room is None:
        return (
            "the KV cache has no block to spare, or not only the KV of full and sliding-window "
            "attention; a larger one may help"
        )
    if not room.sides:
        return (
            "one request alone leaves no sequence or too few KV blocks for a side path; raise "
            "max_num_seqs, or the KV cache"
        )
    if _guesses_contexts(runner):
        return "its MLA backend computes drafts of several lengths as it does prompts"
    if room.sides < len(_PATHS) - 1 or rows < 9:
        return ""  # such trees are never asked for
    try:
        difference = _difference(trial(runner, sides))
    except Exception as error:
        runner.execute_model_state = None
        with contextlib.suppress(Exception):  # the first one counts
            _finish(runner)
        return f"a first one ended with {type(error).__name__}: {error}"
    if not difference <= _ROUNDING:  # nor is what is no number
        return (
            f"rows of a tree differ from those of its paths by {difference:.2g} of their length, "
            "more than rounding explains"
        )
    return ""


def _guesses_contexts(runner: Any) -> bool:
    """Whether some attention computes sequences of several lengths in a step as it does prompts.

    MLA reads a prompt's context as far as the host counts, which on Model Runner V2 counts drafts
    that were not accepted. A trial cannot see it: its steps are not scheduled ahead.
    """
    from vllm.model_executor.layers.attention.mla_attention import QueryLenSupport
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    return any(
        isinstance(group.kv_cache_spec, MLAAttentionSpec)
        and getattr(group.get_metadata_builder(), "query_len_support", None)
        is not QueryLenSupport.VARLEN
        for groups in runner.attn_groups
        for group in groups
    )


def _finish(runner: Any) -> None:
    """Have a runner forget the request that nobody has made."""
    from vllm.v1.core.sched.output import SchedulerOutput

    output = SchedulerOutput.make_empty()
    output.finished_req_ids = {_NAME}
    runner.execute_model(output)


def _difference(trial: "Trial") -> float:
    """How far rows of the tree are from those of its paths at most, relative to their length."""
    at: dict[tuple[int, ...], torch.Tensor] = {}
    for path in _PATHS:
        rows = trial.rows(path, None)
        at |= {path[:depth]: row for depth, row in enumerate(rows)}
    tree = lay_out(trial.root, _TOKENS, _PARENTS, _VALUES, sides=len(_PATHS) - 1, rows=9)
    found = trial.rows(tree.tokens, tree)
    paths: list[tuple[int, ...]] = []
    pairs = []
    for place, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
        if parent >= -1:
            pairs.append((found[1 + place], at[paths[-1]]))
    ours, expected = (torch.stack(rows).float() for rows in zip(*pairs, strict=True))
    apart = ((ours - expected).norm(dim=-1) / expected.norm(dim=-1)).max()
    return float(Receiver(trial.runner.device, 4).fetch(apart).wait())


class Trial(ABC):
    """Steps of a request that nobody has made, over the first blocks of an empty KV cache.

    Args:
        runner: vLLM's.
        sides: Its trees.

    Attributes:
        graphs: Of batches of any kind, those that steps with trees can use.
        runner: As above.
        root: The token behind its prompt; from the first step on.
    """

    graphs: ClassVar[Sequence[CUDAGraphMode]] = (CUDAGraphMode.PIECEWISE,)

    def __init__(self, runner: Any, sides: "SideSequences") -> None:
        self.runner, self.root = runner, 0
        self._sides = sides
        size = block_sizes_of(runner.kv_cache_config)[0]
        most = min(runner.max_num_tokens, runner.max_model_len - 12)
        # The paths go on in a second block, if there is room.
        self._start = start = max(1, min(size - 2, most))
        words = runner.model_config.get_vocab_size()
        self._prompt = [7 + place % (words - 8) for place in range(start)]

    def rows(self, draft: Sequence[int], tree: TreeRows | None) -> torch.Tensor:
        """[1 + draft tokens, hidden size], of the request's next step."""
        from vllm.v1.core.sched.output import SchedulerOutput

        start = self._start
        self._prefill(start + 1 + len(draft))
        torch.accelerator.synchronize()
        self.root = self._behind_prompt(start)
        self._put(draft)
        trees = {} if tree is None else {_NAME: tree}
        self._sides.handed_out({_NAME: list(draft)}, trees, {_NAME: start + 1})
        output = SchedulerOutput.make_empty()
        cached = output.scheduled_cached_reqs
        cached.req_ids, cached.new_block_ids = [_NAME], [None]
        cached.num_computed_tokens, cached.num_output_tokens = [start], [1]
        output.scheduled_spec_decode_tokens = {_NAME: list(draft)}
        found = self._step(output, 1 + len(draft))
        _finish(self.runner)
        return found

    @abstractmethod
    def _behind_prompt(self, start: int) -> int:
        """The token that the request has sampled, behind a prompt of so many."""

    @abstractmethod
    def _put(self, draft: Sequence[int]) -> None:
        """Put a draft where the runner reads it."""

    @abstractmethod
    def _sampled_from(self) -> torch.Tensor:
        """[n, hidden size], rows of the step that has been computed."""

    def _prefill(self, length: int) -> None:
        from vllm import SamplingParams
        from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

        blocks, first = [], 1
        for size in block_sizes_of(self.runner.kv_cache_config):
            blocks.append(list(range(first, first - (-length // size))))
            first += len(blocks[-1])
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = [
            NewRequestData(
                req_id=_NAME,
                prompt_token_ids=self._prompt,
                prefill_token_ids=self._prompt,
                mm_features=[],
                sampling_params=SamplingParams(temperature=0.0, max_tokens=length),
                pooling_params=None,
                block_ids=tuple(blocks),
                num_computed_tokens=0,
                lora_request=None,
            )
        ]
        self._step(output, self._start)

    def _step(self, output: "SchedulerOutput", count: int) -> torch.Tensor:
        """Run a step of so many tokens; [n, hidden size], the rows that are sampled from."""
        output.num_scheduled_tokens = {_NAME: count}
        output.total_num_scheduled_tokens = count
        spec = self.runner.speculative_config
        output.num_spec_tokens_to_schedule = spec.num_speculative_tokens
        self.runner.execute_model(output)
        rows = self._sampled_from().clone()
        self.runner.sample_tokens(None)
        return rows


class TrialV1(Trial):
    """Of Model Runner V1."""

    def _behind_prompt(self, start: int) -> int:
        """See Trial."""
        return int(self.runner.requests[_NAME].output_token_ids[0])

    def _put(self, draft: Sequence[int]) -> None:
        """See Trial: V1 takes it from the scheduler's output."""

    def _sampled_from(self) -> torch.Tensor:
        """See Trial."""
        rows: torch.Tensor = self.runner.execute_model_state.sample_hidden_states
        return rows


class TrialV2(Trial):
    """Of Model Runner V2."""

    graphs: ClassVar[Sequence[CUDAGraphMode]] = (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)

    def _behind_prompt(self, start: int) -> int:
        """See Trial."""
        states = self.runner.req_states
        return int(states.all_token_ids._uva_buf.np[states.req_id_to_index[_NAME], start])

    def _put(self, draft: Sequence[int]) -> None:
        """See Trial."""
        states = self.runner.req_states
        (tokens,) = Sender(self.runner.device).send(np.array(draft, np.int64))
        states.draft_tokens[states.req_id_to_index[_NAME], : len(draft)] = tokens

    def _sampled_from(self) -> torch.Tensor:
        """See Trial."""
        state = self.runner.execute_model_state
        rows: torch.Tensor = state.hidden_states[state.input_batch.logits_indices]
        return rows
