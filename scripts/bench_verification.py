# SPDX-License-Identifier: Apache-2.0
"""Cost of verification: memory of the laws of a large batch, time against vLLM's own sampler.

Memory: the laws of a round of drafts and everything that drafting and verifying them takes on top,
as the process's resident peak. Time: our rules and the stock one on the same logits and drafts, in
turns, as ratios of neighbouring runs; `rule` is from logits to tokens, `sampler` the whole of it,
bonus tokens included. One thread.
"""

import argparse
import ctypes
import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from rich.console import Console
from rich.table import Table
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import (
    RejectionSampler,
    apply_sampling_constraints,
    rejection_sample,
)
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_hetero_spec.config import HeteroOptions
from vllm_hetero_spec.draft.drawing import Draw, DrawBatch, SampledMethod
from vllm_hetero_spec.draft.rows import TokenMap
from vllm_hetero_spec.engine.compat import cpu_expand
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.verifier.draft_probs import DraftLaw, DraftLaws
from vllm_hetero_spec.engine.verifier.install import Verifier
from vllm_hetero_spec.verify.drafts import DraftBatch
from vllm_hetero_spec.verify.noise import Noise
from vllm_hetero_spec.verify.race import race
from vllm_hetero_spec.verify.rules import block_rule, token_rule

CPU = torch.device("cpu")
MB = 1e6
RULES = ("token", "block", "race")


# ------------------------------------------------------------------------------------- memory


def resident(field: str) -> int:
    """Bytes that the process has (VmRSS) or has had at most since `forget_peak` (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def peak_of(work: Callable[[], Any]) -> tuple[Any, float]:
    """What the work gives, and MB that it took at most on top of what there was."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free counts as not taken
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    result = work()
    return result, (resident("VmHWM") - before) / MB


def measure_memory(batch: int, lookahead: int, target: int, drafter: int) -> Table:
    """Peaks of a round of drafts and of each rule over it."""
    generator = torch.Generator().manual_seed(0)
    count = batch * lookahead
    first = torch.arange(drafter) % target
    method = SampledMethod(TokenMap(first, target), torch.ones_like(first))
    logits = [torch.randn(batch, drafter, generator=generator) for _ in range(lookahead)]
    # What is allocated once, as by the random numbers and by threads, belongs to nobody.
    DrawBatch([Draw(1.0)], [1], method, generator).draw(torch.randn(1, drafter))

    def draft() -> tuple[DrawBatch, torch.Tensor]:
        draws = DrawBatch([Draw(1.0)] * batch, [lookahead] * batch, method, generator)
        return draws, torch.stack([first[draws.draw(step)] for step in logits], 1).reshape(-1)

    (draws, tokens), drafting = peak_of(draft)
    logits.clear()
    rows = draws.laws
    laws = rows.untyped_storage().nbytes() / MB
    # Drawn step by step, but verified request by request.
    row_of = torch.arange(count).reshape(lookahead, batch).T.reshape(-1)
    drafts = DraftBatch(tokens, [lookahead] * batch, rows, row_of)
    p = torch.randn(count, target, generator=generator).softmax(-1)
    bonus = torch.zeros(batch, dtype=torch.int64)
    table = Table(title=f"memory: {batch} requests, {lookahead} tokens, {target} target ids")
    for column in ("what", "MB"):
        table.add_column(column, justify="right" if column == "MB" else "left")
    table.add_row("laws", f"{laws:.1f}")
    table.add_row(f"drafting, laws included ({drafter} drafter ids)", f"{drafting:.1f}")
    for name, rule in (("token", token_rule), ("block", block_rule)):
        _, peak = peak_of(partial(rule, drafts, p, bonus, Noise(CPU)))
        table.add_row(f"{name} rule, laws included", f"{laws + peak:.1f}")
    _, peak = peak_of(lambda: race(p, torch.arange(count), torch.arange(count)))
    table.add_row("race, which needs no laws", f"{peak:.1f}")
    return table


# --------------------------------------------------------------------------------------- time


@dataclass(frozen=True)
class Scene:
    """Drafts of a batch, what the target says to them, and vLLM's view of both.

    Attributes:
        logits: float32 [N + B, V], the target's at every draft token and behind each draft.
        draft_probs: float32 [N, V].
        metadata: Of the drafts.
        sampling: Of the requests.
    """

    logits: torch.Tensor
    draft_probs: torch.Tensor
    metadata: SpecDecodeMetadata
    sampling: SamplingMetadata

    def target_logits(self) -> torch.Tensor:
        """float32 [N, V], at every draft token; a copy, as both sides change it in place."""
        return self.logits[self.metadata.target_logits_indices]

    @property
    def bonus(self) -> torch.Tensor:
        """int64 [B], of no account for the time."""
        return torch.zeros(len(self.metadata.num_draft_tokens), dtype=torch.int64)


