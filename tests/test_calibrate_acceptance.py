# SPDX-License-Identifier: Apache-2.0
"""Rows of two models at the same places of a text, and the figures made of them."""

import json
import sys
from pathlib import Path

import calibrate_acceptance
import pytest
import torch
from _demo_corpus import Corpus, standard_library
from _demo_training import Budget, ModelSpec
from calibrate_acceptance import PairRows, measure
from oracle_acceptance import load
from train_demo_models import PairBudget, train_pair

from vllm_hetero_spec.draft.slrs import MergeSpan

TARGET = ModelSpec("byte_bpe", vocab_size=512, layers=1, heads=1)
DRAFTER = ModelSpec("sentencepiece", vocab_size=512, layers=1, heads=1)
TEXTS = (
    'def naïve(self):\n    return "日本 😀"  # a comment that goes on\n',
    "for number in range(10):\n    print(number, file=sys.stderr)\n",
    "class Stack:\n    def push(self, item):\n        self.items.append(item)\n",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = standard_library()
    corpus = Corpus(train=library.train[:4], heldout=dict([*library.heldout.items()][:1]))
    out = tmp_path_factory.mktemp("models") / "pair"
    budget = PairBudget(Budget(steps=3), Budget(steps=1), Budget(steps=3))
    train_pair(out, TARGET, DRAFTER, budget, corpus=corpus)
    return out


@pytest.fixture(scope="module")
def pair(folder: Path) -> PairRows:
    return PairRows(load(folder / "target"), load(folder / "drafter"))


@pytest.mark.parametrize("text", TEXTS)
def test_both_rows_are_behind_the_same_text(folder: Path, pair: PairRows, text: str) -> None:
    rows = pair.read(text, 6, 64, torch.Generator().manual_seed(1))
    (target, tokenizer), (drafter, _) = load(folder / "target"), load(folder / "drafter")
    ids = tokenizer(text)["input_ids"]
    prefixes = {pair.target.decode_bytes(ids[:end]): ids[:end] for end in range(1, len(ids) + 1)}
    assert len(rows.contexts) == len({tuple(context) for context in rows.contexts}) == 6
    for place, context in enumerate(rows.contexts):
        read = pair.drafter.decode_bytes(context).removeprefix(b" ")
        assert text.startswith(read.decode())  # whole characters
        with torch.inference_mode():
            p = target(torch.tensor([prefixes[read]])).logits[0, -1]
            q = drafter(torch.tensor([context])).logits[0, -1]
        assert torch.allclose(rows.p[place], p, atol=1e-4)
        drafted = rows.q[place].isfinite()
        assert torch.allclose(rows.q[place][drafted], q[drafted], atol=1e-4)
        assert not drafted[: drafter.generation_config.eos_token_id[0]].any()  # <unk>, <s>
        assert -1 <= rows.greedy[place] < len(tokenizer)


def test_places_follow_from_the_seed(pair: PairRows) -> None:
    def contexts(seed: int) -> list[list[int]]:
        return pair.read(TEXTS[2], 5, 64, torch.Generator().manual_seed(seed)).contexts

    assert contexts(0) == contexts(0) != contexts(1)


def test_a_text_too_short_has_no_places(pair: PairRows) -> None:
    assert pair.read("x", 4, 64, torch.Generator()) is None
    with pytest.raises(ValueError, match="no text is long enough"):
        measure(pair, ["x", "y"], [1.0], 4, 64, [MergeSpan()], 0)
    single, places = measure(pair, [TEXTS[0], "x"], [1.0], 4, 64, [MergeSpan()], 0)
    assert places == 4
    assert single[1.0]["tli"].error is None


def test_figures_of_every_method(pair: PairRows) -> None:
    results, places = measure(
        pair, TEXTS, [0.5, 1.0], 5, 64, [MergeSpan(), MergeSpan(2, 4), MergeSpan(3)], 0
    )
    assert places == 15
    assert list(results) == [0.5, 1.0]
    for figures in results.values():
        value = {name: figure.value for name, figure in figures.items()}
        assert all(0 <= share <= 1 for share in value.values())
        assert value["union"] <= value["tli"] <= value["target_shared"]
        assert value["race_tli"] <= value["tli"]
        slrs = ["slrs_2", "slrs_2_of_4", "slrs_3"]
        methods = sorted(value.keys() - {"target_shared", "drafter_shared", "race_tli", "union"})
        assert methods == ["push_forward", "slem", *slrs, "tli"]


def test_the_script_prints_what_it_measures(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    options = ["--target", folder / "target", "--drafter", folder / "drafter", "--text", file]
    options += ["--places", "2", "--temperatures", "1.0"]
    monkeypatch.setattr(sys, "argv", ["calibrate", *map(str, options), "--json"])
    assert calibrate_acceptance.main() == 0
    (data,) = json.loads(capsys.readouterr().out)
    assert data["places"] == 6
    assert {"value", "error"} == data["figures"]["slrs_2"].keys()
    monkeypatch.setattr(sys, "argv", ["calibrate", *map(str, options)])
    assert calibrate_acceptance.main() == 0
    printed = capsys.readouterr().out
    assert f"| {data['figures']['tli']['value']:.3f} ± " in printed
    assert "| target_shared | drafter_shared | union | tli | push_forward | slrs_2 | " in printed
