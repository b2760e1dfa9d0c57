# SPDX-License-Identifier: Apache-2.0
"""Drafting ahead (`draft_ahead`): a drafter in a process of its own, while the target verifies."""
