# SPDX-License-Identifier: Apache-2.0
"""`vllm-hetero-spec compare`: refusals, reports, and one real comparison."""

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from advice_fakes import WORKER, Answers
from command_line import refused
from rich.console import Console
from safetensors.torch import save_file

from vllm_hetero_spec.bench import engines
from vllm_hetero_spec.bench.load import MeasurementError, Sample, Trace
from vllm_hetero_spec.cli import compare, doctor
from vllm_hetero_spec.cli.main import main
from vllm_hetero_spec.errors import ConfigError
from vllm_hetero_spec.inputs.model_folder import widened_columns
from vllm_hetero_spec.inputs.prompts import BUILT_IN, load_prompts

Out = pytest.CaptureFixture[str]

ALONE = Sample(
    traces=[
        Trace([1, 2, 3], "abc", 0.0, [0.2, 0.6, 1.0], [1, 1, 1]),
        Trace([4, 5, 6], "def", 1.0, [1.4, 1.7, 2.0], [1, 1, 1]),
    ],
    seconds=2.0,
)
SPECULATIVE = Sample(
    traces=[
        Trace([1, 2, 3], "abc", 0.0, [0.3, 0.5], [1, 2]),
        Trace([4, 5, 6], "def", 0.5, [1.0], [3]),
    ],
    seconds=1.0,
    drafts=4,
    draft_tokens=10,
    accepted_tokens=6,
    worker=WORKER,
)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder with the files of a model, all without contents, and two prompts."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.bin").write_bytes(b"")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    return str(tmp_path)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    found = Answers(ALONE, SPECULATIVE)
    monkeypatch.setattr(engines, "start", found.start)
    return found


def compared(folder: str, capsys: Out, *options: str) -> str:
    """Return the output of a comparison on two prompts."""
    assert main(["compare", folder, folder, "--prompts", f"{folder}/prompts.jsonl", *options]) == 0
    return capsys.readouterr().out


