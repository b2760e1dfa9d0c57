# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers as a measured engine, alone or with an assistant.

Assisted generation serves one request at a time, so it is comparable at batch size 1 only. With
different tokenizers, greedy loads use universal assisted generation and sampled loads token-level
intersection. The child process runs `python -m` this module.
"""

import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation import BaseStreamer

from vllm_hetero_spec.bench.child_process import REST, EngineProcess, serve
from vllm_hetero_spec.bench.load import Load, Sample, Trace
from vllm_hetero_spec.errors import ConfigError, one_line

_DTYPES = ("half", "float16", "bfloat16", "float", "float32")  # of vLLM and of torch


@dataclass(frozen=True)
class HuggingFaceSpec:
    """Models of an engine, and their settings."""

    model: str  # the target: a Hugging Face name or a folder
    assistant: str | None = None  # the drafter; None: the target alone
    num_assistant_tokens: int = 4  # drafter tokens per draft
    dtype: str = "auto"  # a name of `_DTYPES`; "auto": float32 on CPUs, otherwise 16 bits
    tokenizer: str | None = None  # the target's; None: that of the model
    revision: str | None = None  # the target's
    trust_remote_code: bool = False


class HuggingFaceEngine(EngineProcess):
    """`generate` for a `HuggingFaceSpec`; both models have the same dtype.

    As in vLLM, a verification of at least one draft token counts as a draft. The first draft is
    verified with the prompt, so `drafts` may exceed vLLM's by one per prompt.
    """

    program = "vllm_hetero_spec.bench.huggingface_engine"


class _Arrivals(BaseStreamer):
    """Records arrival times; the tokens of one verification arrive together."""

    def __init__(self, began: float, trace: Trace) -> None:
        self._began, self._trace = began, trace
        self._prompt_seen = False  # the first tokens that arrive are the prompt

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self._trace.arrived(value.flatten().tolist(), time.perf_counter() - self._began)
        self._prompt_seen = True

    def end(self) -> None: ...


def counts(verified: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Counts of a `Sample` from the (drafted, accepted) tokens of each verification."""
    drafts = [(drafted, accepted) for drafted, accepted in verified if drafted]
    positions = range(max((drafted for drafted, _ in drafts), default=0))
    return {
        "drafts": len(drafts),
        "draft_tokens": sum(drafted for drafted, _ in drafts),
        "accepted_tokens": sum(accepted for _, accepted in drafts),
        "accepted_per_position": [sum(n > position for _, n in drafts) for position in positions],
    }


