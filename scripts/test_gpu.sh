#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The engine tests that say something on a GPU, on Model Runner V2 with CUDA graphs: samples follow
# the target's law, greedy output is the target's own, as a chain and as a tree, and wrong rules are
# caught. Several engines run beside each other. Wants an environment with vLLM's CUDA
# build and pytest-xdist: `.venv` of `setup.sh` where it exists, or else the current one. Arguments
# go to pytest.

set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"
[ ! -f .venv/bin/activate ] || . .venv/bin/activate

export HETERO_SPEC_ON_GPU=1 VLLM_USE_V2_MODEL_RUNNER=1
export TRITON_F32_DEFAULT=ieee # or float32 is multiplied as TF32
E="tests/engine"
python -m pytest -n "${GPU_ENGINES:-6}" --dist loadscope -k "not wrong and not tight and not small" \
    "$@" $E/laws_v2.py $E/tree_runs.py $E/grown_trees.py $E/test_identity.py $E/test_races.py
