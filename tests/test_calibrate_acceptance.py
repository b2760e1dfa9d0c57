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
from _markdown import compared, markdown_table, with_error
from calibrate_acceptance import title, verdict
from oracle_acceptance import load
from train_demo_models import PairBudget, train_pair

from vllm_hetero_spec.advice.alphas import measure
from vllm_hetero_spec.advice.place_rows import PairRows
from vllm_hetero_spec.draft.calibration import Estimate
from vllm_hetero_spec.draft.slrs import Reach

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
    with pytest.raises(ValueError, match="two groups"):
        measure(pair, [TEXTS[0], "x"], [1.0], 4, 64, [Reach()], 0)


def test_figures_of_every_method(pair: PairRows) -> None:
    results, places = measure(pair, TEXTS, [0.5, 1.0], 5, 64, [Reach(), Reach(2, 4), Reach(3)], 0)
    assert places == 15
    assert [result.temperature for result in results] == [0.5, 1.0]
    for result in results:
        value = {name: figure.value for name, figure in result.figures.items()}
        assert all(0 <= share <= 1 for share in value.values())
        assert value["union"] <= value["tli"] <= value["target_shared"]
        assert value["ersd_slrs"] <= value["slrs_3"]
        slrs = ["slrs_2", "slrs_2_of_4", "slrs_3"]
        assert sorted(result.ranking) == ["push_forward", "slem_greedy", *slrs, "tli"]
        assert verdict(result).startswith(
            f"temperature {result.temperature:g}: {title(result.ranking[0])} comes first"
        )


def test_a_greedy_target_accepts_by_argument(pair: PairRows) -> None:
    (greedy, warm), _ = measure(pair, TEXTS, [0.0, 1.0], 5, 64, [Reach()], 0)
    assert greedy.ranking == ["slem_greedy"]
    assert greedy.predicted == "slem"
    rows = [pair.read(text, 64, 64, torch.Generator()) for text in TEXTS]
    (alone,), places = measure(pair, TEXTS, [0.0], 64, 64, [Reach()], 0)
    hits = sum(sum(r.p.argmax(-1) == torch.tensor(r.greedy)).item() for r in rows)
    assert alone.figures["slem_greedy"].value == pytest.approx(hits / places)
    assert 0 < hits < places
    assert len(warm.ranking) == 4


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
    assert f"| {data['figures']['tli']['value']:.3f} (" in printed
    assert "comes first" in printed


def test_tables() -> None:
    half = Estimate.of(torch.tensor([0.4, 0.6]), torch.ones(2))
    assert markdown_table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
    assert with_error(half) == "0.500 (.100)"
    assert compared("x", half, "y", half) == "x - y: +0.000 (+/- 0.000, +0.0%)"
