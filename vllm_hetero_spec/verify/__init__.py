# SPDX-License-Identifier: Apache-2.0
"""Rules of verification on tensors. Imports neither vLLM nor tokenizers."""
