# SPDX-License-Identifier: Apache-2.0
"""What speculation did, counted in the worker, and how a front end reads it."""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Annotated, Any, Literal, get_type_hints

from vllm_hetero_spec.lookahead.controllers import Gauges

logger = logging.getLogger("vllm.hetero_spec")

RPC = "hetero_spec_stats"
# By field of `DraftStats`, a number or numbers by label.
Counted = dict[str, Any]

# Why a request went undrafted in a step, and what a user can do about it.
REASONS = {
    "no_blocks": "the drafter's KV pool is full; raise its own kv_cache_memory_bytes",
    "drafter_length": "the text has no place to be cut to the drafter's context",
    "catching_up": "first tokens go before drafts and the reading of long prompts",
    "drafter_error": "the drafter raised an exception",
    "backing_off": "the drafter failed before and rests for a while",
    "nan_logits": "the drafter's logits were not finite",
    "untranslatable": "the text cannot be spelt in the drafter's vocabulary",
    "no_text": "the request has no token ids (prompt embeddings)",
    "not_guessed": "the target has written something else than the drafter's process foresaw",
    "not_ready": "the drafter's process has not drafted that far yet",
    "drafter_down": "the drafter's process has ended, and is started again",
    "not_worth_it": "the target alone is faster at present; see the option controller",
}
# What of texts and drafts could not be translated: see `text.bridge.Bridge.failures`.
FAULTS = ("unencodable", "unknown_id", "held_mismatch", "draft_error", "context_error")
# Why a draft is a chain where drafts may be trees.
CHAINS = {
    "drawn": "trees of random requests are raced for; see the option verification",
    "penalties": "the target's rows with penalties are those of a chain",
    "grammar": "a grammar constrains the request",
    "restricted": "bad words, allowed tokens or min_tokens constrain the request",
    "thinking": "the request has a budget of tokens for thinking",
    "no_room": "side paths take sequences and KV blocks beside the requests'; raise max_num_seqs, "
    "or the KV cache",
    "not_worth_it": "the target's rows cost more than side paths bring",
}
# Expected now and then in normal operation: counted, but not worth a warning.
_QUIET = frozenset({"catching_up", "not_worth_it", "not_guessed", "not_ready"})
_MANY = 500  # requests left undrafted: one long prompt that the drafter reads takes fewer steps
_FADE = 0.3  # weight of the newest steps in `off_fraction`


@dataclass(frozen=True)
class Metric:
    """How a field of `DraftStats` is shown in a front end.

    Attributes:
        kind: "counter" only grows, "gauge" goes up and down, "seconds" is host time, shown as what
            each step took.
        help: What it means.
        label: What the keys are where the field is a dictionary; empty where it is a number.
        shown: Its name in a front end where that is not the field's.
    """

    kind: Literal["counter", "gauge", "seconds"]
    help: str
    label: str = ""
    shown: str = ""


_count, _gauge, _seconds = (partial(Metric, kind) for kind in ("counter", "gauge", "seconds"))


