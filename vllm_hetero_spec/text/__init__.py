# SPDX-License-Identifier: Apache-2.0
"""The tokenizer bridge: bytes and ids. Imports neither torch nor vLLM."""
