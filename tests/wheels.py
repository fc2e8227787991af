"""Source trees of Megatron's releases: `megatron/` as the wheel of megatron-core has it."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


def installed_release() -> str:
    return importlib.metadata.version("megatron-core")


def installed() -> Path:
    """The folder that has the installed `megatron/` in it."""
    return Path(importlib.metadata.distribution("megatron-core").locate_file(""))


def unpack(release: str, folder: Path) -> Path:
    """Put `megatron/` of a release into `folder`: the installed one, or from its wheel, which pip fetches. Skips the test
    where that cannot be had."""
    if installed_release() == release:
        shutil.copytree(installed() / "megatron", folder / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
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


def pretend(version: str, folder: Path) -> Path:
    """Put a package into `folder` that says that it is megatron-core `version` and has nothing else in it, and beside it a
    script that imports it and prints 'went on'; the script."""
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    for package in (core.parent, core):
        (package / "__init__.py").write_text("")
    major, minor, _ = version.split(".")
    (core / "package_info.py").write_text(f"MAJOR, MINOR, __version__ = {major}, {minor}, {version!r}")
    script = folder / "script.py"
    script.write_text("import megatron.core.package_info\nprint('went on')")
    return script


def environment(root: Path) -> dict[str, str]:
    """Environment variables under which Python finds the `megatron/` below `root` first, and then this checkout."""
    return {**os.environ, "PYTHONPATH": f"{root}:{Path(__file__).resolve().parent.parent}", "PYTHONDONTWRITEBYTECODE": "1"}
