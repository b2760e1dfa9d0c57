# SPDX-License-Identifier: Apache-2.0
"""`vllm-hetero-spec compare`: what it refuses, what it reports, and one real comparison."""

import dataclasses
import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from vllm_hetero_spec.cli import compare
from vllm_hetero_spec.cli.comparison import Comparison
from vllm_hetero_spec.cli.main import main
from vllm_hetero_spec.inputs.model_folder import widened_columns
from vllm_hetero_spec.inputs.prompts import BUILT_IN, load_prompts
from vllm_hetero_spec.measure.load import MeasurementError, Sample, Trace

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
    worker={
        "drafter_tokens": 12,
        "propose_seconds": 0.4,
        "forward_seconds": 0.3,
        "translate_seconds": 0.05,
        "verify_seconds": 0.02,
        "skipped": {"no_blocks": 7, "drafter_error": 0},
    },
)
COMPARISON = Comparison(
    target="big",
    drafter="small",
    prompts=["one", "two"],
    greedy=True,
    alone=ALONE,
    speculative=SPECULATIVE,
)


def shown(comparison: Comparison) -> str:
    output = io.StringIO()
    comparison.show(Console(file=output, width=100))
    return output.getvalue()


def with_texts(sample: Sample, *texts: str) -> Sample:
    """The sample with other texts."""
    pairs = zip(sample.traces, texts, strict=True)
    return dataclasses.replace(
        sample, traces=[dataclasses.replace(trace, text=text) for trace, text in pairs]
    )


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence with which a command line is refused."""
    assert main(["compare", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    return printed.err


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder that looks like a model until something opens it."""
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def test_figures_of_a_comparison() -> None:
    found = COMPARISON.as_json()
    assert found["identical"] == found["prompts"] == 2
    assert found["speedup"] == pytest.approx(2.0)
    assert found["alone"]["tokens_per_second"] == pytest.approx(3.0)
    assert found["speculative"]["acceptance_length"] == pytest.approx(1 + 6 / 4)
    assert found["speculative"]["skipped"]["no_blocks"] == 7
    assert found["alone"]["median_ttft_seconds"] == pytest.approx((0.2 + 0.4) / 2)
    assert found["alone"]["median_tpot_seconds"] == pytest.approx((0.4 + 0.3) / 2)
    assert found["speculative"]["median_ttft_seconds"] == pytest.approx((0.3 + 0.5) / 2)
    # The second completion came at once, so that only the first has later tokens.
    assert found["speculative"]["median_tpot_seconds"] == pytest.approx(0.1)
    json.dumps(found)


def test_table_tells_what_happened() -> None:
    text = shown(COMPARISON)
    for expected in ("yes: 2 of 2", "2.00x", "2.50", "skipped: no_blocks", "abc"):
        assert expected in text
    rows = {
        line.split("│")[1].strip(): line.split("│")[2:4]
        for line in text.splitlines()
        if "│" in line
    }
    assert [c.strip() for c in rows["time to first token, median"]] == ["300.0 ms", "400.0 ms"]
    assert [c.strip() for c in rows["time per output token, median"]] == ["350.0 ms", "100.0 ms"]
    assert "drafter_error" not in text
    assert "widened" not in text
    assert "widened with zero MLP columns: 60 of 64" in shown(
        dataclasses.replace(COMPARISON, widened=(60, 64))
    )


def test_a_differing_token_is_reported() -> None:
    same, last = SPECULATIVE.traces
    changed = dataclasses.replace(last, token_ids=[4, 5, 7], text="dex")
    other = dataclasses.replace(SPECULATIVE, traces=[same, changed])
    differing = dataclasses.replace(COMPARISON, speculative=other)
    assert differing.identical == 1
    text = shown(differing)
    assert "no: 1 of 2" in text
    assert "def" in text
    assert "dex" in text