def test_equal_texts_of_a_widened_target(
    folder: str, answers: Answers, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`test_golden.py` has the whole table for differing texts."""
    monkeypatch.setattr(compare, "widened_columns", lambda _: (60, 64))
    text = " ".join(compared(folder, capsys).split())
    assert "yes: 2 of 2" in text
    assert "widened with zero MLP columns: 60 of 64" in text


def test_ties_of_16_bit_dtypes_are_reported(folder: str, answers: Answers, capsys: Out) -> None:
    """The note is printed only if texts differ."""
    same, last = SPECULATIVE.traces
    changed = [same, dataclasses.replace(last, token_ids=[4, 5, 7], text="dex")]
    for traces, dtype, told in (
        (changed, "bfloat16", True),
        (changed, "float32", False),
        (SPECULATIVE.traces, "bfloat16", False),
    ):
        answers.speculative = dataclasses.replace(SPECULATIVE, traces=traces, dtype=dtype)
        assert ("In bfloat16 a tie" in compared(folder, capsys)) is told


def test_too_few_prompts_are_reported(answers: Answers, folder: str, capsys: Out) -> None:
    assert "--num-prompts is" not in compared(folder, capsys, "--num-prompts", "2")
    printed = compared(folder, capsys, "--num-prompts", "3")
    assert f"--num-prompts is 3; {folder}/prompts.jsonl contains 2 prompts." in printed


def test_sampled_texts_are_not_compared(folder: str, answers: Answers, capsys: Out) -> None:
    found = json.loads(compared(folder, capsys, "--temperature", "1", "--json"))
    assert found["identical"] is None


def test_missing_weights_are_refused(folder: str, answers: Answers, capsys: Out) -> None:
    """The refusal comes before any engine starts. An engine would download silently."""
    (Path(folder) / "model.bin").unlink()
    assert "contains no weights." in refused(capsys, "compare", folder, folder)
    (Path(folder) / "model.bin").touch()
    said = refused(capsys, "compare", folder, "organisation/absent")
    assert "of organisation/absent are not on this machine (`hf download org" in said
    assert "; downloading them failed: " in said
    assert answers.started == []


def test_engine_arguments_are_checked_before_weights_are_fetched(
    folder: str, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []
    monkeypatch.setattr(compare, "fetch_weights", lambda name, _: fetched.append(name))
    said = refused(capsys, "compare", folder, folder, "--engine-args", '{"max-model-len": 64}')
    assert "'max-model-len' is unknown to this vLLM (did you mean 'max_model_len'?)" in said
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert main(["compare", folder, folder]) == 1
    assert "error: vLLM is not installed; " in capsys.readouterr().err
    assert fetched == []


def test_absent_models_are_refused(capsys: Out, folder: str) -> None:
    absent = f"{folder}/absent"
    for models, side in (((absent, folder), "target"), ((folder, absent), "drafter")):
        assert f"the {side} folder {absent} does not exist" in refused(capsys, "compare", *models)


def test_a_folder_without_a_model_is_refused(capsys: Out, folder: str) -> None:
    empty = Path(folder) / "empty"
    empty.mkdir()
    assert "contains no config.json" in refused(capsys, "compare", folder, str(empty))
    file = empty / "model.gguf"
    file.touch()
    for name in (file, empty):
        said = refused(capsys, "compare", folder, str(name))
        assert f"{name} cannot be used: this vLLM reads no GGUF;" in said


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--num-speculative-tokens", "400"], "num_speculative_tokens is 400"),
        (["--speculative-config", '{"tree_node": 8}'], "did you mean 'tree_nodes'?"),
        (["--speculative-config", '{"method": "tli"}'], "method of --speculative-config is set"),
        (["--temperature", "-1"], "--temperature is -1.0"),
        (["--temperature", "nan"], "--temperature is nan; it must be a number from 0 to 10."),
        (["--engine-args", '{"model": "x"}'], "is set by the benchmark"),
        (["--engine-args", '{"tensor_parallel_size": "2"}'], "size of --engine-args is '2'"),
        (
            ["--batch-size", "9", "--num-prompts", "9"],
            "needs as many prompts, and the built-in text contains 8 prompts; give a longer file",
        ),
        (["--prompts", "absent.jsonl"], "cannot read the prompts in absent.jsonl"),
    ],
)
def test_wrong_options_are_refused(
    capsys: Out, folder: str, options: list[str], sentence: str
) -> None:
    assert sentence in refused(capsys, "compare", folder, folder, *options)


@pytest.mark.parametrize(
    "options",
    [["--batch-size", "0"], ["--method", "slemm"], ["--engine-args", "[]"], ["--engine-args", "x"]],
)
def test_argparse_refuses_malformed_options(folder: str, options: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["compare", folder, folder, *options])
    assert stopped.value.code == 2


@pytest.mark.parametrize("line", ["not json", "[1]", '{"text": "a"}', '{"prompt": 3}'])
def test_malformed_prompts_are_refused(capsys: Out, folder: str, line: str) -> None:
    prompts = Path(folder) / "prompts.jsonl"
    prompts.write_text(f'{{"prompt": "a"}}\n{line}\n')
    said = refused(capsys, "compare", folder, folder, "--prompts", str(prompts))
    assert f"{prompts}, line 2" in said


def test_prompts_of_a_file_and_built_in(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a\\nb"}\n\n{"prompt": "c", "id": 1}\n{"prompt": "d"}\n')
    assert load_prompts(file, 2) == ["a\nb", "c"]
    assert load_prompts(None, 3) == list(BUILT_IN[:3])
    file.write_text('{"prompt": "\\ud83d"}\n')
    with pytest.raises(ConfigError, match="half a surrogate pair"):
        load_prompts(file)


def test_prompts_keep_other_line_separators(tmp_path: Path) -> None:
    """Other separators are part of the text. A byte order mark is ignored."""
    file = tmp_path / "prompts.jsonl"
    texts = ["a\u2028b\u2029c", "d\x85e", "f"]
    rows = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    file.write_bytes("\r\n".join(rows).encode("utf-8-sig"))
    assert load_prompts(file, 9) == texts


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            MeasurementError("the engine ended with exit code 9"),
            "the engine ended with exit code 9",
        ),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device."),
    ],
)
def test_failures_are_one_sentence(
    capsys: Out, monkeypatch: pytest.MonkeyPatch, folder: str, error: Exception, sentence: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(engines, "start", fail)
    assert main(["compare", folder, folder]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {sentence}"


def test_widened_columns(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    projection = torch.ones(8, 4)
    save_file({name: projection}, tmp_path / "model.safetensors")
    assert widened_columns(str(tmp_path)) is None
    projection[3:] = 0
    save_file({name: projection}, tmp_path / "model.safetensors")
    assert widened_columns(str(tmp_path)) == (5, 8)
    assert widened_columns("organisation/name") is None
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert widened_columns(str(tmp_path)) is None


@pytest.mark.parametrize("show", [print, lambda text: Console().print(text)])
def test_a_closed_pipe_ends_the_command_silently(
    monkeypatch: pytest.MonkeyPatch, capsys: Out, show: Callable[[str], None]
) -> None:
    """The reader of the output has ended, as in `| head`, while printing or at exit."""
    monkeypatch.setattr(doctor, "run", lambda _: show("all is well"))
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        assert main(["doctor"]) == 141
    # Closing the file, as Python does at exit, does not fail either.
    assert capsys.readouterr().err == ""


@pytest.mark.full
@pytest.mark.engine
def test_a_real_comparison(demo_pair: Path, capsys: Out) -> None:
    models = [str(demo_pair / "target"), str(demo_pair / "drafter")]
    prompts = ["--prompts", str(demo_pair / "prompts.jsonl"), "--num-prompts", "3"]
    sizes = ["--max-tokens", "24", "--batch-size", "2"]
    always = ["--speculative-config", '{"controller": "fixed"}']  # a tiny target is faster alone
    assert main(["compare", *models, *prompts, *sizes, *always, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    speculative = found["speculative"]
    assert found["identical"] == found["prompts"] == 3
    assert found["alone"]["tokens"] == speculative["tokens"] <= 3 * 24
    assert 0 < speculative["accepted_tokens"] <= speculative["draft_tokens"]
    assert speculative["draft_tokens"] <= 4 * speculative["drafts"]
    assert speculative["acceptance_length"] == pytest.approx(
        1 + speculative["accepted_tokens"] / speculative["drafts"]
    )
    assert 0 < speculative["forward_seconds"] < speculative["propose_seconds"]
    for run in (found["alone"], speculative):
        assert 0 < run["ttft"]["median"] < run["seconds"]
        assert 0 < run["tpot"]["median"] < run["seconds"]
