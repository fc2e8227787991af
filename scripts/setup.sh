#!/usr/bin/env bash
# Make .venv in the project: find a Python >= 3.12, install torch, megatron-core and this package into it.
#
#   scripts/setup.sh [extra...]      extras of setup.py beside `megatron`: demo, test (default: demo)
#   scripts/setup.sh slurm [...]     beside that, Debian's Slurm, for the tests of scripts/slurm: it runs only while they do
#
# A second run reuses what is there. PYTHON=/path/to/python chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

suits() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        suits "$PYTHON" && { echo "$PYTHON"; return; }
        echo "setup.sh: PYTHON=$PYTHON is no Python >= 3.12 with the venv module; unset it or name another one." >&2
        return 1
    fi
    # 3.12 first: it is what this release is tested on.
    for candidate in python3.12 "$HOME"/.pyenv/versions/3.12*/bin/python3 /usr/local/bin/python3.12 /opt/*/bin/python3.12 \
                     python3.13 "$HOME"/.pyenv/versions/3.13*/bin/python3 python3.14 python3 python; do
        suits "$candidate" && { command -v "$candidate"; return; }
    done
    if command -v uv >/dev/null 2>&1 && candidate=$(uv python find '>=3.12' 2>/dev/null) && suits "$candidate"; then
        echo "$candidate"; return
    fi
    cat >&2 <<'EOF'
setup.sh: no Python >= 3.12 with the venv module was found, and megatron-core needs one. Any of these provides it:
  apt install python3.12 python3.12-venv     (Debian and Ubuntu releases that have it)
  pyenv install 3.12                         (https://github.com/pyenv/pyenv)
  uv python install 3.12                     (https://docs.astral.sh/uv)
Then run this again, or name it: PYTHON=/path/to/python3.12 scripts/setup.sh
EOF
    return 1
}

# Slurm is for some tests only, so that without it everything else goes on.
install_slurm() {
    local become=() apt=(apt-get -qq -o DPkg::Lock::Timeout=60 -o Acquire::Retries=1 -o Acquire::http::Timeout=15)
    local PATH="$PATH:/usr/sbin:/sbin"
    command -v munged && command -v slurmctld && command -v slurmd && command -v sbatch && return
    if [ "$(id -u)" != 0 ]; then become=(sudo -n); fi
    if command -v apt-get && "${become[@]}" true 2>/dev/null; then
        echo "setup.sh: installing slurm-wlm and munge" >&2
        local install=("${become[@]}" env DEBIAN_FRONTEND=noninteractive
                       "${apt[@]}" install -y --no-install-recommends slurm-wlm munge)
        "${install[@]}" || { "${become[@]}" "${apt[@]}" update && "${install[@]}"; } && return
    fi
    cat >&2 <<'EOF'
setup.sh: Slurm could not be installed here, so its tests will be skipped. It takes the right to install packages, and
  apt-get install --no-install-recommends slurm-wlm munge     (Debian and Ubuntu)
EOF
}

extras="megatron"
for extra in "${@:-demo}"; do
    if [ "$extra" = slurm ]; then install_slurm >/dev/null; else extras="$extras,$extra"; fi
done
[ "$extras" != megatron ] || extras="megatron,demo"

if ! [ -x .venv/bin/python ] || ! suits .venv/bin/python; then
    python=$(find_python)
    echo "setup.sh: making .venv with $("$python" --version)"
    rm -rf .venv
    "$python" -m venv .venv
fi

# What was installed is remembered by the text of setup.py and the extras asked for so far.
stamp=".venv/.installed-$(printf '%s %s' "$extras" "$(cat setup.py)" | cksum | tr ' ' '-')"
if ! [ -e "$stamp" ]; then
    echo "setup.sh: installing [$extras]; torch alone is some gigabytes, so the first time takes a minute or more"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[$extras]"
    touch "$stamp"
fi
