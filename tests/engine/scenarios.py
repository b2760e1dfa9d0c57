# SPDX-License-Identifier: Apache-2.0
"""Scenarios: ways to use an engine. Each is a function from an engine to token ids."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness import engine, metrics_of
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from vllm_hetero_spec import read_stats

Outputs = dict[str, list[int]]
# scenario -> token ids, and by how much the counters grew during it.
Run = dict[str, tuple[Outputs, dict[str, Any]]]
# Our counters that do not depend on time: the same load adds the same on every machine.
COUNTED = (
    "steps",
    "drafts",
    "draft_tokens",
    "drafter_tokens",
    "catch_up_tokens",
    "forwards",
    "reused_tokens",
)
Scenario = Callable[[LLM, list[str]], Outputs]


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 24} | changes))


def generate(llm: LLM, prompts: list, params: Any) -> Outputs:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return {str(i): list(o.outputs[0].token_ids) for i, o in enumerate(outputs)}


async def answers(texts: list[str], **arguments: Any) -> Outputs:
    """Return the greedy tokens of an `AsyncLLM` with these arguments; all requests run at once."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    async def answer(index: int) -> list[int]:
        ids: list[int] = []
        async for output in llm.generate(texts[index], greedy(), str(index)):
            ids = list(output.outputs[0].token_ids)
        return ids

    try:
        found = await asyncio.gather(*map(answer, range(len(texts))))
    finally:
        llm.shutdown()
    return {str(index): ids for index, ids in enumerate(found)}


def in_batches_of(size: int, most: int = 64) -> Scenario:
    def run(llm: LLM, prompts: list[str]) -> Outputs:
        found: Outputs = {}
        for start in range(0, min(len(prompts), most), size):
            part = generate(llm, prompts[start : start + size], greedy())
            found |= {f"{start}+{k}": v for k, v in part.items()}
        return found

    return run


def joining_and_aborting(llm: LLM, prompts: list[str]) -> Outputs:
    """One request joins in every second step. Lengths differ, and some requests are aborted."""
    engine = llm.llm_engine
    waiting = list(enumerate(prompts[:24]))
    found: Outputs = {}
    aborted = set()
    step = 0
    while waiting or engine.has_unfinished_requests():
        if waiting and step % 2 == 0:
            index, prompt = waiting.pop(0)
            engine.add_request(str(index), prompt, greedy(max_tokens=8 + 3 * (index % 9)))
        for output in engine.step():
            if output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)
            elif int(output.request_id) % 5 == 2 and len(output.outputs[0].token_ids) >= 5:
                aborted.add(output.request_id)
                engine.abort_request([output.request_id])
        step += 1
    assert aborted
    return {k: v for k, v in found.items() if k not in aborted}


def common_prefix(llm: LLM, prompts: list[str]) -> Outputs:
    """Requests with one long prefix, for the prefix caches of both the target and the drafter."""
    prefix = "\n".join(prompts[:4])[:1500]
    return generate(llm, [prefix + p[:200] for p in prompts[:12]], greedy()) | {
        f"again {k}": v
        for k, v in generate(llm, [prefix + p[:200] for p in prompts[:12]], greedy()).items()
    }


def with_params(**changes: Any) -> Scenario:
    def run(llm: LLM, prompts: list[str]) -> Outputs:
        return generate(llm, prompts[:16], greedy(**changes))

    return run


def stops_behind_min_tokens(llm: LLM, prompts: list[str]) -> Outputs:
    """The token after `min_tokens` tokens, often inside or right after a draft, is a stop token."""
    chosen = prompts[:22]
    free = generate(llm, chosen, greedy(max_tokens=16, ignore_eos=True))
    params = []
    for number, output in enumerate(free.values()):
        least = 2 + number % 11
        stops = {"min_tokens": least, "stop_token_ids": [output[least]]}
        params.append(greedy(max_tokens=16, ignore_eos=True, **stops))
    # Return both: the counters include the drafts of both.
    return {f"free {key}": ids for key, ids in free.items()} | generate(llm, chosen, params)


def mixed_params(llm: LLM, prompts: list[str]) -> Outputs:
    """One batch of requests with different parameters."""
    kinds = [
        {},
        {"repetition_penalty": 1.3},
        {"min_tokens": 12},
        {"max_tokens": 3},
        {"bad_words": [" self", "("]},
        {"logprobs": 3},
        {"stop": ["\n\n"]},
        {"max_tokens": 1},
    ]
    chosen = prompts[:24]
    return generate(llm, chosen, [greedy(**kinds[i % len(kinds)]) for i in range(len(chosen))])


def named_tokens(llm: LLM, prompts: list[str]) -> Outputs:
    """Requests with `logprob_token_ids` beside requests with `logprobs`.

    On V1 this combination ends the engine of an unpatched vLLM. The first request names some of its
    own likeliest tokens, so their log probabilities must be the same in both ways.
    """
    (first,) = llm.generate(prompts[:1], greedy(logprobs=20), use_tqdm=False)
    likeliest = first.outputs[0].logprobs
    kinds = [
        {"logprob_token_ids": sorted({token for row in likeliest for token in list(row)[:5]})},
        {"logprobs": 2},
        {"logprob_token_ids": [7], "max_tokens": 1},
        {},
    ]
    outputs = llm.generate(prompts[:8], [greedy(**kinds[i % 4]) for i in range(8)], use_tqdm=False)
    found: Outputs = {"first": list(first.outputs[0].token_ids)}
    for index, request in enumerate(outputs):
        tokens, told = list(request.outputs[0].token_ids), request.outputs[0].logprobs
        found[str(index)] = tokens
        named = kinds[index % 4].get("logprob_token_ids")
        if named is not None:
            for row, token in zip(told, tokens, strict=True):
                assert set(row) == {token, *named}
                assert all(value.logprob <= row[token].logprob for value in row.values())
        if not index:
            pairs = [
                (row[i].logprob, known[i].logprob)
                for row, known in zip(told, likeliest, strict=True)
                for i in row.keys() & known.keys()
            ]
            assert len(pairs) >= 5 * len(told)
            assert all(abs(one - other) < 0.02 for one, other in pairs)
    return found


