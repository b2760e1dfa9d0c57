# SPDX-License-Identifier: Apache-2.0
"""Refusals in one sentence, and the folders for cache and demo models."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, StrictBool
from pydantic.dataclasses import dataclass

from vllm_hetero_spec import paths
from vllm_hetero_spec.errors import (
    ConfigError,
    Table,
    between,
    checked,
    first_line,
    nearest,
    one_line,
    one_of,
    whole,
)


@dataclass(frozen=True)
class Loud(Table):
    volume: Annotated[float, between(0, 1, "a volume from 0 to 1")] = 0.5


@dataclass(frozen=True)
class Pet(Table):
    name: Annotated[str, Field(strict=True)]
    legs: Annotated[int, whole(0, 8)] = 4
    kind: Literal["cat", "dog"] = "cat"
    tame: StrictBool = True
    voice: Annotated[str | Loud, one_of(("soft", "loud"), loud=Loud)] = "soft"
    young: tuple["Pet", ...] = ()


def pet(**changes: Any) -> Pet:
    return checked(Pet, {"name": "Tom"} | changes, "the pet")


def test_users_values_become_a_model() -> None:
    assert pet() == Pet("Tom")
    assert pet(legs="3.0", kind="dog") == Pet("Tom", 3, "dog")
    assert pet(voice="loud") == pet(voice={"loud": {}}) == Pet("Tom", voice=Loud())
    assert pet(voice={"loud": {"volume": "1e-1"}}).voice == Loud(0.1)
    assert pet(young=[{"name": "Tim"}]).young == (Pet("Tim"),)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"legs": 9}, "legs is 9; it must be a whole number from 0 to 8."),
        ({"legs": True}, "legs is True; it must be a whole number from 0 to 8."),
        ({"legs": None}, "legs is missing; it must be a whole number from 0 to 8."),
        ({"kind": "dig"}, "kind is 'dig' (did you mean 'dog'?); supported: cat, dog."),
        ({"tame": "yes"}, "tame is 'yes'; it must be true or false."),
        ({"name": 3}, "name is 3; it must be a string."),
        ({"voice": "lout"}, "voice is 'lout' (did you mean 'loud'?); supported: soft, loud."),
        ({"voice": ["loud"]}, "voice is ['loud'] (did you mean 'loud'?); supported: soft, loud."),
        ({"voice": {"soft": {}}}, "voice is {'soft': {}}; supported: soft, loud."),
        ({"voice": {"loud": 1}}, "voice.loud is 1; it must be a mapping of keys."),
        ({"voice": {"loud": {"volume": 2}}}, "voice.loud.volume is 2; it must be a volume from 0"),
        ({"voice": {"loud": {"volum": 1}}}, "voice.loud has an unknown key 'volum' (did you mean"),
        ({"leg": 3}, "the pet has an unknown key 'leg' (did you mean 'legs'?); supported: name, l"),
        ({"young": [{"name": "Tim"}, {}]}, "young[1] has no name."),
        ({"young": [{"name": "Tim", "legs": -1}]}, "young[0].legs is -1; it must be"),
    ],
)
def test_the_first_mistake_is_one_sentence(changes: dict, refusal: str) -> None:
    with pytest.raises(ConfigError) as refused:
        pet(**changes)
    assert str(refused.value).startswith(refusal)
    assert str(refused.value).count("\n") == 0


def test_errors_of_others_become_one_line() -> None:
    assert first_line(OSError("\nno such model.\nTraceback")) == "no such model"
    assert one_line("a\n  b\tc") == "a b c"


def test_only_near_names_are_proposed() -> None:
    assert nearest("slam", ["slem", "tli"]) == " (did you mean 'slem'?)"
    assert nearest("zzz", ["slem", "tli"]) == nearest(3, []) == ""


def test_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HETERO_SPEC_DEMO", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert paths.demo_folder() == tmp_path / "vllm_hetero_spec" / "demo"
    monkeypatch.setenv("HETERO_SPEC_DEMO", str(tmp_path / "elsewhere"))
    assert paths.demo_folder() == tmp_path / "elsewhere"
