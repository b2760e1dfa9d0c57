# SPDX-License-Identifier: Apache-2.0
"""Measures how often one drafted token of each method is accepted on a pair of models.

At places of some texts both models say what they expect next. The acceptance of each method is a
sum over these two rows: nothing is drawn, and all methods are compared on the same places. Whole
drafts of a running engine accept in the same order, but less where their contexts come from earlier
drafts. Plain transformers forwards, on a GPU if there is one; no vLLM.

    python scripts/calibrate_acceptance.py --target DIR --drafter DIR --text FILE.jsonl
"""

import argparse
import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from oracle_acceptance import greedy_decode, load
from rich.console import Console
from rich.progress import track
from transformers.utils.logging import disable_progress_bar

from vllm_hetero_spec.config import ConfigError
from vllm_hetero_spec.draft.methods import span as span_of
from vllm_hetero_spec.draft.pair_merges import PairMerges
from vllm_hetero_spec.draft.path import Path as DraftPath
from vllm_hetero_spec.draft.slrs import MergeSpan, Slrs
from vllm_hetero_spec.draft.token_map import TokenMap, probabilities
from vllm_hetero_spec.inputs.prompts import load_prompts
from vllm_hetero_spec.report.figures import error_of_ratio
from vllm_hetero_spec.report.tables import Column, markdown_table, print_json
from vllm_hetero_spec.report.values import with_error
from vllm_hetero_spec.text.bridge import make_bridge
from vllm_hetero_spec.text.loading import load_tokenizer
from vllm_hetero_spec.text.sample_text import CALIBRATION_TEXT
from vllm_hetero_spec.text.statistics import documents_of
from vllm_hetero_spec.text.vocabulary import build_maps, default_cache

# As in the engine: the first greedy token is chosen from so many candidates.
CANDIDATES = 8
# Drafter tokens of a greedy draft, of which the first target token counts: enough to settle it.
GREEDY_TOKENS = 12
# Target tokens of a text before its first place.
LEAST_CONTEXT = 8

# Given places and for each a path of drafter tokens, the drafter's rows [n, V_D] behind it.
Follow = Callable[[Sequence[int], Sequence[Sequence[int]]], torch.Tensor]


class Figure(NamedTuple):
    """A mean over places, and its standard error over texts; None of a single text."""

    value: float
    error: float | None


class RowAcceptance:
    """Acceptance of every method at places of a text, from rows of both models.

    Args:
        twins: The target token with the bytes of each drafter token; -1 where there is none.
        firsts: The first target token of each drafter token; -1 where the target cannot spell it.
        merging: Target tokens of several drafter tokens.
        spans: Of SLRS-n.
    """

    def __init__(
        self, twins: TokenMap, firsts: TokenMap, merging: PairMerges, spans: Sequence[MergeSpan]
    ) -> None:
        self._twins, self._firsts = twins, firsts
        device = twins.first.device
        self._slrs = {
            span: Slrs(firsts, merging, frozenset(), span.tokens) for span in sorted(set(spans))
        }
        self._shared = torch.zeros(twins.width, dtype=torch.bool, device=device)
        self._shared[twins.first[twins.first >= 0]] = True

    def measure(
        self, p: torch.Tensor, q: torch.Tensor, greedy: Sequence[int], follow: Follow
    ) -> dict[str, torch.Tensor]:
        """Acceptance at each of n places.

        Args:
            p: float32 [n, V_T], the target's probabilities of its next token behind a text.
            q: float32 [n, V_D] or wider, the drafter's; 0 where a token must not be drafted.
            greedy: The first target token of a greedy draft, -1 where it gave none.
            follow: The drafter's rows behind what it may draft next.

        Returns:
            float64 [n] by name: the mass of tokens that the other model has too, then acceptance.
            `union` rejects what has no twin, `slem` matches a greedy draft as a string, `race_tli`
            races on the row of TLI, and SLRS-n has the name of its span.
        """
        union = self._twins.draft_probs(q)
        tli = _normalised(union)
        picked = torch.tensor(greedy, device=p.device)
        matched = p.gather(1, picked.clamp_min(0)[:, None])[:, 0]
        return {
            "target_shared": p[:, self._shared].double().sum(-1),
            "drafter_shared": union.double().sum(-1),
            "union": overlap(p, union),
            "tli": overlap(p, tli),
            "push_forward": overlap(p, _normalised(self._firsts.draft_probs(q))),
            **{each.name: overlap(p, self._slrs_probs(q, follow, each)) for each in self._slrs},
            "slem": torch.where(picked >= 0, matched, 0.0).double(),
            "race_tli": race_acceptance(p, tli),
        }

    def _slrs_probs(self, q: torch.Tensor, follow: Follow, span: MergeSpan) -> torch.Tensor:
        """float32 [n, V_T], the distribution of the first token that SLRS-n proposes."""
        fed: list[list[int]] = [[] for _ in q]

        def feed(
            indices: Sequence[int], ids: Sequence[Sequence[int]], side_branches: int = 0
        ) -> torch.Tensor:
            texts = [[*fed[place], *tokens] for place, tokens in zip(indices, ids, strict=True)]
            kept = len(indices) - side_branches
            for place, text in zip(indices[:kept], texts, strict=False):
                fed[place] = text
            return follow(indices, texts)

        rows = q[:, : len(self._firsts.first)] * (self._firsts.first >= 0)
        sides = span.candidates - 1
        paths = [
            DraftPath(span.tokens, wanted=1, side_branches=sides, seed=i) for i in range(len(q))
        ]
        return self._slrs[span].draft(_normalised(rows), paths, feed)


