#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Serves a target with a drafter of any tokenizer: bash examples/serve.sh [TARGET DRAFTER [FLAGS]]
# Without names: the demo models of scripts/quickstart.sh, or of $HETERO_SPEC_DEMO. FLAGS go to `vllm serve`.

set -euo pipefail

demo=${HETERO_SPEC_DEMO:-${XDG_CACHE_HOME:-~/.cache}/vllm_hetero_spec/demo}
target="${1:-$demo/target-wide}"
drafter="${2:-$demo/drafter}"
shift $(($# < 2 ? $# : 2))

flags=()
if ! nvidia-smi -L >/dev/null 2>&1; then
    # On a CPU vLLM would claim most of the memory, and compile for minutes.
    flags=(--dtype float32 --enforce-eager --max-model-len 2048 --kv-cache-memory-bytes 1G)
fi

exec vllm serve "$target" --host 127.0.0.1 --port "${PORT:-8000}" ${flags[@]+"${flags[@]}"} "$@" \
    --speculative-config \
    "{\"method\": \"hetero\", \"model\": \"$drafter\", \"num_speculative_tokens\": 4}"
