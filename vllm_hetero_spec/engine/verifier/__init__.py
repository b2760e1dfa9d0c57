# SPDX-License-Identifier: Apache-2.0
"""Verification inside vLLM, and the `draft_probs` that it needs."""
