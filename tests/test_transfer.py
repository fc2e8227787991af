"""The executor and the two verifications over real gloo ranks, without Megatron: old and new ranks differ, some are in one
set only, storages are strided, and the budget is so small that there are many windows."""

import multiprocessing
import os
import socket
import time

import numpy as np
import pytest
from worlds import TENSORS

from megatron_dynatrain.geometry import Box, flat_interval_boxes, row_major_strides
from megatron_dynatrain.planning import make_plan
from megatron_dynatrain.space import Holdings, Piece, Storage, World

WORLD_SIZE = 4
SRC_RANKS, DST_RANKS = (0, 2, 3), (1, 3)


def holdings(rank, ranks, cut_flat):
    """The rank-th part of each tensor: of its flat elements, or of its last axis; the embedding is replicated."""
    pieces, storages = [], []
    for tensor in TENSORS:
        index, parts = ranks.index(rank), len(ranks)
        if tensor.key.startswith("embedding"):
            boxes, main = [Box((0,) * len(tensor.shape), tensor.shape)], index == 0
        elif cut_flat:
            bounds = [tensor.numel * i // parts for i in range(parts + 1)]
            boxes, main = flat_interval_boxes(tensor.shape, bounds[index], bounds[index + 1]), True
        else:
            bounds = [tensor.shape[-1] * i // parts for i in range(parts + 1)]
            boxes = [Box((0,) * (len(tensor.shape) - 1) + (bounds[index],),
                         (*tensor.shape[:-1], bounds[index + 1] - bounds[index]))]
            main = True
        for box in boxes:
            strides = tuple(2 * s for s in row_major_strides(box.shape))
            storages.append(Storage(f"{tensor.name} {box}", 3 + 2 * int(np.prod(box.shape)), tensor.dtype))
            pieces.append(Piece(tensor, box, len(storages) - 1, 3, strides, main))
    return Holdings.from_pieces(pieces, storages)


def memory(world, rank, held, fill):
    """Storages of a rank; with `fill` every element names its coordinate, so exactly that bfloat16 can hold it."""
    import torch

    storages = [torch.zeros(s.numel, dtype=getattr(torch, s.dtype)) for s in held.storages]
    for row in np.nonzero(world.rank == rank)[0] if fill else ():
        tensor = world.tensors[world.boxes.tensor[row]]
        box = world.boxes.box(row, len(tensor.shape))
        whole = torch.arange(tensor.numel).view(tensor.shape) % 251
        part = whole[tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape))]
        view = torch.as_strided(storages[world.storage[row]], box.shape, world.stride[row, :len(box.shape)].tolist(),
                                int(world.start[row]))
        view.copy_(part)
    return storages


def join(rank, port):
    """Meet the other ranks. (source world, destination world, the holdings of both by rank)."""
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE)
    src_held = {r: holdings(r, SRC_RANKS, False) for r in SRC_RANKS}
    dst_held = {r: holdings(r, DST_RANKS, True) for r in DST_RANKS}
    return World.assemble(src_held), World.assemble(dst_held), src_held, dst_held


def run_rank(rank, port, answers, corrupt):
    import torch
    import torch.distributed as dist

    from megatron_dynatrain.transfer import Checksums, compare_bits, execute

    src, dst, src_held, dst_held = join(rank, port)
    plan = make_plan(src, dst, 64)
    old = memory(src, rank, src_held[rank], True) if rank in SRC_RANKS else []
    new = memory(dst, rank, dst_held[rank], False) if rank in DST_RANKS else []
    wanted = memory(dst, rank, dst_held[rank], True) if rank in DST_RANKS else []
    before = Checksums(src, rank, old, plan.common)
    received = execute(plan, rank, old, new)
    equal = all(torch.equal(a, b) for a, b in zip(new, wanted, strict=True))
    if corrupt and rank == DST_RANKS[1]:
        new[-1][3:4].view(torch.int32)[0] ^= 1
    full = compare_bits(src, dst, rank, old, new)
    digest = before.differences(Checksums(dst, rank, new, plan.common))
    answers.put((rank, received, equal, full, digest, plan.num_windows, plan.moved_bytes))
    dist.destroy_process_group()


def run_rank_beside_a_silent_one(rank, port, answers, silent):
    from datetime import timedelta

    import torch.distributed as dist

    from megatron_dynatrain.errors import TransferError
    from megatron_dynatrain.transfer import execute

    src, dst, src_held, dst_held = join(rank, port)
    said = None
    if rank != silent:
        old = memory(src, rank, src_held[rank], True) if rank in SRC_RANKS else []
        new = memory(dst, rank, dst_held[rank], False) if rank in DST_RANKS else []
        try:
            execute(make_plan(src, dst, 64), rank, old, new, timedelta(seconds=3))
        except TransferError as error:
            said = str(error)
    answers.put((rank, said))
    store = dist.distributed_c10d._get_default_store()
    store.add("answered", 1)
    while store.add("answered", 0) < WORLD_SIZE:  # no connection is closed while others wait
        time.sleep(0.05)
    time.sleep(1)  # nor the store while others ask it
    os._exit(0)


def start(target, *arguments):
    """(rank, ...) as each of WORLD_SIZE processes answers, sorted."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=target, args=(rank, port, answers, *arguments)) for rank in range(WORLD_SIZE)]
    for process in processes:
        process.start()
    found = sorted(answers.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    return found


def test_a_silent_rank_is_named():
    """Rank 0 sends to rank 1, which never comes; so the ranks that wait for either say for whom."""
    said = dict(start(run_rank_beside_a_silent_one, 1))
    assert said[1] is None
    waiting = {rank: text for rank, text in said.items() if text}
    assert set(waiting) >= {0}  # rank 0 only has rank 1 and rank 3 to send to
    for rank, text in waiting.items():
        assert text.startswith(f"rank {rank} waited 3 s in window ") and "for ranks [1]" in text, text


@pytest.mark.parametrize("corrupt", [False, True])
def test_state_arrives_where_ranks_differ(corrupt):
    found = start(run_rank, corrupt)
    assert all(equal for _, _, equal, *_ in found)
    assert sum(received for _, received, *_ in found) == found[0][6] > 0
    assert found[0][5] > 3  # windows
    last = f"{TENSORS[-1].name}"
    for rank, _, _, full, digest, *_ in found:
        if not corrupt:
            assert not full and not digest
        else:
            assert digest == [f"{last}: the checksum after the switch differs from the one before it"]
            expected = [f"{last}: 1 elements differ on rank {rank}, the first at (4,)"] if rank == DST_RANKS[1] else []
            assert full == expected
