# SPDX-License-Identifier: Apache-2.0
"""How far to draft, and whether at all, from what steps cost and drafts bring. Pure numpy."""
