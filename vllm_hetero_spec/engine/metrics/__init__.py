# SPDX-License-Identifier: Apache-2.0
"""What speculation did: counted in workers, shown in front ends."""
