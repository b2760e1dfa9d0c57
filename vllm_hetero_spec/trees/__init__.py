# SPDX-License-Identifier: Apache-2.0
"""Draft trees: growth, layout, walk and value. Imports no vLLM."""
