"""Carry out the copies of a plan: pack, exchange and unpack, window by window."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_dynatrain.planning.plan import LOCAL, Plan


def execute(plan: Plan, rank: int, src_storages: Sequence[torch.Tensor], dst_storages: Sequence[torch.Tensor]) -> int:
    """Copy every piece of `plan` that `rank` sends, receives or keeps; returns the bytes that it received from others.

    Collective over all ranks of both worlds, on the default process group, whose ranks are the plan's ranks.

    src_storages, dst_storages: this rank's flat 1-D tensors, numbered as in the descriptions; empty for a rank that is
    not a member. The two sets must not share memory. Scratch is at most twice `plan.staging_bytes`.
    """
    with torch.no_grad():
        _fill_padding(plan, rank, dst_storages)
        _copy_locally(plan, rank, src_storages, dst_storages)
        received = 0
        for window in range(plan.num_windows):
            received += _exchange(plan, rank, window, src_storages, dst_storages)
    return received


def views(plan: Plan, side: str, rows: np.ndarray, storages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensor views, shaped as their boxes, in which the copies `rows` lie on one side ('src' or 'dst')."""
    return _strided(storages, *plan.addresses(side, rows), plan.boxes.shape[rows])


def _strided(storages, storage, start, stride, shape) -> list[torch.Tensor]:
    return [torch.as_strided(storages[s], extent, step, storages[s].storage_offset() + begin)
            for s, begin, step, extent in zip(*(column.tolist() for column in (storage, start, stride, shape)), strict=True)]


def _fill_padding(plan, rank, dst_storages):
    for piece in _strided(dst_storages, *plan.zeros_of(rank)):
        piece.zero_()


def _copy_locally(plan, rank, src_storages, dst_storages):
    rows = np.nonzero((plan.window == LOCAL) & (plan.dst_rank == rank))[0]
    for src, dst in zip(views(plan, "src", rows, src_storages), views(plan, "dst", rows, dst_storages), strict=True):
        dst.copy_(src)


def _exchange(plan, rank, window, src_storages, dst_storages) -> int:
    """One window: all sends and receives of this rank posted together."""
    in_window = plan.window == window
    operations, arrivals, received = [], [], 0
    sends = np.nonzero(in_window & (plan.src_rank == rank))[0]
    for peer, rows in _by_peer(plan.dst_rank, sends):
        message = _message(plan, rows, src_storages)
        for part, piece in zip(_parts(plan, rows, message), views(plan, "src", rows, src_storages), strict=True):
            part.copy_(piece)
        operations.append(dist.P2POp(dist.isend, message, peer))
    for peer, rows in _by_peer(plan.src_rank, np.nonzero(in_window & (plan.dst_rank == rank))[0]):
        message = _message(plan, rows, dst_storages)
        operations.append(dist.P2POp(dist.irecv, message, peer))
        arrivals.append((rows, message))
        received += message.numel()
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    for rows, message in arrivals:
        for part, piece in zip(_parts(plan, rows, message), views(plan, "dst", rows, dst_storages), strict=True):
            piece.copy_(part)
    return received


def _by_peer(peer_of_row: np.ndarray, rows: np.ndarray):
    """(peer, its rows) in ascending order of peers; rows keep their order, which both sides share."""
    for peer in np.unique(peer_of_row[rows]).tolist():
        yield peer, rows[peer_of_row[rows] == peer]


def _message(plan, rows, storages) -> torch.Tensor:
    return torch.empty(int(plan.nbytes[rows].sum()), dtype=torch.uint8, device=storages[0].device)


def _parts(plan, rows, message) -> list[torch.Tensor]:
    """Views into `message`, one per copy, typed and shaped as the piece that travels there."""
    parts, begin = [], 0
    for row, nbytes in zip(rows.tolist(), plan.nbytes[rows].tolist(), strict=True):
        dtype = getattr(torch, plan.tensors[plan.boxes.tensor[row]].dtype)
        parts.append(message[begin:begin + nbytes].view(dtype).view(plan.boxes.shape[row].tolist()))
        begin += nbytes
    return parts
