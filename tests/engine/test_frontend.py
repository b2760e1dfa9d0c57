# SPDX-License-Identifier: Apache-2.0
"""vLLM's EngineArgs with the plugin's configuration: accepted, sent to workers, or refused."""

import copy
import json
import logging
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import BASE, slem, with_config
from vllm import SamplingParams, logger
from vllm.config import KVTransferConfig, SpeculativeConfig, speculative
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.utils.argparse_utils import FlexibleArgumentParser

import vllm_hetero_spec
from vllm_hetero_spec.engine.seam.frontend import check_stages
from vllm_hetero_spec.engine.seam.request_params import LOOKAHEAD_ARG
from vllm_hetero_spec.engine.seam.tokenizers import load_pair
from vllm_hetero_spec.errors import ConfigError


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    vllm_hetero_spec.register()


@pytest.fixture
def make(demo_pair: Path):
    def make(spec: dict | None, **changes: Any) -> Any:
        return EngineArgs(str(demo_pair / "target"), **(BASE | changes), speculative_config=spec)

    return make


def test_a_configuration_is_accepted_and_survives_pickling(make, demo_pair: Path) -> None:
    user = slem(demo_pair / "drafter", lookahead=3)
    args = make(user)
    before = copy.deepcopy(args.speculative_config)
    first = args.create_engine_config().speculative_config
    assert first.method == "custom_class"
    assert first.num_speculative_tokens == 3
    assert first.hetero.model == str(demo_pair / "drafter")
    assert first.drafter_model_config.model == str(demo_pair / "drafter")
    # The target's context bounds the drafter's. The drafter's own maximum does not.
    assert 1024 < first.drafter_model_config.max_model_len <= 2048
    # The user's dictionary is not changed, so a second configuration is equal.
    assert args.speculative_config == before
    second = args.create_engine_config().speculative_config
    assert second.hetero == first.hetero
    for copied in (pickle.loads(pickle.dumps(first)), copy.deepcopy(first)):
        assert copied.hetero == first.hetero
        assert copied.drafter_model_config.model == first.drafter_model_config.model
    assert "slem" in repr(first)


def test_a_process_that_unpickles_a_configuration_has_the_plugin(
    make, demo_pair: Path, tmp_path: Path
) -> None:
    """Ray Serve's replicas unpickle it in a process in which vLLM has loaded no plugin."""
    carried = tmp_path / "config"
    config = make(slem(demo_pair / "drafter")).create_engine_config().speculative_config
    program = (
        "import pickle, sys\n"
        "from vllm.v1.metrics.loggers import PrometheusStatLogger\n"
        "from vllm.v1.worker.worker_base import WorkerBase\n"
        "from vllm import SamplingParams\n"
        "def patched(): return [hasattr(hook, '__vllm_hetero_spec_patch__') for hook in\n"
        "    (PrometheusStatLogger.record, SamplingParams._validate_spec_decode)]\n"
        "def answers(): return hasattr(WorkerBase, 'hetero_spec_stats')\n"
        "before = any(patched()) or answers()\n"
        "pickle.load(open(sys.argv[1], 'rb'))\n"
        "print(before, all(patched()) and answers())"
    )
    command = [sys.executable, "-c", program, str(carried)]
    carried.write_bytes(pickle.dumps(config))
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["False True"], done.stderr
    config.plugin_version = "9.8.7"
    carried.write_bytes(pickle.dumps(config))
    done = subprocess.run(command, capture_output=True, text=True)
    refusal = done.stderr.splitlines()[-1]
    assert refusal.startswith("vllm_hetero_spec.errors.ConfigError: vllm_hetero_spec is")
    assert vllm_hetero_spec.__version__ in refusal
    assert "9.8.7" in refusal


def test_our_method_in_a_key_that_neither_has_is_refused(make, demo_pair: Path) -> None:
    """vLLM's own refusal only reports an unexpected key."""
    spec = {"method": "draft_model", "heterogeneous_vocab_method": "slem", "model": "D"}
    with pytest.raises(ConfigError, match=r'heterogeneous_vocab_method is no key .*write "method"'):
        make(spec | {"num_speculative_tokens": 3}).create_engine_config()


