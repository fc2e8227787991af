"""The table of README.md, section "Against the paper": planned bytes and lower bounds on its cluster. Computed, not measured.

    python scripts/paper_table.py [--only NAME] [--jobs N] [--cache FOLDER]

The cluster of arXiv 2605.18815: nodes of 8 A800-80GB, 8 cards of 200 Gb/s a node, NVLink of 400 GB/s inside. 400 GB/s is
taken as the speed of one direction, which can only make a bound smaller.
"""

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_dynatrain.layout import LAUNCH, Layout  # noqa: E402
from megatron_dynatrain.planner import model_file, survey  # noqa: E402
from megatron_dynatrain.planner.cluster import Cluster  # noqa: E402
from megatron_dynatrain.planner.forecast import forecast  # noqa: E402
from megatron_dynatrain.planner.show import in_seconds  # noqa: E402
from megatron_dynatrain.planning import DEFAULT_STAGING_BYTES  # noqa: E402
from megatron_dynatrain.report import in_bytes  # noqa: E402

CLUSTER = Cluster(gpus_per_node=8, gpu_link=200e9 / 8, nvlink=400e9, gpu_memory=80e9)


def sizes(tp: int, pp: int, ep: int | None = None) -> Layout:
    experts = {} if ep is None else {"expert_model_parallel_size": ep}
    return Layout(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, **experts)


@dataclass(frozen=True)
class Case:
    """A model on `world_size` ranks, launched in one layout and switched to others, and what the paper says of its size."""

    title: str
    model: str
    world_size: int
    launch: Layout
    targets: list[Layout]
    paper: str


CASES = [
    Case("Llama-2 7B", "llama2-7b", 32, sizes(4, 2), [sizes(2, 4), sizes(4, 1)], ""),
    Case("Llama-2 13B", "llama2-13b", 32, sizes(4, 2), [sizes(2, 4), sizes(8, 1)], ""),
    Case("Llama-2 70B", "llama2-70b", 128, sizes(8, 4), [sizes(4, 8), sizes(8, 2), sizes(8, 8)], "a dense 70B: under 2 s"),
    Case("Qwen3-30B-A3B", "qwen3-30b-a3b", 64, sizes(4, 2, 8), [sizes(2, 4, 8), sizes(4, 1, 16)], ""),
    Case("Qwen3-235B-A22B", "qwen3-235b-a22b", 128, sizes(4, 8, 16), [sizes(2, 16, 8), sizes(4, 4, 32), sizes(8, 8, 16)],
         "a 235B MoE: 4.36 s"),
]


def name_of(layout: Layout, world_size: int) -> str:
    """'TP8 PP4 DP4'."""
    tp, pp = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    ep = layout.arguments().get("expert_model_parallel_size")
    return f"TP{tp} PP{pp}" + (f" EP{ep}" if ep else "") + f" DP{world_size // (tp * pp)}"


def rows_of(case: Case, jobs: int, cache: Path | None):
    """The lines of the table for one model."""
    job = model_file.job_of(str(ROOT / "configs" / "models" / f"{case.model}.yaml"), case.launch)
    layouts = {LAUNCH: Layout(), **{name_of(target, case.world_size): target for target in case.targets}}
    described = survey.describe(job, layouts, case.world_size, jobs, cache)
    for name in list(layouts)[1:]:
        found = forecast(described[LAUNCH], described[name], CLUSTER, DEFAULT_STAGING_BYTES)
        plan = found.plan
        cells = (case.title, case.world_size, f"{name_of(case.launch, case.world_size)} → {name}", in_bytes(plan.moved_bytes),
                 in_bytes(plan.max_rank_bytes), in_bytes(int(found.peak_bytes.max())), in_seconds(found.bound_seconds),
                 in_seconds(found.estimate_seconds), case.paper or "—")
        yield f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", help="only models whose file name has this in it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes that describe")
    parser.add_argument("--cache", type=Path, default=survey.default_cache(), metavar="FOLDER",
                        help="where descriptions are kept")
    flags = parser.parse_args()
    print("| model | GPUs | switch | moved (= minimum) | busiest rank | peak per GPU | lower bound, computed | estimate, "
          "computed | the paper, measured |\n|---|---|---|---|---|---|---|---|---|", flush=True)
    for case in CASES:
        if not flags.only or flags.only in case.model:
            for row in rows_of(case, flags.jobs, flags.cache):
                print(row, flush=True)


if __name__ == "__main__":
    main()