def scene(batch: int, lookahead: int, vocabulary: int, raced: bool) -> Scene:
    """Requests at temperature 1 whose drafter's logits are the target's and noise."""
    generator = torch.Generator().manual_seed(1)
    count = batch * lookahead
    logits = torch.randn(count + batch, vocabulary, generator=generator) * 3
    index = torch.arange(count + batch).reshape(batch, lookahead + 1)
    noise = torch.randn(count, vocabulary, generator=generator)
    probs = (logits[index[:, :-1].reshape(-1)] + noise).softmax(-1)
    if raced:
        seeds, places = torch.arange(batch), torch.arange(lookahead)
        pairs = torch.cartesian_prod(seeds * 2 + 1, places)
        tokens = race(probs, pairs[:, 0].contiguous(), pairs[:, 1].contiguous())
    else:
        tokens = torch.multinomial(probs, 1, generator=generator)[:, 0]
    ends = torch.arange(1, batch + 1, dtype=torch.int32)
    metadata = SpecDecodeMetadata(
        draft_token_ids=tokens.to(torch.int32),
        num_draft_tokens=[lookahead] * batch,
        cu_num_draft_tokens=ends * lookahead,
        cu_num_sampled_tokens=ends * (lookahead + 1),
        target_logits_indices=index[:, :-1].reshape(-1).to(torch.int32),
        bonus_logits_indices=index[:, -1].to(torch.int32),
        logits_indices=torch.arange(count + batch, dtype=torch.int32),
    )
    nothing = torch.zeros(batch)
    sampling = SamplingMetadata(
        temperature=torch.ones(batch),
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=nothing,
        presence_penalties=nothing,
        repetition_penalties=nothing,
        output_token_ids=[[] for _ in range(batch)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    return Scene(logits, probs, metadata, sampling)


class Ours:
    """Our sampler as the engine installs it, around a model runner that has only a batch."""

    def __init__(self, rule: str, scene: Scene) -> None:
        self._scene = scene
        requests = {
            str(index): SimpleNamespace(
                sampling_params=SimpleNamespace(seed=index), output_token_ids=[]
            )
            for index in range(len(scene.metadata.num_draft_tokens))
        }
        runner = SimpleNamespace(
            sampler=Sampler(),
            speculative_config=None,
            device=CPU,
            requests=requests,
            input_batch=SimpleNamespace(req_ids=list(requests)),
            model_config=SimpleNamespace(seed=0),
        )
        options = HeteroOptions(
            model="none", num_speculative_tokens=1, method="push_forward", verification=rule
        )
        self._laws = DraftLaws()
        Verifier(options, runner, self._laws, DraftStats()).install()
        self._sampler: Any = runner.rejection_sampler
        self._requests = requests

    def _put(self) -> None:
        lookahead = self._scene.metadata.max_spec_len
        for index, req_id in enumerate(self._requests):
            row_of = range(index * lookahead, (index + 1) * lookahead)
            self._laws.put(req_id, DraftLaw(self._scene.draft_probs, row_of))

    def rule(self) -> torch.Tensor:
        self._put()
        scene, metadata = self._scene, self._scene.metadata
        drafts = self._laws.batch(
            list(self._requests), metadata.num_draft_tokens, metadata.draft_token_ids.long()
        )
        tokens: torch.Tensor = self._sampler._verdict(
            drafts, scene.target_logits(), scene.bonus, scene.sampling
        ).tokens
        return tokens.to(torch.int32)

    def sampler(self) -> torch.Tensor:
        self._put()
        scene = self._scene
        tokens: torch.Tensor = self._sampler(
            scene.metadata, None, scene.logits, scene.sampling
        ).sampled_token_ids
        return tokens


class Stock:
    """vLLM's sampler."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._sampler = RejectionSampler(Sampler())

    def rule(self) -> torch.Tensor:
        scene, metadata = self._scene, self._scene.metadata
        ends = metadata.cu_num_draft_tokens
        return rejection_sample(
            metadata.draft_token_ids,
            metadata.num_draft_tokens,
            metadata.max_spec_len,
            ends,
            scene.draft_probs,
            apply_sampling_constraints(scene.target_logits(), ends, scene.sampling),
            scene.bonus[:, None],
            scene.sampling,
        )

    def sampler(self) -> torch.Tensor:
        scene = self._scene
        tokens: torch.Tensor = self._sampler(
            scene.metadata, scene.draft_probs, scene.logits, scene.sampling
        ).sampled_token_ids
        return tokens


def seconds(work: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def measure_time(batch: int, lookahead: int, vocabulary: int, rounds: int) -> Table:
    """Milliseconds of each rule and of the stock one beside it, and their ratio."""
    table = Table(
        title=f"time: {batch} requests, {lookahead} tokens, {vocabulary} ids, {rounds} rounds"
    )
    for column in ("what", "accepted", "stock ms", "ours ms", "ratio", "quartiles"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for rule in RULES:
        stage = scene(batch, lookahead, vocabulary, raced=rule == "race")
        both = Stock(stage), Ours(rule, stage)
        for part in ("rule", "sampler"):
            times: list[tuple[float, float]] = []
            accepted = 0.0
            for turn in range(-2, rounds):  # the first ones warm up
                order = (0, 1) if turn % 2 else (1, 0)
                taken = [0.0, 0.0]
                for side in order:
                    taken[side], tokens = seconds(getattr(both[side], part))
                    if side == 1 and turn >= 0:
                        accepted += float((tokens >= 0).sum()) / batch - 1
                if turn >= 0:
                    times.append((taken[0], taken[1]))
            ratios = [mine / theirs for theirs, mine in times]
            low, middle, high = statistics.quantiles(ratios, n=4)
            table.add_row(
                f"{rule}, {part}",
                f"{accepted / rounds:.2f}",
                *(f"{statistics.median(side) * 1e3:.2f}" for side in zip(*times, strict=True)),
                f"{middle:.2f}",
                f"{low:.2f} to {high:.2f}",
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="pairs of runs of each rule")
    parser.add_argument("--ids", type=int, default=32_000, help="vocabulary of the timed batch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    current_platform.register_triton_kernel_overrides()
    cpu_expand.repair()
    console = Console()
    console.print(measure_memory(64, 5, 152_064, 152_064))
    console.print(measure_memory(64, 5, 152_064, 32_000))
    console.print(measure_time(32, 4, options.ids, options.rounds))


if __name__ == "__main__":
    main()
