# SPDX-License-Identifier: Apache-2.0
"""Every vLLM symbol this package touches: why, what breaks without it, when it can go.

`missing` checks the ledger against a vLLM source tree by parsing it, without importing anything, so
a release can be checked from its unpacked wheel on a machine that cannot run it.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

_UPSTREAM = "vLLM takes third-party drafters with their own configuration"
_METRICS = "vLLM takes metrics from proposers"
_NO_METRICS = "no vllm:hetero_spec_* metrics, said once in the log"


@dataclass(frozen=True)
class Seam:
    """One symbol of vLLM.

    Attributes:
        symbol: "path/in/vllm.py:Name" or "path/in/vllm.py:Class.member".
        how: "wrap", "replace", "extend", "subclass", "call", "build" or "read".
        why: What we need it for.
        symptom: What a user sees when it changes under us.
        remove: When the entry can go.
        names: Parameters (of a function) or members (of a class) that we use,
            separated by spaces.
        releases: vLLM series that have it; all supported ones where empty.
    """

    symbol: str
    how: str
    why: str
    symptom: str
    remove: str
    names: str = ""
    releases: tuple[str, ...] = ()


LEDGER = (
    Seam(
        "engine/arg_utils.py:EngineArgs.create_speculative_config",
        "wrap",
        "our methods in --speculative-config",
        "vLLM refuses method 'slem' as unknown",
        _UPSTREAM,
        "self target_model_config target_parallel_config",
    ),
    Seam(
        "engine/arg_utils.py:EngineArgs.add_cli_args",
        "wrap",
        "our methods among the choices of --spec-method",
        "argparse: invalid choice: 'slem'",
        _UPSTREAM,
        "parser",
    ),
    Seam(
        "engine/arg_utils.py:EngineArgs",
        "read",
        "the user's configuration in all its spellings",
        "AttributeError at start-up",
        _UPSTREAM,
        "speculative_config spec_method spec_model spec_tokens",
    ),
    Seam(
        "config/speculative.py:SpeculativeConfig",
        "subclass",
        "carries our options to the workers as a custom_class configuration",
        "vLLM refuses the configuration, or workers do not see the drafter",
        _UPSTREAM,
        "num_speculative_tokens model method rejection_sample_method",
    ),
    Seam(
        "config/speculative.py:SpeculativeMethod",
        "read",
        "tells a misspelt method of ours from one of vLLM's",
        "ImportError at start-up",
        _UPSTREAM,
    ),
    Seam(
        "config/model.py:ModelConfig",
        "build",
        "reads the drafter's configuration in the front end",
        "a bad drafter fails in the worker instead of at start-up",
        "never",
        "tokenizer tokenizer_mode trust_remote_code dtype seed revision tokenizer_revision "
        "max_model_len quantization enforce_eager is_encoder_decoder registry architectures "
        "try_get_generation_config",
    ),
    Seam(
        "config/utils.py:replace",
        "call",
        "the drafter's VllmConfig from the target's",
        "ImportError in the worker",
        "never",
        "dataclass_instance",
    ),
    Seam(
        "config/utils.py:config",
        "call",
        "makes HeteroSpeculativeConfig a vLLM configuration",
        "ImportError at start-up",
        "never",
    ),
    Seam(
        "config/compilation.py:CompilationConfig",
        "build",
        "a forward context of the drafter's own",
        "the target's KV cache manager would see the drafter's layers",
        "never",
        "mode cudagraph_mode static_forward_context",
    ),
    Seam(
        "config/observability.py:ObservabilityConfig",
        "read",
        "figures per request are the target's alone",
        "the worker does not start with --per-request-spec-decode-metrics",
        "never",
        "per_request_spec_decode_metrics",
    ),
    Seam(
        "tokenizers/registry.py:cached_tokenizer_from_config",
        "call",
        "both tokenizers, as vLLM loads them",
        "no tokenizer can be loaded for the drafter",
        "never",
        "model_config",
    ),
    Seam(
        "v1/core/sched/output.py:NewRequestData.from_request",
        "wrap",
        "cache_salt reaches the drafter's prefix cache",
        "requests with different salts would share the drafter's KV",
        "NewRequestData has a cache_salt of its own",
        "cls request",
    ),
    Seam(
        "v1/core/sched/output.py:SchedulerOutput",
        "read",
        "new requests, and how far to draft",
        "the proposer raises; requests go undrafted",
        "never",
        "scheduled_new_reqs num_spec_tokens_to_schedule",
    ),
    Seam(
        "v1/spec_decode/custom_class_proposer.py:create_custom_proposer",
        "call",
        "vLLM builds our proposer in the worker",
        "vLLM does not find the proposer",
        _UPSTREAM,
        "vllm_config",
    ),
    Seam(
        "v1/worker/gpu_model_runner.py:GPUModelRunner.load_model",
        "wrap",
        "binds the proposer to its runner before the drafter loads",
        "the proposer has no runner",
        "custom_class proposers are given the runner",
        "self",
    ),
    Seam(
        "v1/worker/cpu_model_runner.py:CPUModelRunner.load_model",
        "wrap",
        "as above: the CPU runner overrides it",
        "the proposer has no runner",
        "custom_class proposers are given the runner",
        "self",
    ),
    Seam(
        "v1/worker/gpu_model_runner.py:GPUModelRunner.propose_draft_token_ids",
        "wrap",
        "request ids and the scheduler's output for the proposer",
        "RuntimeError: the model runner hook is not installed",
        "custom_class proposers are given request ids",
        "self scheduler_output sampled_token_ids",
    ),
    Seam(
        "v1/worker/gpu_model_runner.py:GPUModelRunner",
        "read",
        "live requests and their tokens; the nested runner's model and attention groups",
        "the proposer raises; requests go undrafted",
        "never",
        "effective_drafter_max_model_len rejection_sampler sampler input_batch requests "
        "max_model_len attn_groups discard_request_mask _draft_probs _draft_prob_req_ids "
        "initialize_kv_cache get_kv_cache_spec",
    ),
    Seam(
        "v1/worker/gpu_input_batch.py:InputBatch",
        "read",
        "each request's token ids so far",
        "the proposer raises; requests go undrafted",
        "never",
        "req_id_to_index num_tokens_no_spec num_prompt_tokens token_ids_cpu is_token_ids "
        "random_reqs generators num_reqs",
    ),
    Seam(
        "v1/worker/utils.py:AttentionGroup.build_metadata",
        "call",
        "attention metadata of the drafter's forwards, on any backend",
        "the drafter raises; requests go undrafted",
        "never",
        "self common_attn_metadata",
    ),
    Seam(
        "v1/attention/backend.py:CommonAttentionMetadata",
        "build",
        "as above",
        "the drafter raises; requests go undrafted",
        "never",
        "query_start_loc query_start_loc_cpu seq_lens seq_lens_cpu_upper_bound num_reqs "
        "num_actual_tokens max_query_len max_seq_len block_table_tensor slot_mapping causal",
    ),
    Seam(
        "v1/attention/backends/utils.py:get_supported_kv_cache_layouts",
        "call",
        "the layout of the drafter's KV: vLLM resolves the target's after load_model",
        "KV cache layout has not been resolved yet",
        "layouts are resolved before load_model",
        "backends",
    ),
    Seam(
        "platforms/interface.py:Platform.update_block_size_for_backend",
        "call",
        "the drafter's block size, which its attention backends must take",
        "No common block size for 16, where the worker starts",
        "never",
        "vllm_config",
    ),
    Seam(
        "forward_context.py:set_forward_context",
        "call",
        "runs the drafter's forwards",
        "the drafter raises; requests go undrafted",
        "never",
        "attn_metadata vllm_config num_tokens slot_mapping",
    ),
    Seam(
        "distributed/parallel_state.py:_TP",
        "replace",
        "the drafter runs whole on one rank of a tensor parallel target",
        "the drafter's weights do not load under tensor parallelism",
        "vLLM builds layers from a group that is passed in",
    ),
    Seam(
        "distributed/parallel_state.py:get_tp_group",
        "call",
        "which rank drafts",
        "ImportError in the worker",
        "never",
    ),
    Seam(
        "distributed/parallel_state.py:GroupCoordinator.broadcast_object",
        "call",
        "ranks that draft together draft as far, and calibrate as long",
        "the first step of a split drafter raises",
        "never",
        "self obj src",
    ),
    Seam(
        "v1/worker/cpu_worker.py:CPUWorker.compile_or_warm_up_model",
        "wrap",
        "target and drafter are timed once the engine is warm",
        "no calibration on CPUs: goodput learns costs from its first steps",
        "vLLM tells proposers when it is warm",
        "self",
    ),
    Seam(
        "v1/worker/gpu_worker.py:Worker.compile_or_warm_up_model",
        "wrap",
        "target and drafter are timed once the engine is warm",
        "no calibration on GPUs: goodput learns costs from its first steps",
        "vLLM tells proposers when it is warm",
        "self",
    ),
    Seam(
        "v1/worker/gpu_model_runner.py:GPUModelRunner._dummy_run",
        "call",
        "a step of the target to be timed",
        "a warning at start-up that the models could not be timed",
        "vLLM has a public way to time a step",
        "self num_tokens",
    ),
    Seam(
        "distributed/parallel_state.py:GroupCoordinator.broadcast_tensor_dict",
        "call",
        "all ranks verify sampled drafts with the first one's draft_probs",
        "every step of a sampled method raises under tensor parallelism",
        "never",
        "self tensor_dict src",
    ),
    Seam(
        "v1/sample/rejection_sampler.py:RejectionSampler.__init__",
        "subclass",
        "verification, timed",
        "the worker does not start",
        "never",
        "self sampler spec_config device",
    ),
    Seam(
        "v1/sample/rejection_sampler.py:RejectionSampler",
        "subclass",
        "penalties, bad words and logprobs of draft rows",
        "every step with a draft raises in the worker",
        "never",
        "apply_logits_processors _get_logprobs_tensors is_processed_logprobs_mode sampler",
    ),
    Seam(
        "v1/spec_decode/metadata.py:SpecDecodeMetadata",
        "read",
        "which rows of the logits are whose draft",
        "every step with a draft raises in the worker",
        "never",
        "draft_token_ids num_draft_tokens target_logits_indices bonus_logits_indices max_spec_len",
    ),
    Seam(
        "v1/sample/metadata.py:SamplingMetadata",
        "read",
        "the requests' sampling parameters and generators",
        "every step with a draft raises in the worker",
        "never",
        "temperature all_greedy all_random top_k top_p generators max_num_logprobs",
    ),
    Seam(
        "v1/sample/ops/topk_topp_sampler.py:apply_top_k_top_p",
        "call",
        "target_probs of draft rows and of raced tokens",
        "ImportError in the worker",
        "never",
        "logits k p",
    ),
    Seam(
        "v1/sample/sampler.py:Sampler.__init__",
        "replace",
        "its topk_topp_sampler, whose randomness races take the place of",
        "seeded requests depend on the drafter under races",
        "never",
        "logprobs_mode",
    ),
    Seam(
        "v1/engine/llm_engine.py:LLMEngine.add_request",
        "call",
        "measured engines keep a number of requests in flight",
        "measurements fail at once",
        "never",
        "request_id prompt params",
    ),
    Seam(
        "v1/engine/core_client.py:BackgroundResources",
        "read",
        "tells a measured engine whose core was killed",
        "a measurement waits for its timeout",
        "never",
        "engine_dead",
    ),
    Seam(
        "v1/sample/rejection_sampler.py:expand_batch_to_tokens",
        "replace",
        "the CPU build loses temperature, top-p and top-k of draft rows",
        "vLLM's own methods sample wrongly on CPU at temperature > 0",
        "the stock function passes our small test on CPU",
        "x cu_num_tokens num_tokens replace_from replace_to",
    ),
    Seam(
        "v1/worker/worker_base.py:WorkerBase.__init__",
        "wrap",
        "every worker on a CPU is repaired before it is built",
        "as for the functions repaired",
        "nothing is left to repair",
        "self",
    ),
    Seam(
        "v1/worker/gpu_model_runner.py:GPUModelRunner._sample",
        "wrap",
        "CPU generators cannot be set back: draws that vLLM discards are undone here",
        "RuntimeError: CPU Generator does not use offset, with a seed and chunked prefill",
        "vLLM or torch can undo a draw of a CPU generator",
        "self",
    ),
    Seam(
        "v1/worker/gpu_model_runner.py:GPUModelRunner._bookkeeping_sync",
        "wrap",
        "and not there",
        "RuntimeError: CPU Generator does not use offset, with a seed and chunked prefill",
        "vLLM or torch can undo a draw of a CPU generator",
        "self",
    ),
    Seam(
        "v1/worker/worker_base.py:WorkerBase",
        "replace",
        "collective_rpc('hetero_spec_stats') answers with our counters",
        "read_stats fails",
        _METRICS,
    ),
    Seam(
        "v1/worker/gpu_model_runner.py:GPUModelRunner.sample_tokens",
        "wrap",
        "the step's output carries what the drafter counted to the scheduler",
        _NO_METRICS,
        _METRICS,
        "self",
    ),
    Seam(
        "v1/outputs.py:EMPTY_MODEL_RUNNER_OUTPUT",
        "read",
        "an output shared by all steps must not carry one step's counts",
        _NO_METRICS,
        _METRICS,
    ),
    Seam(
        "v1/core/sched/scheduler.py:Scheduler.update_from_output",
        "wrap",
        "what the drafter counted goes on in the step's statistics",
        _NO_METRICS,
        _METRICS,
        "self scheduler_output model_runner_output",
    ),
    Seam(
        "v1/engine/__init__.py:EngineCoreOutputs",
        "read",
        "as above",
        _NO_METRICS,
        _METRICS,
        "scheduler_stats",
    ),
    Seam(
        "v1/metrics/stats.py:SchedulerStats",
        "extend",
        "a field for what the drafter counted",
        _NO_METRICS,
        _METRICS,
        "spec_decoding_stats",
    ),
    Seam(
        "v1/metrics/loggers.py:PrometheusStatLogger.__init__",
        "wrap",
        "our metrics are registered beside vLLM's, and cleared away with them",
        _NO_METRICS,
        _METRICS,
        "self vllm_config",
    ),
    Seam(
        "v1/metrics/loggers.py:PrometheusStatLogger.record",
        "wrap",
        "our metrics grow with every step",
        _NO_METRICS,
        _METRICS,
        "self scheduler_stats iteration_stats mm_cache_stats engine_idx",
    ),
    Seam(
        "v1/metrics/loggers.py:PrometheusStatLogger",
        "read",
        "classes and label values of vLLM's own metrics",
        _NO_METRICS,
        _METRICS,
        "vllm_config per_engine_labelvalues _counter_cls _gauge_cls _histogram_cls",
    ),
    Seam(
        "v1/metrics/loggers.py:LoggingStatLogger.__init__",
        "wrap",
        "a line about the drafter beside vLLM's about speculation",
        "no 'Drafter metrics' in the log",
        _METRICS,
        "self vllm_config",
    ),
    Seam(
        "v1/metrics/loggers.py:LoggingStatLogger.record",
        "wrap",
        "as above",
        "no 'Drafter metrics' in the log",
        _METRICS,
        "self scheduler_stats iteration_stats mm_cache_stats engine_idx",
    ),
    Seam(
        "v1/metrics/loggers.py:LoggingStatLogger.log",
        "wrap",
        "as above",
        "no 'Drafter metrics' in the log",
        _METRICS,
        "self",
    ),
    Seam(
        "v1/metrics/loggers.py:LoggingStatLogger",
        "read",
        "as above",
        "no 'Drafter metrics' in the log",
        _METRICS,
        "vllm_config engine_is_idle",
    ),
    Seam(
        "v1/core/kv_cache_utils.py:get_kv_cache_configs",
        "call",
        "lays out the drafter's KV tensors",
        "the worker does not start",
        "never",
        "vllm_config kv_cache_specs available_memory",
        ("0.32",),
    ),
    Seam(
        "v1/core/kv_cache_planning.py:get_kv_cache_configs",
        "call",
        "lays out the drafter's KV tensors",
        "the worker does not start",
        "never",
        "vllm_config kv_cache_specs available_memory global_kv_cache_groups",
        ("0.33",),
    ),
    Seam(
        "v1/core/kv_cache_planning.py:get_global_kv_cache_groups",
        "call",
        "lays out the drafter's KV tensors",
        "the worker does not start",
        "never",
        "vllm_config kv_cache_specs",
        ("0.33",),
    ),
)


def missing(vllm_root: Path, release: str) -> list[str]:
    """What the ledger names that a vLLM source tree does not have.

    Args:
        vllm_root: The folder `vllm` of an installation or an unpacked wheel.
        release: Its series, "0.33".

    Returns:
        One line per missing symbol, parameter or member; empty if all is there.
    """
    faults = []
    for seam in LEDGER:
        if seam.releases and release not in seam.releases:
            continue
        path, _, name = seam.symbol.partition(":")
        file = vllm_root / path
        if not file.is_file():
            faults.append(f"{seam.symbol}: no file {path}")
            continue
        node = _find(ast.parse(file.read_text()), name.split("."))
        if node is None:
            faults.append(f"{seam.symbol}: not found")
            continue
        known = _names_of(node)
        faults += [
            f"{seam.symbol}: no {used!r}" for used in seam.names.split() if used not in known
        ]
    return faults


def _find(tree: ast.AST, path: list[str]) -> ast.AST | None:
    for step in path:
        found = None
        for node in ast.iter_child_nodes(tree):
            targets = (
                node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            )
            if getattr(node, "name", None) == step or any(
                isinstance(t, ast.Name) and t.id == step for t in targets
            ):
                found = node
        if found is None:
            return None
        tree = found
    return tree


def _names_of(node: ast.AST) -> set[str]:
    """Parameters of a function; fields, methods and `self.` attributes of a class."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = node.args
        return {a.arg for a in arguments.posonlyargs + arguments.args + arguments.kwonlyargs}
    names = {
        target.id
        for child in ast.iter_child_nodes(node)
        if isinstance(child, ast.Assign)
        for target in child.targets
        if isinstance(target, ast.Name)
    }
    for child in ast.walk(node):
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            names.add(child.target.id)
        elif isinstance(child, ast.FunctionDef):
            names.add(child.name)
        elif (
            isinstance(child, ast.Attribute)
            and isinstance(child.ctx, ast.Store)
            and isinstance(child.value, ast.Name)
            and child.value.id == "self"
        ):
            names.add(child.attr)
    return names
