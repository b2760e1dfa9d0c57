# SPDX-License-Identifier: Apache-2.0
"""Complete a table of prompts with Ray Data. Each of its workers has an engine with a drafter.

python examples/ray_data.py [TARGET DRAFTER] [--engines 2] [--out FOLDER]

Without names it runs the demo models of scripts/quickstart.sh. It needs vllm-hetero-spec[ray]. It
runs in the Ray cluster that RAY_ADDRESS names or that runs on this machine, or starts one.
"""

import argparse

import ray
from ray.data.llm import build_processor, vLLMEngineProcessorConfig
from vllm.platforms import current_platform

from vllm_hetero_spec.paths import demo_folder

DEMO_PAIR = [str(demo_folder() / "target-wide"), str(demo_folder() / "drafter")]
PROMPTS = [
    "def read_lines(path):\n    with open(",
    "class Stack:\n    def __init__(self):\n        self.items",
    "import argparse\n\n\ndef main():\n    parser =",
    "for index, line in enumerate(",
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
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--out", help="a folder for the answers, as JSON lines")
    arguments = parser.parse_args()
    if len(arguments.models) != 2:
        parser.error("name TARGET and DRAFTER, or neither")
    target, drafter = arguments.models

    gpu = not current_platform.is_cpu()  # by vLLM's build: this process may have no GPU itself
    config = vLLMEngineProcessorConfig(
        model_source=target,
        engine_kwargs={
            "speculative_config": {
                "method": "hetero",
                "model": drafter,
                "num_speculative_tokens": 4,
            },
            **({} if gpu else CPU),
        },
        concurrency=arguments.engines,
        batch_size=16,
        # By default every engine requests a GPU.
        placement_group_config=None if gpu else {"bundle_per_worker": {"CPU": 1}},
        # Prompts are plain text, which the engine itself tokenizes and detokenizes.
        chat_template_stage={"enabled": False},
        tokenize_stage={"enabled": False},
        detokenize_stage={"enabled": False},
    )
    processor = build_processor(
        config,
        preprocess=lambda row: {
            "prompt": row["prompt"],
            "sampling_params": {"temperature": 0, "max_tokens": 64},
        },
        postprocess=lambda row: {
            "prompt": row["prompt"],
            "text": row["generated_text"],
            "token_ids": list(row["generated_tokens"]),
        },
    )
    answers = processor(ray.data.from_items([{"prompt": prompt} for prompt in PROMPTS]))
    answers = answers.materialize()
    for row in answers.iter_rows():  # in any order
        print("-" * 80)
        print(row["prompt"] + row["text"])
    if arguments.out:
        answers.write_json(arguments.out)


if __name__ == "__main__":  # Ray starts processes that may import this file
    main()
