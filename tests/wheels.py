"""Source trees of Megatron's releases: `megatron/` as the wheel of megatron-core has it."""

import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


def unpack(release: str, folder: Path) -> Path:
    """Put `megatron/` of a release into `folder`: the installed one, or from its wheel, which pip fetches. Skips the test
    where that cannot be had."""
    if importlib.metadata.version("megatron-core") == release:
        found = importlib.metadata.distribution("megatron-core").locate_file("megatron")
        shutil.copytree(found, folder / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
        return folder
    done = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
                           "--dest", folder / "wheel", f"megatron-core=={release}"], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"pip could not fetch the wheel of megatron-core {release}: {done.stderr.strip()[-200:]}")
    wheel, = (folder / "wheel").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith("megatron/")])
    shutil.rmtree(folder / "wheel")
    return folder
