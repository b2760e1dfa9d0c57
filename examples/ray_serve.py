# SPDX-License-Identifier: Apache-2.0
"""Serve a target with a drafter on Ray Serve: replicas behind one OpenAI-compatible address.

python examples/ray_serve.py [TARGET DRAFTER] [--replicas 2] [--port 8000]

Without names it serves the demo models of scripts/quickstart.sh. It needs vllm-hetero-spec[ray] and
vLLM 0.32. It runs in the Ray cluster that RAY_ADDRESS names or that runs on this machine, or starts
one, until Ctrl-C. Send requests with examples/client.py.
"""

import argparse
import time

from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app
from vllm.platforms import current_platform

from vllm_hetero_spec.paths import demo_folder

DEMO_PAIR = [str(demo_folder() / "target-wide"), str(demo_folder() / "drafter")]
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
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    if len(arguments.models) != 2:
        parser.error("name TARGET and DRAFTER, or neither")
    target, drafter = arguments.models

    gpu = not current_platform.is_cpu()  # by vLLM's build: this process may have no GPU itself
    config = LLMConfig(
        model_loading_config={"model_id": "target", "model_source": target},
        accelerator_config=None if gpu else {"kind": "cpu"},
        deployment_config={"num_replicas": arguments.replicas},
        engine_kwargs={
            "speculative_config": {
                "method": "hetero",
                "model": drafter,
                "num_speculative_tokens": 4,
            },
            **({} if gpu else CPU),
        },
    )
    serve.start(http_options={"port": arguments.port})
    serve.run(build_openai_app({"llm_configs": [config]}))
    print(f"serving at http://127.0.0.1:{arguments.port}/v1", flush=True)
    try:
        while True:
            time.sleep(3600)
    finally:
        serve.shutdown()


if __name__ == "__main__":
    main()
