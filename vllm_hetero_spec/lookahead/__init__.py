# SPDX-License-Identifier: Apache-2.0
"""How far to draft, so that speculation is never slower than the target alone. Pure numpy."""
