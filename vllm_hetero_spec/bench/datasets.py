# SPDX-License-Identifier: Apache-2.0
"""The prompts of a suite: from a JSONL file, from Hugging Face, or the few that come along."""

import itertools
import json
import string
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from vllm_hetero_spec.bench.models import located, tokenizer_of
from vllm_hetero_spec.bench.optional import optional
from vllm_hetero_spec.bench.yaml_file import Entry
from vllm_hetero_spec.config import ConfigError
from vllm_hetero_spec.errors import first_line, nearest
from vllm_hetero_spec.inputs.prompts import BUILT_IN

BUILT_IN_SETS = {"mixed": BUILT_IN}
_SOURCES = ("file", "builtin", "hf")
_HF_KEYS = ("config", "data_dir", "split", "revision")
KEYS = (
    *_SOURCES,
    *_HF_KEYS,
    *("prompt", "where", "count", "repeat", "max_prompt_chars", "chat_template"),
)
_MAX = 1 << 31


def check_dataset(entry: Entry) -> None:
    """Refuse a dataset that cannot be loaded as it is described; loads nothing."""
    keys = entry.mapping(KEYS)
    sources = [key for key in _SOURCES if key in keys]
    if len(sources) != 1:
        found = " and ".join(sources) or "none"
        raise entry.refuse(f"{entry.name} needs one of {', '.join(_SOURCES)}; found {found}.")
    if sources != ["hf"]:
        for key in _HF_KEYS:
            if key in keys:
                raise keys[key].refuse(f"{keys[key].name} goes with hf, not with {sources[0]}.")
    elif "split" not in keys:
        raise entry.refuse(f"{entry.name} needs a split, as `split: test`.")
    if "builtin" in keys:
        keys["builtin"].choice(BUILT_IN_SETS)
    for key in ("hf", *_HF_KEYS, "prompt"):
        if key in keys:
            keys[key].text()
    for key in ("count", "max_prompt_chars"):
        if key in keys:
            keys[key].integer(1, _MAX)
    if "file" in keys and not located(keys["file"]).is_file():
        raise keys["file"].refuse(f"the file {located(keys['file'])} does not exist.")
    if "hf" in keys:
        _datasets_library(keys["hf"])
    for key in ("chat_template", "repeat"):
        if key in keys:
            keys[key].flag()
    if "repeat" in keys and "count" not in keys:
        raise keys["repeat"].refuse(f"{keys['repeat'].name} needs a count to come to.")
    if "where" in keys:
        keys["where"].mapping()
    _fields(entry)


def load_dataset(entry: Entry) -> list[str]:
    """The prompts of a dataset that `check_dataset` passed, before any chat template.

    Raises:
        ConfigError: It cannot be read, holds fewer rows than asked for, or an empty prompt.
    """
    keys = entry.mapping()
    where = keys["where"].value() if "where" in keys else {}
    count = keys["count"].value() if "count" in keys else None
    longest = keys["max_prompt_chars"].value() if "max_prompt_chars" in keys else None
    chosen = (row for row in _rows(keys) if _matches(row, where, entry))
    prompts = [_prompt(row, entry, longest) for row in itertools.islice(chosen, count)]
    if not prompts:
        raise entry.refuse(f"{entry.name} has no prompts.")
    if count and len(prompts) < count:
        if not ("repeat" in keys and keys["repeat"].value()):
            raise keys["count"].refuse(
                f"{entry.name} has {len(prompts)} prompts, {count} are asked; `repeat: true` "
                "begins again with the first."
            )
        prompts = list(itertools.islice(itertools.cycle(prompts), count))
    for number, prompt in enumerate(prompts, 1):
        if not prompt.strip():
            raise entry.refuse(f"prompt {number} of {entry.name} is empty.")
    return prompts


