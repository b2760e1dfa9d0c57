# SPDX-License-Identifier: Apache-2.0
"""Suite files: valid contents, and the line number of each mistake."""

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from bench_fakes import GOOD

from vllm_hetero_spec.bench import datasets
from vllm_hetero_spec.bench.plan import make_plan
from vllm_hetero_spec.bench.suite import (
    KINDS,
    PEERS,
    Suite,
    SuiteDrafter,
    read_suite,
    speculative_config,
)
from vllm_hetero_spec.errors import ConfigError
from vllm_hetero_spec.options import METHODS

Write = Callable[[str], Path]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "bench"


def with_dataset(dataset: str) -> str:
    """Return GOOD with another dataset."""
    return GOOD.replace("{builtin: mixed, count: 2}", dataset)


def refused(file: Path) -> tuple[int, str]:
    """Return the line and the sentence with which a suite is refused."""
    with pytest.raises(ConfigError) as found:
        read_suite(file)
    place, _, sentence = str(found.value).partition(": ")
    name, _, line = place.rpartition(":")
    assert name == str(file)
    assert "\n" not in sentence
    return int(line), sentence


def test_defaults(write: Write) -> None:
    suite = read_suite(write(GOOD))
    assert (suite.name, suite.methods, suite.peers) == ("suite", METHODS, tuple(PEERS))
    assert suite.targets[0].name == "big"
    assert suite.targets[0].drafters == (SuiteDrafter("small", "org/small"),)
    assert (suite.batch_sizes, suite.temperatures) == ((1,), (0.0,))
    assert suite.num_speculative_tokens == (4,)
    assert (suite.repeats, suite.seed, suite.top_p, suite.ignore_eos) == (3, 0, 1.0, False)
    assert suite.engines_at_once is None
    assert len(suite.prompts["big"]["code"]) == 2


def test_all_keys(write: Write) -> None:
    suite = read_suite(
        write("""\
name: all
targets:
  - model: org/big
    name: tall
    drafters:
      - {model: org/small, name: one, speculative: {kv_cache_memory_bytes: 64MiB}}
      - org/tiny
    datasets: [file]
    engine: {dtype: float16}
  - {model: org/other, drafters: [org/small]}
methods: [slem]
peers: [alone, vllm_tli]
datasets:
  file: {file: prompts.jsonl}
  built: {builtin: mixed, max_prompt_chars: 10}
batch_sizes: [2, 1]
temperatures: [1, 0.5]
num_speculative_tokens: [3, 5]
max_tokens: 7
repeats: 2
ignore_eos: true
seed: null
top_p: 0.9
engine: {dtype: bfloat16, max_model_len: 100}
engines_at_once: 2
""")
    )
    tall, other = suite.targets
    assert (tall.name, tall.datasets, other.datasets) == ("tall", ("file",), ("file", "built"))
    assert tall.engine == {"dtype": "float16", "max_model_len": 100}
    assert other.engine == {"dtype": "bfloat16", "max_model_len": 100}
    assert [drafter.name for drafter in tall.drafters] == ["one", "tiny"]
    assert speculative_config("slem", tall.drafters[0], 3) == {
        "method": "slem",
        "model": "org/small",
        "num_speculative_tokens": 3,
        "kv_cache_memory_bytes": "64MiB",
    }
    assert suite.prompts["tall"] == {"file": ("a", "b")}
    assert {len(text) for text in suite.prompts["other"]["built"]} == {10}
    assert (suite.batch_sizes, suite.temperatures) == ((2, 1), (1.0, 0.5))
    assert (suite.seed, suite.engines_at_once, suite.ignore_eos) == (None, 2, True)


