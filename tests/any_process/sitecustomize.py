# SPDX-License-Identifier: Apache-2.0
"""Of every process that the tests start, with this folder on PYTHONPATH: seldom collect garbage.

Each of them imports vLLM, whose objects stay: a sixth of the time that this takes goes into looking
through them again and again.
"""

import gc

gc.set_threshold(100_000, 50, 1000)
