# SPDX-License-Identifier: Apache-2.0
"""Draft trees in vLLM: branches are additional sequences of the target's batch."""
