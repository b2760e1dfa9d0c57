# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of engines, methods and datasets in interleaved rounds."""
