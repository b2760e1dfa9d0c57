# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: engines, methods and data, measured in turns."""
