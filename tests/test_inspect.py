# SPDX-License-Identifier: Apache-2.0
"""`vllm-hetero-spec inspect`: figures of tiny pairs counted by hand, real pairs, refusals."""

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from command_line import refused
from recipes import altered, build_bytes
from tokenizers import Tokenizer, decoders, models, normalizers

from vllm_hetero_spec.cli.main import main
from vllm_hetero_spec.inputs.tokenizer_source import open_tokenizer

END = "<|endoftext|>"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (
    "{% for message in messages %}<|user|>{{ message['role'] }}: {{ message['content'] }}"
    + END
    + "\n"
    "{% endfor %}{% if add_generation_prompt %}<|user|>assistant: {% endif %}"
)

Out = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def save(
    folder: Path, tokenizer: Tokenizer, config: Mapping[str, Any] = {"eos_token": END}, **files: Any
) -> str:
    """Write a model folder without weights; `files` are more JSON files by name."""
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    files["tokenizer_config"] = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    """Folders of a target with the token "hello" and a drafter with the tokens "he" and "lo"."""
    target = build_bytes("h e,l l,he ll,hell o", (END, "<|user|>", "<|pad|>"))
    drafter = build_bytes("h e,l o", (END, "<|user|>", "<s>"))
    roles = {"eos_token": "<|user|>", "pad_token": "<|pad|>"}
    return [
        save(tmp_path / "target", target, roles, generation_config={"eos_token_id": [260, 261]}),
        save(tmp_path / "drafter", drafter, {"bos_token": "<s>", "eos_token": END}),
    ]


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """Path of a tokenizer file."""
    file = tmp_path / "tiny.json"
    build_bytes("h e", [END]).save(str(file))
    return str(file)


