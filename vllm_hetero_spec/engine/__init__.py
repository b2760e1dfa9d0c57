# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding inside vLLM. Only files in this folder import vLLM at their head."""
