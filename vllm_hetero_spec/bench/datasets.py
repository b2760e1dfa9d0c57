# SPDX-License-Identifier: Apache-2.0
"""Prompts of a suite: from a JSONL file, from Hugging Face, or built in."""

import importlib
import itertools
import os
import string
from collections.abc import Iterator, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, StrictBool, model_validator
from pydantic.dataclasses import dataclass

from vllm_hetero_spec.bench.values import Positive, Text, located
from vllm_hetero_spec.errors import ConfigError, Mistake, Table, first_line, nearest, one_of
from vllm_hetero_spec.inputs.model_folder import tokenizer_of
from vllm_hetero_spec.inputs.prompts import BUILT_IN, json_lines

BUILT_IN_SETS = {"mixed": BUILT_IN}
_SOURCES = ("file", "builtin", "hf")
_HF_KEYS = ("config", "data_dir", "split", "revision")
_FOLDER = "HETERO_SPEC_PROMPTS"  # names a folder with local copies of Hugging Face datasets


def _template(text: str) -> str:
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(text)]
    except ValueError as error:
        raise Mistake(f"is no template: {error}.") from error
    if not any(names):
        raise Mistake(
            'names no column; write one in braces, as "Summarize: {article}" or "{turns[0]}".'
        )
    return text


@dataclass(frozen=True, kw_only=True)
class Dataset(Table):
    """A dataset in a suite file: a file, built-in prompts or a Hugging Face dataset."""

    file: Annotated[Text, AfterValidator(located)] | None = None  # JSONL
    builtin: Annotated[Text, one_of(tuple(BUILT_IN_SETS))] | None = None
    hf: Text | None = None
    config: Text | None = None
    data_dir: Text | None = None
    split: Text | None = None
    revision: Text | None = None
    prompt: Annotated[Text, AfterValidator(_template)] = "{prompt}"  # columns in braces
    where: dict[str, Any] = field(default_factory=dict)  # required values; a list: any of them
    count: Positive | None = None
    repeat: StrictBool = False  # repeat prompts from the first one to reach the count
    max_prompt_chars: Positive | None = None  # per column
    chat_template: StrictBool = False  # apply the target's

    @model_validator(mode="after")
    def _fits(self) -> "Dataset":
        sources = [key for key in _SOURCES if getattr(self, key)]
        if len(sources) != 1:
            raise Mistake(
                f"needs one of {', '.join(_SOURCES)}; found {' and '.join(sources) or 'none'}."
            )
        if self.file and not Path(self.file).is_file():
            raise ConfigError(f"the file {self.file} does not exist.")
        if self.hf is None:
            for key in _HF_KEYS:
                if getattr(self, key):
                    raise Mistake(f"goes with hf, not with {sources[0]}.", key)
        elif self.split is None:
            raise Mistake("needs a split, as `split: test`.")
        elif not os.environ.get(_FOLDER):
            hub_library(self.hf)
        if self.repeat and self.count is None:
            raise Mistake("needs `count`, the number of prompts.", "repeat")
        return self


def hub_library(hf: str) -> Any:
    """Import the library that loads a dataset of Hugging Face, or raise ConfigError."""
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise ConfigError(f"the dataset {hf} needs datasets: `pip install datasets`.") from error


def load_dataset(dataset: Dataset, name: str) -> list[str]:
    """Load the prompts of a dataset, without a chat template.

    Raises:
        ConfigError: It cannot be read.
        Mistake: It contains fewer rows than `count`, or an empty prompt.
    """
    count, template = dataset.count, _Template(dataset.max_prompt_chars)
    chosen = (row for row in _rows(dataset, name) if _matches(row, dataset.where))
    prompts = [template.vformat(dataset.prompt, (), row) for row in itertools.islice(chosen, count)]
    if not prompts:
        raise Mistake("has no prompts.")
    if count and len(prompts) < count:
        if not dataset.repeat:
            raise Mistake(
                f"is {count}, and there are {len(prompts)} prompts; `repeat: true` begins again "
                "with the first.",
                "count",
            )
        prompts = list(itertools.islice(itertools.cycle(prompts), count))
    for number, prompt in enumerate(prompts, 1):
        if not prompt.strip():
            raise Mistake(f"has an empty prompt, number {number}.")
    return prompts


def in_chat_template(prompts: Sequence[str], model: str, engine: dict[str, Any]) -> tuple[str, ...]:
    """Render each prompt as a user's turn in a model's chat template, without a BOS.

    Raises:
        ConfigError: The model's tokenizer cannot be loaded.
        Mistake: It has no chat template.
    """
    tokenizer = tokenizer_of(
        engine.get("tokenizer") or model, bool(engine.get("trust_remote_code"))
    )
    if not getattr(tokenizer, "chat_template", None):
        raise Mistake(f"is true, and {model} has no chat template.", "chat_template")
    own = tokenizer("").input_ids
    bos = tokenizer.bos_token if tokenizer.bos_token_id in own else ""  # vLLM adds it
    texts = (
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        for prompt in prompts
    )
    return tuple(text.removeprefix(bos) for text in texts)


def _rows(dataset: Dataset, name: str) -> Iterator[dict[str, Any]]:
    folder = os.environ.get(_FOLDER)
    if dataset.builtin:
        return ({"prompt": text} for text in BUILT_IN_SETS[dataset.builtin])
    if dataset.hf and not folder:
        return _hf_rows(dataset)
    file = Path(dataset.file or Path(folder or "", f"{name}.jsonl"))
    if dataset.hf and not file.is_file():
        raise ConfigError(
            f"{_FOLDER} is {folder}, which has no {file.name}; put the rows of {dataset.hf} "
            "there as JSONL, or unset the variable to load them from Hugging Face."
        )
    return (row for _, row in json_lines(file))


def _hf_rows(dataset: Dataset) -> Iterator[dict[str, Any]]:
    assert dataset.hf is not None
    library = hub_library(dataset.hf)
    given = {key: value for key in _HF_KEYS[1:] if (value := getattr(dataset, key))}
    try:
        # Streaming, because a dataset may have gigabytes; offline mode reads the cache.
        yield from library.load_dataset(
            dataset.hf, dataset.config, streaming=not library.config.HF_DATASETS_OFFLINE, **given
        )
    # The library passes on exceptions of file systems, parsers and HTTP clients.
    except Exception as error:
        raise ConfigError(f"cannot load the dataset {dataset.hf}: {first_line(error)}.") from error


def _matches(row: dict[str, Any], where: dict[str, Any]) -> bool:
    for column, wanted in where.items():
        if column not in row:
            raise _no_column(column, row)
        if row[column] not in (wanted if isinstance(wanted, list) else [wanted]):
            return False
    return True


class _Template(string.Formatter):
    """Fills a template from a row, with up to `longest` characters of each field."""

    def __init__(self, longest: int | None) -> None:
        self._longest = longest

    def get_field(self, name: str, args: Any, row: Any) -> tuple[str, str]:
        column = name.split("[")[0].split(".")[0]
        if column not in row:
            raise _no_column(column, row)
        try:
            found, _ = super().get_field(name, args, row)
        except (LookupError, AttributeError, TypeError) as error:
            raise ConfigError(f"a row has no {name!r}.") from error
        if not isinstance(found, str):
            raise ConfigError(f"{name!r} of a row is {found!r}, which is no text.")
        return found[: self._longest], column


def _no_column(column: str, row: dict[str, Any]) -> ConfigError:
    return ConfigError(f"a row has no {column!r}{nearest(column, row)}; it has: {', '.join(row)}.")
