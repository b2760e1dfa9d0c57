#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Serve a target with a drafter: bash examples/serve.sh [TARGET DRAFTER [FLAGS]]
# Without names it serves the demo models of scripts/quickstart.sh, or those of $HETERO_SPEC_DEMO. FLAGS go to
# `vllm serve`.

set -euo pipefail

if [ $# -eq 1 ] || [[ "${1-}" == -* ]]; then
    echo "error: name TARGET and DRAFTER, before any flags, or neither for the demo models" >&2
    exit 2
fi
demo=${HETERO_SPEC_DEMO:-${XDG_CACHE_HOME:-~/.cache}/vllm_hetero_spec/demo}
target="${1:-$demo/target-wide}"
drafter="${2:-$demo/drafter}"
shift $(($# < 2 ? $# : 2))

flags=()
if ! nvidia-smi -L >/dev/null 2>&1; then
    # For a CPU, where vLLM by default takes most of the memory and compiles for minutes.
    flags=(--dtype float32 --enforce-eager --max-model-len 2048 --kv-cache-memory-bytes 1G)
fi

exec vllm serve "$target" --host 127.0.0.1 --port "${PORT:-8000}" ${flags[@]+"${flags[@]}"} "$@" \
    --speculative-config \
    "{\"method\": \"hetero\", \"model\": \"$drafter\", \"num_speculative_tokens\": 4}"
