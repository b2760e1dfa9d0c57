# SPDX-License-Identifier: Apache-2.0
"""`vllm-hetero-spec advise`: what it measures, what it makes of it, and what it refuses."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from advice_fakes import PROMPTS, FakeEngine, World

from vllm_hetero_spec.advice import work
from vllm_hetero_spec.advice.findings import DrafterFindings
from vllm_hetero_spec.advice.memory import missing_weights
from vllm_hetero_spec.advice.pairs import PairView
from vllm_hetero_spec.cli import advise
from vllm_hetero_spec.cli.main import main
from vllm_hetero_spec.config import ConfigError, parse
from vllm_hetero_spec.measure.load import MeasurementError
from vllm_hetero_spec.measure.vllm_engine import EngineSpec
from vllm_hetero_spec.text.statistics import PairStatistics

Make = Callable[..., str]
GOOD = World(right=["110"])
IDLE = World(right=["000"])


class Fakes:
    """Starts engines of worlds, by the name of the drafter's folder.

    Attributes:
        worlds: GOOD where not given; what is no world is raised.
        engines: All that were started.
    """

    def __init__(self) -> None:
        self.worlds: dict[str, Any] = {}
        self.engines: list[FakeEngine] = []

    def start(self, spec: EngineSpec, *, verbose: bool) -> FakeEngine:
        assert all(engine.closed for engine in self.engines)  # one at a time
        config = spec.speculative_config
        world = GOOD
        if config is not None:
            parse(config)
            world = self.worlds.get(Path(config["model"]).name, GOOD)
            if isinstance(world, ConfigError):
                raise world
        elif "alone" in self.worlds:
            raise self.worlds["alone"]
        fail = None if isinstance(world, World) else world
        self.engines.append(FakeEngine(GOOD if fail else world, spec, fail))
        return self.engines[-1]

    @property
    def configs(self) -> list[dict[str, Any] | None]:
        return [engine.spec.speculative_config for engine in self.engines]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    found = Fakes()
    monkeypatch.setattr(advise, "VllmEngine", found.start)
    return found


@pytest.fixture
def target(make: Make) -> str:
    return make("target", "h e,l l,he ll,hell o")


@pytest.fixture
def small(make: Make) -> str:
    return make("small", "h e,l o")


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """A small load: 4 prompts of 13 tokens, batch 1 and 4, temperature 0 and 1."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return ["--prompts", str(file), "--max-tokens", "13", "--batch-sizes", "4", "1"]


