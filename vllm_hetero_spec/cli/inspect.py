# SPDX-License-Identifier: Apache-2.0
"""`vllm-hetero-spec inspect`: compare the tokenizers of a pair without loading a model."""

import argparse
import gc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_hetero_spec.bench.tables import print_json
from vllm_hetero_spec.cli.pair_tables import show
from vllm_hetero_spec.draft.methods import order
from vllm_hetero_spec.errors import ConfigError
from vllm_hetero_spec.inputs.model_folder import mask_token, text_config
from vllm_hetero_spec.inputs.prompts import load_prompts
from vllm_hetero_spec.inputs.tokenizer_source import ROLES, OpenTokenizer, open_tokenizer
from vllm_hetero_spec.text.bridge import make_bridge
from vllm_hetero_spec.text.sample_text import CALIBRATION_TEXT
from vllm_hetero_spec.text.special_tokens import SpecialTokens
from vllm_hetero_spec.text.statistics import (
    PairMeter,
    PairStatistics,
    count_vocabulary,
    documents_of,
    length_histogram,
    measure_overlap,
    shared_text,
    unspelled_characters,
)
from vllm_hetero_spec.text.vocabulary import build_maps, default_cache

_LONGEST = 16  # bytes; the last bin of a histogram includes longer tokens
_EXAMPLES = 12  # characters without a token
_TEMPERATURES = (0.0, 1.0)  # methods are ranked for each


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        help="show what two tokenizers share, what is lost between them and which methods fit",
        description="Compares the tokenizers of a target and a drafter. Reads no weights and "
        "starts no engine.",
    )
    what = "Hugging Face name, folder, or a tokenizer.json, tekken.json or .model file"
    parser.add_argument("target", help=what)
    parser.add_argument("drafter", help="the same of the drafter")
    what = (
        'text like the one to be generated, or JSONL with "prompt" keys (default: a built-in text '
        "of prose, code and several scripts)"
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help=what)
    parser.add_argument("--json", action="store_true", help="print one JSON object and no table")
    what = "run tokenizer code of the repositories"
    parser.add_argument("--trust-remote-code", action="store_true", help=what)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    documents = _documents(arguments.text)
    pair = {"target": arguments.target, "drafter": arguments.drafter}
    trust = arguments.trust_remote_code
    collects = gc.isenabled()
    gc.disable()  # collections take a quarter of the time and free nothing
    try:
        with Console(stderr=True).status("comparing the tokenizers ..."):
            opened = {
                role: open_tokenizer(name, role, trust_remote_code=trust)
                for role, name in pair.items()
            }
            source = str(arguments.text or "built-in")
            found = _findings(opened["target"], opened["drafter"], documents, source)
            configs = {role: _config(name, trust) for role, name in pair.items()}
            for role, config in configs.items():
                found[role]["output_rows"] = getattr(config, "vocab_size", None)
            found["drafter"]["mask_token"] = mask_token(configs["drafter"])
    finally:
        if collects:
            gc.enable()
    if arguments.json:
        print_json(found)
    else:
        show(found, opened, Console())


def _config(model: str, trust_remote_code: bool) -> Any:
    """Return a model's text configuration; None if there is none."""
    if Path(model).expanduser().is_file():
        return None
    try:
        return text_config(str(Path(model).expanduser()), trust_remote_code)
    except ConfigError:
        return None


