# SPDX-License-Identifier: Apache-2.0
"""Which drafter and method a target should have: measured in short, foreseen for the rest."""
