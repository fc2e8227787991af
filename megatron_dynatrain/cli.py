"""The command line: `python -m megatron_dynatrain <command>`. (Jobs start through `megatron_dynatrain.launch`.)

    check      print the support matrix: what can be switched, what is refused and why
    plan       plan a switch on a cluster of any size, without one
    report     say what became of a run, and draw its timeline
    bench      measure switches on this machine, beside what they could cost at best and what they replace
    request    ask a running job for a switch
    status     say what the job of a run directory is doing
    cancel     take a request back
    store      hold the key-value store of elastic jobs, on a machine that stays
    patch      patch a Megatron-LM checkout, so that its jobs need no launcher
"""

import argparse
import sys

from megatron_dynatrain.bench import command as bench
from megatron_dynatrain.elastic import job_store
from megatron_dynatrain.patching import command as patching
from megatron_dynatrain.planner import command as planner
from megatron_dynatrain.run_dir import commands as run_dir
from megatron_dynatrain.timeline import command as timeline


DESCRIPTION = """\
Ask running jobs, look at their reports, plan and measure switches. COMMAND --help has flags, examples and exit codes.
"""
EPILOG = """\
A job itself starts with the launcher, or from a patched checkout without it:

  torchrun ... -m megatron_dynatrain.launch pretrain_gpt.py <Megatron arguments> --dynatrain-config switch.yaml
"""
CHECK = """\
Print what can be switched, and what is refused and why, as the Markdown tables of the README. Needs neither a GPU nor Megatron.

  python -m megatron_dynatrain check

The exit code is 0.
"""


def main(arguments: list[str] | None = None) -> None:
    flags = parse(sys.argv[1:] if arguments is None else list(arguments))
    sys.exit(flags.run(flags))


def parse(arguments: list[str]) -> argparse.Namespace:
    """The flags of a command line: `run(flags)` carries it out and returns its exit code; `script` is what stands after `--`.
    Ends the process with code 2 where the line is wrong, as argparse does."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    flags = parser().parse_args(arguments[:at])
    flags.script = arguments[at + 1:]
    return flags


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    whole = argparse.ArgumentParser(prog="python -m megatron_dynatrain", description=DESCRIPTION, epilog=EPILOG,
                                    allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    checking = commands.add_parser("check", help="print what can be switched, and what is refused and why", description=CHECK,
                                   allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    checking.set_defaults(run=check)
    planning = commands.add_parser("plan", help=planner.HELP, allow_abbrev=False)
    planner.add_flags(planning)
    planning.set_defaults(run=planner.run)
    reporting = commands.add_parser("report", help=timeline.HELP, allow_abbrev=False)
    timeline.add_flags(reporting)
    reporting.set_defaults(run=timeline.run)
    measuring = commands.add_parser("bench", help="measure switches on this machine", allow_abbrev=False)
    bench.add_flags(measuring)
    measuring.set_defaults(run=bench.run)
    run_dir.add_flags(commands)
    storing = commands.add_parser("store", help=job_store.HELP, allow_abbrev=False)
    job_store.add_flags(storing)
    storing.set_defaults(run=job_store.run)
    patch = commands.add_parser("patch", help=patching.HELP, allow_abbrev=False)
    patching.add_flags(patch)
    patch.set_defaults(run=patching.run)
    return whole


def check(flags: argparse.Namespace) -> None:
    """Print the support matrix as Markdown, as in the README."""
    from megatron_dynatrain.megatron import support

    print(support.matrix())
