# SPDX-License-Identifier: Apache-2.0
"""The second model: its requests, its KV, and the loop that drafts."""
