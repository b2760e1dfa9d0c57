# SPDX-License-Identifier: Apache-2.0
"""Interface to vLLM: configuration, hooks, and one view of each step."""
