# SPDX-License-Identifier: Apache-2.0
"""Complete outputs of the commands, compared with files in tests/golden.

HETERO_SPEC_GOLDEN=write rewrites the files. Review the difference before you commit it.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import advice_fakes
import pytest
from advice_fakes import ALONE, CONFIG, WORKER, World
from recipes import build_bytes

from vllm_hetero_spec.bench import engines
from vllm_hetero_spec.bench.load import MeasurementError, Sample, Trace
from vllm_hetero_spec.bench.suite import read_suite
from vllm_hetero_spec.cli import doctor
from vllm_hetero_spec.cli.health import Finding
from vllm_hetero_spec.cli.main import main
from vllm_hetero_spec.errors import ConfigError

Prints = Callable[..., None]
GOLDEN = Path(__file__).parent / "golden"
# Users have results of this suite from earlier versions. `bench` must not measure them again.
SUITE = """\
name: stored
targets:
  - model: org/big
    name: tall
    drafters:
      - {model: org/small, speculative: {kv_cache_memory_bytes: 64MiB}}
      - model: org/tiny
        settings: {chain: {}, tree: {tree-nodes: 4, num_speculative_tokens: 6}}
    datasets: [built]
    engine: {dtype: float16}
methods: [slem, tli]
peers: [alone, vllm_tli, hf_assisted]
datasets:
  built: {builtin: mixed, max_prompt_chars: 10}
  more: {builtin: mixed, count: 3, prompt: 'Say {prompt}'}
batch_sizes: [2, 1]
temperatures: [1, 0.5]
num_speculative_tokens: [3, 5]
max_tokens: 7
repeats: 2
ignore_eos: true
seed: null
top_p: 0.9
engine: {max_model_len: 100}
engines_at_once: 2
"""
TEXT = "hello hello\nthe yellow hall, hélas!\n"


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(engines, "available_memory_bytes", lambda: 64 << 30)


def agrees(name: str, found: str, folder: Path) -> None:
    """Compare with a golden file, in which TMP stands for the test's folder."""
    found = found.replace(str(folder), "TMP")
    file = GOLDEN / name
    if os.environ.get("HETERO_SPEC_GOLDEN") == "write":
        file.write_text(found, encoding="utf-8")
    assert found == file.read_text(encoding="utf-8")


def model(folder: Path, merges: str, special: Sequence[str]) -> str:
    """Write a folder with a byte-level tokenizer, a configuration and a dummy weight file."""
    folder.mkdir()
    build_bytes(merges, special).save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": special[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.bin").write_bytes(b"12345678")
    return str(folder)


@pytest.fixture
def prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Prints:
    """A function that runs a command line and compares its output with a golden file."""

    def run(name: str, *arguments: str, code: int = 0) -> None:
        assert main(list(arguments)) == code
        agrees(name, capsys.readouterr().out, tmp_path)

    return run


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    ends = ("<|end|>", "<|user|>", "<|pad|>")
    return [
        model(tmp_path / "target", "h e,l l,he ll,hell o", ends),
        model(tmp_path / "drafter", "h e,l o", ends[:2]),
    ]


# ---- bench --------------------------------------------------------------------------------------


def test_a_report_of_stored_results(tmp_path: Path, prints: Prints) -> None:
    """The results contain two sessions with failures, peers, drafter settings and skipped cells."""
    shutil.copy(GOLDEN / "results.jsonl", tmp_path)
    prints("bench.txt", "bench", "--report", str(tmp_path))
    agrees("results.md", (tmp_path / "results.md").read_text(), tmp_path)
    agrees("summary.json", (tmp_path / "summary.json").read_text(), tmp_path)


def test_the_digest_of_earlier_versions(tmp_path: Path) -> None:
    """With another digest, `bench` could not continue a folder of results."""
    file = tmp_path / "suite.yaml"
    file.write_text(SUITE)
    suite = read_suite(file)
    agrees("suite.json", json.dumps(suite.described(), indent=2) + "\n", tmp_path)
    agrees("digest.txt", suite.digest + "\n", tmp_path)


# ---- compare ------------------------------------------------------------------------------------