def inspect(capsys: Out, *arguments: str) -> dict[str, Any]:
    """Return the JSON output; nothing else may be printed."""
    assert main(["inspect", *arguments, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    found: dict[str, Any] = json.loads(printed.out)
    return found


def write(file: Path, text: str) -> str:
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_straddled_boundaries(capsys: Out, tmp_path: Path) -> None:
    """Target hel|lo, drafter he|llo: one of two tokens straddles a boundary on each side."""
    target = save(tmp_path / "target", build_bytes("h e,he l,l o", [END]))
    drafter = save(tmp_path / "drafter", build_bytes("h e,l o,l lo", [END]))
    text = write(tmp_path / "text.jsonl", '{"prompt": "hello"}\n{"prompt": "hello"}\n')
    found = inspect(capsys, target, drafter, "--text", text)
    assert found["text"]["documents"] == 2
    assert found["pair"]["target_straddle"] == found["pair"]["drafter_straddle"] == 0.5
    # "lo" of the target is a drafter token; "llo" is l|lo in the target, and "he" is one token.
    assert (found["pair"]["omega_t"], found["pair"]["omega_k"]) == (0.5, 0.5)


def test_roles(capsys: Out, pair: list[str]) -> None:
    """`test_golden.py` has the sizes of the vocabularies and of their intersection."""
    found = inspect(capsys, *pair)
    target, drafter = found["target"], found["drafter"]
    assert target["roles"] == {
        "bos": None,
        "eos": {"id": 261, "content": "<|user|>"},
        "unk": None,
        "pad": {"id": 262, "content": "<|pad|>"},
    }
    assert (target["eos_ids"], drafter["eos_ids"]) == ([260, 261], None)
    assert drafter["roles"]["bos"] == {"id": 260, "content": "<s>"}


def test_control_tokens_for_the_drafter(capsys: Out, pair: list[str]) -> None:
    """<|endoftext|> and <|user|> end the target's text. Only the first ends the drafter's."""
    bridge = inspect(capsys, *pair)["bridge"]
    assert bridge["kind"] == "text"
    assert [
        (token["content"], token["becomes"], token["drafter_id"], token["text"])
        for token in bridge["control_tokens"]
    ] == [
        (END, "special", 258, ""),
        ("<|user|>", "special", 258, ""),
        ("<|pad|>", "text", None, "<|pad|>"),
    ]


def test_equal_tokenizers_pass_ids(capsys: Out, pair: list[str]) -> None:
    found = inspect(capsys, pair[0], pair[0])
    assert found["bridge"]["kind"] == "identity"
    assert found["pair"]["omega_t"] == 1.0
    assert found["pair"]["target_straddle"] == 0.0


def test_rewriting_and_missing_characters(capsys: Out, tmp_path: Path) -> None:
    vocabulary = {piece: i for i, piece in enumerate(["<unk>", "▁", *"Thecats'12dog"])}
    partial = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    partial.normalizer = normalizers.Replace(" ", "▁")
    partial.decoder = decoders.Replace("▁", " ")
    drafter = save(tmp_path / "drafter", partial, {"unk_token": "<unk>"})
    composing = altered(build_bytes("", [END]), normalizer=normalizers.NFC())
    target = save(tmp_path / "target", composing)
    text = write(tmp_path / "text.txt", "the cat\nthe ox\n\no\u0308 dots\n")
    found = inspect(capsys, target, drafter, "--text", text)
    assert found["text"]["lines"] == 3
    assert found["target"]["normalizers"] == ["NFC"]
    assert found["target"]["changed_lines"] == 1
    assert found["target"]["unspelled"]["characters"] == 0
    assert found["drafter"]["normalizers"] == []
    assert found["drafter"]["unspelled"] == {
        "characters": 6,
        "distinct": 3,
        "examples": ["\n", "x", "\u0308"],
    }
    best = found["methods"]["temperature_1"][0]
    assert (best["method"], best["reason"][:6]) == ("tli", "100.0%")


def test_a_parallel_drafter_is_named(capsys: Out, tmp_path: Path, pair: list[str]) -> None:
    """Its configuration has the id of its mask token."""
    drafter = tmp_path / "parallel"
    shutil.copytree(pair[1], drafter)
    (drafter / "config.json").write_text(json.dumps({"model_type": "llama", "pard_token": 7}))
    assert main(["inspect", pair[0], str(drafter)]) == 0
    assert "parallel: one forward writes a draft, by mask token 7" in capsys.readouterr().out
    assert main(["inspect", *pair]) == 0
    assert "mask token" not in capsys.readouterr().out


def test_output_rows_decide_what_vllm_serves(capsys: Out, tmp_path: Path, pair: list[str]) -> None:
    """vLLM's method `draft_model` compares the numbers of output rows, padding included."""
    models = []
    for rows in (300, 300, 364):
        models.append(tmp_path / str(len(models)))
        shutil.copytree(pair[0], models[-1])
        config = {"model_type": "llama", "vocab_size": rows}
        (models[-1] / "config.json").write_text(json.dumps(config))
    for drafter, line in (
        (models[1], "draft_model serves this pair, too"),
        (models[2], "draft_model refuses this pair: 300 and 364 output rows"),
    ):
        assert main(["inspect", str(models[0]), str(drafter)]) == 0
        assert line in capsys.readouterr().out
    assert main(["inspect", *pair]) == 0
    assert "draft_model" not in capsys.readouterr().out


def test_chat_templates(capsys: Out, tmp_path: Path) -> None:
    special = (END, "<|user|>", "<|im_start|>", "<|im_end|>")
    chat = {"eos_token": END, "chat_template": CHATML}
    target = save(tmp_path / "target", build_bytes("h e", special), chat)
    other = save(tmp_path / "other", build_bytes("l o", special), chat | {"chat_template": HEADERS})
    plain = save(tmp_path / "plain", build_bytes("l o", special))
    on = inspect(capsys, target, other)["bridge"]["chat_template"]
    assert on == {"active": True, "reason": ""}
    off = inspect(capsys, target, plain)["bridge"]["chat_template"]
    assert not off["active"]
    assert "no chat template" in off["reason"]


def test_a_table_fits_a_narrow_terminal(
    capsys: Out, pair: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "44")
    assert main(["inspect", *pair]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    assert lines[:2] == [f"target   {pair[0]}", f"drafter  {pair[1]}"]
    assert max(map(len, lines[2:])) <= 44
    for expected in ("omega_T", "<|pad|> (262)", "slem", "has no chat template"):
        assert expected in " ".join(printed.out.split())


def test_characters_missing_in_the_locale_are_replaced(
    pair: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "30")  # here tables cut words with a non-ASCII mark
    with open(tmp_path / "printed", "w", encoding="ascii") as printed:
        monkeypatch.setattr(sys, "stdout", printed)
        assert main(["inspect", *pair]) == 0
    assert "omega" in (tmp_path / "printed").read_text()


@pytest.mark.parametrize("content", [b"", b" \n\n\t\n", None, b"caf\xe9"])
def test_unusable_texts_are_refused(
    capsys: Out, tmp_path: Path, tiny: str, content: bytes | None
) -> None:
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    assert str(text) in refused(capsys, "inspect", tiny, tiny, "--text", str(text))


@pytest.mark.parametrize("line", ["{", '{"text": "b"}', '{"prompt": 1}', '{"prompt": "\\ud800"}'])
def test_unusable_prompts_are_refused(capsys: Out, tmp_path: Path, tiny: str, line: str) -> None:
    text = write(tmp_path / "text.jsonl", f'{{"prompt": "a"}}\n{line}\n')
    assert text in refused(capsys, "inspect", tiny, tiny, "--text", text)


def test_missing_tokenizers_are_refused(capsys: Out, tmp_path: Path, tiny: str) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty" / "config.json", "{}")
    assert "the target folder" in refused(capsys, "inspect", str(tmp_path / "empty"), tiny)
    assert "does not exist" in refused(capsys, "inspect", tiny, str(tmp_path / "missing"))
    assert "does not exist" in refused(capsys, "inspect", tiny, "missing.json")
    notes = write(tmp_path / "notes.txt", "a")
    assert "not a tokenizer file" in refused(capsys, "inspect", notes, tiny)
    # Names are looked up in the cache only: HF_HUB_OFFLINE is set.
    said = refused(capsys, "inspect", tiny, "organisation/name")
    assert "drafter's tokenizer organisation/name" in said


@pytest.mark.parametrize("content", ['{"model": ', "{}", "[]", '{"version": "1.0"}'])
def test_corrupt_tokenizers_are_refused(
    capsys: Out, tmp_path: Path, tiny: str, content: str
) -> None:
    file = write(tmp_path / "tokenizer.json", content)
    assert "target's tokenizer" in refused(capsys, "inspect", file, tiny)
    assert "drafter's tokenizer" in refused(capsys, "inspect", tiny, str(tmp_path))


def test_tokenizers_without_exact_bytes_are_refused(capsys: Out, tmp_path: Path, tiny: str) -> None:
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    words.decoder = decoders.CTC()
    words.save(str(tmp_path / "words.json"))
    assert "cannot be bridged" in refused(capsys, "inspect", str(tmp_path / "words.json"), tiny)


def test_tekken_files(capsys: Out, tmp_path: Path, tiny: str) -> None:
    pytest.importorskip("mistral_common")
    words = [bytes([byte]) for byte in range(256)] + [b"he", b"hello"]
    content = {
        "config": {
            "pattern": r"\p{L}+|\P{L}",
            "num_vocab_tokens": len(words),
            "default_vocab_size": len(words) + 20,
            "default_num_special_tokens": 20,
            "version": "v3",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
            for rank, word in enumerate(words)
        ],
    }
    write(tmp_path / "tekken.json", json.dumps(content))
    write(tmp_path / "generation_config.json", '{"eos_token_id": 2}')
    (tmp_path / "other").mkdir()
    (tmp_path / "tiny.json").rename(tmp_path / "other" / "tiny.json")
    drafter = str(tmp_path / "other" / "tiny.json")
    found = inspect(capsys, str(tmp_path), drafter)
    target = found["target"]
    assert target["vocabulary"]["ids"] == 278
    assert target["vocabulary"]["text"] == 258
    assert target["roles"]["bos"] == {"id": 1, "content": "<s>"}
    assert (target["adds_bos"], target["eos_ids"]) == (True, [2])
    # The tokenizer adds a BOS that decoding keeps, so every document changes, but no line.
    assert target["changed_documents_with_special_tokens"] == found["text"]["documents"]
    assert target["changed_lines"] == 0
    assert found["intersection"]["text_bytes"] == 257
    file = inspect(capsys, str(tmp_path / "tekken.json"), drafter)["target"]
    assert file["vocabulary"] == target["vocabulary"]


def test_sentencepiece_files(capsys: Out, tmp_path: Path, tiny: str) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat", "the dog sat on the cat"] * 20),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=290,
        hard_vocab_limit=False,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    file = str(tmp_path / "tokenizer.model")
    model = sentencepiece.SentencePieceProcessor(model_file=file)
    target = inspect(capsys, file, tiny)["target"]
    size = model.get_piece_size()
    assert target["vocabulary"]["ids"] == size
    assert target["vocabulary"]["text"] == size - sum(
        model.is_control(i) or model.is_unknown(i) for i in range(size)
    )
    assert target["roles"]["eos"] == {"id": model.eos_id(), "content": "</s>"}
    assert (target["leading_space"], target["changed_lines"]) == ("always", 0)


@pytest.mark.parametrize("kind", ["files", "names"])
def test_no_model_library_is_imported(pair: list[str], tmp_path: Path, kind: str) -> None:
    """vLLM is never imported. torch is imported only by transformers, for folders and hub names."""
    names = [f"{folder}/tokenizer.json" for folder in pair]
    heavy = ["vllm", "torch", "transformers"]
    if kind == "names":
        names = ["organisation/target", "organisation/drafter"]
        heavy = ["vllm"]
        for name, folder in zip(names, pair, strict=True):
            cached = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
            shutil.copytree(folder, cached / "snapshots" / "0123abc")
            (cached / "refs").mkdir()
            (cached / "refs" / "main").write_text("0123abc")
            config = {"model_type": "llama", "eos_token_id": 258}
            (cached / "snapshots" / "0123abc" / "config.json").write_text(json.dumps(config))
    program = (
        "import sys; from vllm_hetero_spec.cli.main import main; main(sys.argv[1:]); "
        f"print(*({{*sys.modules}} & {{*{heavy}}}), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "inspect", *names, "--json"],
        env=os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.strip() == ""
    found = json.loads(done.stdout)
    assert found["target"]["name"] == names[0]
    if kind == "names":
        # The target's generation_config.json overrides its config.json.
        assert (found["target"]["eos_ids"], found["drafter"]["eos_ids"]) == ([260, 261], [258])


def test_a_real_pair(capsys: Out, shared: Path) -> None:
    """The main difference: Llama 3.1 has tokens of three digits, and Qwen2 has none."""
    names = [str(shared / "tokenizers" / name) for name in ("llama-3.1", "qwen2")]
    if not all(Path(name).is_dir() for name in names):
        pytest.skip("needs the tokenizers of Llama 3.1 and Qwen2")
    found = inspect(capsys, *names)
    common = found["intersection"]
    assert common["get_vocab"] == common["space_normalised"] == common["true_bytes"] == 109_566
    assert found["target"]["roles"]["eos"] == {"id": 128009, "content": "<|eot_id|>"}
    assert found["target"]["changed_lines"] == 0
    assert found["drafter"]["normalizers"] == ["NFC"]
    assert found["drafter"]["changed_lines"] == 1
    assert 0.9 < found["pair"]["omega_t"] <= found["pair"]["omega_k"] < 1
    assert found["pair"]["target_straddle"] > found["pair"]["drafter_straddle"]
    (bos,) = (t for t in found["bridge"]["control_tokens"] if t["content"] == "<|begin_of_text|>")
    assert bos["becomes"] == "nothing"


# Name -> size of get_vocab(), and True if the tokenizer adds a BOS.
REAL = {
    "llama-3.1": (128_256, True),
    "qwen2": (151_646, False),
    "mistral-v3-32768": (32_768, True),
    "phi-3-medium-128k-instruct": (32_011, False),
    "phi-4": (100_352, False),
    "deepseek-r1-distill-qwen": (151_665, False),
    "codellama": (32_016, True),
    "starcoder": (49_152, False),
    "llama-2": (32_000, True),
}


@pytest.mark.parametrize("name", REAL)
def test_real_tokenizers_alone(shared: Path, name: str) -> None:
    """decode(encode(text)) returns the same news article, unless a BOS was added."""
    file = shared / "tokenizers" / name / "tokenizer.json"
    news = shared / "data" / "prompts" / "news_articles_cnndm_80.jsonl"
    if not (file.is_file() and news.is_file()):
        pytest.skip(f"needs {file} and {news}")
    articles = [json.loads(line)["prompt"] for line in news.read_text().splitlines()]
    opened = open_tokenizer(str(file), "target")
    size, adds_bos = REAL[name]
    assert len(opened.strings) == size
    assert {opened.round_trip(article) == article for article in articles} == {not adds_bos}
    spelled = opened.text.encode_batch(articles)
    for article, ids in zip(articles, spelled, strict=True):
        assert opened.text.decode_bytes(ids) == article.encode()
