#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs everything if need be, then checks style and types and runs the tests, in two processes
# at once. Arguments go to pytest: `bash scripts/test.sh -m "not engine and not server"` leaves out
# what starts vLLM, and `-n 0` runs all in one process.

set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"

say "ruff"
ruff check
ruff format --check
say "mypy"
mypy
say "pytest"
python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
