"""What a switch would do, in numbers: the fields of `plan --json`, and what the tables and pictures show."""

import time
from dataclasses import dataclass, replace

import numpy as np

from megatron_dynatrain.planner.cluster import Cluster
from megatron_dynatrain.planner.survey import Survey
from megatron_dynatrain.planning import Balance, Cells, Plan, draft_plan, finish_plan, node_numbers, peak_bytes
from megatron_dynatrain.space import nothing


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """A plan and what follows from it. Arrays are int64 [num_ranks], one element for each rank of the plan.

    ranks: their numbers in the job, ascending. The plan counts them from 0, as a job does that goes on with other ranks; where
    all that train go on, the two are the same. src, dst: the layouts on the ranks of the plan.
    needed_bytes, stays_bytes: of the new layout, what ranks hold, and the part that they hold already.
    by_field: 'weight' or the optimizer's name of a state -> (needed, stays, moved) bytes.
    one_rank_seconds: for the plan of one rank, given the descriptions and what the others need.
    peak_bytes: the most that a rank holds in the switch.
    """

    plan: Plan
    ranks: np.ndarray
    src: Survey
    dst: Survey
    cluster: Cluster
    plan_seconds: float
    one_rank_seconds: float
    sent_bytes: np.ndarray
    received_bytes: np.ndarray
    peak_bytes: np.ndarray
    by_field: dict[str, tuple[int, int, int]]
    num_messages: int
    bound_seconds: float
    bound_by: str
    estimate_seconds: float

    @property
    def needed_bytes(self) -> int:
        return sum(needed for needed, *_ in self.by_field.values())

    @property
    def stays_bytes(self) -> int:
        return sum(stays for _, stays, _ in self.by_field.values())

    @property
    def too_large(self) -> np.ndarray:
        """Ranks, by their numbers in the job, whose peak does not fit in a GPU's memory."""
        return self.ranks[self.peak_bytes > self.cluster.gpu_memory]

    @property
    def from_ranks(self) -> list[int]:
        """The ranks that train before, by their numbers in the job."""
        return self.ranks[self.src.world.ranks].tolist()

    @property
    def to_ranks(self) -> list[int]:
        """The ranks that train after, by their numbers in the job."""
        return self.ranks[self.dst.world.ranks].tolist()

    def numbers(self) -> dict:
        """The fields of the JSON file."""
        plan, others = self.plan, {}
        if self.from_ranks != self.to_ranks:
            others = {"from_ranks": self.from_ranks, "to_ranks": self.to_ranks}
        return {
            "world_size": len(plan.src.ranks), "world_size_after": len(plan.dst.ranks), **others,
            "describe_seconds": round(self.src.seconds + self.dst.seconds, 3),
            "plan_seconds_one_rank": round(self.one_rank_seconds, 3),
            "plan_seconds_all_ranks": round(self.plan_seconds, 3),
            "moved_bytes": plan.moved_bytes, "minimum_bytes": plan.minimum_bytes, "max_rank_bytes": plan.max_rank_bytes,
            "balanced_max_rank_bytes": plan.balance.max_rank_bytes,
            "peak_bytes": int(self.peak_bytes.max()), "num_windows": plan.num_windows, "bound_seconds": self.bound_seconds,
            "plan_hash": plan.digest, "bound_by": self.bound_by, "estimate_seconds": self.estimate_seconds,
            "num_copies": len(plan), "num_messages": self.num_messages, "stays_bytes": self.stays_bytes,
            "needed_bytes": self.needed_bytes,
            "by_field": {name: {"needed_bytes": needed, "stays_bytes": stays, "moved_bytes": moved}
                         for name, (needed, stays, moved) in self.by_field.items()},
            "sent_bytes": spread(self.sent_bytes), "received_bytes": spread(self.received_bytes),
            "state_bytes_before": spread(self.src.state_bytes), "state_bytes_after": spread(self.dst.state_bytes),
            "fits_in_memory": not len(self.too_large), "refused": None}


def forecast(src: Survey, dst: Survey, cluster: Cluster, staging_bytes: int, old: tuple[int, ...] | None = None,
             new: tuple[int, ...] | None = None) -> Forecast:
    """Plan the switch between two described layouts, and count. Raises LayoutRefused as `draft_plan`.

    old, new: the ranks that train in them, ascending, by their numbers in the job; None where all ranks of one world do.
    """
    old, new = (tuple(survey.world.ranks.tolist()) if numbers is None else numbers for survey, numbers in ((src, old), (dst, new)))
    ranks = np.array(sorted({*old, *new}), np.int64)
    if old != new:
        src, dst = (replace(survey, world=survey.world.renumbered(np.searchsorted(ranks, numbers)))
                    for survey, numbers in ((src, old), (dst, new)))
    started = time.perf_counter()
    cells = Cells(src.world, dst.world)
    draft = draft_plan(src.world, dst.world, staging_bytes, cells=cells)
    plan = finish_plan(draft, Balance(draft.demand, node_numbers((ranks // cluster.gpus_per_node).tolist())))
    seconds = time.perf_counter() - started
    started = time.perf_counter()
    busiest = int(plan.rank_bytes("dst").argmax())
    finish_plan(draft_plan(src.world, dst.world, staging_bytes, busiest, cells), plan.balance)
    one_rank_seconds = time.perf_counter() - started
    sent, received = plan.rank_bytes("src"), plan.rank_bytes("dst")
    bound_seconds, bound_by = cluster.bound(plan, ranks)
    return Forecast(plan, ranks, src, dst, cluster, seconds, one_rank_seconds, sent, received,
                    _peak_bytes(plan, src, dst), _by_field(plan), len(plan.messages[0]), bound_seconds, bound_by,
                    cluster.estimate(plan, ranks))


def spread(values: np.ndarray) -> dict[str, int]:
    return {"min": int(values.min()), "median": int(np.median(values)), "max": int(values.max())}


def _by_field(plan: Plan) -> dict[str, tuple[int, int, int]]:
    fields = sorted({tensor.field for tensor in plan.tensors}, key=lambda field: (field != "weight", field))
    field_of = np.array([fields.index(tensor.field) for tensor in plan.tensors], np.int64)
    itemsize = np.array([tensor.itemsize for tensor in plan.tensors], np.int64)
    held = plan.dst.boxes
    crosses = plan.crosses
    sums = (np.bincount(field_of[held.tensor], held.volume * itemsize[held.tensor], len(fields)),
            np.bincount(field_of[plan.boxes.tensor[~crosses]], plan.nbytes[~crosses], len(fields)),
            np.bincount(field_of[plan.boxes.tensor[crosses]], plan.nbytes[crosses], len(fields)))
    return {field: tuple(int(column[i]) for column in sums) for i, field in enumerate(fields)}


def _peak_bytes(plan: Plan, src: Survey, dst: Survey) -> np.ndarray:
    """The most that each rank holds in the switch, int64 [num_ranks]."""
    before, after = (dict(zip(survey.world.ranks.tolist(), survey.memory, strict=True)) for survey in (src, dst))
    return np.array([peak_bytes(plan, rank, before.get(rank, nothing().memory), after.get(rank, nothing().memory))
                     for rank in sorted({*before, *after})], np.int64)
