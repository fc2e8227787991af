"""What a process must agree with before it may join a job: what is published by the job, and the comparison. Pure."""

import importlib.metadata
import platform
from argparse import Namespace

from megatron_dynatrain.errors import ConfigError

# Arguments that say where a process is, not what the job is.
OF_PROCESS = {"rank", "world_size", "local_rank", "dynatrain_join", "local_world_size", "inprocess_active_world_size"}
_PACKAGES = ("torch", "megatron-core", "megatron_dynatrain", "numpy", "transformer-engine", "apex")


def fingerprint(raw: Namespace, config_text: str) -> dict[str, str]:
    """What all processes of a job have in common, as texts. raw: the arguments before their validation."""
    facts = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            facts[f"version of {package}"] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[f"version of {package}"] = "none"
    facts |= {f"--{name.replace('_', '-')}": repr(value) for name, value in sorted(vars(raw).items()) if name not in OF_PROCESS}
    return {**facts, "the file of --dynatrain-config": config_text}


def check(job: dict[str, str], own: dict[str, str]) -> None:
    """Raise ConfigError naming each difference between a job and a process that wants to join it."""
    wrong = [name for name in {**job, **own} if job.get(name) != own.get(name)]
    if wrong:
        said = "; ".join(f"{name} is {_short(own.get(name))} here and {_short(job.get(name))} in the job" for name in wrong[:5])
        more = f" (and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
        raise ConfigError(f"--dynatrain-join: this process does not belong to the job: {said}{more}; start it with the command, "
                          "the files and the packages of the job")


def _short(text: str | None) -> str:
    text = "nothing" if text is None else " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:77]}..."
