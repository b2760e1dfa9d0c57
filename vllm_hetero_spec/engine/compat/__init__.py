# SPDX-License-Identifier: Apache-2.0
"""Compatibility with vLLM: releases, patches, and the ledger of vLLM's symbols."""