def test_sampled_texts_are_not_compared() -> None:
    sampled = dataclasses.replace(COMPARISON, greedy=False)
    assert sampled.identical is None
    assert "not compared" in shown(sampled)


def test_no_drafts_is_no_acceptance_length() -> None:
    idle = dataclasses.replace(SPECULATIVE, drafts=0, draft_tokens=0, accepted_tokens=0)
    assert idle.acceptance_length is None
    assert "no drafts" in shown(dataclasses.replace(COMPARISON, speculative=idle))


def test_markup_in_a_text_is_printed_as_it_is() -> None:
    texts = ["[bold]x[/] [0]", "y"]
    odd = dataclasses.replace(
        COMPARISON, alone=with_texts(ALONE, *texts), speculative=with_texts(SPECULATIVE, *texts)
    )
    assert "[bold]x[/] [0]" in shown(odd)


def test_absent_models_are_refused(capsys: pytest.CaptureFixture[str], folder: str) -> None:
    absent = f"{folder}/absent"
    assert f"the target folder {absent} does not exist" in refused(capsys, absent, folder)
    assert f"the drafter folder {absent} does not exist" in refused(capsys, folder, absent)


def test_a_folder_without_a_model_is_refused(
    capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    empty = Path(folder) / "empty"
    empty.mkdir()
    assert "holds no config.json" in refused(capsys, folder, str(empty))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--num-speculative-tokens", "400"], "num_speculative_tokens is 400"),
        (["--speculative-config", '{"translatoin": "text"}'], "did you mean 'translation'?"),
        (["--temperature", "-1"], "--temperature is -1.0"),
        (["--prompts", "absent.jsonl"], "cannot read the prompts in absent.jsonl"),
    ],
)
def test_wrong_options_are_refused(
    capsys: pytest.CaptureFixture[str], folder: str, options: list[str], sentence: str
) -> None:
    assert sentence in refused(capsys, folder, folder, *options)


@pytest.mark.parametrize(
    "options",
    [["--batch-size", "0"], ["--method", "slemm"], ["--engine-args", "[]"], ["--engine-args", "x"]],
)
def test_argparse_refuses_malformed_options(folder: str, options: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["compare", folder, folder, *options])
    assert stopped.value.code == 2


@pytest.mark.parametrize("line", ["not json", "[1]", '{"text": "a"}', '{"prompt": 3}'])
def test_malformed_prompts_are_refused(
    capsys: pytest.CaptureFixture[str], folder: str, line: str
) -> None:
    prompts = Path(folder) / "prompts.jsonl"
    prompts.write_text(f'{{"prompt": "a"}}\n{line}\n')
    assert f"{prompts}, line 2" in refused(capsys, folder, folder, "--prompts", str(prompts))


def test_prompts_of_a_file_and_built_in(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a\\nb"}\n\n{"prompt": "c", "id": 1}\n{"prompt": "d"}\n')
    assert load_prompts(file, 2) == ["a\nb", "c"]
    assert load_prompts(None, 3) == list(BUILT_IN[:3])


def test_a_failing_engine_is_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    def fail(*_: object, **__: object) -> Sample:
        raise MeasurementError("the engine ended with exit code 9")

    monkeypatch.setattr(compare, "VllmEngine", fail)
    assert main(["compare", folder, folder]) == 1
    assert "error: the engine ended with exit code 9" in capsys.readouterr().err


def test_widened_models_are_told_from_others(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    projection = torch.ones(8, 4)
    save_file({name: projection}, tmp_path / "model.safetensors")
    assert widened_columns(str(tmp_path)) is None
    projection[3:] = 0
    save_file({name: projection}, tmp_path / "model.safetensors")
    assert widened_columns(str(tmp_path)) == (5, 8)
    assert widened_columns("organisation/name") is None


@pytest.mark.engine
def test_a_real_comparison(demo_pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
        assert 0 < run["median_ttft_seconds"] < run["seconds"]
        assert 0 < run["median_tpot_seconds"] < run["seconds"]
