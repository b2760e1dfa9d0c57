# SPDX-License-Identifier: Apache-2.0
"""Part C of `measure_gpu.py`: tokens per second beside the target alone, in interleaved rounds.

The target alone stays up and runs in every round; the other engines come in groups of as many as
fit into the memory beside it. A ratio is one of two runs of the same round. All run as users have
them, but for those whose acceptance is imposed: they are watched, and so is a target alone beside
them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, TypeAlias

import torch
from _gpu_engine import Continuation, Facts, GpuEngine, Lesson, Outcome, Record, Setup, Task
from _gpu_parts import RATE, Report, Result
from _gpu_setups import FIXED, LOOKAHEAD, Options, Setups, modes, running, served, shells, tried

from vllm_hetero_spec.bench.figures import speedup

_BATCHES = (1, 8)
# In bfloat16 logits between 16 and 32 are steps of 1/8 apart. Rows of another batch are rounded
# otherwise, so that the better of two tokens that are two steps apart may change.
_GAP = 0.25
_MEMORY = 55e9  # bytes of a GPU: three 8B-shaped targets, two drafters, their KV and workspaces


@dataclass(frozen=True)
class Variant:
    """One way to run a load.

    Attributes:
        engine: Which engine.
        lookahead: Fixed, of a watched engine; None leaves it to the engine.
        taught: Whether acceptance is imposed.
    """

    engine: str
    lookahead: int | None = None
    taught: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """What is to be told of it."""
        imposed = {"imposed_rate": RATE} if self.taught else {}
        return {"engine": self.engine, "lookahead": self.lookahead, **imposed}


# Engines to start, by name, and what they run.
Group: TypeAlias = Mapping[str, tuple[Setup, Sequence[Variant]]]


class Rounds:
    """Runs of the same loads by several engines, each in its turn the first.

    Args:
        known: What the target alone says after each prompt.
        texts: The prompts.
        max_tokens: Of each.
    """

    def __init__(
        self, known: Sequence[Continuation], texts: Sequence[str], max_tokens: int
    ) -> None:
        self._known, self._texts, self._max_tokens = known, texts, max_tokens
        self._pairs: dict[tuple[Variant, int], list[tuple[Outcome, Outcome]]] = {}

    def run(
        self,
        rounds: int,
        reference: tuple[Variant, GpuEngine],
        others: Sequence[tuple[Variant, GpuEngine]],
    ) -> None:
        """Run all, beside the target alone."""
        everyone = [reference, *others]
        for number in range(rounds):
            for batch in _BATCHES:
                by = number % len(everyone)
                turned = [*everyone[by:], *everyone[:by]]
                found = {v: engine.ask(self._task(v, batch)) for v, engine in turned}
                for variant, outcome in found.items():
                    pairs = self._pairs.setdefault((variant, batch), [])
                    pairs.append((outcome, found[reference[0]]))

    def rows(self) -> Iterator[Result]:
        """What was found, one row for each variant and batch size."""
        for (variant, batch), pairs in self._pairs.items():
            ratio = speedup(pairs)
            assert ratio is not None
            newest = pairs[-1][0]
            gaps = [gap for outcome, _ in pairs for gap in self._gaps(outcome)]
            yield {
                **variant.settings,
                "batch": batch,
                "of_alone": {name: _rounded(value) for name, value in asdict(ratio).items()},
                "tokens_per_second": _rounded(median(o.tokens_per_second for o, _ in pairs)),
                **newest.figures(),
                "failures": sum(outcome.failures for outcome, _ in pairs),
                "texts": sum(len(outcome.traces) for outcome, _ in pairs),
                "gaps_where_texts_differ": [_rounded(gap) for gap in gaps],
            }

    def _task(self, variant: Variant, batch: int) -> Task:
        texts = self._texts[: max(2, batch)]
        lesson = None
        if variant.taught:
            lesson = Lesson([known.token_ids for known in self._known[: len(texts)]], RATE)
        return Task(
            texts,
            self._max_tokens,
            batch,
            ignore_eos=True,
            lookahead=variant.lookahead,
            lesson=lesson,
        )

    def _gaps(self, outcome: Outcome) -> Iterator[float]:
        """How sure the target alone was of the first token that is another, text by text."""
        for trace, known in zip(outcome.traces, self._known, strict=False):
            for mine, its, gap in zip(trace.token_ids, known.token_ids, known.gaps, strict=False):
                if mine != its:
                    yield gap
                    break


class Engines:
    """Starts engines, and notes what became of them.

    Args:
        options: The user's.
        facts: Notes go here, by the engine's name.
    """

    def __init__(self, options: Options, facts: Result) -> None:
        self._options, self._facts = options, facts

    def up(self, variants: Group, stack: ExitStack) -> list[tuple[Variant, GpuEngine]]:
        """Start engines until the stack is left; their variants, none of those that fail."""
        found: list[tuple[Variant, GpuEngine]] = []
        for name, (setup, of) in variants.items():
            engines: list[GpuEngine] = []

            def begin(setup: Setup = setup, engines: list[GpuEngine] = engines) -> Result:
                engines.append(stack.enter_context(running(self._options, setup)))
                return dict(engines[0].ask(Facts())) if setup.watched else {}

            self._facts[name] = tried(begin)
            if "error" not in self._facts[name]:
                found += [(variant, engines[0]) for variant in of]
        return found


def part_c(options: Options, report: Report) -> bool:
    """Tokens per second of all that can be had, as ratios to the target alone."""
    if options.on_gpu and (free := torch.cuda.mem_get_info()[0]) < _MEMORY:
        raise ValueError(
            f"part C needs {_MEMORY / 1e9:.0f} GB of the GPU's memory, and {free / 1e9:.0f} GB are "
            "free; the other parts need less (--parts 0 A B D)"
        )
    rounds, most = (3, 128) if options.on_gpu else (1, 16)
    with shells(options) as (target, drafter):
        setups = Setups(options, exact=False, batch=max(_BATCHES), target=target, drafter=drafter)
        result: Result = {"shapes": [target.name, drafter.name], "engines": {}, "rows": []}
        engines = Engines(options, result["engines"])
        texts = options.texts(max(_BATCHES))

        def run(reference: tuple[Variant, GpuEngine], group: Group) -> None:
            with ExitStack() as inner:
                others = engines.up(group, inner)

                def rounded() -> Result:
                    table.run(rounds, reference, others)
                    return {}

                result.update(tried(rounded))
                result["rows"] = list(table.rows())
                report(result)

        with ExitStack() as outer:
            (alone,) = engines.up(
                {"alone, watched": (setups.alone(), [Variant("alone, watched")])}, outer
            )
            table = Rounds(alone[1].ask(Record(texts, most + LOOKAHEAD)), texts, most)
            run(alone, _taught(setups, options))
        with ExitStack() as outer:
            (alone,) = engines.up({"alone": (served(setups.alone()), [Variant("alone")])}, outer)
            for group in _groups(setups, options):
                run(alone, group)
        good = "error" not in result and all("error" not in e for e in result["engines"].values())
        allowed = 0.0 if setups.exact else _GAP
        for row in result["rows"]:
            good &= not row["failures"]
            good &= all(gap <= allowed for gap in row["gaps_where_texts_differ"])
        return good


def _taught(setups: Setups, options: Options) -> Group:
    """Engines whose acceptance is imposed, or that are told not to draft."""
    *_, (mode, given) = modes(options).items()
    variants = [Variant("ours, watched", far, far > 0) for far in (0, 3, LOOKAHEAD)]
    return {f"ours, {mode}, watched": (setups.ours({**FIXED, **given}), variants)}


def _groups(setups: Setups, options: Options) -> Iterator[Group]:
    """Engines that are up together beside the target alone."""
    *slower, (mode, given) = modes(options).items()

    def ours(more: Mapping[str, Any], runner: str = "", **engine: Any) -> Setup:
        return served(setups.ours({**given, **more}, runner=runner, **engine))

    def group(**of: Setup) -> Group:
        return {name: (setup, [Variant(name)]) for name, setup in of.items()}

    name = f"ours, {mode}"
    fixed = {far: {**FIXED, "num_speculative_tokens": far} for far in (3, LOOKAHEAD)}
    yield group(**{name: ours({}), "vLLM's TLI": served(setups.tli())})
    yield group(**{f"{name}, lookahead {far}": ours(of) for far, of in fixed.items()})
    if options.on_gpu:
        yield group(**{"alone, V1": served(setups.alone("0")), f"{name}, V1": ours({}, "0")})
        apart = {f"{name}, not ahead": ours({}, async_scheduling=False)}
        yield group(**apart, **{f"ours, {slow}": ours(of) for slow, of in slower})


def _rounded(value: float) -> float:
    return round(value, 3)