@dataclass
class DraftStats:
    """What one worker has counted since it started, and what its controller thinks at present."""

    steps: Annotated[int, _count("Steps in which the drafter was asked for drafts.")] = 0
    off_steps: Annotated[int, _count("Steps in which the controller left all undrafted.")] = 0
    drafts: Annotated[int, _count("Drafts proposed to the target.")] = 0
    draft_tokens: Annotated[int, _count("Target tokens in proposed drafts.")] = 0
    trees: Annotated[int, _count("Those drafts that were trees, not chains.")] = 0
    tree_tokens: Annotated[int, _count("Target tokens in those trees.")] = 0
    side_tokens_accepted: Annotated[
        int, _count("Accepted tokens of trees that were not of the drafter's own chain.")
    ] = 0
    paths_without_room: Annotated[
        int, _count("Paths of the drafter's for trees that had no KV blocks or places.")
    ] = 0
    chains: Annotated[
        Counter[str], _count("Drafts that were to be chains though trees are on.", label="because")
    ] = field(default_factory=Counter)
    drafter_tokens: Annotated[int, _count("Tokens the drafter generated for those drafts.")] = 0
    catch_up_tokens: Annotated[int, _count("Context tokens read by the drafter.")] = 0
    forwards: Annotated[int, _count("Forwards of the drafter.")] = 0
    graph_forwards: Annotated[int, _count("Forwards of the drafter replayed as CUDA graphs.")] = 0
    restarted_rounds: Annotated[
        int, _count("Drafting rounds that restarted because a first token was replaced.")
    ] = 0
    shortened_drafts: Annotated[
        int, _count("Drafts of one token: it was replaced, and the round did not restart.")
    ] = 0
    reused_tokens: Annotated[int, _count("Context tokens whose KV another request had left.")] = 0
    media_tokens: Annotated[int, _count("Prompt tokens for images and the like, left out.")] = 0
    skipped: Annotated[
        Counter[str], _count("Requests left undrafted in a step.", label="reason")
    ] = field(default_factory=Counter)
    untranslated: Annotated[
        Counter[str], _count("What of texts and drafts could not be translated.", label="fault")
    ] = field(default_factory=Counter)
    drafts_ahead: Annotated[int, _count("Drafts made before their text was known.")] = 0
    drafts_guessed: Annotated[int, _count("Of those, behind a guess beside the chain.")] = 0
    drafts_waited: Annotated[
        int, _count("Drafts that nobody foresaw, and that the target waited for.")
    ] = 0
    hit_rate: Annotated[float, _gauge("Share of recent look-ups that found a draft.")] = 0.0
    guesses: Annotated[int, _gauge("Lines that are drafted beside each chain at present.")] = 0
    restarts: Annotated[int, _count("Drafter processes that took the place of one that ended.")] = 0
    lengths: Annotated[
        Counter[int],
        _count("Proposed drafts by their longest path.", "length", "drafts_by_length"),
    ] = field(default_factory=Counter)
    translate_seconds: Annotated[float, _seconds("Translation between the tokenizers.")] = 0.0
    forward_seconds: Annotated[float, _seconds("Drafter forwards, token choice included.")] = 0.0
    wait_seconds: Annotated[float, _seconds("Waiting for drafts that nobody foresaw.")] = 0.0
    propose_seconds: Annotated[
        float, _seconds("Drafting in the engine's own process, with the forwards that run there.")
    ] = 0.0
    verify_seconds: Annotated[float, _seconds("The rejection sampler.")] = 0.0
    fuzzy_tokens: Annotated[int, _count("Tokens that only fuzzy verification accepted.")] = 0
    fuzzy_variation: Annotated[float, _count("Total variation that fuzzy tokens cost.")] = 0.0
    kv_blocks: Annotated[int, _gauge("Blocks of the drafter's KV pool.")] = 0
    kv_blocks_held: Annotated[int, _gauge("Blocks of that pool in use after a step.")] = 0
    requests_held: Annotated[int, _gauge("Requests whose text the drafter keeps.")] = 0
    lookahead: Annotated[int, _gauge("Target tokens drafted at present; 0 while off.")] = 0
    off_fraction: Annotated[float, _gauge("Share of recent steps that were off.")] = 0.0
    gain: Annotated[float, _gauge("Foreseen tokens per second over the target's alone.")] = 0.0
    tokens_per_second: Annotated[float, _gauge("Achieved, as the controller sees it.")] = 0.0
    drafter_step_seconds: Annotated[
        float, _gauge("Foreseen for a forward of the drafter, a token for each of the batch.")
    ] = 0.0
    target_step_seconds: Annotated[
        float, _gauge("Foreseen for a step of the target without drafts, for the present batch.")
    ] = 0.0
    acceptance: Annotated[
        dict[int, float],
        _gauge("Acceptance of a token whose predecessors were.", "position", "acceptance_rate"),
    ] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._shown = 0, 0  # steps and off_steps when the gauges were last set
        self._late = False  # whether it was logged that most drafts are not ready

    def skip(self, reason: str, detail: str = "", times: int = 1) -> None:
        """Count undrafted requests; the first of each reason is logged once."""
        if times <= 0:
            return
        if not self.skipped[reason] and reason not in _QUIET:
            logger.warning(
                "Not speculating for some requests (%s): %s%s. They complete as without a drafter; "
                "further cases are only counted.",
                reason,
                REASONS[reason],
                f": {detail}" if detail else "",
            )
        self.skipped[reason] += times
        late, looked_up = self.skipped["not_ready"], self.drafts + self.skipped["not_guessed"]
        if late >= _MANY and late > looked_up and not self._late:
            self._late = True
            logger.warning(
                "Most drafts are not ready when the target needs them (%d of %d): the drafter's "
                "process is too slow, or shares CPU cores or a device with the target. Give it "
                'more of its own ("drafter_device"), or leave out "draft_ahead"; further cases are '
                "only counted.",
                late,
                late + looked_up,
            )

    def keep_chain(self, because: str) -> None:
        """Count a draft that is to be a chain though trees are on; each cause is logged once."""
        if not self.chains[because] and because not in _QUIET:
            logger.info(
                "Drafts are chains, not trees, for some requests (%s): %s. Further cases are only "
                "counted.",
                because,
                CHAINS[because],
            )
        self.chains[because] += 1

    def drafted(self, lengths: Iterable[int]) -> None:
        """Count drafts that are chains of so many target tokens, but for empty ones."""
        lengths = list(filter(None, lengths))
        self.drafts += len(lengths)
        self.draft_tokens += sum(lengths)
        self.lengths.update(lengths)

    def drafted_tree(self, depth: int, nodes: int) -> None:
        """Count a draft that is a tree, unless it is empty.

        Args:
            depth: Target tokens of its longest path.
            nodes: All that it has.
        """
        if not nodes:
            return
        self.drafts += 1
        self.draft_tokens += nodes
        self.lengths[depth] += 1
        self.trees += 1
        self.tree_tokens += nodes

    def show(self, gauges: Gauges) -> None:
        """Take over what the controller thinks at present."""
        steps, off = self.steps - self._shown[0], self.off_steps - self._shown[1]
        if steps > 0:
            self.off_fraction += _FADE * (off / steps - self.off_fraction)
        self._shown = self.steps, self.off_steps
        self.lookahead = gauges.lookahead
        self.gain, self.tokens_per_second = gauges.gain, gauges.tokens_per_second
        self.drafter_step_seconds = gauges.drafter_seconds
        self.target_step_seconds = gauges.target_seconds
        self.acceptance = {j: float(rate) for j, rate in enumerate(gauges.acceptance)}

    def as_dict(self) -> Counted:
        """All of it as plain numbers and dictionaries, which vLLM's serializer takes."""
        return {
            name: plain(value)
            for (name, plain), value in zip(_PLAIN.items(), _read(self), strict=True)
        }


