# SPDX-License-Identifier: Apache-2.0
"""Verification inside vLLM, and what drafts were drawn from."""
