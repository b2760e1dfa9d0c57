# SPDX-License-Identifier: Apache-2.0
"""How a draft is chosen from the drafter's rows. Pure tensors."""