def overlap(p: torch.Tensor, psi: torch.Tensor) -> torch.Tensor:
    """float64 [n], how often a draw from psi is accepted for p, rows [n, V]: sum of min(p, psi)."""
    return torch.minimum(p, psi).double().sum(-1)


def race_acceptance(p: torch.Tensor, psi: torch.Tensor) -> torch.Tensor:
    """float64 [n], how often two races with one seed have the same winner, of rates [n, V].

    That is the sum over i of 1 / sum_j max(p_j / p_i, psi_j / psi_i)
    (`verify.reference.race_acceptance`). Sorted by psi / p, the maximum is p_j / p_i up to i and
    psi_j / psi_i from there on: two running sums instead of all pairs.
    """
    p, psi = p.double(), psi.double()
    order = (psi / p).nan_to_num(posinf=math.inf).argsort(-1)
    p, psi = p.gather(-1, order), psi.gather(-1, order)
    before = p.cumsum(-1) / p
    behind = (psi.sum(-1, keepdim=True) - psi.cumsum(-1)).clamp_min(0.0) / psi
    return torch.where((p > 0) & (psi > 0), 1.0 / (before + behind), 0.0).sum(-1)


def _normalised(rows: torch.Tensor) -> torch.Tensor:
    """Rows that add up to 1; a row of nothing stays one."""
    return rows / rows.sum(-1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)


@dataclass(frozen=True)
class TextRows:
    """What both models expect at n places of a text.

    Attributes:
        p: float32 [n, V_T], the target's logits.
        q: float32 [n, V_D], the drafter's; -inf for tokens that are never drafted.
        contexts: The drafter's ids of the text before each place.
        greedy: The first target token of a greedy draft, -1 where it gave none.
    """

    p: torch.Tensor
    q: torch.Tensor
    contexts: list[list[int]]
    greedy: list[int]


