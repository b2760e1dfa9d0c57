#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs everything if need be, then checks style and types and runs the tests. Arguments go to
# pytest: `bash scripts/test.sh -m "not engine and not server"` leaves out what starts vLLM.

set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"

say "ruff"
ruff check
ruff format --check
say "mypy"
mypy
say "pytest"
python -m pytest "$@"
