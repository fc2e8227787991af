#!/usr/bin/env bash
# Run the core of the tests on every release of megatron-core that is supported, each in an environment of its own.
#
#   scripts/test_releases.sh [release...] [-- arguments for pytest]      scripts/test_releases.sh 0.18.2 -- -k matrix
#
# An environment (.venv-<release>) holds megatron-core alone, a few megabytes, and finds torch and all else in .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh test demo

releases=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do releases+=("$1"); shift; done
[ $# -eq 0 ] || shift
if [ ${#releases[@]} -eq 0 ]; then
    read -ra releases < <(.venv/bin/python -c 'from megatron_dynatrain.megatron.versions import TESTED; print(*TESTED.values())')
fi

packages_of() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

make_environment() {
    local release=$1 folder=$2 own
    echo "test_releases.sh: making $folder"
    rm -rf "$folder"
    .venv/bin/python -m venv --without-pip "$folder"
    own=$(packages_of "$folder/bin/python")
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target "$own" "megatron-core==$release"
    # After its own packages those of .venv, with what their own .pth files bring.
    echo "import site; site.addsitedir('$(packages_of .venv/bin/python)')" > "$own/shared.pth"
}

results=()
for release in "${releases[@]}"; do
    folder=.venv-$release
    says="import importlib.metadata; print(importlib.metadata.version('megatron-core'))"
    if [ "$("$folder/bin/python" -c "$says" 2>/dev/null)" != "$release" ]; then
        make_environment "$release" "$folder"
    fi
    echo "test_releases.sh: megatron-core $("$folder/bin/python" -c "$says")"
    if "$folder/bin/python" -m pytest -q -m core "$@"; then results+=("$release passed"); else results+=("$release FAILED"); fi
done
printf 'test_releases.sh: megatron-core %s\n' "${results[@]}"
case "${results[*]}" in *FAILED*) exit 1 ;; esac
