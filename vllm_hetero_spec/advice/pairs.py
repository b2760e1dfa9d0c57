# SPDX-License-Identifier: Apache-2.0
"""What the tokenizers say of a target with one drafter, before an engine has run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_hetero_spec.advice.memory import Memory
from vllm_hetero_spec.config import METHODS
from vllm_hetero_spec.draft.selection import Choice, order
from vllm_hetero_spec.inputs.tokenizer_source import OpenTokenizer
from vllm_hetero_spec.text.statistics import PairMeter, PairStatistics, shared_text
from vllm_hetero_spec.text.vocabulary import build_maps, default_cache


@dataclass(frozen=True)
class PairView:
    """Two tokenizers on a text.

    Attributes:
        statistics: The figures.
        shared_tokens: Byte strings that are a text token of both.
    """

    statistics: PairStatistics
    shared_tokens: int

    def methods(self, temperature: float) -> list[Choice]:
        """Methods that this version runs, the most promising first."""
        choices = order(self.statistics, temperature=temperature)
        return [choice for choice in choices if choice.method in METHODS]

    def as_json(self, memory: Memory, temperatures: Sequence[float]) -> dict[str, Any]:
        """Every figure under stable names; shares are between 0 and 1."""
        found = self.statistics
        return {
            "statistics": {
                "omega_t": found.omega_t,
                "omega_k": found.omega_k,
                "target_straddle": found.target_straddle,
                "drafter_straddle": found.drafter_straddle,
                "drafter_tokens_per_target_token": self.tokens_ratio,
                "changed_lines": found.failure_share,
                "shared_tokens": self.shared_tokens,
            },
            "expected_methods": {
                f"temperature_{t:g}": [choice._asdict() for choice in self.methods(t)]
                for t in temperatures
            },
            "memory": {
                "weight_bytes": memory.weight_bytes,
                "kv_bytes_per_token": memory.kv_bytes_per_token,
                "kv_bytes": memory.kv_bytes,
                "sequences": memory.sequences,
                "tokens": memory.tokens,
            },
        }

    @property
    def tokens_ratio(self) -> float | None:
        """Drafter tokens per target token on the text, None for a text without target tokens."""
        found = self.statistics
        return found.drafter_tokens / found.target_tokens if found.target_tokens else None


def view_pair(target: OpenTokenizer, drafter: OpenTokenizer, documents: Sequence[str]) -> PairView:
    """Compare two tokenizers on a text."""
    ours, theirs = target.text, drafter.text
    meter = PairMeter(ours, theirs, build_maps(ours, theirs, cache=default_cache()))
    meter.add(documents)
    return PairView(meter.statistics(), len(shared_text(ours, theirs)))