def test_settings_of_a_drafter_are_rows_of_their_own(write: Write) -> None:
    """A row is named drafter:setting. A setting overrides the drafter's keys, and is validated."""
    drafter = (
        "{model: org/small, speculative: {controller: fixed, tree_nodes: 4}, "
        "settings: {chain: {tree_nodes: 0}, ahead: {tree_nodes: 0, draft_ahead: true}}}"
    )
    good = "methods: [slem]\n" + GOOD
    suite = read_suite(write(good.replace("org/small", drafter)))
    assert [(each.name, each.speculative, each.settings) for each in suite.targets[0].drafters] == [
        ("small:chain", {"controller": "fixed", "tree_nodes": 0}, {}),
        ("small:ahead", {"controller": "fixed", "tree_nodes": 0, "draft_ahead": True}, {}),
    ]
    plan = make_plan(suite, 9, lambda target, drafter: None)
    cells = [cell.engine for cell in plan.waves[0].groups[0]]
    drafting = [(engine.method, engine.drafter) for engine in cells if engine.drafter]
    assert drafting[:3] == [
        ("slem", "small:chain"),
        ("slem", "small:ahead"),
        ("vllm_tli", "small:chain"),  # peers run each model once, without settings
    ]
    assert len(drafting) == 5
    spelt = drafter.replace("tree_nodes: 4", "tree-nodes: 4")
    assert read_suite(write(good.replace("org/small", spelt))).targets == suite.targets
    wrong = drafter.replace("draft_ahead: true", "draft_ahead: maybe")
    line, sentence = refused(write(good.replace("org/small", wrong)))
    assert line == 4
    assert "draft_ahead is 'maybe'" in sentence


@pytest.mark.parametrize(
    ("key", "where"),
    [
        ("method", "by methods in a suite"),
        ("model", "as the drafter's model"),
        ("num_speculative_tokens", "by num_speculative_tokens in a suite"),
        ("num-speculative-tokens", "by num_speculative_tokens in a suite"),
    ],
)
def test_keys_that_name_rows_are_set_in_one_place(write: Write, key: str, where: str) -> None:
    """Only a setting may change the lookahead, because each setting has its own row name."""
    given = f"{{{key}: slem}}"
    drafter = f"\n      - model: org/small\n        speculative: {given}"
    line, sentence = refused(write(GOOD.replace("[org/small]", drafter)))
    assert line == 5
    assert sentence.startswith(f"targets[0].drafters[0].speculative.{key} is set {where}")
    assert sentence.endswith("leave it out here.")
    drafter = f"[{{model: org/small, settings: {{k2: {given.replace('slem', '2')}}}}}]"
    file = write(GOOD.replace("[org/small]", drafter))
    if where.startswith("by num"):
        (setting,) = read_suite(file).targets[0].drafters
        assert setting.name == "small:k2"
        assert setting.speculative == {"num_speculative_tokens": 2}
    else:
        assert f"settings.k2.{key} is set {where}" in refused(file)[1]


def test_every_method_has_a_kind() -> None:
    assert set(METHODS) <= set(KINDS)
    assert not set(METHODS) & set(PEERS)


def test_digest(write: Write) -> None:
    plain = read_suite(write(GOOD)).digest
    assert read_suite(write("# a comment\n" + GOOD)).digest == plain
    assert read_suite(write(GOOD + "repeats: 4\n")).digest != plain
    by_file = with_dataset("{file: prompts.jsonl}")
    before = read_suite(write(by_file)).digest
    (write(by_file).parent / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "c"}\n')
    assert read_suite(write(by_file)).digest != before


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("methods: [slam]", "methods[0] is 'slam' (did you mean 'slem'?)"),
        ("peers: [alone, hf]", "peers[1] is 'hf'; supported: alone, "),
        ("\n\npeers: [alone, alone]", "peers[1] repeats 'alone'"),
        ("batch_sizes: [1, 0]", "batch_sizes[1] is 0; it must be a number from"),
        ("batch_sizes: [1.5]", "batch_sizes[0] is 1.5"),
        ("batch_sizes: []", "batch_sizes is []; it must be a list"),
        ("batch_sizes: 4", "batch_sizes is 4; it must be a list"),
        ("batch_sizes: [2, 3]", "batch size 3 needs as many prompts"),
        ("temperatures: [-1]", "temperatures[0] is -1; it must be a num"),
        ("temperatures: [.nan]", "temperatures[0] is nan"),
        ("temperatures: [true]", "temperatures[0] is True"),
        ("temperatures: [1, 1.0]", "temperatures[1] repeats 1.0"),
        ("num_speculative_tokens: [400]", "[0] is 400; it must be a number up to 64"),
        ("max_tokens: 0", "max_tokens is 0"),
        ("repeats: many", "repeats is 'many'"),
        ("seed: -1", "seed is -1"),
        ("top_p: 2", "top_p is 2"),
        ("ignore_eos: 1", "ignore_eos is 1; it must be true or false"),
        ("engines_at_once: al", "must be auto or a number"),
        ("engines_at_once: 0", "engines_at_once is 0"),
        ("engine: [a]", "engine is ['a']; it must be a mapping"),
        ("engine:\n  model: x", "is set by the benchmark"),
        (
            "engine:\n  tensor_parallel_size: '2'",
            "engine.tensor_parallel_size is '2'; it must be a whole number from 1",
        ),
        ("name: ''", "name is ''; it must be a string"),
        ("seed: 1\nseed: 2", "'seed' appears twice; names must differ"),
    ],
)
def test_mistakes_before_the_targets_are_refused(write: Write, lines: str, sentence: str) -> None:
    line, found = refused(write(f"{lines}\n{GOOD}"))
    assert sentence in found
    assert line == lines.count("\n") + 1


