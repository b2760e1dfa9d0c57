# SPDX-License-Identifier: Apache-2.0
"""`vllm-hetero-spec bench` from the command line: on fake engines, and once on real ones."""

import dataclasses
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from bench_fakes import GOOD, Fakes
from bench_fakes import SUITE as FAKE_SUITE

from vllm_hetero_spec.bench import engines, huggingface_engine, vllm_engine
from vllm_hetero_spec.bench.engines import vocabularies_differ
from vllm_hetero_spec.bench.figures import rows_of
from vllm_hetero_spec.bench.huggingface_engine import HuggingFaceSpec
from vllm_hetero_spec.bench.load import MeasurementError
from vllm_hetero_spec.bench.plan import EngineId
from vllm_hetero_spec.bench.results import read_results
from vllm_hetero_spec.bench.suite import SuiteDrafter, Target, read_suite
from vllm_hetero_spec.cli import bench
from vllm_hetero_spec.cli.main import main
from vllm_hetero_spec.inputs.weights import fetch_weights
from vllm_hetero_spec.options import METHODS

Write = Callable[[str], Path]
SUITE = "methods: [slem]\npeers: [alone]\nengines_at_once: 4\nrepeats: 2\n" + GOOD

Out = pytest.CaptureFixture[str]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """Fake engines that answer at once."""
    found = Fakes()
    monkeypatch.setattr(engines, "start", found.start)
    monkeypatch.setattr(bench, "fetch_weights", lambda name, engine: None)
    return found


def run(file: Path, *options: str) -> int:
    return main(["bench", str(file), "--out", str(file.parent / "out"), *options])


def test_a_suite_is_measured_and_reported(write: Write, fakes: Fakes, capsys: Out) -> None:
    file = write(SUITE)
    assert run(file) == 0
    printed = capsys.readouterr()
    assert "[4/4] big/slem/small/k4/code/b1/t0" not in printed.out
    assert "[1/4] big/alone/code/b1/t0, round 1: 8.0 tok/s; about" in printed.err
    assert "| code | big | slem | small | 4 | 0 | 1 |" in printed.out
    assert fakes.order("start") == ["alone", "slem"]
    out = file.parent / "out"
    files = {"results.jsonl", "results.md", "summary.json"}
    assert {path.name for path in out.iterdir()} == files
    header = read_results(out).header
    assert header["suite"]["targets"][0]["model"] == "org/big"
    assert header["provenance"]["machine"]["cores"] >= 1
    assert header["engines_at_once"] == 4


