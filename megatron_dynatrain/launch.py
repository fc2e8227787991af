"""Run a Megatron pretraining script, unchanged, so that its job can switch layouts.

    torchrun --nproc-per-node 8 -m megatron_dynatrain.launch [--cpu] pretrain_gpt.py <Megatron arguments> \\
        --dynatrain-config switch.yaml

Flags of the launcher come before the script. Everything after it belongs to the script and to Megatron, whose arguments have
--dynatrain-config FILE beside them: the YAML with layouts and schedule. Without it the script runs as it would run alone.
"""

import argparse
import runpy
import sys
from pathlib import Path


EPILOG = """\
The exit code is that of the script, or 2 where the launcher's own flags are wrong or the script does not exist.

`python -m megatron_dynatrain --help` lists the commands for running jobs, reports and plans.
"""


def main() -> None:
    flags, script = parse(sys.argv[1:])
    if not Path(script[0]).is_file():
        parser().error(f"the script {script[0]} does not exist")
    run(script, cpu=flags.cpu, cpu_optimizer=flags.cpu_optimizer)


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The launcher's own flags, and the script with its arguments. Ends the process with code 2 where the line is wrong."""
    own, script = _split(arguments)
    flags = parser().parse_args(own)
    if not script:
        parser().error("no script was given; name the pretraining script after the launcher's own flags")
    return flags, script


def parser() -> argparse.ArgumentParser:
    """The parser of the launcher's own flags."""
    flags = argparse.ArgumentParser(prog="python -m megatron_dynatrain.launch", description=__doc__, epilog=EPILOG,
                                    usage="%(prog)s [-h] [--cpu] [--cpu-optimizer {fused,torch}] SCRIPT [its arguments]",
                                    formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    flags.add_argument("--cpu", action="store_true", help="run without a GPU, on gloo")
    flags.add_argument("--cpu-optimizer", choices=("fused", "torch"), default="fused",
                       help="with --cpu: Adam with the interface of Apex, or torch's AdamW (%(default)s)")
    return flags


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The launcher's own flags, and the script with its arguments: it starts at the first word that is no flag."""
    at = 0
    while at < len(arguments) and arguments[at].startswith("-"):
        at += 2 if arguments[at] == "--cpu-optimizer" else 1
    return arguments[:at], arguments[at:]


def install() -> None:
    """Make the session of this process, and wrap Megatron's seams when it loads them. Call before Megatron is imported."""
    from megatron_dynatrain import gloo_threads, session
    from megatron_dynatrain.megatron import seams
    from megatron_dynatrain.megatron.job import MegatronJob

    gloo_threads.outlast()
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
