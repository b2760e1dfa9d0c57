# SPDX-License-Identifier: Apache-2.0
"""Speculation inside vLLM: the only folder whose files import vLLM at their head."""
