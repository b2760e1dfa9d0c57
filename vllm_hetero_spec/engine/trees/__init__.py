# SPDX-License-Identifier: Apache-2.0
"""Draft trees inside vLLM: branches as sequences of the target's batch."""
