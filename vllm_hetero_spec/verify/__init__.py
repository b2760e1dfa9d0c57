# SPDX-License-Identifier: Apache-2.0
"""How a draft is accepted. Pure tensors; knows neither vLLM nor tokenizers."""