def test_command_line_flags(demo_pair: Path) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    line = f"--model {demo_pair / 'target'} --dtype float32 --max-model-len 512 --enforce-eager "
    line += f"--spec-method slem --spec-model {demo_pair / 'drafter'} --spec-tokens 2"
    args = EngineArgs.from_cli_args(parser.parse_args(line.split()))
    spec = args.create_engine_config().speculative_config
    assert (spec.hetero.method, spec.hetero.num_speculative_tokens) == ("slem", 2)
    assert (args.spec_method, args.spec_tokens) == ("slem", 2)
    args.speculative_config = {"method": "slem"}
    with pytest.raises(ConfigError, match="--spec-method"):
        args.create_engine_config()


@pytest.mark.parametrize(
    ("verification", "said"),
    [({}, "lossless"), ({"verification": {"fuzzy": {"threshold": 0.1}}}, "LOSSY (fuzzy)")],
)
def test_the_log_says_whether_output_is_the_targets(
    make, demo_pair: Path, caplog: pytest.LogCaptureFixture, verification: dict, said: str
) -> None:
    caplog.set_level(logging.INFO, "vllm.hetero_spec")
    make(slem(demo_pair / "drafter", method="hetero", **verification)).create_engine_config()
    (line,) = [m for m in caplog.messages if m.startswith("Speculative decoding by hetero")]
    assert line.endswith(f"verification {said}.")


def test_users_who_do_not_ask_see_nothing(make, demo_pair: Path) -> None:
    assert make(None).create_engine_config().speculative_config is None
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    assert type(make(ngram).create_engine_config().speculative_config) is SpeculativeConfig
    tli = {
        "method": "draft_model",
        "use_heterogeneous_vocab": True,
        "model": str(demo_pair / "drafter"),
        "num_speculative_tokens": 2,
    }
    config = make(tli).create_engine_config().speculative_config
    assert type(config) is SpeculativeConfig
    assert (config.method, config.use_heterogeneous_vocab) == ("draft_model", True)
    with pytest.raises(ValueError, match="eagel"):
        make({"method": "eagel", "model": "x", "num_speculative_tokens": 2}).create_engine_config()


def test_vllms_warning_to_authors_of_proposers_is_not_shown(
    make, demo_pair: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for spec, shown in (
        (slem(demo_pair / "drafter"), 0),
        ({"method": "custom_class", "model": "any.proposer", "num_speculative_tokens": 2}, 1),
    ):
        logger._print_warning_once.cache_clear()
        caplog.clear()
        make(spec).create_engine_config()
        found = [r for r in caplog.records if r.name == speculative.logger.name]
        assert sum("experimental" in r.getMessage() for r in found) == shown


@pytest.mark.parametrize("method", [{}, {"method": "draft_model"}])
def test_vllms_refusal_of_two_vocabularies_names_our_method(
    make, demo_pair: Path, tmp_path: Path, method: dict[str, Any]
) -> None:
    larger = with_config(demo_pair / "drafter", tmp_path / "larger", vocab_size=100_000)
    spec = {**method, "model": str(larger), "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match=r"same vocabulary size.*\"method\": \"hetero\""):
        make(spec).create_engine_config()


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_instances_that_only_prefill_for_others_have_no_drafter(
    make, demo_pair: Path, caplog: pytest.LogCaptureFixture, role: str
) -> None:
    caplog.set_level(logging.INFO, "vllm.hetero_spec")
    transfer = KVTransferConfig(kv_connector="ExampleConnector", kv_role=role)
    args = make(slem(demo_pair / "drafter"), kv_transfer_config=transfer)
    loads = args.create_engine_config().speculative_config is not None
    assert loads == (role != "kv_producer")
    assert len([m for m in caplog.messages if "No drafter is loaded" in m]) == (not loads)


def _bert(folder: Path, tokenizer: Path) -> Path:
    folder.mkdir()
    config = {"architectures": ["BertModel"], "model_type": "bert", "hidden_size": 64}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 64}
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 1024}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    return folder


