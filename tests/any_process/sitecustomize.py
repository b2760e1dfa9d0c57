# SPDX-License-Identifier: Apache-2.0
"""Reduce garbage collection in every process that the tests start with this folder on PYTHONPATH.

Each process imports vLLM, whose objects stay. Collecting them repeatedly takes a sixth of the
import time.
"""

import gc

gc.set_threshold(100_000, 50, 1000)
