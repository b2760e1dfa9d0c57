# SPDX-License-Identifier: Apache-2.0
"""Methods slrs and SLRS-n: sampling target tokens from a drafter's tree. Pure tensors."""
