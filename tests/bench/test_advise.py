# SPDX-License-Identifier: Apache-2.0
"""`vllm-hetero-spec advise`: measurements, recommendations and refusals."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from advice_fakes import ALONE, PROMPTS, Fakes, World
from command_line import refused

from vllm_hetero_spec.bench import engines
from vllm_hetero_spec.bench.load import MeasurementError
from vllm_hetero_spec.cli.main import main
from vllm_hetero_spec.errors import ConfigError
from vllm_hetero_spec.options import parse

Make = Callable[..., str]
Out = pytest.CaptureFixture[str]
BROKEN = MeasurementError("the engine ended with exit code 9")

MAMBA = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 300}


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    found = Fakes()
    monkeypatch.setattr(engines, "start", found.start)
    return found


@pytest.fixture
def target(make: Make) -> str:
    return make("target", "h e,l l,he ll,hell o")


@pytest.fixture
def small(make: Make) -> str:
    return make("small", "h e,l o")


@dataclass
class Advise:
    """The command, and the words that each of its command lines begins with."""

    out: Out
    begins: Sequence[str] = ()

    def run(self, *arguments: str, code: int = 0) -> Any:
        """Return what is printed to stdout and stderr."""
        assert main(["advise", *self.begins, *arguments]) == code
        return self.out.readouterr()

    def data(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        """Return the findings of a run with `--json`; stdout contains nothing else."""
        printed = self.run(*arguments, "--json", code=code)
        assert code or "error" not in printed.err
        found: dict[str, Any] = json.loads(printed.out)
        return found

    def text(self, *arguments: str) -> str:
        """Return the printed text on one line."""
        return " ".join(self.run(*arguments).out.split())

    def refusal(self, *arguments: str) -> str:
        return refused(self.out, "advise", *self.begins, *arguments)


@pytest.fixture
def advise(capsys: Out, fakes: Fakes, target: str, tmp_path: Path) -> Advise:
    """`advise` for the target on fake engines, with a small load.

    It has 4 prompts, 13 tokens each, batch sizes 1 and 4, and temperatures 0 and 1.
    """
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    options = ["--prompts", str(file), "--batch-sizes", "4", "1", "--max-tokens", "13"]
    return Advise(capsys, [*options, target])


def test_settings_are_measured_side_by_side(advise: Advise, fakes: Fakes, small: str) -> None:
    fakes.worlds |= {"small:chain": World((12,)), "small:tree": World((15,))}
    settings = json.dumps({"chain": {}, "tree": {"tree_nodes": 8}})
    found = advise.data(small, "--settings", settings)
    assert [each["drafter"] for each in found["measured"]] == ["small:tree", "small:chain"]
    assert found["recommended"]["tree_nodes"] == 8
    assert len(found["drafters"]) == 1


def test_figures_of_a_load(advise: Advise, fakes: Fakes, small: str) -> None:
    """Speeds in tokens/s: target 10, 8, 10; drafter 20, 12, 15, and half of it at batch size 4."""
    fakes.worlds = {ALONE: World((10, 8, 10)), "small": World((20, 12, 15), {4: 0.5})}
    found = advise.data(small)
    assert found["load"] == {
        "prompts": 4,
        "max_tokens": 13,
        "batch_sizes": [1, 4],
        "temperatures": [0, 1],
        "repeats": 3,
        "num_speculative_tokens": 8,
    }
    (measured,) = found["measured"]
    loads = measured["loads"]
    assert [(load["temperature"], load["batch_size"]) for load in loads] == [
        (t, size) for size in (1, 4) for t in (0, 1)
    ]
    for load in loads:
        scale = 1 if load["batch_size"] == 1 else 0.5
        # Ratios of the same rounds: 20 / 10, 12 / 8, 15 / 10.
        assert load["speedup"]["median"] == pytest.approx(1.5 * scale)
        assert load["speedup"]["low"] == pytest.approx(1.5 * scale)
        assert load["speedup"]["high"] == pytest.approx(2 * scale)
        assert load["tokens_per_second"] == pytest.approx(15 * scale)
        assert load["acceptance_length"] == 3
        assert load["identical"] == (None if load["temperature"] else [4, 4])
    assert [load["tokens_per_second"] for load in found["target_alone"]] == [10] * 4
    # Geometric means over the four loads.
    assert measured["speedup"]["median"] == pytest.approx((1.5 * 0.75) ** 0.5)
    assert measured["speedup"]["high"] == pytest.approx((2 * 1) ** 0.5)
    assert measured["speedup"]["rounds"] == 3
    config = {"method": "hetero", "model": small, "num_speculative_tokens": 8}
    assert found["recommended"] == measured["speculative_config"] == config


def test_options_reach_the_engines(advise: Advise, fakes: Fakes, small: str) -> None:
    debug = {"debug": {"translation": "text"}}
    options = ["--engine-args", '{"max_model_len": 64}', "--trust-remote-code"]
    options += ["--speculative-config", json.dumps(debug), "--num-speculative-tokens", "5"]
    found = advise.data(small, *options)
    config = {"method": "hetero", "model": small, "num_speculative_tokens": 5} | debug
    assert fakes.configs == [None, config]
    assert found["recommended"] == config
    for suite in fakes.suites:
        assert suite.target("target").engine == {"max_model_len": 64, "trust_remote_code": True}
    assert fakes.up == []
    alone, drafting = ([load for who, load in fakes.runs if who == w] for w in (ALONE, "small"))
    assert sorted(map(repr, alone)) == sorted(map(repr, drafting))
    assert len(alone) == 2 * 2 * 3
    # Engines take turns; every second round begins with the other engine.
    assert [who for who, _ in fakes.runs[:4]] == [ALONE, "small", "small", ALONE]


def test_candidates_are_ranked_by_speed(advise: Advise, fakes: Fakes, make: Make) -> None:
    names = [make(name, "h e,l o") for name in ("slow", "unsure", "good", "tied", "best")]
    fakes.worlds |= {
        "best": World((20, 22, 24)),
        "tied": World((19, 21, 20)),
        "good": World((15, 15, 15)),
        "unsure": World((9, 11, 13)),
        "slow": World((8, 9, 9.5)),
    }
    found = advise.data(*names)
    verdicts = {each["drafter"]: each["verdict"] for each in found["measured"]}
    assert list(verdicts.items()) == [
        ("best", "recommended"),
        ("tied", "faster, not told apart from the recommended one"),
        ("good", "faster than the target alone"),
        ("unsure", "not told apart from the target alone"),
        ("slow", "slower than the target alone"),
    ]
    assert found["recommended"]["model"] == names[4]
    assert "2.20x (2.00-2.40)" in advise.text(*names)


def test_a_fast_but_unsteady_drafter_is_not_recommended(
    advise: Advise, fakes: Fakes, make: Make
) -> None:
    names = [make(name, "h e,l o") for name in ("unsteady", "steady")]
    fakes.worlds |= {"unsteady": World((9, 20, 20)), "steady": World((12,))}
    found = advise.data(*names)
    assert [each["drafter"] for each in found["measured"]] == ["unsteady", "steady"]
    assert found["recommended"]["model"] == names[1]


@pytest.mark.parametrize(
    ("speeds", "sentence"),
    [
        ((9.0,), "The target alone is faster than with any drafter under these loads."),
        ((9.0, 11.0), "No drafter makes the target faster in all rounds of these loads"),
        ((10.0,), "No drafter makes the target faster in all rounds of these loads"),
    ],
)
def test_the_target_alone_may_be_fastest(
    advise: Advise, fakes: Fakes, small: str, speeds: tuple[float, ...], sentence: str
) -> None:
    fakes.worlds["small"] = World(speeds)
    assert advise.data(small)["recommended"] is None
    printed = advise.text(small)
    assert sentence in printed
    assert "--speculative-config" not in printed


def test_loads_under_which_a_drafter_is_faster_are_named(
    advise: Advise, fakes: Fakes, small: str
) -> None:
    fakes.worlds["small"] = World((12.0,), {4: 0.5})
    printed = advise.text(small)
    faster = "small (hetero) at batch 1, temperature 0; batch 1, temperature 1: name these"
    assert f"No drafter makes the target faster over all of these loads. {faster}" in printed
    found = advise.data(small, "--batch-sizes", "4")
    assert found["recommended"] is None
    found = advise.data(small, "--batch-sizes", "1")
    assert found["recommended"] is not None


def test_statistics_alone_start_nothing(advise: Advise, fakes: Fakes, make: Make) -> None:
    small = make("small", "h e,l o")
    bare = make("bare", "h e", weights=False)
    found = advise.data(small, bare, "--statistics-only")
    assert fakes.configs == []
    drafter, other = found["drafters"]
    assert drafter["not_measured"] == "not measured: --statistics-only."
    # No prompt ("one", "two", "three", "four") contains a merge of the target, so all tokens are
    # single bytes. Both vocabularies have 256 bytes and "he".
    assert drafter["statistics"]["omega_t"] == 1
    assert drafter["statistics"]["shared_tokens"] == 257
    assert drafter["suggested_method"].keys() == {"method", "reason"}
    # 100 weights of 4 bytes on a CPU. KV: 2 layers, keys and values, one head of size 8.
    size = 4 if not engines.on_gpu() else 2
    assert drafter["memory"] == {
        "weight_bytes": 100 * size,
        "kv_bytes_per_token": 2 * 2 * 8 * size,
        "kv_bytes": 4 * 64 * 2 * 2 * 8 * size,
        "sequences": 4,
        "tokens": 64,
    }
    assert other["memory"]["weight_bytes"] is None
    assert found["measured"] == found["target_alone"] == []
    assert found["recommended"] is None
    assert "ranking" not in advise.text(small, "--statistics-only")


def test_drafters_without_weights_stop_at_statistics(
    advise: Advise, make: Make, target: str
) -> None:
    small, bare = make("small", "h e,l o"), make("bare", "h e", weights=False)
    found = advise.data(bare, small)
    assert [each["not_measured"] for each in found["drafters"]] == [
        f"not measured: {bare} contains no weights.",
        "",
    ]
    assert [each["drafter"] for each in found["measured"]] == ["small"]
    (Path(target) / "model.safetensors").unlink()
    (drafter,) = advise.data(small)["drafters"]
    assert drafter["not_measured"] == f"not measured: {target} contains no weights."


def test_a_refused_tokenizer_leaves_out_its_drafter(advise: Advise, make: Make) -> None:
    odd, small = make("odd", "h e", known=False), make("small", "h e,l o")
    found = advise.data(odd, small)
    assert "cannot be bridged" in found["drafters"][0]["not_measured"]
    assert "statistics" not in found["drafters"][0]
    assert found["recommended"]["model"] == small
    assert "cannot be bridged" in advise.text(odd, small)
    assert "cannot be bridged" in advise.refusal(odd)
    assert "cannot be bridged" in refused(advise.out, "advise", odd, small)


@pytest.mark.parametrize(
    ("file", "data", "sentence"),
    [
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        ("config.json", json.dumps(MAMBA).encode(), "'num_attention_heads'); choose a model with"),
    ],
)
def test_an_incomplete_drafter_is_left_out(
    advise: Advise, fakes: Fakes, small: str, make: Make, file: str, data: bytes, sentence: str
) -> None:
    spoilt = Path(make("spoilt", ""))
    (spoilt / file).write_bytes(data)
    found = advise.data(small, str(spoilt))
    (told,) = [each for each in found["drafters"] if each["model"] == str(spoilt)]
    assert sentence in told["not_measured"]
    assert {config["model"] for config in fakes.configs if config} == {small}


def test_failing_drafters_are_reported(advise: Advise, fakes: Fakes, make: Make) -> None:
    """`test_golden.py` has the measurements of the others."""
    names = [make(name, "h e,l o") for name in ("big", "broken", "good")]
    fakes.worlds |= {
        "big": World(refuse=ConfigError("no memory for this one.")),
        "broken": World((99.0,), fail_at=(4, BROKEN)),
    }
    printed = advise.run(*names, code=1)
    assert fakes.up == []
    assert "error: big (hetero): no memory for this one.; broken (hetero): the e" in printed.err


def test_a_failing_target_ends_the_command(advise: Advise, fakes: Fakes, small: str) -> None:
    fakes.worlds = {ALONE: World(refuse=BROKEN)}
    printed = advise.run(small, code=1)
    assert "error: the target alone: the engine ended with exit code 9" in printed.err
    assert printed.out == ""


def test_methods_of_the_option_are_measured(advise: Advise, fakes: Fakes, small: str) -> None:
    found = advise.data(small, "--methods", "slem", "slrs")
    assert [config and config["method"] for config in fakes.configs] == [None, "slem", "slrs"]
    assert [each["method"] for each in found["measured"]] == ["slem", "slrs"]


@pytest.mark.parametrize("fitting", [1, 2, 3])
def test_never_more_engines_are_up_than_fit(
    advise: Advise, fakes: Fakes, make: Make, monkeypatch: pytest.MonkeyPatch, fitting: int
) -> None:
    names = [make(name, "h e,l o") for name in ("a", "b", "c")]
    monkeypatch.setattr(engines, "at_once_for", lambda suite: fitting)
    found = advise.data(*names)
    assert fakes.most_up == fitting
    assert [each["speedup"]["median"] for each in found["measured"]] == pytest.approx([1.2] * 3)
    alone = "One engine was up at a time" in advise.text(*names)
    assert alone == (fitting == 1)


def test_engines_at_once(advise: Advise, fakes: Fakes, make: Make) -> None:
    names = [make(name, "h e,l o") for name in ("a", "b")]
    advise.data(*names, "--engines-at-once", "1")
    assert fakes.most_up == 1


def test_drafters_of_the_same_last_name_have_different_names(
    advise: Advise, make: Make, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    names = [make("small", "h e"), make("other/small", "h e")]
    found = advise.data(*names, names[0])
    assert [each["drafter"] for each in found["measured"]] == names


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (["--temperatures", "1", "-1"], "--temperatures is -1.0"),
        (["--repeats", "2000"], "--repeats is 2000"),
        (["--settings", '{"a": {"method": "tli"}}'], "a.method of --settings is set by"),
        (["--batch-sizes", "5"], "batch size 5 needs as many prompts"),
        (["--engine-args", '{"max_num_seqs": 9}'], "max_num_seqs of --engine-args is set"),
        (["--num-speculative-tokens", "65"], "num_speculative_tokens is 65"),
        (["--speculative-config", '{"tree_node": 8}'], "did you mean 'tree_nodes'?"),
        (["--prompts", "absent.jsonl"], "cannot read the prompts in absent.jsonl"),
    ],
)
def test_wrong_options_are_refused(
    advise: Advise, fakes: Fakes, small: str, wrong: list[str], sentence: str
) -> None:
    assert sentence in advise.refusal(small, *wrong)
    assert fakes.configs == []


def test_wrong_names_are_refused_before_anything_is_read(
    advise: Advise, target: str, small: str
) -> None:
    absent = f"{target}/absent"
    assert f"the drafter folder {absent} does not exist" in advise.refusal(small, absent)
    said = refused(advise.out, "advise", absent, small)
    assert f"the target folder {absent} does not exist" in said


@pytest.mark.full
@pytest.mark.engine
def test_real_advice(demo_pair: Path, capsys: Out) -> None:
    models = [str(demo_pair / "target"), str(demo_pair / "drafter")]
    prompts = ["--prompts", str(demo_pair / "prompts.jsonl"), "--num-prompts", "2"]
    sizes = ["--max-tokens", "12", "--batch-sizes", "1", "--repeats", "1"]
    found = Advise(capsys).data(
        *models, *prompts, *sizes, "--speculative-config", '{"debug": {"calibrate": false}}'
    )
    (measured,) = found["measured"]
    assert measured["failure"] == ""
    assert len(measured["loads"]) == len(found["target_alone"]) == 2
    assert measured["loads"][0]["identical"] == [2, 2]
    for load in measured["loads"]:
        spread = load["speedup"]
        assert 0 < spread["low"] <= spread["median"] <= spread["high"]
        assert load["acceptance_length"] is None or 1 <= load["acceptance_length"] <= 9
    parse(measured["speculative_config"])
    assert found["recommended"] in (None, measured["speculative_config"])
