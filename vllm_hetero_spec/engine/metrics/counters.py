# SPDX-License-Identifier: Apache-2.0
"""Counters of speculation in a worker, and their changes for a front end."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal

from vllm_hetero_spec.lookahead.controllers import Gauges

logger = logging.getLogger("vllm.hetero_spec")

RPC = "hetero_spec_stats"
# By field of `DraftStats`: a number, or numbers by label.
Counted = dict[str, Any]

# Reasons for a request without a draft, and remedies.
REASONS = {
    "no_blocks": "the drafter's KV pool is full; raise its own kv_cache_memory_bytes",
    "drafter_length": "the context is too long for the drafter and cannot be cut at a safe place",
    "catching_up": "first tokens have priority over drafts and over the drafter's prefill",
    "drafter_error": "the drafter raised an exception",
    "backing_off": "the drafter is paused after a failure",
    "nan_logits": "the drafter's logits were not finite",
    "untranslatable": "the text cannot be spelt in the drafter's vocabulary",
    "no_text": "the request has no token ids (prompt embeddings)",
    "not_guessed": "the target's tokens match no precomputed draft",
    "not_ready": "the drafter's process has not drafted that far yet",
    "drafter_down": "the drafter's process has ended, and is started again",
    "not_worth_it": "the target alone is faster at present; see the option controller",
}
# Kinds of translation failures: see `text.bridge.Bridge.failures`.
FAULTS = ("unencodable", "unknown_id", "held_mismatch", "draft_error", "context_error")
# Reasons for a chain although `tree_nodes` is set.
CHAINS = {
    "drawn": "sampled requests have trees only with verification race",
    "penalties": "the target's rows with penalties are those of a chain",
    "grammar": "a grammar constrains the request",
    "restricted": "bad words, allowed tokens or min_tokens constrain the request",
    "thinking": "the request has a budget of tokens for thinking",
    "no_room": "side paths take sequences and KV blocks beside the requests'; raise max_num_seqs, "
    "or the KV cache",
    "not_worth_it": "branches cost more of the target's time than they gain",
}
# Normal in operation: counted, but not logged.
_QUIET = frozenset({"catching_up", "not_worth_it", "not_guessed", "not_ready"})
_MANY = 500  # requests without a draft; the prefill of one long prompt causes fewer
_FADE = 0.3  # weight of the newest steps in `off_fraction`


@dataclass(frozen=True)
class Metric:
    """Export of a field of `DraftStats` by a front end.

    Attributes:
        kind: "counter" only grows, "gauge" goes up and down, "seconds" is a duration, exported as
            a histogram over steps.
        help: Description.
        label: Name of the label if the field is a dictionary; empty if it is a number.
        shown: Exported name if it differs from the field's.
    """

    kind: Literal["counter", "gauge", "seconds"]
    help: str
    label: str = ""
    shown: str = ""


def _metric(kind: Any, *described: str) -> Any:
    """Return a field of `DraftStats`: a number, or with a label a dictionary of numbers."""
    metric = Metric(kind, *described)
    zero: Callable[[], Any] = Counter if metric.label else int
    return field(default_factory=zero, metadata={"metric": metric})


_count, _gauge, _seconds = (partial(_metric, kind) for kind in ("counter", "gauge", "seconds"))
# ruff: noqa: RUF009 - these calls return fields


@dataclass
class DraftStats:
    """Counters of one worker since its start, and current estimates of its controller."""

    steps: int = _count("Steps of the target, also while speculation is disabled.")
    off_steps: int = _count("Steps for which the controller planned no drafts.")
    drafts: int = _count("Drafts proposed to the target.")
    draft_tokens: int = _count("Draft tokens proposed, as target tokens.")
    copies: int = _count("Proposed drafts copied from the request's earlier text.")
    copied_tokens_accepted: int = _count("Accepted tokens of such drafts.")
    trees: int = _count("Proposed drafts that were trees.")
    tree_tokens: int = _count("Draft tokens in proposed trees, as target tokens.")
    side_tokens_accepted: int = _count(
        "Accepted tokens of trees that were not on the drafter's own chain."
    )
    paths_without_room: int = _count(
        "Drafter paths for trees left out because KV blocks or batch rows ran out."
    )
    chains: Counter[str] = _count("Drafts kept to chains although tree_nodes is set.", "because")
    drafter_tokens: int = _count("Drafter tokens generated for drafts.")
    catch_up_tokens: int = _count("Context tokens that the drafter prefilled.")
    forwards: int = _count("Drafter forwards.")
    graph_forwards: int = _count("Drafter forwards replayed as CUDA graphs.")
    restarted_rounds: int = _count(
        "Drafting rounds that restarted because a first draft token was replaced."
    )
    shortened_drafts: int = _count(
        "Drafts cut to a replaced first token because the round did not restart."
    )
    reused_tokens: int = _count("Context tokens whose KV was reused from another request.")
    media_tokens: int = _count("Prompt tokens of images and other media, which the drafter skips.")
    skipped: Counter[str] = _count("Requests without a draft in a step.", "reason")
    untranslated: Counter[str] = _count(
        "Contexts and drafts that could not be translated.", "fault"
    )
    drafts_ahead: int = _count("Drafts that were precomputed.")
    drafts_guessed: int = _count("Precomputed drafts of a branch, not of the chain.")
    drafts_waited: int = _count("Drafts that were not precomputed and that the target waited for.")
    hit_rate: float = _gauge("Share of recent look-ups that found a precomputed draft.")
    guesses: int = _gauge("Current number of branches beside each chain.")
    restarts: int = _count("Restarts of the drafter process.")
    lengths: Counter[int] = _count(
        "Proposed drafts by the length of their longest path.", "length", "drafts_by_length"
    )
    translate_seconds: float = _seconds("Translation between the tokenizers.")
    forward_seconds: float = _seconds("Drafter forwards and token selection.")
    wait_seconds: float = _seconds("Waiting for drafts that were not precomputed.")
    propose_seconds: float = _seconds(
        "Drafting in the engine process, including forwards that run there."
    )
    verify_seconds: float = _seconds("The rejection sampler.")
    fuzzy_tokens: int = _count("Tokens accepted only because of fuzzy verification.")
    fuzzy_variation: float = _count("Total variation distance that fuzzy tokens added.")
    kv_blocks: int = _gauge("Blocks in the drafter's KV pool.")
    kv_blocks_held: int = _gauge("Blocks of the drafter's KV pool in use after a step.")
    requests_held: int = _gauge("Requests whose context the drafter keeps.")
    lookahead: int = _gauge(
        "Current draft length in target tokens; 0 while speculation is disabled."
    )
    off_fraction: float = _gauge("Share of recent steps with speculation disabled.")
    gain: float = _gauge("Predicted speedup over the target alone.")
    tokens_per_second: float = _gauge("Achieved tokens per second, as estimated by the controller.")
    drafter_step_seconds: float = _gauge(
        "Predicted time of a drafter forward with a token for each request of the batch."
    )
    target_step_seconds: float = _gauge(
        "Predicted time of a target step without drafts for the current batch."
    )
    acceptance: dict[int, float] = _gauge(
        "Acceptance rate of a draft token if all tokens before it were accepted.",
        "position",
        "acceptance_rate",
    )

    def __post_init__(self) -> None:
        self._shown = 0, 0  # steps and off_steps when the gauges were last set
        self._late = False  # True once the warning about late drafts was logged

    def skip(self, reason: str, detail: str = "", times: int = 1) -> None:
        """Count requests without a draft. The first of each reason is logged."""
        if times <= 0:
            return
        if not self.skipped[reason] and reason not in _QUIET:
            logger.warning(
                "No drafts for some requests (%s): %s%s. They continue without drafts; "
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
        """Count a draft that is kept to a chain although trees are on; log each cause once."""
        if not self.chains[because] and because not in _QUIET:
            logger.info(
                "Drafts are chains, not trees, for some requests (%s): %s. Further cases are only "
                "counted.",
                because,
                CHAINS[because],
            )
        self.chains[because] += 1

    def drafted(self, lengths: Iterable[int]) -> None:
        """Count drafts that are chains, by their numbers of target tokens. Ignore empty ones."""
        lengths = list(filter(None, lengths))
        self.drafts += len(lengths)
        self.draft_tokens += sum(lengths)
        self.lengths.update(lengths)

    def drafted_tree(self, depth: int, nodes: int) -> None:
        """Count a draft that is a tree with a longest path of `depth`. Ignore empty ones."""
        if not nodes:
            return
        self.drafts += 1
        self.draft_tokens += nodes
        self.lengths[depth] += 1
        self.trees += 1
        self.tree_tokens += nodes

    def show(self, gauges: Gauges) -> None:
        """Copy the current estimates of the controller."""
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
        """All fields as plain numbers and dictionaries, which vLLM can serialize."""
        return {name: plain(getattr(self, name)) for name, plain in _PLAIN.items()}


METRICS: dict[str, Metric] = {f.name: f.metadata["metric"] for f in fields(DraftStats)}
# Constructor of each field's plain value.
_PLAIN: dict[str, Any] = {
    f.name: dict if METRICS[f.name].label else f.type for f in fields(DraftStats)
}


class Growth:
    """Changes since the last step, which is all that a step sends to the front end.

    A counter that was reset counts from zero again, as in Prometheus.
    """

    def __init__(self) -> None:
        zero = DraftStats().as_dict()
        # A gauge is sent once even if it is zero.
        self._last = {n: v for n, v in zero.items() if v == {} or METRICS[n].kind != "gauge"}

    def take(self, stats: DraftStats) -> Counted:
        """Return the increments of counters that grew, and the new values of gauges that changed.

        Empty before the first step, so that timing at start-up is not counted.
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
    """Sum the counters of several workers, each from `DraftStats.as_dict`."""
    total = DraftStats().as_dict()
    for worker in workers:
        for name, value in worker.items():
            if METRICS[name].label:
                total[name] = dict(Counter(total[name]) + Counter(value))
            else:
                total[name] += value
    return total