def structured(llm: LLM, prompts: list[str]) -> Outputs:
    schema = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["function", "class", "module"]},
            "public": {"type": "boolean"},
        },
        "required": ["kind", "public"],
        "additionalProperties": False,
    }
    params = greedy(max_tokens=40, structured_outputs=StructuredOutputsParams(json=schema))
    free = greedy(max_tokens=24)
    chosen = prompts[:12]
    return generate(llm, chosen, [(params, free)[i % 2] for i in range(len(chosen))])


def up_to_max_model_len(llm: LLM, prompts: list[str]) -> Outputs:
    """Requests that end only at `max_model_len`, beside short requests."""
    length = llm.llm_engine.model_config.max_model_len
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("\n".join(prompts), add_special_tokens=False)
    starts = [length - 1, length - 2, length - 5, length - 9, length - 40, 10, 20, 30]
    requests = [{"prompt_token_ids": ids[i * 7 : i * 7 + n]} for i, n in enumerate(starts)]
    params = [greedy(max_tokens=None, ignore_eos=True)] * 5 + [greedy()] * 3
    found = generate(llm, requests, params)
    assert [len(found[str(i)]) for i in range(5)] == [length - n for n in starts[:5]]
    return found


def long_prompts(llm: LLM, prompts: list[str]) -> Outputs:
    """Prompts of several times the token budget of a step, beside short requests that decode."""
    text = "\n".join(prompts)
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    limit = llm.llm_engine.model_config.max_model_len - 30
    long = [{"prompt_token_ids": ids[i * 50 : i * 50 + min(limit, 150 + 40 * i)]} for i in range(4)]
    short = [{"prompt_token_ids": ids[900 + i * 20 : 915 + i * 20]} for i in range(8)]
    return generate(llm, [*short[:4], *long, *short[4:]], greedy())


def crowded(llm: LLM, prompts: list[str]) -> Outputs:
    """More requests than the KV cache can hold, so that vLLM preempts some."""
    ids = llm.get_tokenizer().encode("\n".join(prompts), add_special_tokens=False)
    requests = [{"prompt_token_ids": ids[i * 30 : i * 30 + 60]} for i in range(16)]
    return generate(llm, requests, greedy(max_tokens=90, ignore_eos=True))


ROOMY: dict[str, Scenario] = {
    "batch 1": in_batches_of(1, most=8),
    "batch 8": in_batches_of(8, most=24),
    "batch 32": in_batches_of(32),
    "joining and aborting": joining_and_aborting,
    "common prefix": common_prefix,
    "penalties": with_params(presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.2),
    "min_tokens": with_params(min_tokens=16, max_tokens=24),
    "stops behind min_tokens": stops_behind_min_tokens,
    "bad_words": with_params(bad_words=[" self", "return", "(", "import"]),
    "mixed parameters": mixed_params,
    "named tokens": named_tokens,
    "structured output": structured,
}

# Limits of the engine that runs the scenarios of `TIGHT`.
TIGHT_LIMITS: dict[str, Any] = {
    "max_num_batched_tokens": 64,
    "max_model_len": 320,
    "num_gpu_blocks_override": 40,
    "block_size": 32,
    "max_num_seqs": 16,
}
TIGHT: dict[str, Scenario] = {
    "long prompts": long_prompts,
    "up to max_model_len": up_to_max_model_len,
    "preemption": crowded,
}


def run_all(
    target: Path,
    spec: dict[str, Any] | None,
    prompts: list[str],
    roomy: Mapping[str, Scenario] = ROOMY,
    tight: Mapping[str, Scenario] = TIGHT,
    **changes: Any,
) -> Run:
    """Return token ids and counter increments by scenario; `skipped` has totals since the start."""
    found = {}
    for scenarios, limits in ((roomy, {}), (tight, TIGHT_LIMITS)):
        if not scenarios:
            continue
        with engine(target, spec, **limits, **changes) as llm:
            if changes.get("pipeline_parallel_size"):
                llm.collective_rpc("execute_dummy_batch")  # stages on a CPU need this first
            for name, scenario in scenarios.items():
                before = counts_of(llm, spec)
                ids = scenario(llm, prompts)
                gained: dict[str, Any] = {
                    name: count - before.get(name, 0)
                    for name, count in counts_of(llm, spec).items()
                }
                if spec is not None:
                    gained["skipped"] = read_stats(llm)["skipped"]
                found[name] = (ids, gained)
    return found


def counts_of(llm: LLM, spec: dict[str, Any] | None) -> dict[str, int]:
    """Return vLLM's counters, and those of the drafter if the engine has one."""
    ours = {} if spec is None else read_stats(llm)
    return metrics_of(llm) | {f"drafter {name}": ours[name] for name in COUNTED if ours}
