"""Checks that need no rank to run: descriptions of whole worlds, and plans between them, in one process."""

import faulthandler
import json
import os
import sys
import traceback

import numpy as np


def run(rank, folder, world, layouts, pairs):
    """Describe every layout of the job whose arguments are in sys.argv, check the plans of `pairs` (names), and write one
    record for each: what is wrong with it, or None."""
    from megatron_dynatrain import session as sessions
    from megatron_dynatrain.errors import LayoutRefused
    from megatron_dynatrain.layout import LAUNCH, Layout
    from megatron_dynatrain.megatron import offline

    faulthandler.enable()
    job = offline.capture(sessions.current(), sys.argv, world)
    worlds, refused = {}, {}
    for name, sizes in {LAUNCH: {}, **layouts}.items():
        try:
            worlds[name] = offline.describe_world(job, name, Layout(**sizes), world)
        except LayoutRefused as error:
            refused[name] = str(error)
    with open(folder / "pairs.000.jsonl", "w") as file:
        for src, dst in pairs:
            missing = refused.get(src) or refused.get(dst)
            try:
                wrong = None if missing else checked(worlds[src], worlds[dst])
            except Exception:
                wrong = traceback.format_exc()
            file.write(json.dumps({"src": src, "dst": dst, "refused": missing, "wrong": wrong}) + "\n")
    os._exit(0)


def checked(src, dst):
    """The laws, by counting and by carrying the plans out on numbers: cover, one source for each piece, the minimum of
    bytes, there and back the identity."""
    from worlds import carried_out, filled

    from megatron_dynatrain.planning import make_plan

    there, back = make_plan(src, dst, 1 << 14), make_plan(dst, src, 1 << 14)
    before, wanted = filled(src), filled(dst)
    after = carried_out(there, before)
    for key, expected in wanted.items():
        if not np.array_equal(after[key], expected):
            return f"storage {key[1]} of rank {key[0]} is wrong after the switch"
    returned = carried_out(back, after)
    for key, expected in before.items():
        if not np.array_equal(returned[key], expected):
            return f"storage {key[1]} of rank {key[0]} is wrong after the way back"
    for plan in (there, back):
        minimum = bytes_needed(plan.src, plan.dst)
        if plan.moved_bytes != minimum:
            return f"{plan.moved_bytes} bytes would be moved where {minimum} are needed"
        balanced = plan.balance.max_rank_bytes
        if plan.max_rank_bytes > 1.1 * balanced:
            return f"a rank sends or receives {plan.max_rank_bytes} bytes where {balanced} could do"
    return None


def bytes_needed(src, dst):
    """Bytes that ranks need and do not hold: by marking elements, one tensor and rank at a time."""
    total = 0
    for rank in dst.ranks.tolist():
        for number, tensor in enumerate(dst.tensors):
            held = np.zeros(tensor.shape, bool)
            for row in np.nonzero((src.rank == rank) & (src.boxes.tensor == number))[0]:
                held[slices(src, row, tensor)] = True
            for row in np.nonzero((dst.rank == rank) & (dst.boxes.tensor == number))[0]:
                total += int((~held[slices(dst, row, tensor)]).sum()) * tensor.itemsize
    return total


def slices(world, row, tensor):
    begin, shape = world.boxes.offset[row], world.boxes.shape[row]
    return tuple(slice(int(begin[a]), int(begin[a] + shape[a])) for a in range(len(tensor.shape)))
