"""What planning costs from 64 to 4,096 ranks: the part of the benchmark that starts no ranks (`bench --planning`).

The worlds are made of numbers alone: a mixture of experts in bf16 with fp32 masters and Adam's moments, its dense weights cut by
TP, its experts dealt out by EP, its optimizer states cut over data parallelism. The model stays, the number of ranks grows.
"""

import resource
import time

import numpy as np

from megatron_dynatrain.geometry import BoxTable, concatenate
from megatron_dynatrain.planning import Balance, Cells, draft_plan, finish_plan
from megatron_dynatrain.space import LogicalTensor, World, check_cover

RANKS = (64, 256, 1024, 4096)
LAYERS, EXPERTS, ROWS, COLUMNS = 32, 64, 65536, 512
STATES = ("exp_avg", "exp_avg_sq", "param")
STAGING_BYTES = 64 << 20
GPUS_PER_NODE = 8


def measure(tell) -> list[dict]:
    """One record for each number of ranks: seconds for the plan of one rank and for those of all, on one core. `tell` hears, in
    words, what is being done."""
    records = []
    for num_ranks in RANKS:
        src, dst = world(num_ranks, tp=4, pp=4, ep=4), world(num_ranks, tp=2, pp=8, ep=8)
        started = time.perf_counter()
        cells = Cells(src, dst)
        draft = draft_plan(src, dst, STAGING_BYTES, cells=cells)
        plan = finish_plan(draft, Balance(draft.demand, np.arange(num_ranks) // GPUS_PER_NODE))
        all_ranks = time.perf_counter() - started
        started = time.perf_counter()
        finish_plan(draft_plan(src, dst, STAGING_BYTES, num_ranks // 2, Cells(src, dst)), plan.balance)
        one_rank = time.perf_counter() - started
        records.append({"world_size": num_ranks, "num_pieces": len(src) + len(dst), "num_copies": len(plan),
                        "plan_seconds_one_rank": round(one_rank, 4), "plan_seconds_all_ranks": round(all_ranks, 4),
                        "moved_bytes": plan.moved_bytes, "max_rank_bytes": plan.max_rank_bytes, "num_windows": plan.num_windows,
                        "peak_process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024})
        tell(f"{num_ranks:5,} ranks: {len(src) + len(dst):9,} pieces, {len(plan):9,} copies; one rank {one_rank:.3f} s, all ranks "
             f"{all_ranks:.2f} s, {1e6 * all_ranks / len(plan):.1f} s a million copies")
        del src, dst, cells, draft, plan
    return records


def world(num_ranks: int, tp: int, pp: int, ep: int) -> World:
    """The pieces of all ranks; DP follows. The numbers must divide one another and the model's."""
    rank = np.arange(num_ranks)
    stage = num_ranks // pp
    dp, edp = stage // tp, stage // ep
    pp_rank, within = np.divmod(rank, stage)
    dp_rank, tp_rank = np.divmod(within, tp)
    edp_rank, ep_rank = np.divmod(within, ep)
    layers, experts = LAYERS // pp, EXPERTS // ep
    tensors, tables, columns = [], [], []

    def add(tensor, offset, shape, is_main):
        """offset, is_main: over all pieces, rank by rank; shape: that of every piece."""
        offset = np.stack(np.broadcast_arrays(*offset), axis=-1).reshape(-1, 4)
        per_rank = len(offset) // num_ranks
        tables.append(BoxTable(np.full(len(offset), len(tensors)), offset, np.broadcast_to(shape, offset.shape)))
        stride = (0, 0, shape[3], 1)
        columns.append((np.repeat(rank, per_rank), np.tile(np.arange(per_rank), num_ranks), np.zeros(len(offset), np.int64),
                        np.broadcast_to(stride, offset.shape), np.repeat(is_main, per_rank)))
        tensors.append(tensor)

    layer = (pp_rank * layers)[:, None] + np.arange(layers)  # [num_ranks, layers]
    tp_rows, dp_rows = ROWS // tp, ROWS // tp // dp
    layer_of, expert_of = layer[:, :, None], ((ep_rank * experts)[:, None] + np.arange(experts))[:, None, :]
    # A rank owns the states of whole experts, an equal number in each layer or a part of the rows of each.
    whole, parts = max(experts // edp, 1), max(edp // experts, 1)
    first, row = edp_rank // parts * whole, edp_rank % parts * (ROWS // parts)
    owned = ((ep_rank * experts + first)[:, None] + np.arange(whole))[:, None, :]
    for field in (*STATES, "weight"):
        itemsize, dtype = (2, "bfloat16") if field == "weight" else (4, "float32")
        of = {"field": field, "dtype": dtype, "itemsize": itemsize}
        dense = LogicalTensor("decoder.layers.mlp.linear_fc1.weight", shape=(LAYERS, 1, ROWS, COLUMNS), **of)
        expert = LogicalTensor("decoder.layers.mlp.experts.linear_fc1.weight", shape=(LAYERS, EXPERTS, ROWS, COLUMNS), **of)
        if field == "weight":
            add(dense, (layer, 0, (tp_rank * tp_rows)[:, None], 0), (1, 1, tp_rows, COLUMNS), dp_rank == 0)
            add(expert, (layer_of, expert_of, 0, 0), (1, 1, ROWS, COLUMNS), edp_rank == 0)
        else:
            add(dense, (layer, 0, (tp_rank * tp_rows + dp_rank * dp_rows)[:, None], 0), (1, 1, dp_rows, COLUMNS), rank >= 0)
            add(expert, (layer_of, owned, row[:, None, None], 0), (1, 1, ROWS // parts, COLUMNS), rank >= 0)
    made = World(rank, tuple(tensors), concatenate(tables), *(np.concatenate(column) for column in zip(*columns)),
                 digest=f"{num_ranks} {tp} {pp} {ep}")
    check_cover(made)
    return made
