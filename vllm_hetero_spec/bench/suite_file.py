# SPDX-License-Identifier: Apache-2.0
"""Reads a suite file and checks all of it before any model is loaded.

Each mistake is a ConfigError with the file, the line and what is supported.
"""

from pathlib import Path
from typing import Any

from vllm_hetero_spec.bench.datasets import check_dataset, in_chat_template, load_dataset
from vllm_hetero_spec.bench.methods import PEERS
from vllm_hetero_spec.bench.models import model_name
from vllm_hetero_spec.bench.suite import Drafter, Suite, Target, short_name, speculative_config
from vllm_hetero_spec.bench.yaml_file import Entry, distinct, read_yaml
from vllm_hetero_spec.config import MAX_LOOKAHEAD, METHODS, ConfigError, parse

_AUTO = "auto"
_MAX = 1 << 20
# What the benchmark itself gives vllm.LLM.
_RESERVED = ("model", "speculative_config", "max_num_seqs", "disable_log_stats")


def read_suite(file: Path) -> Suite:
    """Read and check a suite file, and load its prompts.

    Raises:
        ConfigError: The first mistake, with its line and what is supported.
    """
    top = read_yaml(file)
    keys = top.mapping(_KEYS)
    for needed in ("targets", "datasets"):
        if needed not in keys:
            raise top.refuse(f"the suite has no {needed}.")
    datasets = keys["datasets"].mapping()
    if not datasets:
        raise keys["datasets"].refuse("datasets is empty; name one or more.")
    for dataset in datasets.values():
        check_dataset(dataset)
    engine = _engine(keys)
    targets = _targets(keys["targets"], engine, tuple(datasets))
    methods = _choices(keys, "methods", METHODS)
    lookaheads = tuple(_integers(keys, "num_speculative_tokens", 4, MAX_LOOKAHEAD))
    _check_configurations(keys["targets"], targets, methods, lookaheads)
    batch_sizes = _integers(keys, "batch_sizes", 1, _MAX)
    prompts = _prompts(keys, targets, datasets, max(batch_sizes))
    return Suite(
        name=keys["name"].text() if "name" in keys else file.stem,
        targets=targets,
        methods=methods,
        peers=_choices(keys, "peers", tuple(PEERS)),
        prompts=prompts,
        batch_sizes=tuple(batch_sizes),
        temperatures=_temperatures(keys),
        lookaheads=lookaheads,
        max_tokens=_integer(keys, "max_tokens", 128, _MAX),
        repeats=_integer(keys, "repeats", 3, 1000),
        ignore_eos=keys["ignore_eos"].flag() if "ignore_eos" in keys else False,
        seed=_seed(keys),
        top_p=keys["top_p"].number(1e-6, 1) if "top_p" in keys else 1.0,
        engines_at_once=_engines_at_once(keys),
    )


_KEYS = (
    "name",
    "targets",
    "methods",
    "peers",
    "datasets",
    "batch_sizes",
    "temperatures",
    "num_speculative_tokens",
    "max_tokens",
    "repeats",
    "ignore_eos",
    "seed",
    "top_p",
    "engine",
    "engines_at_once",
)


def _targets(entry: Entry, engine: dict[str, Any], datasets: tuple[str, ...]) -> tuple[Target, ...]:
    found = []
    entries = entry.sequence()
    for each in entries:
        keys = each.mapping(("model", "name", "drafters", "datasets", "engine"))
        for needed in ("model", "drafters"):
            if needed not in keys:
                raise each.refuse(f"{each.name} has no {needed}.")
        model = model_name(keys["model"], "target")
        found.append(
            Target(
                name=_name(keys, model),
                model=model,
                drafters=_drafters(keys["drafters"]),
                datasets=_choices(keys, "datasets", datasets),
                engine=engine | _engine(keys),
            )
        )
    distinct(entries, [target.name for target in found])
    return tuple(found)