def compared(pair: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a `compare` command line. With the drafter, the last token differs."""
    drafted = Sample(
        [
            Trace([1, 2, 3], "abc [x]", 0.0, [0.3, 0.5], [1, 2]),
            Trace([4, 5, 7], "d" * 300, 0.5, [1.0], [3]),
        ],
        1.0, 4, 10, 6, [3, 2, 1], worker=WORKER, runner="V1", dtype="bfloat16",
    )  # fmt: skip
    own = Sample(
        [
            Trace([1, 2, 3], "abc [x]", 0.0, [0.2, 0.6, 1.0], [1, 1, 1]),
            Trace([4, 5, 6], "e" * 300, 1.0, [1.4, 1.7, 2.0], [1, 1, 1]),
        ],
        2.0, runner="V2", dtype="bfloat16",
    )  # fmt: skip
    monkeypatch.setattr(engines, "start", advice_fakes.Answers(own, drafted).start)
    file = Path(pair[0]).parent / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    return ["compare", *pair, "--prompts", str(file)]


def test_comparisons(
    pair: list[str],
    tmp_path: Path,
    prints: Prints,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = compared(pair, monkeypatch)
    assert main(arguments) == 0
    assert main([*arguments, "--temperature", "0.5", "--method", "slem"]) == 0
    printed = capsys.readouterr()
    agrees("compare.txt", printed.out, tmp_path)
    agrees("compare-progress.txt", printed.err, tmp_path)
    prints("compare.json", *arguments, "--json")


# ---- advise -------------------------------------------------------------------------------------

PAYS = {"good": World((15, 16, 17)), "same": World((9, 11, 10)), "slow": World((8,), accepted=0)}
WORLDS: dict[str, dict[str, World]] = {
    "recommended": PAYS,
    "partly": {"good": World((12,), {4: 0.5}), "same": World((9,)), "slow": World(accepted=None)},
    "slower": dict.fromkeys(PAYS, World((9,))),
    "failed": PAYS | {
        "good": World(refuse=ConfigError("no such drafter")),
        "same": World(fail_at=(4, MeasurementError("no memory\n  ValueError: none"))),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", WORLDS)
def test_advice(
    name: str, pair: list[str], tmp_path: Path, prints: Prints, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes = advice_fakes.Fakes({ALONE: World((10.0,)), **WORLDS[name]})
    monkeypatch.setattr(engines, "start", fakes.start)
    drafters = [model(tmp_path / each, "h e,l o", ["<|end|>"]) for each in WORLDS[name]]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"prompt": "{text}"}}\n' for text in advice_fakes.PROMPTS))
    arguments = ["advise", pair[0], *drafters, f"{tmp_path}/drafter", "--prompts", str(file)]
    arguments += ["--max-tokens", "13", "--batch-sizes", "4", "1"]
    code = 1 if name == "failed" else 0
    prints(f"advise-{name}.txt", *arguments, code=code)
    prints(f"advise-{name}.json", *arguments, "--json", code=code)


def test_advice_without_a_measurement(pair: list[str], prints: Prints) -> None:
    prints("advise-statistics.txt", "advise", *pair, "--statistics-only")


# ---- inspect ------------------------------------------------------------------------------------


def test_inspected_tokenizers(
    pair: list[str], tmp_path: Path, prints: Prints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    prints("inspect.json", "inspect", *pair, "--text", "text.txt", "--json")
    prints("inspect.txt", "inspect", *pair, "--text", "text.txt")


# ---- doctor -------------------------------------------------------------------------------------


def test_findings_of_the_doctor(prints: Prints, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [
        Finding("versions", True, "torch [2]"),
        Finding("plugin", False, "vLLM does not see it", "install it"),
        Finding("hooks", False, "not applied"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda *, run: iter(findings))
    prints("doctor.txt", "doctor", code=1)
    prints("doctor.json", "doctor", "--json", code=1)


def test_nodes_of_a_cluster(prints: Prints, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = {
        "vllm-hetero-spec": "0.2.0",
        "vLLM": "0.33.0",
        "Ray": "2.60.0",
        "Python": "3.12.1",
        "Ray device": "GPU",
        "drafter": "there",
    }
    nodes = {"a": sound, "b": sound | {"vLLM": "0.32.0", "drafter": None}, "c": "GoneError: [gone]"}
    monkeypatch.setattr(doctor, "ask_nodes", lambda drafter: nodes)
    prints("doctor-ray.txt", "doctor", "--ray", "org/small", code=1)
    prints("doctor-ray.json", "doctor", "--ray", "org/small", "--json", code=1)
