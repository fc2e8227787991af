#!/usr/bin/env bash
# Install what tests need and run them all; arguments go to pytest, for example: scripts/test.sh -k geometry
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh test demo
exec .venv/bin/python -m pytest -q "$@"
