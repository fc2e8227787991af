#!/usr/bin/env bash
# Measure switches on this machine; flags as in `python -m megatron_dynatrain bench --help`, for example: --json FILE, --quick
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh demo
exec .venv/bin/python -m megatron_dynatrain bench "$@"
