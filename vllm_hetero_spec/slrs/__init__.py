# SPDX-License-Identifier: Apache-2.0
"""Methods `slrs` and SLRS-n: sample target tokens from a tree of drafter tokens. No vLLM."""
