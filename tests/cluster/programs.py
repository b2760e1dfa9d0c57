# SPDX-License-Identifier: Apache-2.0
"""Programs that the tests run in a Ray cluster: NAME, and its arguments as JSON.

Each runs in its own process and prints its answer as a line of JSON.
"""

import asyncio
import json
import os
import sys
from typing import Any

import psutil
from harness import BASE
from scenarios import answers, generate, greedy


def executor(
    target: str, spec: dict[str, Any], texts: list[str], sampled: dict[str, Any]
) -> dict[str, Any]:
    """Run an engine of two ranks, then kill one of them during a step.

    `sampled` has sampling parameters, `prompt` and `times`. The first three texts run one at a
    time, so that the number of drafts in `counts` of each rank does not depend on other requests.
    """
    from vllm import LLM, SamplingParams

    from vllm_hetero_spec.engine.metrics.counters import RPC

    llm = LLM(
        target,
        **BASE,
        tensor_parallel_size=2,
        distributed_executor_backend="ray",
        speculative_config=spec,
    )
    for text in texts[:3]:
        generate(llm, [text], greedy())
    found: dict[str, Any] = {"counts": llm.collective_rpc(RPC)}
    found["greedy"] = generate(llm, texts, greedy())
    prompts = [sampled.pop("prompt")] * sampled.pop("times")
    outputs = llm.generate(prompts, SamplingParams(**sampled), use_tqdm=False)
    found["sampled"] = [list(output.outputs[0].token_ids) for output in outputs]
    found["killed"] = killed(llm, texts)
    llm.llm_engine.engine_core.shutdown()
    return found


def killed(llm: Any, texts: list[str]) -> dict[str, Any]:
    """Return the engine's error when the second rank is killed; the first one has the drafter."""
    engine = llm.llm_engine
    ranks = [psutil.Process(pid) for pid in llm.collective_rpc(lambda worker: os.getpid())]
    for index, text in enumerate(texts):
        engine.add_request(f"kill-{index}", text, greedy(max_tokens=400, ignore_eos=True))
    for _ in range(5):
        engine.step()
    ranks[1].kill()
    try:
        while engine.has_unfinished_requests():
            engine.step()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    else:
        said = ""
    _, alive = psutil.wait_procs(ranks, timeout=60)
    return {"ranks": len(ranks), "said": said, "alive": len(alive)}


def data_parallel(texts: list[str], **arguments: Any) -> dict[str, Any]:
    """Return the greedy tokens of two engines, and the drafts in the metrics of each."""
    from prometheus_client import REGISTRY

    from vllm_hetero_spec.engine.metrics.sinks import PREFIX

    found = asyncio.run(answers(texts, **(BASE | arguments)))
    labels = [{"engine": engine, "model_name": arguments["model"]} for engine in ("0", "1")]
    return {
        "greedy": found,
        "drafts": [REGISTRY.get_sample_value(f"{PREFIX}drafts_total", each) for each in labels],
    }


if __name__ == "__main__":
    answer = globals()[sys.argv[1]](**json.loads(sys.argv[2]))
    print(f"\n{json.dumps(answer)}", flush=True)  # other output of the process may lack a newline
