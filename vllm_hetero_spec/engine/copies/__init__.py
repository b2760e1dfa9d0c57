# SPDX-License-Identifier: Apache-2.0
"""Drafts that are copied from the earlier text of their request."""
