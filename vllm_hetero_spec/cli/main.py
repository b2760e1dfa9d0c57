# SPDX-License-Identifier: Apache-2.0
"""Entry point of `vllm-hetero-spec`."""


def main() -> None:
    """Not built yet."""
