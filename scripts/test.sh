#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs everything if need be, then checks style and types and runs the tests, in two processes
# at once. Arguments go to pytest: `bash scripts/test.sh -m "not engine and not server"` leaves out
# what starts vLLM, and `-n 0` runs all in one process. The tests are written for vLLM's CPU build:
# on a machine with a GPU they have it in an environment of their own.

set -euo pipefail

if [ -z "${HETERO_SPEC_BUILD:-}" ] && nvidia-smi -L >/dev/null 2>&1; then
    VENV="${VENV:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv}"
    export HETERO_SPEC_BUILD=cpu VENV="${VENV%/}-cpu"
    echo "==> there is a GPU here; the tests use vLLM's CPU build, in $VENV" >&2
fi
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"

say "ruff"
ruff check
ruff format --check
say "mypy"
mypy
say "pytest"
python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