@pytest.mark.parametrize(
    ("old", "new", "line", "sentence"),
    [
        ("datasets:", "dataset:", 4, "the suite has an unknown key 'dataset' (did you mean"),
        ("drafters:", "drafter:", 3, "targets[0] has an unknown key 'drafter' (did you m"),
        ("org/big", "./absent", 2, "the target folder "),
        ("org/big", "demo:target", 2, "make it with `python scripts/make_demo"),
        ("[org/small]", "[/absent/folder]", 3, "the drafter folder /absent/folder does not"),
        ("[org/small]", "[]", 3, "targets[0].drafters is []"),
        ("[org/small]", "[org/small, other/small]", 3, "targets[0].drafters[1] repeats 'small'"),
        (
            "org/small",
            "{model: org/small, name: 'small:a'}",  # the name of a setting of another drafter
            3,
            "name is 'small:a'; in the rows a colon parts a drafter's name from its setting's: "
            "write 'small-a'.",
        ),
        ("[org/small]", "[{name: x}]", 3, "targets[0].drafters[0] has no model"),
        ("[org/small]", "[{speculative: {}}]", 3, "targets[0].drafters[0] has no model"),
        ("[org/small]", "['']", 3, "targets[0].drafters[0].model is ''; it must be a string"),
        ("org/big", "3", 2, "targets[0].model is 3; it must be a string"),
        ("org/big", "org/big\n    name: 3", 3, "targets[0].name is 3; it must be a string"),
        (
            "[org/small]",
            "\n      - org/tiny\n      - {model: org/small, speculative: {tree_node: 8}}",
            5,
            "the speculative configuration has an unknown key 'tree_node' (did you mean",
        ),
        ("[org/small]", "[org/small]\n    datasets: [cod]", 4, "datasets[0] is 'cod' (did you me"),
        ("[org/small]", "[org/small]\n  - {model: a/big, drafters: [a/b]}", 4, "repeats 'big'"),
        ("    drafters: [org/small]\n", "", 2, "targets[0] has no drafters"),
        ("{builtin: mixed, count: 2}", "{}", 5, "needs one of file, builtin, hf; found none"),
        ("builtin: mixed", "builtin: mixed, file: x", 5, "found file and builtin"),
        ("mixed", "mxed", 5, "datasets.code.builtin is 'mxed' (did you mean 'mixed'?)"),
        ("count: 2", "count: 0", 5, "datasets.code.count is 0"),
        ("count: 2", "count: 99", 5, "count is 99, and there are 8 prompts; `repe"),
        ("count: 2", "repeat: true", 5, "datasets.code.repeat needs `count`"),
        ("count: 2", "count: 2, repeat: 1", 5, "datasets.code.repeat is 1"),
        ("count: 2", "split: test", 5, "datasets.code.split goes with hf, not with builtin"),
        ("count: 2", "prompt: '{text}'", 5, "a row has no 'text'; it has: prompt"),
        ("count: 2", "prompt: 'text'", 5, "names no column; write one in braces"),
        ("count: 2", "prompt: '{text'", 5, "datasets.code.prompt is no template"),
        ("count: 2", "where: {kind: 1}", 5, "a row has no 'kind'"),
        ("count: 2", "max_prompt_chars: -1", 5, "datasets.code.max_prompt_chars is -1"),
        ("count: 2", "chat_template: 1", 5, "datasets.code.chat_template is 1"),
        ("{builtin: mixed, count: 2}", "{file: absent.jsonl}", 5, "absent.jsonl does not exist"),
        ("{builtin: mixed, count: 2}", "{hf: org/data}", 5, "needs a split, as `split: test`"),
        ("{builtin: mixed, count: 2}", "prompts", 5, "datasets.code is 'prompts'; it must be a ma"),
        ("datasets:\n  code: {builtin: mixed, count: 2}\n", "", 1, "the suite has no datasets"),
        ("datasets:\n  code: {builtin: mixed, count: 2}\n", "datasets: {}", 4, "datasets is empty"),
        ("datasets:", "seed: [1\ndatasets:", 5, "not YAML"),
        (GOOD, "", 1, "the suite is empty"),
        (GOOD, "- a", 1, "the suite is ['a']; it must be a mapping"),
    ],
)
def test_mistakes_are_refused_with_their_line(
    write: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    old: str,
    new: str,
    line: int,
    sentence: str,
) -> None:
    monkeypatch.setenv("HETERO_SPEC_DEMO", str(tmp_path / "no-demo"))
    assert old in GOOD
    found_line, found = refused(write(GOOD.replace(old, new, 1)))
    assert sentence in found
    assert found_line == line


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ('{"prompt": "a"}\n{"prompt": "  "}\n', "datasets.code has an empty prompt, number 2"),
        ('{"prompt": "a"}\n[1]\n', "line 2 is not a JSON object"),
        ("nonsense\n", "line 1 is not a JSON object"),
        ('{"prompt": 3}\n', "'prompt' of a row is 3, which is no text"),
        ('{"promt": "a"}\n', "has no 'prompt' (did you mean 'promt'?); it has: promt"),
        ("\n", "datasets.code has no prompts"),
    ],
)
def test_mistakes_in_prompts_are_refused(write: Write, lines: str, sentence: str) -> None:
    file = write(with_dataset("{file: prompts.jsonl}"))
    (file.parent / "prompts.jsonl").write_text(lines)
    line, found = refused(file)
    assert line == 5
    assert sentence in found


