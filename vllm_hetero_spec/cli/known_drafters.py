# SPDX-License-Identifier: Apache-2.0
"""`vllm-hetero-spec advise TARGET`: public drafters to try, if the user names none."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from vllm_hetero_spec.bench.tables import say
from vllm_hetero_spec.inputs.known_drafters import KnownDrafter, family_of, ranked
from vllm_hetero_spec.inputs.model_folder import text_config
from vllm_hetero_spec.inputs.weights import local_folder, weight_bytes

_FETCH = "hf download "
_BYTES = 2  # per parameter, so that bytes of weights give a number of parameters


def known_for(target: str, trust_remote_code: bool) -> Sequence[KnownDrafter]:
    """Return the public drafters for a target, the most promising first.

    Raises:
        ConfigError: The target's configuration or its weights cannot be read.
    """
    config = text_config(target, trust_remote_code)
    folder = local_folder(target)
    size = None if folder is None else weight_bytes(folder, _BYTES)
    return ranked(family_of(config), None if size is None else size / _BYTES / 1e6)


def show(found: Sequence[KnownDrafter], console: Console) -> None:
    """Print the drafters, with the command that fetches one that is not on this machine."""
    if not found:
        say(console, "The target is so small that no known drafter is much faster.")
        return
    say(
        console, "Public drafters, the most promising first (figures of their model cards):", "bold"
    )
    for each in found:
        kind = "parallel drafter, " if each.parallel else ""
        chat = "chat template" if each.chat else "no chat template"
        say(console, f"{each.name}: {'on this machine' if each.is_local else _FETCH + each.name}")
        say(
            console,
            f"  {kind}{each.millions:,} M parameters, {each.layers} layers, {each.tokenizer} "
            f"tokenizer, languages: {each.languages}, {chat}, licence: {each.licence}",
            "dim",
        )


def as_data(found: Sequence[KnownDrafter]) -> list[dict[str, Any]]:
    return [each._asdict() | {"is_local": each.is_local} for each in found]
