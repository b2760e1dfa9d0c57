# SPDX-License-Identifier: Apache-2.0
"""Complete a batch of prompts offline, with a drafter that has another tokenizer.

python examples/offline_batch.py [TARGET DRAFTER]

Without names it runs the demo models of scripts/quickstart.sh.
"""

import argparse

import torch
from vllm import LLM, SamplingParams

from vllm_hetero_spec import read_stats
from vllm_hetero_spec.paths import demo_folder

DEMO_PAIR = [str(demo_folder() / "target-wide"), str(demo_folder() / "drafter")]
PROMPTS = [
    "def read_lines(path):\n    with open(",
    "class Stack:\n    def __init__(self):\n        self.items",
    "import argparse\n\n\ndef main():\n    parser =",
]
# For a CPU, where vLLM by default takes most of the memory and compiles for minutes.
CPU = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "kv_cache_memory_bytes": 1 << 30,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="TARGET DRAFTER", default=DEMO_PAIR)
    arguments = parser.parse_args()
    if len(arguments.models) != 2:
        parser.error("name TARGET and DRAFTER, or neither")
    target, drafter = arguments.models

    llm = LLM(
        model=target,
        speculative_config={
            "method": "hetero",
            "model": drafter,
            "num_speculative_tokens": 4,
        },
        **({} if torch.cuda.is_available() else CPU),
    )
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=64)):
        print("-" * 80)
        print(output.prompt + output.outputs[0].text)
    stats = read_stats(llm)
    print("-" * 80)
    print(f"{stats['drafts']} drafts of {stats['draft_tokens']} target tokens in all")


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