def prompts_of(suite: Suite) -> tuple[str, ...]:
    return suite.prompts["big"]["code"]


def test_templates_columns_and_filters(write: Write) -> None:
    dataset = (
        "{file: prompts.jsonl, prompt: 'Say {turns[0]}!', where: {kind: [a, b]}, "
        "max_prompt_chars: 5}"
    )
    file = write(with_dataset(dataset))
    (file.parent / "prompts.jsonl").write_text(
        '{"turns": ["{braces} stay"], "kind": "a"}\n'
        '{"turns": ["no"], "kind": "c"}\n'
        '{"turns": ["more than five"], "kind": "b"}\n'
    )
    assert prompts_of(read_suite(file)) == ("Say {brac!", "Say more !")


def test_repeated_prompts(write: Write) -> None:
    file = write(GOOD.replace("count: 2", "count: 10, repeat: true"))
    prompts = prompts_of(read_suite(file))
    assert len(prompts) == 10
    assert len(set(prompts)) == 8
    assert prompts[8:] == prompts[:2]


def test_chat_templates_are_the_targets(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tokenizer:
        chat_template = "some"
        bos_token, bos_token_id = "<s>", 1

        def __call__(self, text: str) -> SimpleNamespace:
            return SimpleNamespace(input_ids=[1])

        def apply_chat_template(self, turns: list[dict[str, str]], **how: bool) -> str:
            assert how == {"tokenize": False, "add_generation_prompt": True}
            (turn,) = turns
            return f"<s>[{turn['role']}] {turn['content']} [reply]"

    monkeypatch.setattr(datasets, "tokenizer_of", lambda model, engine: Tokenizer())
    dataset = "{file: prompts.jsonl, chat_template: true}"
    file = write(with_dataset(dataset))
    # vLLM adds the <s> itself.
    assert prompts_of(read_suite(file)) == ("[user] a [reply]", "[user] b [reply]")
    monkeypatch.setattr(Tokenizer, "chat_template", None)
    sentence = "datasets.code.chat_template is true, and org/big has no chat template."
    assert refused(file) == (5, sentence)


HF = "{hf: org/data, config: small, split: test, prompt: '{text}', count: 2}"


def test_hugging_face_rows_are_streamed(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*names: str, **options: object) -> object:
        asked.append((names, options))
        return iter([{"text": "a"}, {"text": "b"}, {"text": "c"}])

    library = SimpleNamespace(
        load_dataset=load_dataset, config=SimpleNamespace(HF_DATASETS_OFFLINE=False)
    )
    monkeypatch.setattr(importlib, "import_module", lambda name: library)
    suite = read_suite(write(with_dataset(HF)))
    assert prompts_of(suite) == ("a", "b")
    assert asked == [(("org/data", "small"), {"split": "test", "streaming": True})]

    def fail(*names: str, **options: object) -> object:
        raise RuntimeError("Dataset scripts are not supported\nmore")

    library.load_dataset = fail
    sentence = "cannot load the dataset org/data: Dataset scripts are not supported."
    assert refused(write(with_dataset(HF))) == (5, sentence)


def test_a_missing_library_is_named(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    sentence = "the dataset org/data needs datasets: `pip install datasets`."
    assert refused(write(with_dataset(HF))) == (5, sentence)


def test_hugging_face_rows_of_a_folder(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has the dataset's name in the suite. Nothing is downloaded."""
    monkeypatch.setattr(importlib, "import_module", None)  # `datasets` is not needed
    monkeypatch.setenv("HETERO_SPEC_PROMPTS", str(tmp_path / "rows"))
    suite = write(with_dataset(HF))
    line, sentence = refused(suite)
    assert line == 5
    assert sentence.startswith(f"HETERO_SPEC_PROMPTS is {tmp_path}/rows, which has no code.jsonl;")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "code.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n{"text": "c"}\n')
    assert prompts_of(read_suite(suite)) == ("a", "b")


@pytest.mark.parametrize("name", sorted(file.stem for file in EXAMPLES.glob("*.yaml")))
def test_examples_are_suites(
    name: str, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suites = "vllm_hetero_spec.bench.suite"
    # Prompts of these suites are not in the repository.
    if name in ("edits", "long", "paper", "spec_bench") or name.startswith("real"):
        monkeypatch.setattr(f"{suites}.load_dataset", lambda dataset, name: ["a prompt"] * 64)
        monkeypatch.setattr(f"{suites}.in_chat_template", lambda texts, *_: texts)
        monkeypatch.setattr(datasets, "hub_library", lambda hf: None)
    file = EXAMPLES / f"{name}.yaml"
    text = file.read_text()
    if name == "spec_bench":
        (tmp_path / "question.jsonl").write_text("{}\n")
        file = tmp_path / file.name
        file.write_text(text)
    if name == "long":
        (tmp_path / "long").mkdir()
        for length in (2000, 8000):
            (tmp_path / "long" / f"prompts-{length}.jsonl").write_text("{}\n")
    if name in ("long", "parallel_code"):  # their models are not in the repository
        file = tmp_path / file.name
        file.write_text(re.sub(r"\./\w+/(?=[a-z]+$)", "org/", text, flags=re.MULTILINE))
    suite = read_suite(file)
    assert suite.name.replace("_", "-") == name.replace("_", "-")
    assert all(target.drafters for target in suite.targets)
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")
    assert set(suite.methods) <= set(METHODS)
