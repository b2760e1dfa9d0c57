# SPDX-License-Identifier: Apache-2.0
"""What the files of drafters say beside a target's, before an engine has run."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_hetero_spec.advice.memory import Memory, memory_of
from vllm_hetero_spec.bench.suite import Drafter
from vllm_hetero_spec.config import METHODS
from vllm_hetero_spec.draft.methods import Choice, order
from vllm_hetero_spec.errors import ConfigError
from vllm_hetero_spec.inputs.tokenizer_source import open_tokenizer
from vllm_hetero_spec.text.statistics import PairMeter, PairStatistics, shared_text
from vllm_hetero_spec.text.vocabulary import build_maps, default_cache


@dataclass(frozen=True)
class DrafterFacts:
    """One drafter.

    Attributes:
        drafter: Its name in tables, and what engines are told.
        statistics: Of both tokenizers on a text; None where they cannot be bridged.
        shared_tokens: Byte strings that are a text token of both.
        memory: What it takes; None as above.
        not_measured: Why engines are not started with it, in a sentence; "" where they are.
    """

    drafter: Drafter
    statistics: PairStatistics | None = None
    shared_tokens: int = 0
    memory: Memory | None = None
    not_measured: str = ""

    @property
    def suggested(self) -> Choice | None:
        """The method that the tokenizers suggest for sampled requests."""
        if self.statistics is None:
            return None
        choices = order(self.statistics, temperature=1.0)
        return next(choice for choice in choices if choice.method in METHODS)


def look_at(
    target: str,
    drafters: Sequence[Drafter],
    documents: Sequence[str],
    *,
    dtype: str,
    sequences: int,
    trust_remote_code: bool,
) -> list[DrafterFacts]:
    """Compare tokenizers, and tell the memory.

    Args:
        target: A Hugging Face name or a folder.
        drafters: What to compare with it.
        documents: The text that tokenizers are compared on.
        dtype: What vLLM runs drafters in.
        sequences: Contexts at the same time, for the memory.
        trust_remote_code: Run code of the repositories.

    Raises:
        ConfigError: The target's tokenizer cannot be bridged, or no drafter can be used.
    """
    trust = trust_remote_code
    ours = open_tokenizer(target, "target", trust_remote_code=trust).text
    looked_at = []
    for drafter in drafters:
        try:
            theirs = open_tokenizer(drafter.model, "drafter", trust_remote_code=trust).text
            memory = memory_of(drafter.model, dtype, sequences, trust)
        except ConfigError as error:
            looked_at.append(DrafterFacts(drafter, not_measured=str(error)))
            continue
        meter = PairMeter(ours, theirs, build_maps(ours, theirs, cache=default_cache()))
        meter.add(documents)
        shared = len(shared_text(ours, theirs))
        looked_at.append(DrafterFacts(drafter, meter.statistics(), shared, memory))
    if all(facts.not_measured for facts in looked_at):
        raise ConfigError(" ".join(facts.not_measured for facts in looked_at))
    return looked_at
