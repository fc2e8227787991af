"""`python -m megatron_dynatrain report`: a run directory in; tables and a picture out."""

import argparse
import json
import os
import sys
from pathlib import Path

from megatron_dynatrain.errors import ConfigError
from megatron_dynatrain.timeline import history, summary

HELP = "say what became of a run, and draw its timeline"
DESCRIPTION = """\
Read the report of a run, also of one that is training, and print how many steps each layout made and how fast, every switch
with its stall, phases and bytes, and what was refused. The timeline is drawn beside the report: layouts, loss, step times and
the phases of the switches. Step times and losses are in a report with `report_steps: true`.

  python -m megatron_dynatrain report runs/demo
  python -m megatron_dynatrain report runs/demo/report.jsonl --json | jq .stall_seconds

The exit code is 0, or 2 where the command line is wrong, or there is no report that can be read or no place for a picture that
was asked for.
"""
NEEDED = "pip install 'megatron_dynatrain[report]', or rich and matplotlib alone"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.formatter_class = DESCRIPTION, argparse.RawDescriptionHelpFormatter
    parser.add_argument("run_dir", metavar="RUN_DIR", help=f"the directory that holds {history.REPORT}, or the file itself")
    parser.add_argument("--all", action="store_true", help="a row for each switch, also where there are many of them")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables, and draw nothing unless "
                        "--plot is given")
    parser.add_argument("--plot", metavar="FILE", help="where the timeline is drawn, a .png, .pdf or .svg (timeline.png beside "
                        "the report)")
    parser.add_argument("--no-plot", action="store_true", help="draw nothing")
    parser.add_argument("--over", choices=("iteration", "time"), default="iteration", help="what the timeline is drawn over "
                        "(%(default)s)")


def run(flags: argparse.Namespace) -> int:
    """Print and draw; returns the exit code."""
    try:
        path = history.report_of(flags.run_dir)
        runs, num_bad = history.read(path)
        if flags.json:
            print(json.dumps(summary.as_json(runs, num_bad, str(path)), indent=1))
        else:
            _print_tables(flags, runs, num_bad, path)
        if runs and not flags.no_plot and (flags.plot or not flags.json):
            _plot(flags, runs, path)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _print_tables(flags: argparse.Namespace, runs: list[history.Run], num_bad: int, path: Path) -> None:
    try:
        from rich.console import Console
    except ImportError:
        raise ConfigError(f"report: the tables need rich, which is not installed; {NEEDED}, or ask for --json") from None
    from megatron_dynatrain.timeline import show

    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)
    show.show(runs, num_bad, str(path), console, flags.all)


def _plot(flags: argparse.Namespace, runs: list[history.Run], path: Path) -> None:
    """Draw the timeline. Raises ConfigError where a file was asked for and cannot be; what comes of itself may be missing."""
    target = Path(flags.plot) if flags.plot else path.with_name("timeline.png")
    try:
        from megatron_dynatrain.timeline import picture

        target.parent.mkdir(parents=True, exist_ok=True)
        picture.draw(runs, target, flags.over)
    except ImportError:
        problem = f"the timeline needs matplotlib, which is not installed; {NEEDED}"
    except (OSError, ValueError) as error:
        problem = f"the timeline cannot be written to {target} ({error}); give another file with --plot"
    else:
        print(f"wrote {target}", file=sys.stderr if flags.json else sys.stdout)
        return
    if flags.plot:
        raise ConfigError(f"report: {problem}")
    print(f"no picture: {problem}", file=sys.stderr)