class Generator:
    """A loaded target with an optional assistant; runs loads."""

    def __init__(self, spec: HuggingFaceSpec) -> None:
        self._spec = spec
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._tokenizer, self._target = self._load(
            spec.model, self._dtype(), tokenizer=spec.tokenizer, revision=spec.revision
        )
        self._assistants: dict[bool, dict[str, Any]] = {}
        self._warm: set[Hashable] = set()
        self._widths: list[int] = []
        self._target.register_forward_pre_hook(self._saw_forward, with_kwargs=True)
        # Ignore the model's generation defaults except EOS ids, as vLLM with sampling parameters.
        ends = self._target.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        self._ends = sorted({*ends, self._tokenizer.eos_token_id} - {None})
        self._target.generation_config = GenerationConfig()
        self._assistant(sampled=False)  # so that a folder without a model is refused now

    def run(self, load: Load) -> Sample:
        """Generate a load; the first of each kind follows a warm-up."""
        if load.kind not in self._warm:
            self._generate_all(load.warm_up)
            self._warm.add(load.kind)
        time.sleep(REST)
        if self._device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        traces, verified, seconds = self._generate_all(load)
        return Sample(
            traces=traces,
            seconds=seconds,
            **counts(verified),
            peak_memory_bytes=torch.cuda.max_memory_allocated() if self._device == "cuda" else 0,
            dtype=str(self._target.dtype).removeprefix("torch."),
        )

    def _generate_all(self, load: Load) -> tuple[list[Trace], list[tuple[int, int]], float]:
        sampled = load.temperature > 0
        law = {"temperature": load.temperature, "top_p": load.top_p, "top_k": 0} if sampled else {}
        config = GenerationConfig(
            max_new_tokens=load.max_tokens,
            do_sample=sampled,
            eos_token_id=None if load.ignore_eos else self._ends,
            pad_token_id=self._ends[0] if self._ends else 0,
            **law,
        )
        assistance = self._assistant(sampled)
        verified = []
        traces = []
        began = time.perf_counter()
        for index, prompt in enumerate(load.prompts):
            if load.seed is not None:
                torch.manual_seed(load.seed + index)
            trace = Trace([], "", time.perf_counter() - began, [], [])
            inputs = self._tokenizer(prompt, return_tensors="pt").to(self._device)
            self._widths.clear()
            self._target.generate(
                inputs.input_ids,
                attention_mask=inputs.attention_mask,
                generation_config=config,
                streamer=_Arrivals(began, trace),
                **assistance,
            )
            if assistance:
                # A forward reads the last token and the draft; the first reads prompt and draft.
                self._widths[0] -= inputs.input_ids.shape[1] - 1
                for width, taken in zip(self._widths, trace.counts, strict=True):
                    verified.append((width - 1, taken - 1))
            trace.text = self._tokenizer.decode(trace.token_ids, skip_special_tokens=True)
            traces.append(trace)
        return traces, verified, time.perf_counter() - began

    def _saw_forward(self, module: Any, positional: Any, named: dict[str, Any]) -> None:
        self._widths.append(named["input_ids"].shape[1])

    def _assistant(self, sampled: bool) -> dict[str, Any]:
        """Further arguments of `generate`.

        Sampling with different tokenizers prunes the assistant's embeddings permanently, so greedy
        and sampled loads have a copy each.
        """
        if self._spec.assistant is None:
            return {}
        if sampled not in self._assistants:
            tokenizer, model = self._load(self._spec.assistant, self._target.dtype)
            settings = model.generation_config
            settings.num_assistant_tokens = self._spec.num_assistant_tokens
            settings.num_assistant_tokens_schedule = "constant"
            given = {"assistant_model": model}
            if tokenizer.get_vocab() != self._tokenizer.get_vocab():
                given |= {"tokenizer": self._tokenizer, "assistant_tokenizer": _in_order(tokenizer)}
            self._assistants[sampled] = given
        return self._assistants[sampled]

    def _dtype(self) -> torch.dtype:
        spec = self._spec
        if spec.dtype in _DTYPES:
            found: torch.dtype = getattr(torch, spec.dtype)
            return found
        if spec.dtype != "auto":
            raise ConfigError(f"dtype is {spec.dtype!r}; it can be auto, {', '.join(_DTYPES)}.")
        if self._device == "cpu":
            return torch.float32
        with _refusing(spec.model):
            own = AutoConfig.from_pretrained(
                spec.model, revision=spec.revision, trust_remote_code=spec.trust_remote_code
            ).dtype
        return own if own in (torch.float16, torch.bfloat16) else torch.bfloat16

    def _load(
        self,
        name: str,
        dtype: torch.dtype,
        tokenizer: str | None = None,
        revision: str | None = None,
    ) -> tuple[Any, Any]:
        trusted = {"trust_remote_code": self._spec.trust_remote_code}
        # The revision belongs to the model's repository, not to that of another tokenizer.
        of_tokenizer = trusted if tokenizer else {"revision": revision, **trusted}
        with _refusing(name):
            loaded = AutoTokenizer.from_pretrained(tokenizer or name, **of_tokenizer)
            model = AutoModelForCausalLM.from_pretrained(
                name, dtype=dtype, revision=revision, **trusted
            )
        return loaded, model.to(self._device).eval()


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise ConfigError(f"Hugging Face refuses {name}: {one_line(error)}") from error


def _in_order(tokenizer: Any) -> Any:
    """Sort the dictionary that `get_vocab` returns by id.

    transformers 5.19 indexes an assistant's logits by the order of this dictionary. Without sorting
    drafts are verified against the probability of another token, and all are accepted.
    """
    vocabulary = dict(sorted(tokenizer.get_vocab().items(), key=itemgetter(1)))
    tokenizer.get_vocab = vocabulary.copy
    return tokenizer


if __name__ == "__main__":
    serve(lambda spec: Generator(spec).run)
