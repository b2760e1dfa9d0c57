#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs everything if necessary, checks style and types, then runs the fast tests in two
# processes. `--full` runs all tests. Arguments are passed to pytest: `-n 0` uses one process, and
# `-m "not engine and not server"` omits tests that start vLLM. The tests need vLLM's CPU build. On
# a machine with a GPU they use an environment of their own.

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
python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 10 "$@"