def test_bad_drafters_fail_before_anything_loads(make, demo_pair: Path, tmp_path: Path) -> None:
    bare, empty, gguf = tmp_path / "bare", tmp_path / "empty", tmp_path / "gguf"
    for folder in (bare, empty, gguf):
        folder.mkdir()
    (gguf / "model.gguf").touch()
    no_gguf = " cannot be used: this vLLM reads no GGUF; give a folder .* in safetensors"
    shutil.copy(demo_pair / "drafter" / "config.json", bare)
    corrupt = tmp_path / "corrupt"
    shutil.copytree(demo_pair / "drafter", corrupt)
    (corrupt / "tokenizer.json").write_text('{"model": ')
    cases = {
        tmp_path / "nowhere": "the drafter .*nowhere.* cannot be used: there is no such folder",
        empty: "the drafter .*empty.* cannot be used: that folder has no config.json",
        gguf: no_gguf,
        gguf / "model.gguf": no_gguf,
        "organisation/model-GGUF": no_gguf,
        bare: 'no tokenizer .* the drafter .*bare.* tokenizer; .* with "tokenizer"',
        corrupt: "no tokenizer can be loaded for the drafter .*corrupt",
        _bert(tmp_path / "bert", demo_pair / "drafter"): "BertModel.*decoder-only|bert.*cannot",
    }
    for folder, sentence in cases.items():
        with pytest.raises(ConfigError, match=sentence) as refused:
            make(slem(folder)).create_engine_config()
        assert "\n" not in str(refused.value)


def test_an_engine_without_a_tokenizer_has_a_drafter(make, demo_pair: Path, tmp_path: Path) -> None:
    """Translation loads the target's tokenizer itself."""
    args = make(slem(demo_pair / "drafter"), skip_tokenizer_init=True)
    config = args.create_engine_config()
    assert config.model_config.skip_tokenizer_init
    spec = config.speculative_config
    pair = load_pair(config.model_config, spec.drafter_model_config, spec.hetero)
    assert len(pair.target.encode("def main():")) > 0
    args.tokenizer = str(tmp_path)
    sentence = (
        r"tokenizer can be loaded for the target .* --tokenizer, and give detokenize=False in"
    )
    with pytest.raises(ConfigError, match=sentence):
        args.create_engine_config()


