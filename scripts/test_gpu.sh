#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs engine tests on a GPU, on Model Runner V2 with CUDA graphs: samples follow the target's
# distribution, greedy output is equal to the target's for chains and draft trees, and wrong rules
# are detected. Several engines run in parallel. Needs an environment with vLLM's CUDA build and
# pytest-xdist: `.venv` of `setup.sh` if it exists, otherwise the current one. Arguments are passed
# to pytest.

set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"
[ ! -f .venv/bin/activate ] || . .venv/bin/activate

export HETERO_SPEC_ON_GPU=1 VLLM_USE_V2_MODEL_RUNNER=1
export TRITON_F32_DEFAULT=ieee # otherwise Triton multiplies float32 as TF32
E="tests/engine"
python -m pytest -n "${GPU_ENGINES:-6}" --dist loadscope -k "not wrong and not tight and not small" \
    "$@" $E/laws_v2.py $E/tree_runs.py $E/grown_trees.py $E/test_identity.py $E/test_races.py