def _documents(file: Path | None) -> list[str]:
    if file is None:
        return documents_of(CALIBRATION_TEXT)
    if file.suffix == ".jsonl":
        documents = load_prompts(file)
    else:
        try:
            documents = documents_of(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the text in {file}: {error}.") from error
    if not "".join(documents).strip():
        raise ConfigError(f"the text in {file} is empty.")
    return documents


def _findings(
    target: OpenTokenizer, drafter: OpenTokenizer, documents: Sequence[str], source: str
) -> dict[str, Any]:
    """All findings as printed by --json; shares are between 0 and 1."""
    theirs, ours = target.text, drafter.text
    strings = {
        "target": set(theirs.token_bytes),
        "drafter": set(ours.token_bytes),
        "shared": shared_text(theirs, ours),
    }
    # Counts of byte strings of 1, 2, ... bytes.
    lengths = {name: length_histogram(each, _LONGEST) for name, each in strings.items()}
    overlap = measure_overlap(theirs, ours, target.strings, drafter.strings)
    meter = PairMeter(theirs, ours, build_maps(theirs, ours, cache=default_cache()))
    meter.add(documents)
    bridge = make_bridge(
        theirs,
        ours,
        target_eos=target.eos_ids,
        drafter_eos=drafter.eos_ids,
        chats=(target.backend, drafter.backend),
    )
    pair, reason = meter.statistics(), bridge.chat.reason
    return {
        "target": _side(target, documents, pair, "target"),
        "drafter": _side(drafter, documents, pair, "drafter"),
        "intersection": {**asdict(overlap), "lengths": lengths},
        "text": {
            "source": source,
            "documents": len(documents),
            "lines": pair.lines,
            "bytes": pair.text_bytes,
        },
        "pair": {
            "omega_t": pair.omega_t,
            "omega_k": pair.omega_k,
            "target_straddle": pair.target_straddle,
            "drafter_straddle": pair.drafter_straddle,
            "drafter_tokens_per_target_token": pair.tokens_ratio,
        },
        "bridge": {
            "kind": "identity" if bridge.identity else "text",
            "chat_template": {"active": not reason, "reason": reason},
            "control_tokens": list(_control_tokens(target, bridge.special)),
        },
        "methods": {
            f"temperature_{temperature:g}": order(pair, temperature=temperature)
            for temperature in _TEMPERATURES
        },
    }


def _side(
    opened: OpenTokenizer, documents: Sequence[str], pair: PairStatistics, role: str
) -> dict[str, Any]:
    text, view = "".join(documents), opened.text
    tokens: int = getattr(pair, f"{role}_tokens")
    unspelled = unspelled_characters(view, Counter(text))
    # If a tokenizer adds a BOS, all documents change.
    changed = sum(opened.round_trip(document) != document for document in documents)
    return {
        "name": view.name,
        "vocabulary": {"get_vocab": len(opened.strings), **asdict(count_vocabulary(view))},
        "roles": {
            role: {"id": opened.roles[role], "content": opened.text.content(opened.roles[role])}
            if role in opened.roles
            else None
            for role in ROLES
        },
        "eos_ids": opened.eos_ids,
        "adds_bos": view.adds_bos,
        "leading_space": view.leading_space.scope,
        "normalizers": opened.normalizers,
        "lossy_reason": view.lossy_reason,
        "tokens": tokens,
        "tokens_per_byte": tokens / len(text.encode()),
        "changed_lines": getattr(pair, f"{role}_failures"),
        "changed_documents_with_special_tokens": changed,
        "unspelled": {
            "characters": unspelled.total(),
            "distinct": len(unspelled),
            "examples": [character for character, _ in unspelled.most_common(_EXAMPLES)],
        },
    }


def _control_tokens(target: OpenTokenizer, special: SpecialTokens) -> Iterator[Mapping[str, Any]]:
    """The target's control tokens, without unused ids, and their translations for the drafter."""
    known = special.target_control & {*target.text.special_text, *(target.eos_ids or ())}
    for token_id in sorted(known):
        mapped = special.to_drafter(token_id)
        drafter_id, text = (mapped, "") if isinstance(mapped, int) else (None, mapped.decode())
        kind = "text" if text else "nothing"
        yield {
            "id": token_id,
            "content": target.text.content(token_id),
            "drafter_id": drafter_id,
            "text": text,
            "becomes": kind if drafter_id is None else "special",
        }
