# SPDX-License-Identifier: Apache-2.0
"""The seam to vLLM: the only folder that imports it."""
