# SPDX-License-Identifier: Apache-2.0
"""What we hang on vLLM by: releases and their differences, patches, the ledger of its symbols."""