def test_bad_settings_fail_before_anything_loads(make, demo_pair: Path, tmp_path: Path) -> None:
    drafter = demo_pair / "drafter"
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    quantised = with_config(drafter, tmp_path / "quantised", quantization_config=fp8)
    for change, sentence in (
        ({"method": "slme"}, "did you mean 'slem'"),
        ({"num_spec_tokens": 3}, "unknown key 'num_spec_tokens'"),
        ({"num_speculative_tokens": 1000}, "from 1 to 64"),
        ({"rejection_sample_method": "synthetic"}, "'standard'"),
        ({"debug": {"translation": "identity"}}, "differ"),
        ({"model": None}, "needs a drafter"),
        ({"dtype": "fp16"}, r"^dtype is 'fp16': Input should be 'auto', 'half'.*'float32'\.$"),
        ({"quantization": "awq"}, f"^quantization is 'awq': .* config .*; leave it .*{drafter}"),
        ({"quantization": "fp9"}, "^quantization is 'fp9': Unknown quant.*; leave it out, because"),
        ({"quantization": "torchao"}, "^quantization is 'torchao': .* missing .*; leave it out, "),
        ({"revision": 3}, r"^revision is 3; it must be a string\.$"),
        ({"tokenizer": "/nowhere"}, "^the drafter's tokenizer '/nowhere' .* no such folder;"),
        ({"tokenizer_mode": "slow"}, "'slow'; set tokenizer_mode to \"auto\", or name a folder"),
        ({"model": str(quantised), "dtype": "float32"}, "^dtype is 'float32': .* fp8; leave it"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            make(slem(drafter) | change).create_engine_config()
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2"):
        make(slem(drafter), pipeline_parallel_size=2).create_engine_config()
    config = make(None).create_engine_config()
    for key, value in (  # vLLM itself refuses these on a CPU
        ("enable_elastic_ep", True),
        ("decode_context_parallel_size", 2),
        ("prefill_context_parallel_size", 2),
    ):
        parallel = copy.copy(config.parallel_config)
        setattr(parallel, key, value)
        with pytest.raises(ConfigError, match=rf"^{key}.* is not supported with .*\.$"):
            make(slem(drafter)).create_speculative_config(config.model_config, parallel)
    target = copy.copy(config.model_config)
    target.model_arch_config = SimpleNamespace(architectures=["LongcatFlashNgramForCausalLM"])
    with pytest.raises(ConfigError, match="LongcatFlashNgramForCausalLM targets are not"):
        make(slem(drafter)).create_speculative_config(target, config.parallel_config)
    parallel = copy.copy(config.parallel_config)
    parallel.distributed_executor_backend = "external_launcher"
    assert make(slem(drafter)).create_speculative_config(config.model_config, parallel)
    parallel.world_size = 2
    with pytest.raises(ConfigError, match=r"^external_launcher with 2 ranks to an engine is not"):
        make(slem(drafter)).create_speculative_config(config.model_config, parallel)


def test_an_unsupported_vllm_is_refused_only_with_our_method(
    make, demo_pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.version.__version__", "0.40.0")
    with monkeypatch.context() as patch:  # this release also lacks a symbol that the plugin uses
        patch.delattr(speculative, "SpeculativeMethod")
        with pytest.raises(ConfigError, match=r"supports vLLM 0\.32 and 0\.33, found 0\.40\.0"):
            make(slem(demo_pair / "drafter")).create_engine_config()
        ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
        assert make(ngram).create_engine_config().speculative_config.method == "ngram"
        assert make(None).create_engine_config().speculative_config is None
    monkeypatch.setenv("HETERO_SPEC_ALLOW_VLLM", "0.40.0")
    assert make(slem(demo_pair / "drafter")).create_engine_config().speculative_config.hetero


@pytest.mark.parametrize(
    "params", [{"min_p": 0.2}, {"logit_bias": {3: 1.0}}, {"thinking_token_budget": 0}]
)
def test_parameters_that_v1_does_not_apply_to_drafts_are_refused_on_v1(
    make, demo_pair: Path, params: dict[str, Any]
) -> None:
    """Model Runner V2 verifies drafts with every parameter; `laws_v2.py` tests that."""
    from vllm.v1.engine.input_processor import InputProcessor

    config = make(slem(demo_pair / "drafter")).create_engine_config()
    InputProcessor(config)
    asked = SamplingParams(**params)
    assert config.use_v2_model_runner is config.speculative_config.takes_all_params is False
    with pytest.raises(VLLMValidationError, match=f"{next(iter(params))}.* supported"):
        asked._validate_spec_decode(config.speculative_config)
    config.speculative_config.takes_all_params = True
    asked._validate_spec_decode(config.speculative_config)


def test_draft_lengths_of_requests_are_checked(make, demo_pair: Path) -> None:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    config = make(slem(demo_pair / "drafter")).create_engine_config().speculative_config
    for wrong in ({LOOKAHEAD_ARG: 2.5}, {"hetero_spec_lookahed": 2}):
        asked = SamplingParams(extra_args=wrong)
        asked._validate_spec_decode(None)  # requests of other engines are not checked
        for config.takes_all_params in (True, False):
            with pytest.raises(VLLMValidationError, match="hetero_spec_lookahead"):
                asked._validate_spec_decode(config)
    for model, given in (
        (ChatCompletionRequest, {"messages": []}),
        (CompletionRequest, {"prompt": "x"}),
        (ResponsesRequest, {"input": "x"}),
        (AnthropicMessagesRequest, {"messages": [], "model": "m", "max_tokens": 1}),
    ):
        for value, kept in ((True, {}), (False, {LOOKAHEAD_ARG: 0}), ("3", {LOOKAHEAD_ARG: "3"})):
            xargs = {LOOKAHEAD_ARG: value, "another's": 1}
            found = model.model_validate({**given, "vllm_xargs": xargs}).vllm_xargs
            assert found == {**kept, "another's": 1}
        assert model.model_validate(given).vllm_xargs is None
        with pytest.raises(VLLMValidationError, match="hetero_spec_lookahead is -1"):
            model.model_validate({**given, "vllm_xargs": {LOOKAHEAD_ARG: -1}})


def staged(stages: int, *, v2: bool, ahead: bool) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        scheduler_config=SimpleNamespace(async_scheduling=ahead),
        use_v2_model_runner=v2,
    )


@pytest.mark.parametrize(
    ("v2", "ahead", "words"),
    [
        (False, False, ["pipeline_parallel_size=2", "Model Runner V1", "tensor", "V2"]),
        (False, True, ["pipeline_parallel_size=2", "Model Runner V1", "tensor", "V2"]),
        (True, False, ["pipeline_parallel_size=2", "V2 needs asynchronous scheduling", "tensor"]),
    ],
)
def test_stages_that_cannot_be_served_are_refused(v2: bool, ahead: bool, words: list[str]) -> None:
    check_stages(staged(1, v2=v2, ahead=ahead))
    check_stages(staged(2, v2=True, ahead=True))  # `test_runner_v2.py` runs these
    with pytest.raises(ConfigError) as refused:
        check_stages(staged(2, v2=v2, ahead=ahead))
    message = str(refused.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
