"""Is the state after a switch the state before it, bit for bit, in logical coordinates?

Two answers, both independent of the plan and of the way by which the bytes travelled:

* `compare_bits` puts each logical tensor together from the old main pieces by all-reduce and compares every new piece
  on every rank with it. Exact; it names tensor and coordinate. It costs an all-reduce of the whole state and needs the
  old state to be there still.
* `Checksums` sums a position-dependent 64-bit hash of every element: the sum of a logical tensor does not depend on the
  layout. It costs one pass over the local state and one small all-reduce, before and after; it names the tensor.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_dynatrain.geometry import BoxTable, intersect, overlaps, row_major_strides, subtract
from megatron_dynatrain.planning.order import split_large
from megatron_dynatrain.space import World, whole_tensors

REFERENCE_BYTES = 32 << 20  # how much of the state is put together at a time
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _view(world: World, row: int, storages: Sequence[torch.Tensor], box: BoxTable | None = None, i: int = 0):
    """The tensor in which piece `row` lies, or the part of it that row `i` of `box` is, as integers of the same size."""
    offset, shape = (world.boxes.offset[row], world.boxes.shape[row]) if box is None else (box.offset[i], box.shape[i])
    flat = storages[world.storage[row]]
    start = int(world.start[row] + ((offset - world.boxes.offset[row]) * world.stride[row]).sum())
    view = torch.as_strided(flat, shape.tolist(), world.stride[row].tolist(), flat.storage_offset() + start)
    return view.view(_INTEGERS[flat.element_size()])


def compare_bits(src: World, dst: World, rank: int, src_storages: Sequence[torch.Tensor],
                 dst_storages: Sequence[torch.Tensor]) -> list[str]:
    """Differences found on this rank, a sentence each, naming tensor and coordinate; empty if all its pieces are right.

    Replicas of the old world are compared, too: where they differ already, the job trains several models.

    Collective over all ranks of both worlds. `src.tensors` and `dst.tensors` are equal up to padding; padding that only
    the new layout has must be zero.
    """
    itemsize = np.array([t.itemsize for t in src.tensors], np.int64)
    chunks, _ = split_large(whole_tensors(src.tensors, src.boxes.offset.shape[1]), itemsize, REFERENCE_BYTES)
    sizes = chunks.volume * itemsize[chunks.tensor]
    batch = np.cumsum(sizes) // REFERENCE_BYTES
    device = _device([*src_storages, *dst_storages])
    own_src = np.nonzero((src.rank == rank) & src.is_main)[0]
    own_replicas = np.nonzero((src.rank == rank) & ~src.is_main)[0]
    own_dst = np.nonzero(dst.rank == rank)[0]
    differences = []
    for number in np.unique(batch).tolist():
        rows = np.nonzero(batch == number)[0]
        reference = torch.zeros(int(sizes[rows].sum()), dtype=torch.uint8, device=device)
        tensors = _shaped(reference, chunks[rows], itemsize)
        for i, j, box in _pieces_in_chunks(src, own_src, chunks[rows]):
            tensors[j][_slices(box, chunks[rows], j)] = _view(src, own_src[i], src_storages, box)
        dist.all_reduce(reference)  # every byte has one contributor, the others add zero
        for world, own, storages, when in ((src, own_replicas, src_storages, " already before the switch"),
                                           (dst, own_dst, dst_storages, "")):
            for i, j, box in _pieces_in_chunks(world, own, chunks[rows]):
                expected = tensors[j][_slices(box, chunks[rows], j)]
                found = _view(world, own[i], storages, box)
                if not torch.equal(expected, found):
                    where = torch.nonzero(expected != found)
                    first = (where[0].cpu().numpy() + box.offset[0])[: len(src.tensors[box.tensor[0]].shape)]
                    differences.append(f"{src.tensors[box.tensor[0]].name}: {len(where)} elements differ{when} on rank {rank}, "
                                       f"the first at {tuple(first.tolist())}")
    beyond, row, *_ = subtract(dst.boxes[own_dst], whole_tensors(src.tensors, src.boxes.offset.shape[1]))
    differences += [f"{dst.tensors[dst.boxes.tensor[own_dst[i]]].name}: new padding is not zero on rank {rank}"
                    for k, i in enumerate(row.tolist()) if _view(dst, own_dst[i], dst_storages, beyond, k).any()]
    return differences


def _device(storages: Sequence[torch.Tensor]) -> torch.device:
    """Where `storages` lie; for a rank that has none, where those of others do."""
    if storages:
        return storages[0].device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _pieces_in_chunks(world, own, chunks):
    """(position in `own`, row of `chunks`, their intersection as a table of one row)."""
    pieces = world.boxes[own]
    i, j = overlaps(pieces, chunks)
    boxes = intersect(pieces[i], chunks[j])
    for k in range(len(i)):
        yield int(i[k]), int(j[k]), boxes[k:k + 1]


def _shaped(reference, chunks, itemsize) -> list[torch.Tensor]:
    order = np.argsort(-itemsize[chunks.tensor], kind="stable")  # wide elements first, so that all are aligned
    tensors, begin = [None] * len(chunks), 0
    for row in order.tolist():
        size = int(itemsize[chunks.tensor[row]])
        nbytes = int(chunks.volume[row]) * size
        tensors[row] = reference[begin:begin + nbytes].view(_INTEGERS[size]).view(chunks.shape[row].tolist())
        begin += nbytes
    return tensors


def _slices(box, chunks, row):
    begin = box.offset[0] - chunks.offset[row]
    return tuple(slice(int(b), int(b + s)) for b, s in zip(begin, box.shape[0], strict=True))


class Checksums:
    """Layout-independent checksums of all logical tensors of `world` within the boxes `common`, and of the pieces of this rank.

    Collective over the default process group. Take them before a switch on the old world and after it on the new one;
    `differences` compares.
    """

    def __init__(self, world: World, rank: int, storages: Sequence[torch.Tensor], common: BoxTable):
        """storages: those of this rank, numbered as in its description; empty for a rank that is not a member.
        common: one box a tensor, the part that both layouts have (`Plan.common`)."""
        self.world = world
        self._stop = common.shape
        device = _device(storages)
        own = np.nonzero(world.rank == rank)[0]
        pieces = torch.zeros(len(world), dtype=torch.int64, device=device)
        strides = [row_major_strides(t.shape) for t in world.tensors]
        with torch.no_grad():
            for row in own.tolist():
                pieces[row] = self._hash(world, row, storages, strides[world.boxes.tensor[row]])
        main = torch.from_numpy(world.is_main).to(device)
        tensor = torch.from_numpy(world.boxes.tensor).to(device)
        self.totals = torch.zeros(len(world.tensors), dtype=torch.int64, device=device)
        self.totals.index_add_(0, tensor[main], pieces[main])
        dist.all_reduce(self.totals)
        # Replicas: pieces with the same box must have the same hash on every rank.
        _, group = np.unique(np.column_stack([world.boxes.tensor, world.boxes.offset, world.boxes.shape]), axis=0,
                             return_inverse=True)
        own_group = torch.from_numpy(group[own]).to(device)
        limits = torch.iinfo(torch.int64)
        low = torch.full((int(group.max(initial=-1)) + 1,), limits.max, dtype=torch.int64, device=device)
        high = torch.full_like(low, limits.min)
        low.scatter_reduce_(0, own_group, pieces[own], "amin")
        high.scatter_reduce_(0, own_group, pieces[own], "amax")
        dist.all_reduce(low, dist.ReduceOp.MIN)
        dist.all_reduce(high, dist.ReduceOp.MAX)
        unequal = torch.nonzero(low != high).flatten().cpu().numpy()
        self.unequal_replicas = np.unique(world.boxes.tensor[np.isin(group, unequal)]).tolist()

    def _hash(self, world, row, storages, global_strides) -> torch.Tensor:
        """Sum over the elements of a piece of a 64-bit mix of their bits and their global linear index."""
        num_axes = len(global_strides)
        offsets = world.boxes.offset[row]
        extents = np.minimum(world.boxes.shape[row], self._stop[world.boxes.tensor[row]] - offsets)
        if (extents <= 0).any():
            return 0
        part = BoxTable(world.boxes.tensor[row:row + 1], offsets[None], extents[None])
        bits = _view(world, row, storages, part).to(torch.int64)
        index = torch.zeros((), dtype=torch.int64, device=bits.device)
        for axis in range(num_axes):
            offset, extent = int(offsets[axis]), int(extents[axis])
            steps = torch.arange(offset, offset + extent, dtype=torch.int64, device=bits.device) * global_strides[axis]
            index = index + steps.view([-1 if a == axis else 1 for a in range(bits.dim())])
        mixed = (bits ^ (index * -7046029254386353131)) * -4658895280553007687
        mixed = (mixed ^ (mixed >> 29)) * -7723592293110705685
        return (mixed ^ (mixed >> 32)).sum()

    def differences(self, after: "Checksums") -> list[str]:
        """What differs between this (before) and `after`, a sentence each; the same on every rank."""
        found = [f"{self.world.tensors[i].name}: the checksum after the switch differs from the one before it"
                 for i in torch.nonzero(self.totals != after.totals).flatten().tolist()]
        for checksums, when in ((self, "already before"), (after, "after")):
            found += [f"{checksums.world.tensors[i].name}: replicas differ {when} the switch" for i in checksums.unequal_replicas]
        return found
