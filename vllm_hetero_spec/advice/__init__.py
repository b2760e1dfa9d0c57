# SPDX-License-Identifier: Apache-2.0
"""Which drafter a target should have: each is measured beside the target alone."""
