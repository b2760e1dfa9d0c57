# SPDX-License-Identifier: Apache-2.0
"""Controllers of the draft length, from costs of steps and acceptance rates. NumPy only."""