METRICS: dict[str, Metric] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(DraftStats, include_extras=True).items()
}
_PLAIN = {
    n: dict if METRICS[n].label else type(v) for n, v in vars(DraftStats()).items() if n in METRICS
}
_read = attrgetter(*METRICS)


class Growth:
    """What was counted since the last time: all that a step tells the front end.

    Counters that were set back in between count from zero again, as Prometheus reads them.
    """

    def __init__(self) -> None:
        zero = DraftStats().as_dict()
        # A gauge is told once even where it stands at zero.
        self._last = {n: v for n, v in zero.items() if v == {} or METRICS[n].kind != "gauge"}

    def take(self, stats: DraftStats) -> Counted:
        """The counters that grew, by how much, and the gauges that moved, where to.

        Nothing before the first step: what trials at start-up take never reaches the front end.
        """
        if not stats.steps:
            return {}
        now, last = stats.as_dict(), self._last
        self._last = now
        return {
            name: value if METRICS[name].kind == "gauge" else _grown(value, last[name])
            for name, value in now.items()
            if value != last.get(name)
        }


def _grown(now: Any, last: Any) -> Any:
    if isinstance(now, dict):
        grown = {key: _grown(count, last.get(key, 0)) for key, count in now.items()}
        return {key: count for key, count in grown.items() if count}
    return now - last if now >= last else now


def summed(workers: list[Counted]) -> Counted:
    """The counters of several workers, each from `DraftStats.as_dict`, as those of one."""
    total = DraftStats().as_dict()
    for worker in workers:
        for name, value in worker.items():
            if METRICS[name].label:
                total[name] = dict(Counter(total[name]) + Counter(value))
            else:
                total[name] += value
    return total
