#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs everything, and measures the demo target alone and with its drafter, whose tokenizer
# differs:
#
#     bash scripts/quickstart.sh
#
# With your own models instead, by Hugging Face name or folder:
#
#     bash scripts/quickstart.sh --target NAME --drafter NAME
#
# Further options, as --batch-size 8, are passed to `vllm-hetero-spec compare`.

set -euo pipefail

target="" drafter=""
options=()
while [ $# -gt 0 ]; do
    case "$1" in
        --target=*) target="${1#*=}" ;;
        --drafter=*) drafter="${1#*=}" ;;
        --target | --drafter)
            [ $# -gt 1 ] || { echo "error: $1 needs a name or folder" >&2; exit 2; }
            if [ "$1" = --target ]; then target="$2"; else drafter="$2"; fi
            shift
            ;;
        -h | --help) sed -n '4,13s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) options+=("$1") ;;
    esac
    shift
done
if [ "${target:+given}" != "${drafter:+given}" ]; then
    echo "error: --target and --drafter go together; leave both out for the demo models" >&2
    exit 2
fi

cat >&2 <<'END'
==> This installs vLLM and the plugin into a virtual environment (about 4 GB with vLLM's CPU build,
==> two to three minutes if the packages are cached nearby; nothing if they are installed), and then
==> measures the target alone and with its drafter (two minutes with the demo pair on two cores).
END
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

if [ -z "$target" ]; then
    demo=${HETERO_SPEC_DEMO:-${XDG_CACHE_HOME:-~/.cache}/vllm_hetero_spec/demo}
    python "$ROOT/scripts/make_demo.py" --out "$demo" >&2
    mkdir -p "$ROOT/.cache"
    ln -sfn "$(cd "$demo" && pwd)" "$ROOT/.cache/demo" # the path in examples/pair.yaml
    target="$demo/target-wide" drafter="$demo/drafter"
    options=(--prompts "$demo/prompts.jsonl" --max-tokens 64 ${options[@]+"${options[@]}"})
    if nvidia-smi -L >/dev/null 2>&1; then
        say "checking drafts on this GPU (two or three minutes; a line of JSON for each part)"
        code=0
        python "$ROOT/scripts/measure_gpu.py" --parts 0 A --target "$demo/target" \
            --drafter "$demo/drafter" --prompts "$demo/prompts.jsonl" \
            --out "$ROOT/.cache/measure_gpu.jsonl" || code=$?
        case $code in
            0) ;;
            3) say "the check reached its time limit; no fault was found until then" ;;
            *) say "something is wrong on this machine: see the lines above" ;;
        esac
    fi
fi

say "the target alone and with the drafter, one engine after the other"
vllm-hetero-spec compare "$target" "$drafter" ${options[@]+"${options[@]}"}

say "in this shell, \`vllm\` and \`vllm-hetero-spec\` are there after: . $VENV/bin/activate"
