# SPDX-License-Identifier: Apache-2.0
"""Drafts, drafting methods and draft sampling on tensors. Imports no vLLM."""
