"""`python -m megatron_dynatrain plan`: flags in; tables, a JSON file and pictures out."""

import argparse
import json
import os
import sys
from pathlib import Path

import msgspec
from msgspec import UNSET

from megatron_dynatrain.config import parse_layout
from megatron_dynatrain.errors import ConfigError, DynaTrainError, LayoutRefused
from megatron_dynatrain.flags import positive
from megatron_dynatrain.layout import LAUNCH, Layout
from megatron_dynatrain.members import choose
from megatron_dynatrain.planner import model_file, survey
from megatron_dynatrain.planner.cluster import Cluster
from megatron_dynatrain.planner.forecast import Forecast, forecast
from megatron_dynatrain.planning import DEFAULT_STAGING_BYTES

HELP = "plan a switch on a cluster of any size, without one"
DESCRIPTION = """\
Plan the switch between two layouts: every rank is described by Megatron's own code, without memory and without a GPU; the
plan is made and checked as in the job, and costed.

  python -m megatron_dynatrain plan --model configs/models/llama2-70b.yaml --world-size 128 \\
      --from 'tensor_model_parallel_size=8,pipeline_model_parallel_size=4' --to 'tensor_model_parallel_size=4'
  python -m megatron_dynatrain plan --world-size 64 --to 'pipeline_model_parallel_size=8' -- pretrain_gpt.py <its arguments>

A layout is a list of Megatron's argument names with values; what --to leaves out stays as in the launch. With world_size=N or
ranks=[...] it is for other ranks than those of the launch: what growing and shrinking cost.

The exit code is 0, also for a plan that does not fit into the GPU's memory, which is said; 2 for a switch that Megatron or this
package refuses, with the reason (with --json also in the file), and for a wrong command line.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the command. Words after `--` are put into `script` by `cli`."""
    parser.description, parser.formatter_class = DESCRIPTION, argparse.RawDescriptionHelpFormatter
    what = parser.add_argument_group("what is planned")
    what.add_argument("--model", metavar="FILE", help="YAML with Megatron's argument names (see configs/models); without it, "
                      "give the script of a job and its arguments after --")
    what.add_argument("--from", dest="src", metavar="LAYOUT", help="the layout before: with --model that of the launch, with a "
                      "script a change of the launch's, which is the default")
    what.add_argument("--to", dest="dst", metavar="LAYOUT", required=True, help="the layout after; what it leaves out stays "
                      "as in the launch")
    what.add_argument("--world-size", type=positive, required=True, metavar="N", help="number of ranks of the launch")
    what.add_argument("--staging-bytes", type=positive, default=DEFAULT_STAGING_BYTES, metavar="N", help="scratch of a "
                      "rank: transfer.staging_bytes of a job (%(default)s)")
    links = parser.add_argument_group("the cluster")
    links.add_argument("--gpus-per-node", type=positive, default=8, metavar="N", help="neighbouring ranks that share a node "
                       "(%(default)s)")
    links.add_argument("--link-gbps", type=_speed, default=200.0, metavar="X", help="network across nodes in Gb/s for each GPU "
                       "and direction; a node has gpus-per-node times as much, which its GPUs share (%(default)s)")
    links.add_argument("--nvlink-gbs", type=_speed, default=400.0, metavar="X", help="inside a node in GB/s for each GPU and "
                       "direction (%(default)s)")
    links.add_argument("--gpu-memory-gb", type=_speed, default=80.0, metavar="X", help="memory of a GPU in GB (%(default)s)")
    links.add_argument("--gpu-memory-gbs", type=_speed, default=1500.0, metavar="X", help="GB/s at which pieces are packed and "
                       "unpacked, for the estimate (%(default)s)")
    links.add_argument("--window-us", type=_speed, default=200.0, metavar="X", help="microseconds to start a window, for the "
                       "estimate (%(default)s)")
    out = parser.add_argument_group("output")
    out.add_argument("--json", metavar="FILE", help="write the numbers")
    out.add_argument("--plot", metavar="FOLDER", nargs="?", const="plots", help="draw pictures (into %(const)s)")
    how = parser.add_argument_group("how")
    how.add_argument("--jobs", type=positive, default=os.cpu_count() or 1, metavar="N", help="processes that describe ranks, "
                     "about 1 GB each (%(default)s)")
    how.add_argument("--cache", metavar="FOLDER", help="where descriptions are kept (~/.cache/megatron_dynatrain/worlds)")
    how.add_argument("--no-cache", action="store_true", help="describe anew and keep nothing")