def test_weights_are_fetched_before_any_engine_starts(
    write: Write, fakes: Fakes, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    """Only weights to be measured are fetched; missing ones are refused."""
    fetched: list[str] = []
    monkeypatch.setattr(bench, "fetch_weights", lambda name, engine: fetched.append(name))
    file = write(SUITE)
    assert run(file, "--only", "alone") == 0
    assert fetched == ["org/big"]
    monkeypatch.setattr(bench, "fetch_weights", fetch_weights)
    fakes.log.clear()
    assert run(file) == 2
    assert "error: the weights of org/small are not on this machine" in capsys.readouterr().err
    assert fakes.log == []
    monkeypatch.setattr(bench, "fetch_weights", lambda name, engine: fetched.append(name))
    assert run(file) == 0
    fetched.clear()
    assert run(file) == 0
    assert fetched == []


def test_a_misspelt_engine_argument_is_refused_at_once(
    write: Write, fakes: Fakes, capsys: Out
) -> None:
    """No results file is begun, so that the corrected suite can use the folder."""
    file = write(SUITE + "engine: {max_modl_len: 64}\n")
    assert run(file) == 2
    assert "did you mean 'max_model_len'?" in capsys.readouterr().err
    assert not (file.parent / "out").exists()


def test_results_go_into_a_folder_of_the_suites_name(
    write: Write, fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", str(write("name: mine\n" + SUITE))]) == 0
    assert (tmp_path / "bench-results" / "mine" / "results.md").is_file()


def test_an_interrupted_suite_is_resumed(write: Write, fakes: Fakes, capsys: Out) -> None:
    file = write(SUITE)
    fakes.fail[("slem", 1)] = KeyboardInterrupt()
    assert run(file, "--only", "t0") == 130
    assert fakes.up == []
    told = capsys.readouterr().err
    assert "interrupted: 2 runs are recorded, 2 are left; go on with" in told
    assert f"vllm-hetero-spec bench {file} --out {file.parent / 'out'} --only t0" in told
    fakes.log.clear()
    assert run(file) == 0
    assert sorted(fakes.order()) == ["alone", "slem"]
    contents = read_results(file.parent / "out")
    assert len(contents.samples) == 4
    assert len(contents.resumed) == 1
    fakes.log.clear()
    assert run(file) == 0
    assert fakes.log == []


def test_sigterm_is_an_interruption(
    write: Write, fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(engines, "start", lambda _, **__: os.kill(os.getpid(), signal.SIGTERM))
    assert run(write(SUITE)) == 130
    assert signal.getsignal(signal.SIGTERM) is before


def test_another_suite_needs_another_folder(write: Write, fakes: Fakes, capsys: Out) -> None:
    assert run(write(SUITE)) == 0
    changed = write(SUITE + "max_tokens: 9\n")
    capsys.readouterr()
    assert run(changed) == 2
    assert "another version of this suite" in capsys.readouterr().err
    assert run(changed, "--fresh") == 0
    assert (changed.parent / "out" / "results.jsonl.bak").is_file()


def test_results_that_cannot_be_written_are_one_sentence(
    write: Write, fakes: Fakes, capsys: Out
) -> None:
    file = write(SUITE)
    assert main(["bench", str(file), "--out", f"{file}/results"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == (
        f"error: cannot write results to {file}/results/results.jsonl: Not a directory; choose "
        "another folder with --out."
    )
    assert fakes.log == []


def test_failed_cells_end_with_an_error(write: Write, fakes: Fakes, capsys: Out) -> None:
    file = write(SUITE)
    fakes.refuse["slem"] = MeasurementError("no memory")
    assert run(file) == 1
    assert "error: 1 cell(s) failed; " in capsys.readouterr().err
    assert "no memory" in (file.parent / "out" / "results.md").read_text()


def test_waves_are_those_of_the_first_session(write: Write, fakes: Fakes) -> None:
    file = write(SUITE.replace("engines_at_once: 4\n", ""))
    assert run(file) == 0  # two at once, because the size of a model on the hub is unknown
    path = file.parent / "out" / "results.jsonl"
    assert read_results(path.parent).header["engines_at_once"] == 2
    path.write_text(
        path.read_text().replace('"engines_at_once": 2, "gpu"', '"engines_at_once": 1, "gpu"')
    )
    assert run(file) == 0
    assert {recorded.run.wave for recorded in read_results(path.parent).samples} == {0, 1}


def test_a_report_needs_no_suite(write: Write, fakes: Fakes, capsys: Out) -> None:
    file = write(SUITE)
    run(file)
    before = (file.parent / "out" / "results.md").read_text()
    (file.parent / "out" / "results.md").unlink()
    fakes.log.clear()
    capsys.readouterr()
    assert main(["bench", "--report", str(file.parent / "out")]) == 0
    assert (file.parent / "out" / "results.md").read_text() == before
    assert "| code | big | slem |" in capsys.readouterr().out
    assert fakes.log == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "give a suite to run, or --report DIR"),
        (["suite.yaml", "--report", "x"], "give a suite to run, or --report DIR"),
        (["absent.yaml"], "cannot read the suite absent.yaml"),
        (["--report", "absent"], "cannot read absent/results.jsonl"),
    ],
)
def test_wrong_arguments_are_one_sentence(
    fakes: Fakes, capsys: Out, arguments: list[str], sentence: str
) -> None:
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert sentence in error


def test_vllm_configurations() -> None:
    drafter = SuiteDrafter("small", "org/small", {"debug": {"translation": "text"}})

    def config(method: str) -> dict[str, object] | None:
        return engines.vllm_config(EngineId("big", method, "small", 3), drafter)

    shared = {"model": "org/small", "num_speculative_tokens": 3}
    for method in METHODS:
        assert config(method) == {"method": method, "debug": {"translation": "text"}, **shared}
    assert config("draft_model") == {"method": "draft_model", **shared}
    assert config("vllm_tli") == config("draft_model") | {"use_heterogeneous_vocab": True}
    assert engines.vllm_config(EngineId("big", "alone"), None) is None
    whole = SuiteDrafter("small", "org/small", {"parallel_drafting": True})
    found = engines.vllm_config(EngineId("big", "draft_model", "small", 3), whole)
    assert found == config("draft_model") | {"parallel_drafting": True}


def write_weights(folder: Path, size: int, element: int) -> None:
    """Write one tensor of zeros: `size` bytes, `element` bytes per number."""
    tensor = {
        "dtype": {2: "BF16", 4: "F32"}[element],
        "shape": [size // element],
        "data_offsets": [0, size],
    }
    header = json.dumps({"a": tensor}).encode()
    with (folder / "model.safetensors").open("wb") as weights:
        weights.write(len(header).to_bytes(8, "little") + header)
        weights.truncate(8 + len(header) + size)


def test_as_many_engines_as_memory_holds(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"big": 3 << 30, "small": 1 << 30}
    for name, size in sizes.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        write_weights(tmp_path / name, size, 4)
    text = GOOD.replace("org/big", "./big").replace("org/small", "./small")
    suite = read_suite(write(text))
    monkeypatch.setattr(engines, "on_gpu", lambda: False)
    # Each engine takes 3 + 1 + 2 GiB; 80 % of the free memory may be used.
    for free, expected in ((30, 4), (16, 2), (4, 1)):
        monkeypatch.setattr(engines, "available_memory_bytes", lambda free=free: free << 30)
        assert engines.at_once_for(suite) == expected
    write_weights(tmp_path / "big", 3 << 30, 2)
    monkeypatch.setattr(engines, "available_memory_bytes", lambda: 30 << 30)
    assert engines.at_once_for(suite) == 2  # 6 + 1 + 2 GiB as float32
    monkeypatch.setattr(engines, "on_gpu", lambda: True)
    assert engines.at_once_for(suite) == 2
    for share, expected in ((0.9, 1), (0.4, 2)):  # two engines do not fit, or fit
        given = f"engine: {{gpu_memory_utilization: {share}}}\n"
        assert engines.at_once_for(read_suite(write(given + text))) == expected
    assert engines.at_once_for(read_suite(write("engines_at_once: 7\n" + text))) == 7
    (tmp_path / "big" / "model.safetensors").write_text("bad")  # the engine reports the fault
    monkeypatch.setattr(engines, "on_gpu", lambda: False)
    assert engines.at_once_for(suite) == 2


def test_engines_at_once_share_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "on_gpu", lambda: True)
    assert engines.device_share(2) == {"gpu_memory_utilization": 0.45}
    assert engines.device_share(1) == {}
    monkeypatch.setattr(engines, "on_gpu", lambda: False)
    assert engines.device_share(2) == {}


def test_hugging_face_gets_the_engine_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    specs: list[HuggingFaceSpec] = []
    monkeypatch.setattr(
        huggingface_engine, "HuggingFaceEngine", lambda spec, verbose: specs.append(spec)
    )
    (target,) = FAKE_SUITE.targets
    given = {"dtype": "float16", "revision": "v1", "tokenizer": "org/t", "trust_remote_code": True}
    target = dataclasses.replace(target, engine={**given, "max_model_len": 64})
    suite = dataclasses.replace(FAKE_SUITE, targets=(target,))
    engines.start(EngineId("big", "hf_assisted", "small", 3), suite, 1)
    assert specs == [
        HuggingFaceSpec("org/big", assistant="org/small", num_assistant_tokens=3, **given)
    ]


def test_a_number_of_nodes_may_be_text(monkeypatch: pytest.MonkeyPatch) -> None:
    specs: list[vllm_engine.EngineSpec] = []
    monkeypatch.setattr(vllm_engine, "VllmEngine", lambda spec, verbose: specs.append(spec))
    (target,) = FAKE_SUITE.targets
    drafter = dataclasses.replace(target.drafters[0], speculative={"tree_nodes": "8"})
    suite = dataclasses.replace(
        FAKE_SUITE, targets=(dataclasses.replace(target, drafters=(drafter,)),)
    )
    engines.start(EngineId("big", "slem", "small", 3), suite, 1)
    assert [spec.max_batch_size for spec in specs] == [9 * max(FAKE_SUITE.batch_sizes)]


@pytest.mark.parametrize("at_once", [1, 2])
def test_too_little_shared_memory_has_a_remedy(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MeasurementError("the engine ended\n  ValueError: No available memory for the cache")

    monkeypatch.setattr(vllm_engine, "VllmEngine", fail)
    monkeypatch.setattr(engines, "on_gpu", lambda: True)
    with pytest.raises(MeasurementError, match="No available memory") as failed:
        engines.start(EngineId("big", "alone"), FAKE_SUITE, at_once)
    assert ("--engines-at-once 1" in str(failed.value)) == (at_once > 1)


def test_vocabularies_that_agree_and_differ(demo_pair: Path) -> None:
    def differ(drafter: str, **engine: str) -> str | None:
        other = SuiteDrafter("d", str(demo_pair / drafter))
        target = Target("t", str(demo_pair / "target"), (other,), ("code",), engine)
        return vocabularies_differ(target, other)

    assert differ("target-wide") is None
    assert differ("drafter") == "target and drafter have different vocabularies"
    # An engine uses the target's tokenizer, not the drafter's.
    assert differ("drafter", tokenizer=str(demo_pair / "target")) is not None


@pytest.mark.engine
@pytest.mark.full
def test_a_real_suite(demo_pair: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_SPEC_DEMO", str(demo_pair))
    file = write("""\
targets:
  - model: demo:target
    drafters: [{model: demo:drafter, speculative: {controller: fixed}}]
methods: [slem]
peers: [alone]
datasets:
  code: {file: demo:prompts.jsonl, count: 2, max_prompt_chars: 300}
max_tokens: 16
repeats: 1
""")
    assert run(file) == 0
    out = file.parent / "out"
    alone, slem = rows_of(read_results(out))
    assert slem.identical == (2, 2)
    assert slem.figures.tokens == alone.figures.tokens <= 2 * 16
    assert slem.figures.drafts > 0
    assert slem.figures.acceptance_length == pytest.approx(
        1 + slem.figures.accepted_tokens / slem.figures.drafts
    )
    assert slem.figures.ttft.median > 0
    assert slem.figures.peak_memory_bytes > 1 << 20
    summary = json.loads((out / "summary.json").read_text())
    assert [row["method"] for row in summary["rows"]] == ["alone", "slem"]
