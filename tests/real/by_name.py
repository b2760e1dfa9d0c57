# SPDX-License-Identifier: Apache-2.0
"""Program that loads a pair by the models' names on the hub, as users do."""

import json
import sys

from vllm import LLM, SamplingParams

from vllm_hetero_spec import read_stats

target, drafter, prompt = sys.argv[1:]
llm = LLM(
    target,
    dtype="float32",
    enforce_eager=True,
    kv_cache_memory_bytes=256 << 20,
    max_model_len=1024,
    speculative_config={
        "method": "hetero",
        "model": drafter,
        "num_speculative_tokens": 4,
        "controller": "fixed",
    },
)
(output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
found = {"ids": list(output.outputs[0].token_ids), **read_stats(llm)}
print(json.dumps({key: found[key] for key in ("ids", "drafts", "skipped", "kv_blocks")}))
