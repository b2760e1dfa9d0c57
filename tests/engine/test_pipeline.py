# SPDX-License-Identifier: Apache-2.0
"""Refusals of targets with pipeline stages. `test_runner_v2.py` runs one that is supported."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_hetero_spec.engine.seam.frontend import check_stages
from vllm_hetero_spec.errors import ConfigError


def config_of(stages: int, *, v2: bool, ahead: bool) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        scheduler_config=SimpleNamespace(async_scheduling=ahead),
        use_v2_model_runner=v2,
    )


@pytest.mark.parametrize(
    ("v2", "ahead", "words"),
    [
        (False, False, ["pipeline_parallel_size=2", "Model Runner V1", "tensor", "V2"]),
        (False, True, ["pipeline_parallel_size=2", "Model Runner V1", "tensor", "V2"]),
        (True, False, ["pipeline_parallel_size=2", "V2 needs asynchronous scheduling", "tensor"]),
    ],
)
def test_stages_that_cannot_be_served_are_refused(v2: bool, ahead: bool, words: list[str]) -> None:
    check_stages(config_of(1, v2=v2, ahead=ahead))
    with pytest.raises(ConfigError) as refused:
        check_stages(config_of(2, v2=v2, ahead=ahead))
    message = str(refused.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_stages_on_model_runner_v2_with_asynchronous_scheduling_are_served() -> None:
    check_stages(config_of(2, v2=True, ahead=True))
