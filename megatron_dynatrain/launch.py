"""Run a Megatron pretraining script, unchanged, so that its job can switch layouts.

    torchrun --nproc-per-node 8 -m megatron_dynatrain.launch [--cpu] pretrain_gpt.py <Megatron arguments> \\
        --dynatrain-config switch.yaml

Flags of the launcher come before the script:

    --cpu                       run without a GPU, on gloo (see megatron_dynatrain.cpu)
    --cpu-optimizer {fused,torch}  on the CPU: Adam with the interface of Apex (default), or torch's AdamW

Everything after the script belongs to the script. Without --dynatrain-config the script runs as it would run alone.
"""

import argparse
import runpy
import sys
from pathlib import Path


def main() -> None:
    own, script = _split(sys.argv[1:])
    parser = argparse.ArgumentParser(prog="python -m megatron_dynatrain.launch", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--cpu", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cpu-optimizer", choices=("fused", "torch"), default="fused", help=argparse.SUPPRESS)
    flags = parser.parse_args(own)
    if not script:
        parser.error("no script was given; name the pretraining script after the launcher's own flags")
    if not Path(script[0]).is_file():
        parser.error(f"the script {script[0]} does not exist")
    run(script, cpu=flags.cpu, cpu_optimizer=flags.cpu_optimizer)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The launcher's own flags, and the script with its arguments: it starts at the first word that is no flag."""
    at = 0
    while at < len(arguments) and arguments[at].startswith("-"):
        at += 2 if arguments[at] == "--cpu-optimizer" else 1
    return arguments[:at], arguments[at:]


def install() -> None:
    """Make the session of this process, and wrap Megatron's seams when it loads them. Call before Megatron is imported."""
    from megatron_dynatrain import session
    from megatron_dynatrain.megatron import seams
    from megatron_dynatrain.megatron.job import MegatronJob

    session.install(session.Session(MegatronJob()))
    seams.install(session.current())


def run(script: list[str], cpu: bool = False, cpu_optimizer: str = "fused") -> None:
    """Run `script` (path and arguments) as `__main__` in this process, with Megatron's seams wrapped when it loads them."""
    if cpu:
        from megatron_dynatrain import cpu as backend

        backend.install(cpu_optimizer)
    install()
    sys.argv = list(script)
    sys.path[0] = str(Path(script[0]).resolve().parent)
    runpy.run_path(script[0], run_name="__main__")


if __name__ == "__main__":
    main()
