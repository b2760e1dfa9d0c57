# SPDX-License-Identifier: Apache-2.0
"""What tokenizers, files and rows say of a target with one drafter, before an engine has run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_hetero_spec.advice.memory import Memory
from vllm_hetero_spec.config import METHODS
from vllm_hetero_spec.draft.selection import Choice, order, span
from vllm_hetero_spec.inputs.tokenizer_source import OpenTokenizer
from vllm_hetero_spec.text.statistics import PairMeter, PairStatistics, shared_text
from vllm_hetero_spec.text.vocabulary import build_maps, default_cache

# Target tokens of a text that are read for its rows.
_LONGEST = 512
_SEED = 0  # of the choice of places
# Method -> (how often one drafted token of it is accepted, standard error).
Acceptance = Mapping[str, tuple[float, float]]


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


def read_acceptance(
    target: str,
    drafter: str,
    texts: Sequence[str],
    temperatures: Sequence[float],
    places: int,
    trust_remote_code: bool,
) -> dict[float, dict[str, tuple[float, float]]]:
    """Acceptance of one drafted token by temperature and method, most accepted first.

    Loads both models with transformers: in float32 on a CPU, in their own type on a GPU.

    Args:
        target: Folder or Hugging Face name.
        drafter: The same.
        texts: What both read.
        temperatures: 0 is greedy.
        places: Of each text, at most.
        trust_remote_code: Run code of the repositories.

    Raises:
        ValueError: Fewer than two texts are long enough.
    """
    # Here, because they load torch and are needed in a process of their own alone.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from vllm_hetero_spec.advice.alphas import measure, method_of
    from vllm_hetero_spec.advice.place_rows import PairRows
    from vllm_hetero_spec.draft.slrs import Reach

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    gpu = torch.cuda.is_available()

    def load(name: str) -> tuple[Any, Any]:
        trust = {"trust_remote_code": trust_remote_code}
        dtype = "auto" if gpu else torch.float32
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **trust).eval()
        return model.to("cuda" if gpu else "cpu"), AutoTokenizer.from_pretrained(name, **trust)

    pair = PairRows(load(target), load(drafter))
    reaches = [Reach(span(pair.drafter.vocab_size))]
    results, _ = measure(pair, texts, temperatures, places, _LONGEST, reaches, _SEED)
    return {
        result.temperature: {
            method: (result.figures[name].value, result.figures[name].error)
            for name in result.ranking
            if (method := method_of(name)) is not None
        }
        for result in results
    }
