# SPDX-License-Identifier: Apache-2.0
"""Precomputed drafts (`draft_ahead`): a drafter process drafts while the target verifies."""
