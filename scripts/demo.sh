#!/usr/bin/env bash
# Train a small GPT on eight CPU ranks with two changes of its layout, and compare with a run without and with a restart.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh demo
exec .venv/bin/python scripts/demo.py "$@"