class PairRows:
    """Reads texts with a pair of models, at places where the target's tokens end.

    A drafter's tokens of the text before a place are not the first ones of its tokens of a longer
    text: what comes behind may join the last of them. So the drafter reads the text up to each
    place by itself, as the bridge gives it; the target's rows come from one forward.

    Args:
        target: Model and tokenizer, of transformers.
        drafter: The same of the drafter, on the same device.
    """

    def __init__(self, target: tuple[Any, Any], drafter: tuple[Any, Any]) -> None:
        (self._target_model, self._encode), (self._drafter_model, _) = target, drafter
        device = self._device = self._target_model.device
        self.target, self.drafter = (
            load_tokenizer(tokenizer, role).limited_to(model.get_input_embeddings().num_embeddings)
            for role, (model, tokenizer) in (("target", target), ("drafter", drafter))
        )
        ends = (model.generation_config.eos_token_id for model, _ in (target, drafter))
        target_eos, drafter_eos = ([end] if isinstance(end, int) else end for end in ends)
        self._bridge = make_bridge(
            self.target, self.drafter, target_eos=target_eos, drafter_eos=drafter_eos
        )
        banned = sorted(self._bridge.banned)
        self._banned = torch.tensor(banned, dtype=torch.long, device=device)
        maps = build_maps(self.target, self.drafter, cache=default_cache())
        maps = maps.with_control(self._bridge.special)
        width = self._target_model.get_output_embeddings().weight.shape[0]
        self.twins, self.firsts = (
            TokenMap(torch.from_numpy(first).long().to(device), width)
            for first in (maps.d2t, maps.kappa_first)
        )
        self.merging = PairMerges(self.target, self.drafter, maps, device)

    @torch.inference_mode()
    def read(
        self, text: str, count: int, longest: int, generator: torch.Generator
    ) -> TextRows | None:
        """At most `count` places of a text, chosen by chance; None where it is too short."""
        ids = self._encode(text)["input_ids"][:longest]
        ends = self._choose(ids, count, generator)
        if not ends:
            return None
        row = torch.tensor([ids], device=self._device)
        p = self._target_model(input_ids=row, use_cache=False).logits[0].float()
        q, contexts, greedy = [], [], []
        for end in ends:
            context = self._bridge.open()
            context.append(ids[:end])
            contexts.append(list(context.ids))
            q.append(self.behind(context.ids))
            candidates = q[-1].topk(min(CANDIDATES, len(q[-1]))).indices.tolist()
            first = self._bridge.first_choice(context, candidates)
            (tokens,) = self._bridge.to_target([context], [self._draft(context.ids, first)], [1])
            greedy.append(tokens[0] if tokens else -1)
        places = torch.tensor(ends, device=self._device) - 1
        return TextRows(p[places], torch.stack(q), contexts, greedy)

    @torch.inference_mode()
    def behind(self, ids: Sequence[int]) -> torch.Tensor:
        """float32 [V_D], the drafter's logits behind its ids; -inf for what is never drafted."""
        row = torch.tensor([list(ids)], device=self._device)
        logits = self._drafter_model(input_ids=row, use_cache=False).logits[0, -1].float()
        return logits[: self.drafter.vocab_size].index_fill(0, self._banned, float("-inf"))

    def _choose(self, ids: Sequence[int], count: int, generator: torch.Generator) -> list[int]:
        """Lengths of prefixes that the drafter can read: whole characters, all of them."""
        context = self._bridge.open()
        able = []
        for end, token_id in enumerate(ids, 1):
            context.append([token_id])
            if end >= LEAST_CONTEXT and context.ids and not context.held and not context.broken:
                able.append(end)
        picked = torch.randperm(len(able), generator=generator)[:count]
        return sorted(able[i] for i in picked.tolist())

    def _draft(self, ids: Sequence[int], first: int) -> list[int]:
        ends = self._bridge.drafter_eos
        if first in ends:
            return [first]
        rest = greedy_decode(self._drafter_model, [*ids, first], GREEDY_TOKENS - 1, set(ends))
        return [first, *rest]


