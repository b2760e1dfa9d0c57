# SPDX-License-Identifier: Apache-2.0
"""Counters of speculation: counted in workers, exported by front ends."""