def advice(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    """The findings; nothing else is printed."""
    assert main(["advise", *arguments, "--json"]) == code
    printed = capsys.readouterr()
    assert code or printed.err == ""
    found: dict[str, Any] = json.loads(printed.out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence with which a command line is refused."""
    assert main(["advise", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    return printed.err


def test_figures_of_a_load(
    capsys: pytest.CaptureFixture[str],
    fakes: Fakes,
    target: str,
    small: str,
    options: list[str],
) -> None:
    found = advice(capsys, target, small, *options)
    assert found["load"] == {
        "prompts": 4,
        "max_tokens": 13,
        "batch_sizes": [1, 4],
        "temperatures": [0, 1],
        "repeats": 2,
        "num_speculative_tokens": 4,
    }
    (drafter,) = found["drafters"]
    (measured,) = drafter["measured"]
    assert measured["method"] == "slrs"
    assert [(each["temperature"], each["batch_size"]) for each in measured["loads"]] == [
        (0, 1),
        (0, 4),
        (1, 1),
        (1, 4),
    ]
    first = measured["loads"][0]
    assert first["target_step_seconds"] == pytest.approx(1.125)
    assert first["verifying_step_seconds"] == pytest.approx(1 + 5 * 0.125)
    assert first["drafter_step_seconds"] == pytest.approx(0.0625)
    assert first["drafting_seconds"] == pytest.approx(0.03125 + 7 * 0.0625)
    assert first["drafter_steps_per_target_token"] == pytest.approx(7 / 4)
    assert first["acceptance_by_position"] == [1, 1, 0, None]
    # k=2: every step but the prompt's gives three tokens, and twelve are to be given.
    step = 1 + 3 * 0.125 + 0.03125 + 4 * 0.0625
    alone, drafted = 2 + 12 * 1.125, 2.25 + 0.03125 + 4 * 0.0625 + 4 * step
    best = first["foreseen"][first["best"] - 1]
    assert best["num_speculative_tokens"] == first["best"] == 2
    assert best["speedup"] == pytest.approx(alone / drafted)
    assert best["acceptance_length"] == pytest.approx(3)
    assert first["measured_speedup"] == pytest.approx(first["foreseen"][3]["speedup"])
    wide = measured["loads"][1]["foreseen"][1]["speedup"]
    step = 1 + 4 * 3 * 0.125 + 0.03125 + 4 * 0.0625
    alone, drafted = 4 * 2 + 12 * 1.5, 4 * 2.25 + 0.03125 + 4 * 0.0625 + 4 * step
    assert wide == pytest.approx(alone / drafted)
    assert found["recommended"] == {"method": "slrs", "model": small, "num_speculative_tokens": 2}


def test_what_engines_are_asked_for(
    capsys: pytest.CaptureFixture[str],
    fakes: Fakes,
    target: str,
    small: str,
    options: list[str],
) -> None:
    further = ["--engine-args", '{"max_model_len": 64}', "--trust-remote-code"]
    extra = ["--speculative-config", '{"translation": "text"}']
    found = advice(capsys, target, small, *options, *further, *extra)
    base = {"method": "slrs", "model": small, "num_speculative_tokens": 4, "translation": "text"}
    assert fakes.configs == [None, base | {"controller": "fixed"}]
    assert found["recommended"] == base | {"num_speculative_tokens": 2}
    assert all(engine.closed for engine in fakes.engines)
    for engine in fakes.engines:
        assert engine.spec.model == target
        assert engine.spec.max_batch_size == 4
        assert engine.spec.engine == {"max_model_len": 64, "trust_remote_code": True}
    alone, drafting = (engine.loads for engine in fakes.engines)
    assert [load.seed for load in alone] == [0, 4] * 4
    assert [load.max_tokens for load in drafting] == [1, 13, 13] * 4
    assert [load for load in drafting if load.max_tokens > 1] == alone


def test_the_better_drafter_comes_first(
    capsys: pytest.CaptureFixture[str], fakes: Fakes, make: Make, target: str, options: list[str]
) -> None:
    names = [make(name, "h e,l o") for name in ("idle", "good", "better")]
    fakes.worlds = {"idle": IDLE, "better": World(right=["11110"])}
    found = advice(capsys, target, *names, *options)
    order = [(Path(place["drafter"]).name, place["pays"]) for place in found["ranking"]]
    assert order == [("better", True), ("good", True), ("idle", False)]
    assert found["ranking"][1]["num_speculative_tokens"] == 2
    assert found["ranking"][2]["num_speculative_tokens"] == 1  # the least loss
    assert found["recommended"]["model"] == names[2]
    for place in found["ranking"]:
        assert len(place["speedups"]) == 4
    assert len(fakes.configs) == 4


def test_the_target_alone_may_be_fastest(
    capsys: pytest.CaptureFixture[str], fakes: Fakes, target: str, small: str, options: list[str]
) -> None:
    fakes.worlds = {"small": IDLE}
    found = advice(capsys, target, small, *options)
    assert found["recommended"] is None
    assert len(found["ranking"]) == 1
    assert main(["advise", target, small, *options]) == 0
    printed = capsys.readouterr().out
    assert "The target alone is faster than with any drafter" in printed
    assert "--speculative-config" not in printed


def test_a_line_to_paste(
    capsys: pytest.CaptureFixture[str], fakes: Fakes, target: str, small: str, options: list[str]
) -> None:
    assert main(["advise", target, small, *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    (config,) = shlex.split(lines[-1])
    assert lines[-2] == "--speculative-config"
    options_of, _ = parse(json.loads(config))
    assert (options_of.method, options_of.num_speculative_tokens) == ("slrs", 2)
    text = "\n".join(lines)
    for expected in ("memory", "1,125", "ranking", "goodput", "omega_T"):
        assert expected in text


def test_statistics_alone_start_nothing(
    capsys: pytest.CaptureFixture[str], fakes: Fakes, make: Make, target: str, options: list[str]
) -> None:
    small = make("small", "h e,l o")
    bare = make("bare", "h e", weights=False)
    found = advice(capsys, target, small, bare, *options, "--statistics-only")
    assert fakes.engines == []
    drafter, other = found["drafters"]
    assert drafter["stopped"] == "not measured: --statistics-only."
    # Letters alone: no "he" in "one", "two", "three", "four". Both have 256 bytes and "he".
    assert drafter["statistics"]["omega_t"] == 1
    assert drafter["statistics"]["shared_tokens"] == 257
    assert [each["method"] for each in drafter["expected_methods"]["temperature_0"]] == ["slem"]
    # 100 numbers of 4 bytes on a CPU; 2 layers, keys and values, one head of 8.
    size = 4 if not work.on_gpu() else 2
    assert drafter["memory"] == {
        "weight_bytes": 100 * size,
        "kv_bytes_per_token": 2 * 2 * 8 * size,
        "kv_bytes": 4 * 64 * 2 * 2 * 8 * size,
        "sequences": 4,
        "tokens": 64,
    }
    assert other["memory"]["weight_bytes"] is None
    assert found["ranking"] == []
    assert found["recommended"] is None


def test_drafters_without_weights_stop_at_statistics(
    capsys: pytest.CaptureFixture[str], fakes: Fakes, make: Make, target: str, options: list[str]
) -> None:
    small, bare = make("small", "h e,l o"), make("bare", "h e", weights=False)
    found = advice(capsys, target, bare, small, *options)
    stopped, measured = found["drafters"]
    assert stopped["stopped"] == f"not measured: {bare} holds no weights."
    assert stopped["measured"] == []
    assert measured["stopped"] == ""
    assert len(measured["measured"]) == 1
    (Path(target) / "model.safetensors").unlink()
    found = advice(capsys, target, small, *options)
    assert found["drafters"][0]["stopped"] == f"not measured: {target} holds no weights."


def test_a_refused_tokenizer_leaves_out_its_drafter(
    capsys: pytest.CaptureFixture[str], fakes: Fakes, make: Make, target: str, options: list[str]
) -> None:
    odd, small = make("odd", "h e", known=False), make("small", "h e,l o")
    found = advice(capsys, target, odd, small, *options)
    assert "cannot be bridged" in found["drafters"][0]["stopped"]
    assert "statistics" not in found["drafters"][0]
    assert found["recommended"]["model"] == small
    assert main(["advise", target, odd, small, *options]) == 0
    assert "cannot be bridged" in " ".join(capsys.readouterr().out.split())
    assert "cannot be bridged" in refused(capsys, target, odd, *options)
    assert "cannot be bridged" in refused(capsys, odd, small, *options)


def test_a_failing_drafter_is_reported_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str], fakes: Fakes, make: Make, target: str, options: list[str]
) -> None:
    names = [make(name, "h e,l o") for name in ("big", "broken", "mute", "good")]
    fakes.worlds = {
        "big": ConfigError("no memory for this one."),
        "broken": MeasurementError("the engine ended with exit code 9"),
        "mute": World(drafted=False),
    }
    found = advice(capsys, target, *names, *options, code=1)
    big, broken, mute, good = (each["measured"][0] for each in found["drafters"])
    assert big["failure"] == "no memory for this one."
    assert broken["failure"] == "the engine ended with exit code 9"
    assert "nothing drafted (skipped: untranslatable)" in mute["failure"]
    assert good["failure"] == ""
    assert found["recommended"]["model"] == names[3]
    assert all(engine.closed for engine in fakes.engines)
    assert main(["advise", target, *names, *options]) == 1
    printed = capsys.readouterr()
    assert "slrs could not be measured: no memory" in printed.out
    assert f"error: {names[0]} (slrs): no memory for this one.; {names[1]}" in printed.err


def test_a_target_that_fails_alone_ends_it(
    capsys: pytest.CaptureFixture[str], fakes: Fakes, target: str, small: str, options: list[str]
) -> None:
    fakes.worlds = {"alone": MeasurementError("the engine ended with exit code 9")}
    assert main(["advise", target, small, *options]) == 1
    assert "error: the engine ended with exit code 9" in capsys.readouterr().err


def test_methods_asked_for_are_measured(
    capsys: pytest.CaptureFixture[str], fakes: Fakes, target: str, small: str, options: list[str]
) -> None:
    found = advice(capsys, target, small, *options, "--methods", "slem", "slrs")
    assert [config and config["method"] for config in fakes.configs] == [None, "slem", "slrs"]
    assert [each["method"] for each in found["drafters"][0]["measured"]] == ["slem", "slrs"]
    assert len(found["ranking"]) == 2


def test_the_method_that_the_tokenizers_say() -> None:
    statistics = PairStatistics(0.9, 0.9, 0.0, 0.0, 9, 9, 9, 9, 0, 0, 9000)
    drafter = DrafterFindings("a", "a", PairView(statistics, 1))
    assert drafter.best_method([0.0]).method == "slem"
    assert drafter.best_method([0.0, 1.0]).method == "tli"


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (["--temperatures", "1", "-1"], "a temperature is -1.0"),
        (["--batch-sizes", "5"], "batch size 5 needs as many prompts"),
        (["--max-tokens", "5"], "--max-tokens is 5; a draft of 4 tokens needs 6"),
        (["--num-speculative-tokens", "65", "--max-tokens", "99"], "num_speculative_tokens is 65"),
        (["--speculative-config", '{"translatoin": "text"}'], "did you mean 'translation'?"),
        (["--prompts", "absent.jsonl"], "cannot read the prompts in absent.jsonl"),
    ],
)
def test_wrong_options_are_refused(
    capsys: pytest.CaptureFixture[str],
    fakes: Fakes,
    target: str,
    small: str,
    options: list[str],
    wrong: list[str],
    sentence: str,
) -> None:
    assert sentence in refused(capsys, target, small, *options, *wrong)
    assert fakes.engines == []


def test_wrong_names_are_refused_before_anything_is_read(
    capsys: pytest.CaptureFixture[str], target: str, small: str
) -> None:
    absent = f"{target}/absent"
    assert f"the drafter folder {absent} does not exist" in refused(capsys, target, small, absent)
    assert f"the target folder {absent} does not exist" in refused(capsys, absent, small)


def test_weights_that_are_not_here(make: Make) -> None:
    folder = Path(make("model", ""))
    assert missing_weights(str(folder)) == ""
    index = {"weight_map": {"a": "model.safetensors", "b": "rest.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert missing_weights(str(folder)) == f"{folder} lacks rest.safetensors"
    assert "are not on this machine (`hf download" in missing_weights("organisation/absent")


@pytest.mark.engine
def test_real_advice(demo_pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = [str(demo_pair / "target"), str(demo_pair / "drafter")]
    prompts = ["--prompts", str(demo_pair / "prompts.jsonl"), "--num-prompts", "3"]
    sizes = ["--max-tokens", "12", "--batch-sizes", "1", "--repeats", "1"]
    found = advice(capsys, *models, *prompts, *sizes)
    (drafter,) = found["drafters"]
    (measured,) = drafter["measured"]
    assert measured["failure"] == ""
    for load in measured["loads"]:
        assert load["batch_size"] == 1
        assert 0 < load["drafter_step_seconds"] < load["drafting_seconds"]
        assert load["target_step_seconds"] > 0
        assert [each["num_speculative_tokens"] for each in load["foreseen"]] == [1, 2, 3, 4]
        for each in load["foreseen"]:
            assert 0 < each["low"] <= each["speedup"] <= each["high"]
            assert 1 <= each["acceptance_length"] <= each["num_speculative_tokens"] + 1
        assert load["measured_speedup"] > 0
    (place,) = found["ranking"]
    if found["recommended"] is not None:
        options, _ = parse(found["recommended"])
        assert options.num_speculative_tokens == place["num_speculative_tokens"]