def _drafters(entry: Entry) -> tuple[Drafter, ...]:
    found = []
    entries = entry.sequence()
    for each in entries:
        if isinstance(each.value(), str):
            model, keys = model_name(each, "drafter"), {}
        else:
            keys = each.mapping(("model", "name", "speculative"))
            if "model" not in keys:
                raise each.refuse(f"{each.name} has no model.")
            model = model_name(keys["model"], "drafter")
        options = keys["speculative"].options() if "speculative" in keys else {}
        found.append(Drafter(_name(keys, model), model, options))
    distinct(entries, [drafter.name for drafter in found])
    return tuple(found)


def _name(keys: dict[str, Entry], model: str) -> str:
    return keys["name"].text() if "name" in keys else short_name(model)


def _check_configurations(
    entry: Entry, targets: tuple[Target, ...], methods: tuple[str, ...], lookaheads: tuple[int, ...]
) -> None:
    """What a drafter's further keys would be refused for at start-up, refused here."""
    for target, place in zip(targets, entry.sequence(), strict=True):
        places = place.mapping()["drafters"].sequence()
        for drafter, at in zip(target.drafters, places, strict=True):
            for method in methods:
                try:
                    parse(
                        speculative_config(method, drafter, lookaheads[0]),
                        target_tensor_parallel=target.engine.get("tensor_parallel_size", 1),
                    )
                except ConfigError as error:
                    raise at.refuse(str(error)) from error


def _prompts(
    keys: dict[str, Entry],
    targets: tuple[Target, ...],
    datasets: dict[str, Entry],
    largest_batch: int,
) -> dict[str, dict[str, tuple[str, ...]]]:
    used = {name for target in targets for name in target.datasets}
    plain = {name: load_dataset(entry) for name, entry in datasets.items() if name in used}
    for name, texts in plain.items():
        if len(texts) < largest_batch:
            raise keys["batch_sizes"].refuse(
                f"batch size {largest_batch} needs as many prompts; "
                f"dataset {name!r} has {len(texts)}."
            )

    def texts_for(target: Target, name: str) -> tuple[str, ...]:
        flag = datasets[name].mapping().get("chat_template")
        if flag is None or not flag.flag():
            return tuple(plain[name])
        return tuple(in_chat_template(flag, plain[name], target.model, target.engine))

    return {
        target.name: {name: texts_for(target, name) for name in target.datasets}
        for target in targets
    }


def _choices(keys: dict[str, Entry], key: str, choices: tuple[str, ...]) -> tuple[str, ...]:
    """Some of the choices; all of them where the key is left out."""
    if key not in keys:
        return choices
    entries = keys[key].sequence()
    found = [entry.choice(choices) for entry in entries]
    distinct(entries, found)
    return tuple(found)


def _integers(keys: dict[str, Entry], key: str, default: int, high: int) -> list[int]:
    if key not in keys:
        return [default]
    entries = keys[key].sequence()
    found = [entry.integer(1, high) for entry in entries]
    distinct(entries, found)
    return found


def _integer(keys: dict[str, Entry], key: str, default: int, high: int) -> int:
    return keys[key].integer(1, high) if key in keys else default


def _temperatures(keys: dict[str, Entry]) -> tuple[float, ...]:
    if "temperatures" not in keys:
        return (0.0,)
    entries = keys["temperatures"].sequence()
    found = [entry.number(0, 10) for entry in entries]
    distinct(entries, found)
    return tuple(found)


def _seed(keys: dict[str, Entry]) -> int | None:
    if "seed" not in keys:
        return 0
    return None if keys["seed"].value() is None else keys["seed"].integer(0, 1 << 31)


def _engines_at_once(keys: dict[str, Entry]) -> int | None:
    if "engines_at_once" not in keys or keys["engines_at_once"].value() == _AUTO:
        return None
    entry = keys["engines_at_once"]
    if isinstance(entry.value(), str):
        raise entry.refuse(f"engines_at_once is {entry.value()!r}; it must be auto or a number.")
    return entry.integer(1, 100)


def _engine(keys: dict[str, Entry]) -> dict[str, Any]:
    if "engine" not in keys:
        return {}
    for key, entry in keys["engine"].mapping().items():
        if key in _RESERVED:
            raise entry.refuse(f"{entry.name} is the benchmark's own to set; leave it out.")
    return keys["engine"].value()
