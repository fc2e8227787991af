"""The subcommand `bench`: its flags, its progress on the terminal, what it writes."""

import argparse
import json
import time
from pathlib import Path

from megatron_dynatrain.bench.cases import DEFAULT_MODELS, MODELS, RANKS
from megatron_dynatrain.flags import positive

DESCRIPTION = """\
Measures switches between layouts on gloo ranks of this machine: the stall with its phases, the raw exchange of the same
bytes, Megatron's checkpoint save + load, a stop + restart, and Megatron's refit of the weights. Prints a table, and which
targets are met. A missed target is no error. Nothing else should run on the machine. It runs from a checkout of this project.

  python -m megatron_dynatrain bench --quick
  python -m megatron_dynatrain bench --models 10m,100m --repeats 5 --json runs/bench/mine.json

The exit code is 0, also where a model does not fit into memory and is left out; 1 where a job of the benchmark failed, with the
end of its log; 2 where the command line is wrong.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", type=Path, default=Path("runs/bench/bench.json"), metavar="FILE",
                        help="where the records go (default: %(default)s)")
    parser.add_argument("--plot", type=Path, default=Path("runs/bench/bench.png"), metavar="FILE",
                        help="where the plot goes (default: %(default)s)")
    parser.add_argument("--models", type=_models, metavar="A,B",
                        help=f"of {', '.join(MODELS)} (default: {','.join(DEFAULT_MODELS)}; with --quick: tiny)")
    parser.add_argument("--ranks", type=int, choices=RANKS, default=8, help="processes of each job (default: %(default)s)")
    parser.add_argument("--repeats", type=positive, metavar="N",
                        help="warm visits of each pair (default: 3; with --quick: 1)")
    parser.add_argument("--restart", choices=("one", "all"), default="one",
                        help="stop + restart for the first pair of each model, or for all (default: %(default)s)")
    parser.add_argument("--no-restart", dest="restart", action="store_const", const="none", help="no stop + restart")
    parser.add_argument("--checkpoint", choices=("one", "all"), default="one",
                        help="save + load for the first pair of each model, or for all (default: %(default)s)")
    parser.add_argument("--no-checkpoint", dest="checkpoint", action="store_const", const="none", help="no save + load")
    parser.add_argument("--quick", action="store_true",
                        help="a tiny model, one warm visit, no restart: to see that it works, not to measure")
    parser.add_argument("--planning", action="store_true", help="instead, the cost of planning from 64 to 4,096 ranks")


def _models(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no model {unknown[0]!r}; known here: {', '.join(MODELS)}")
    return names


def run(flags: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from megatron_dynatrain.bench import planning_cost, show
    from megatron_dynatrain.bench.cases import Case
    from megatron_dynatrain.bench.run import BenchFailed, TooLarge, measure, prepare

    console, begin = Console(), time.monotonic()
    if flags.planning:
        flags.json.parent.mkdir(parents=True, exist_ok=True)
        flags.json.write_text(json.dumps(planning_cost.measure(console.print), indent=1))
        return
    models = flags.models or (["tiny"] if flags.quick else list(DEFAULT_MODELS))
    restarts = "none" if flags.quick and flags.restart == "one" else flags.restart
    for path in (flags.json, flags.plot):
        path.parent.mkdir(parents=True, exist_ok=True)
    records: list[dict] = []
    too_large: list[str] = []
    try:
        prepare()
        with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as progress:
            for model in models:
                task = progress.add_task(f"{model}: starting {flags.ranks} processes", total=1)
                case = Case(model, flags.ranks, flags.repeats or (1 if flags.quick else 3), flags.checkpoint)
                try:
                    records += measure(case, flags.json.parent.absolute() / model, restarts,
                                       lambda text: progress.update(task, description=f"{model}: {text}"))
                except TooLarge as error:
                    too_large.append(str(error))
                progress.update(task, description=model, completed=1)
    except BenchFailed as error:
        raise SystemExit(f"bench: {error}") from None
    finally:
        flags.json.write_text(json.dumps(records, indent=1))
    console.print(show.phases_table(records))
    console.print(show.profile_table(records))
    console.print(show.table(records))
    for line in show.verdicts(records):
        console.print(line, highlight=False, markup=False)
    for record in records:
        for what, why in record["left_out"].items() if not record["warm"] else ():
            console.print(f"no {what} of {record['model']} {record['src']} -> {record['dst']}: {why}", highlight=False,
                          markup=False)
    for reason in too_large:
        console.print(f"left out: {reason}", highlight=False, markup=False)
    if records:
        show.plot(records, flags.plot)
    for path in (flags.json, *([flags.plot] if records else ())):
        console.print(f"wrote {path}")
    console.print(f"the benchmark took {time.monotonic() - begin:.0f} s")
