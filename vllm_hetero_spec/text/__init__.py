# SPDX-License-Identifier: Apache-2.0
"""Translation between two tokenizers, by bytes. Imports neither torch nor vLLM."""
