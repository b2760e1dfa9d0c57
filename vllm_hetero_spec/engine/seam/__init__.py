# SPDX-License-Identifier: Apache-2.0
"""Where vLLM meets this package: configuration, hooks, and one view of each step."""