def in_chat_template(entry: Entry, prompts: Iterable[str], model: str, engine: dict) -> list[str]:
    """Each prompt as a user's turn in the chat template of a model.

    Without the BOS token where the tokenizer puts it there by itself.
    """
    try:
        tokenizer = tokenizer_of(model, engine)
    except ConfigError as error:
        raise entry.refuse(str(error)) from error
    if not getattr(tokenizer, "chat_template", None):
        raise entry.refuse(f"{entry.name}: {model} has no chat template.")
    own = tokenizer("").input_ids
    bos = tokenizer.bos_token if tokenizer.bos_token_id in own else ""
    texts = (
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        for prompt in prompts
    )
    return [text.removeprefix(bos) for text in texts]


def _rows(keys: dict[str, Entry]) -> Iterator[dict[str, Any]]:
    if "builtin" in keys:
        yield from ({"prompt": text} for text in BUILT_IN_SETS[keys["builtin"].value()])
    elif "file" in keys:
        yield from _file_rows(keys["file"], located(keys["file"]))
    else:
        yield from _hf_rows(keys)


def _file_rows(entry: Entry, file: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise entry.refuse(f"cannot read the prompts in {file}: {error}.") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise entry.refuse(f"{file}, line {number} is no JSON object.")
        yield row


def _hf_rows(keys: dict[str, Entry]) -> Iterator[dict[str, Any]]:
    entry = keys["hf"]
    library = _datasets_library(entry)
    given = {key: keys[key].value() for key in _HF_KEYS if key in keys}
    try:
        # Streamed, as a few rows are wanted of what may be gigabytes; offline, what is kept.
        yield from library.load_dataset(
            entry.value(),
            given.pop("config", None),
            streaming=not library.config.HF_DATASETS_OFFLINE,
            **given,
        )
    # The library raises what its file systems, parsers and HTTP clients raise.
    except Exception as error:
        raise entry.refuse(
            f"cannot load the dataset {entry.value()}: {first_line(error)}."
        ) from error


def _datasets_library(entry: Entry) -> Any:
    try:
        return optional("datasets", f"the dataset {entry.value()}")
    except ConfigError as error:
        raise entry.refuse(str(error)) from error


def _matches(row: dict[str, Any], where: dict[str, Any], entry: Entry) -> bool:
    """Whether a row has the wanted values; a list means any of them."""
    for column, wanted in where.items():
        if column not in row:
            raise entry.refuse(_no_column(entry, column, row))
        if row[column] not in (wanted if isinstance(wanted, list) else [wanted]):
            return False
    return True


def _fields(entry: Entry) -> list[tuple[str, str | None]]:
    """The template of a dataset as (text, field after it) pairs."""
    keys = entry.mapping()
    template = keys["prompt"].value() if "prompt" in keys else "{prompt}"
    try:
        parts = [(text, field) for text, field, _, _ in string.Formatter().parse(template)]
    except ValueError as error:
        raise keys["prompt"].refuse(f"{keys['prompt'].name} is no template: {error}.") from error
    if not any(field for _, field in parts):
        raise keys["prompt"].refuse(
            f"{keys['prompt'].name} names no column; write one in braces, as "
            '"Summarize: {article}" or "{turns[0]}".'
        )
    return parts


def _prompt(row: dict[str, Any], entry: Entry, longest: int | None) -> str:
    prompt = ""
    for text, field in _fields(entry):
        prompt += text
        if field is None:
            continue
        column = field.split("[")[0].split(".")[0]
        if column not in row:
            raise entry.refuse(_no_column(entry, column, row))
        try:
            found = string.Formatter().get_field(field, (), row)[0]
        except (LookupError, AttributeError, TypeError) as error:
            raise entry.refuse(f"{entry.name}: a row has no {field!r}.") from error
        if not isinstance(found, str):
            raise entry.refuse(f"{entry.name}: {field!r} of a row is {found!r}, which is no text.")
        prompt += found[:longest]
    return prompt


def _no_column(entry: Entry, column: str, row: dict[str, Any]) -> str:
    return f"{entry.name}: a row has no {column!r}{nearest(column, row)}; it has: {', '.join(row)}."