def _speed(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} was given, but a number above 0 is expected, such as 200")
    return value


def run(flags: argparse.Namespace) -> int:
    """Plan and print; returns the exit code: 0, or 2 for what is refused and what is asked wrongly."""
    from rich.console import Console

    from megatron_dynatrain.planner import show

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    try:
        src, dst, found = planned(flags)
    except DynaTrainError as error:
        show.refusal(str(error), console) if isinstance(error, LayoutRefused) else print(error, file=sys.stderr)
        if flags.json:
            refused = {"kind": type(error).__name__, "reason": str(error)}
            _write(flags.json, {"world_size": flags.world_size, "refused": refused})
        return 2
    show.show(found, src, dst, console)
    if flags.json:
        _write(flags.json, found.numbers())
        console.print(f"wrote {flags.json}")
    if flags.plot:
        from megatron_dynatrain.planner import pictures

        for path in pictures.draw(found, src, dst, flags.plot):
            console.print(f"wrote {path}")
    return 0


def planned(flags: argparse.Namespace) -> tuple[Layout, Layout, Forecast]:
    """(layout before, layout after, what the switch would do). Raises DynaTrainError."""
    dst = parse_layout(flags.dst, "--to")
    src = parse_layout(flags.src or "", "--from")
    if bool(flags.model) == bool(flags.script):
        raise ConfigError("plan: give either --model FILE or, after --, the script of a job and its arguments")
    if flags.model:
        if flags.src is None:
            raise ConfigError("plan: --model leaves the layout before open; give it with --from, as in "
                              "--from 'tensor_model_parallel_size=4,pipeline_model_parallel_size=8'")
        if src.num_ranks not in (None, flags.world_size):
            raise ConfigError(f"plan: --from is for {src.num_ranks} ranks, but --world-size is {flags.world_size}: with --model "
                              "the layout before is that of the launch; give the same number of ranks")
        launch = msgspec.structs.replace(src, world_size=UNSET, ranks=UNSET)
        job, layouts = model_file.job_of(flags.model, launch), {LAUNCH: Layout(), "to": dst}
    else:
        if not Path(flags.script[0]).is_file():
            raise ConfigError(f"plan: the script {flags.script[0]} does not exist; give its path after --")
        job = survey.Job(flags.script[0], None, Layout(), tuple(flags.script))
        layouts = {"from" if src.arguments() else LAUNCH: src, "to": dst}
    cache = None if flags.no_cache else Path(flags.cache) if flags.cache else survey.default_cache()
    before, after = survey.describe(job, layouts, flags.world_size, flags.jobs, cache).values()
    return src, dst, forecast(before, after, cluster_of(flags), flags.staging_bytes, *_members(src, dst, flags.world_size))


def _members(src: Layout, dst: Layout, launched: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ranks that train before and after, as the job would choose them where a layout does not name them."""
    old, new = (tuple(sorted(layout.ranks)) if layout.ranks is not UNSET else None for layout in (src, dst))
    old = old or tuple(range(src.num_ranks or launched))
    size = dst.num_ranks or launched
    others = [number for number in range(size + len(old)) if number not in old]
    return old, new or choose(size, None, old, others, size + len(old))


def cluster_of(flags: argparse.Namespace) -> Cluster:
    """The cluster that the flags speak of."""
    return Cluster(flags.gpus_per_node, flags.link_gbps * 1e9 / 8, flags.nvlink_gbs * 1e9, flags.gpu_memory_gb * 1e9,
                   flags.gpu_memory_gbs * 1e9, flags.window_us / 1e6)


def _write(path: str, numbers: dict) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