def measure(
    pair: PairRows,
    texts: Iterable[str],
    temperatures: Sequence[float],
    places: int,
    longest: int,
    spans: Sequence[MergeSpan],
    seed: int,
) -> tuple[dict[float, dict[str, Figure]], int]:
    """Means over all places by temperature and name, and how many places these are.

    Of each text `longest` target tokens are read, and `places` at most are chosen by `seed`.

    Raises:
        ValueError: No text is long enough.
    """
    acceptance = RowAcceptance(pair.twins, pair.firsts, pair.merging, spans)
    generator = torch.Generator().manual_seed(seed)
    sums: dict[float, dict[str, list[float]]] = {t: defaultdict(list) for t in temperatures}
    counts: list[int] = []
    for text in texts:
        rows = pair.read(text, places, longest, generator)
        if rows is not None:
            counts.append(len(rows.contexts))
            for temperature, found in _measure(acceptance, pair, rows, temperatures):
                for name, values in found.items():
                    sums[temperature][name].append(values.sum().item())
    if not counts:
        raise ValueError("no text is long enough to have a place")
    return {
        temperature: {
            name: Figure(sum(parts) / sum(counts), error_of_ratio(parts, counts))
            for name, parts in named.items()
        }
        for temperature, named in sums.items()
    }, sum(counts)


def _measure(
    acceptance: RowAcceptance, pair: PairRows, rows: TextRows, temperatures: Sequence[float]
) -> Iterator[tuple[float, dict[str, torch.Tensor]]]:
    logits_behind = cache(lambda place, *path: pair.behind([*rows.contexts[place], *path]))

    def probs(temperature: float, logits: torch.Tensor) -> torch.Tensor:
        return probabilities(logits, logits.new_full((len(logits),), temperature))

    def follow(
        temperature: float, places: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        logits = [logits_behind(at, *path) for at, path in zip(places, paths, strict=True)]
        return probs(temperature, torch.stack(logits))

    for t in temperatures:
        p, q = probs(t, rows.p), probs(t, rows.q)
        yield t, acceptance.measure(p, q, rows.greedy, partial(follow, t))


def merge_span(text: str) -> MergeSpan:
    """`4:16` as a span of SLRS-n; ValueError where it is none."""
    span = MergeSpan(*map(int, text.split(":")))
    if span.tokens < 2 or span.candidates < 1:
        raise ValueError(text)
    return span


def _column(name: str, means: Mapping[float, Mapping[str, Figure]]) -> Column[float]:
    return Column(name, lambda temperature: with_error(*means[temperature][name], digits=3))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--text", type=Path, help='JSON lines with a "prompt" (a built-in text)')
    parser.add_argument("--num-texts", type=int, default=64)
    parser.add_argument("--places", type=int, default=16, help="of each text (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=512, help="read of a text (%(default)s)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.25, 0.5, 1.0])
    parser.add_argument(
        "--spans",
        type=merge_span,
        nargs="+",
        metavar="N[:M]",
        help="of SLRS-n, at least 2, behind M tokens at each step (2, 2:8 and the engine's choice)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    if min(arguments.temperatures) <= 0:
        parser.error("temperatures must be above 0: a greedy target has one right token")
    disable_progress_bar()
    try:
        file, count = arguments.text, arguments.num_texts
        texts = load_prompts(file, count) if file else documents_of(CALIBRATION_TEXT)[:count]
        pair = PairRows(load(arguments.target), load(arguments.drafter))
        engines = MergeSpan(span_of(pair.drafter.vocab_size))
        means, places = measure(
            pair,
            track(texts, "texts", console=Console(stderr=True), transient=True),
            arguments.temperatures,
            arguments.places,
            arguments.max_tokens,
            arguments.spans or [MergeSpan(), MergeSpan(2, 8), engines],
            seed=0,
        )
    except (ConfigError, ValueError) as error:
        parser.error(str(error))
    if arguments.json:
        print_json([{"temperature": t, "places": places, "figures": means[t]} for t in means])
        return 0
    print(
        f"Acceptance of one drafted token at {places} places of {len(texts)} texts (standard "
        f"errors over texts): {arguments.target.name} / {arguments.drafter.name}\n"
    )
    columns = [_column(name, means) for name in next(iter(means.values()))]
    print(markdown_table([Column("temperature", "{:g}".format), *columns], list(means)))
    print(
        "\nSLRS-n pays for this with up to n - 1 more drafter forwards per drafted token, of m "
        "tokens the first; the others take none."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
