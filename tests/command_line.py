# SPDX-License-Identifier: Apache-2.0
"""Refusals of command lines."""

import pytest

from vllm_hetero_spec.cli.main import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the refusal of a command line; nothing but this one line may be printed."""
    assert main(list(arguments)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    return printed.err
