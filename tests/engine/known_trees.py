# SPDX-License-Identifier: Apache-2.0
"""Replace a drafter by random trees that contain the target's known output and wrong branches."""

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

from harness import proposer_of
from vllm import LLM

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.engine.seam.runner_v2 import RunnerV2
from vllm_hetero_spec.engine.seam.step_view import RequestView, StepView
from vllm_hetero_spec.trees.layout import lay_out
from vllm_hetero_spec.trees.walk import ROOT

Known = Mapping[tuple[int, ...], list[int]]  # prompt -> output of the target alone


@contextlib.contextmanager
def overheard(llm: LLM) -> Iterator[dict[tuple[int, ...], list[int]]]:
    """Record the output of an engine by prompt, while the context is active."""
    known: dict[tuple[int, ...], list[int]] = {}
    engine = llm.llm_engine
    step = engine.step

    def listening() -> Any:
        outputs = step()
        for output in outputs:
            ids = output.prompt_token_ids
            known[tuple(ids or ())] = list(output.outputs[0].token_ids)
        return outputs

    engine.step = listening  # type: ignore[method-assign]
    yield known
    engine.step = step  # type: ignore[method-assign]


class KnownTrees:
    """Drafts trees for an engine, in place of its own drafter.

    Attributes:
        known: The output to draft, by prompt.
        drafts: Number of drafted trees with side branches.
        past_the_end: True if drafts continue after the end of their request.
    """

    def __init__(self, llm: Any) -> None:
        self.known: Known = {}
        self.drafts = 0
        self.past_the_end = False
        self._proposer = proposer_of(llm)
        self._drafting = self._proposer.drafting
        self._drafting.finish = self.finish

    @property
    def verification(self) -> str:
        """The engine's option `verification`."""
        return str(self._proposer.options.verification)

    @property
    def v2(self) -> bool:
        """True if the engine runs on Model Runner V2."""
        return isinstance(self._proposer.seam, RunnerV2)

    @property
    def taken(self) -> int:
        """Number of verified trees whose accepted path ended on a side branch."""
        return int(self.branches.taken)

    @property
    def branches(self) -> Any:
        """The runner's branches, or None if trees are disabled."""
        seam = self._proposer.seam
        return seam.trees

    def finish(self) -> list[Draft]:
        step = self._drafting._step
        if step.buckets:  # choose a length, so that trees are cut or padded
            self._drafting.control.requested_length = step.buckets[-1 - len(step.requests) % 2]
        found = [self.draft(step, request) for request in step.requests if request.new_tokens]
        return [draft for draft in found if draft is not None]

    def draft(self, step: StepView, request: RequestView) -> Draft | None:
        """Return a tree, or a chain if the step has no room for branches."""
        prompt = tuple(request.token_ids[: request.num_prompt_tokens].tolist())
        rest = self.known.get(prompt, [])[request.num_output_tokens :]
        longest = step.lookahead
        if not self.past_the_end:
            longest = min(longest, step.room[step.index_of[request.req_id]])
        if not rest or not longest:
            return None
        room = step.trees
        if room is None or not room.branches:
            return Draft.chain(request.req_id, rest[:longest])
        rest = rest + [rest[-1]] * longest if self.past_the_end else rest
        chance = random.Random(f"{prompt} {request.num_tokens}")
        tokens, parents, values = grown(chance, rest, longest, room.nodes)
        root = int(request.token_ids[-1])
        rows = lay_out(root, tokens, parents, values, branches=room.branches, rows=room.rows)
        self.drafts += len(rows.counts) > 1
        return Draft(request.req_id, tokens, parents, rows=rows)


def grown(
    chance: random.Random, rest: list[int], longest: int, nodes: int
) -> tuple[list[int], list[int], list[float]]:
    """Return tokens, parents and values of a tree with a prefix of `rest` and wrong branches."""
    tokens: list[int] = []
    parents: list[int] = []
    values: list[float] = []
    depths: list[int] = []
    true = [ROOT]  # the known path so far

    def add(parent: int, token: int) -> bool:
        depth = 1 + (depths[parent] if parent >= 0 else 0)
        siblings = [t for t, p in zip(tokens, parents, strict=True) if p == parent]
        if token in siblings or depth > longest or len(tokens) == nodes:
            return False
        tokens.append(token)
        parents.append(parent)
        values.append((values[parent] if parent >= 0 else 1.0) * chance.uniform(0.2, 1.0))
        depths.append(depth)
        return True

    for _ in range(4 * nodes):
        if chance.random() < 0.5 and len(true) <= len(rest):
            if add(true[-1], rest[len(true) - 1]):
                true.append(len(tokens) - 1)
        else:
            parent = chance.randrange(-1, len(tokens))
            wrong = rest[chance.randrange(len(rest))] ^ chance.randrange(2)
            expected = rest[len(true) - 1] if len(true) <= len(rest) else None
            if not (parent == true[-1] and wrong == expected):
                add(parent, wrong)
    return tokens, parents, values
