#!/usr/bin/env bash
# Install what tests need and run them all; arguments go to pytest, for example: scripts/test.sh -k geometry
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Root, as in a container, gets Slurm for its tests, too. Elsewhere nothing is put into the system, unless by
# `scripts/setup.sh slurm`.
slurm=$([ "$(id -u)" != 0 ] || echo slurm)
scripts/setup.sh test demo ${slurm:+"$slurm"}
exec .venv/bin/python -m pytest -q "$@"
