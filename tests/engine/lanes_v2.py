# SPDX-License-Identifier: Apache-2.0
"""`v2_on_cpu` computes the same bits as Triton's interpreter.

`test_runner_v2.py` runs these tests in a child process with V2_CHECK=1, which runs every launch in
both ways and compares the stores.
"""

from pathlib import Path

import lanes
import pytest
import torch
from chain_pair import PROMPT
from harness import engine, metrics_of, slem
from lane_language import Language
from lane_values import Value
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.worker.gpu.sample.min_p import apply_min_p

ASKED = [
    {},
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0.7, "min_p": 0.1, "seed": 7},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"logit_bias": {70: 4.0}, "allowed_token_ids": [67, 70, 72, 90]},
    {"min_tokens": 4, "stop_token_ids": [70]},
    {"bad_words": ["abd", "f"]},
    {"structured_outputs": StructuredOutputsParams(regex="[a-f ]+")},
]
# Kernels that must be compared. Without them the comparison could be empty.
KERNELS = {
    "_apply_grammar_bitmask_kernel",
    "_apply_write_kernel",
    "_bad_words_kernel",
    "_bias_kernel",
    "_bincount_kernel",
    "_combine_sampled_and_draft_tokens_kernel",
    "_compute_slot_mappings_kernel",
    "_expand_idx_mapping_kernel",
    "_gather_block_tables_kernel",
    "_gather_draft_sampled_kernel",
    "_get_num_sampled_and_rejected_kernel",
    "_gumbel_sample_kernel",
    "_min_p_kernel",
    "_penalties_kernel",
    "_post_update_kernel",
    "_prepare_pos_seq_lens_kernel",
    "_prepare_prefill_inputs_kernel",
    "_temperature_kernel",
    "_topk_log_softmax_kernel",
}


def test_every_launch_of_an_engine_is_the_same(chain_pair: Path) -> None:
    """The engine splits prompts into chunks, and drafts have different lengths."""
    spec = slem(chain_pair / "drafter", lookahead=3, method="tli")
    tight = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 128}
    params = [
        SamplingParams(**({"max_tokens": 5 + i % 3, "ignore_eos": True} | asked))
        for i, asked in enumerate(ASKED)
    ]
    with engine(chain_pair / "target", spec, **tight) as llm:
        llm.generate([PROMPT[i:] for i in range(len(params))], params, use_tqdm=False)
        assert metrics_of(llm)["num_accepted_tokens"] > 0
    assert lanes.UNKNOWN.keys() <= {"expand_kernel"}  # a kernel of V1; it reads the type of a value
    assert lanes.COMPARED.keys() >= KERNELS


def test_a_difference_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Language, "log", lambda self, x: Value(x.data))
    logits = torch.tensor([[1.0, 2.0, 0.5]])
    with pytest.raises(AssertionError, match="_min_p_kernel stores something else"):
        apply_min_p(logits, torch.zeros(1, dtype=torch.int32), torch.tensor([0.5]))
