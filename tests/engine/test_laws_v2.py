# SPDX-License-Identifier: Apache-2.0
"""Distributions of samples on Model Runner V2: run `laws_v2.py` in its own process."""

import os

import pytest
from child_tests import environment_of, passed

LONG = "HETERO_SPEC_SAMPLES" in os.environ
pytestmark = [pytest.mark.full, pytest.mark.engine, pytest.mark.timeout(36_000 if LONG else 1200)]


@pytest.mark.parametrize("way", ["installed", "ahead", "0.33"])
def test_samples_of_v2_follow_the_targets_law(way: str, request: pytest.FixtureRequest) -> None:
    """A few tests on vLLM 0.33 show that its sampler calls the plugin's, which decides the law."""
    chosen = {
        "installed": "not slrs" if not LONG else "",
        "ahead": "slrs" if not LONG else "",
        "0.33": "races or (log_prob and tli)",
    }
    passed(["laws_v2.py"], environment_of(way, request), chosen[way])
