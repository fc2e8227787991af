"""From two worlds to the list of copies between them.

In the order of `make_plan`:

1. In both worlds the main pieces cover every logical tensor exactly once (`World.assemble` sees to that).
2. What a rank needs and holds already is copied locally. The rest of each piece is cut along the main pieces of the
   source: every element that crosses between ranks crosses once per rank that needs it.
3. Padding that only the destination has is filled with zeros; padding that only the source has is left behind.
4. Where replicas hold the same box, the one with the least to send so far is the source.
5. Copies between ranks are packed into windows (`windows`): bounded in bytes and operations, the same on all ranks.
6. The plan is checked (`Plan.check`): every destination element is written once, and moved bytes equal the minimum.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_dynatrain.errors import LayoutRefused, SpaceError
from megatron_dynatrain.geometry import BoxTable, concatenate, intersect, overlaps, subtract
from megatron_dynatrain.planning.windows import DEFAULT_STAGING_BYTES, assign_windows, split_large
from megatron_dynatrain.space import LogicalTensor, World, whole_tensors

LOCAL = -1  # window of a copy that stays on its rank


@dataclass(frozen=True, eq=False)
class Plan:
    """Every copy of one switch, one row each, sorted by (window, src_rank, dst_rank, order of packing).

    tensors: those of the destination; the source's differ in their padding at most.
    boxes: the global coordinates; `boxes.tensor` indexes `tensors`.
    src_piece, dst_piece: rows of the source and of the destination world from which and into which the box is copied.
    window: int64, LOCAL for copies within a rank.
    zeros, zeros_dst_piece: boxes that the source does not have, and the rows of the destination world that they fill.
    minimum_bytes: what has to cross between ranks in any plan: what ranks need and do not hold.
    staging_bytes: the bound on what a rank sends, and on what it receives, in one window.
    """

    src: World
    dst: World
    tensors: tuple[LogicalTensor, ...]
    boxes: BoxTable
    src_piece: np.ndarray
    dst_piece: np.ndarray
    window: np.ndarray
    zeros: BoxTable
    zeros_dst_piece: np.ndarray
    minimum_bytes: int
    staging_bytes: int

    def __len__(self) -> int:
        return len(self.boxes)

    @cached_property
    def itemsize(self) -> np.ndarray:
        return np.array([t.itemsize for t in self.tensors], np.int64)[self.boxes.tensor]

    @cached_property
    def nbytes(self) -> np.ndarray:
        """Bytes of each copy, int64 [num_copies]."""
        return self.boxes.volume * self.itemsize

    @cached_property
    def src_rank(self) -> np.ndarray:
        return self.src.rank[self.src_piece]

    @cached_property
    def dst_rank(self) -> np.ndarray:
        return self.dst.rank[self.dst_piece]

    @property
    def num_windows(self) -> int:
        return int(self.window.max(initial=LOCAL)) + 1

    @property
    def moved_bytes(self) -> int:
        """Bytes that cross between ranks."""
        return int(self.nbytes[self.window != LOCAL].sum())

    @property
    def local_bytes(self) -> int:
        """Bytes that are copied within ranks."""
        return int(self.nbytes[self.window == LOCAL].sum())

    @property
    def max_rank_bytes(self) -> int:
        """The most that any one rank sends or receives: no switch is faster than this over the rank's link."""
        crosses = self.window != LOCAL
        size = int(max(self.src.ranks.max(initial=0), self.dst.ranks.max(initial=0))) + 1
        sums = (np.bincount(rank[crosses], self.nbytes[crosses], size) for rank in (self.src_rank, self.dst_rank))
        return int(max(s.max(initial=0) for s in sums))

    def addresses(self, side: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where copies lie on one side ('src' or 'dst'): (storage [n], start [n], stride [n, num_axes]), in elements."""
        world, piece = (self.src, self.src_piece) if side == "src" else (self.dst, self.dst_piece)
        return _addresses(world, piece[rows], self.boxes.offset[rows])

    def zeros_of(self, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """What `rank` fills with zeros: (storage [n], start [n], stride [n, num_axes], shape [n, num_axes])."""
        rows = np.nonzero(self.dst.rank[self.zeros_dst_piece] == rank)[0]
        return *_addresses(self.dst, self.zeros_dst_piece[rows], self.zeros.offset[rows]), self.zeros.shape[rows]

    @cached_property
    def common(self) -> BoxTable:
        """One box a tensor: what both layouts have of it, which is all but padding."""
        num_axes = self.boxes.offset.shape[1]
        whole = whole_tensors(self.dst.tensors, num_axes)
        return BoxTable(whole.tensor, whole.offset, np.minimum(whole.shape, whole_tensors(self.src.tensors, num_axes).shape))

    @cached_property
    def digest(self) -> str:
        """A hash of the whole plan: ranks that agree on it will send and receive the same bytes in the same order."""
        state = hashlib.blake2b(digest_size=16)
        state.update(repr((self.tensors, self.staging_bytes)).encode())
        for column in (self.boxes.tensor, self.boxes.offset, self.boxes.shape, self.src_rank, self.dst_rank, self.window,
                       *self.addresses("src", slice(None)), *self.addresses("dst", slice(None)),
                       self.zeros.offset, self.zeros.shape, self.zeros_dst_piece):
            state.update(np.ascontiguousarray(column).tobytes())
        return state.hexdigest()

    def check(self) -> None:
        """Raise SpaceError unless every destination element is written exactly once and nothing moves needlessly."""
        boxes, dst_piece = concatenate([self.boxes, self.zeros]), np.concatenate([self.dst_piece, self.zeros_dst_piece])
        written = np.bincount(dst_piece, boxes.volume, len(self.dst))
        wrong = np.nonzero(written != self.dst.boxes.volume)[0]
        if len(wrong):
            row = int(wrong[0])
            raise SpaceError(f"{int(written[row])} of {int(self.dst.boxes.volume[row])} elements would be written where "
                             f"{self.dst.describe(row)} in the new layout")
        by_piece = BoxTable(dst_piece, boxes.offset, boxes.shape)
        i, j = overlaps(by_piece, by_piece)
        if (i != j).any():
            row = int(dst_piece[i[np.nonzero(i != j)[0][0]]])
            raise SpaceError(f"an element would be written twice where {self.dst.describe(row)} in the new layout")
        if self.moved_bytes != self.minimum_bytes:
            raise SpaceError(f"the plan moves {self.moved_bytes} bytes where {self.minimum_bytes} suffice")


def _addresses(world: World, piece: np.ndarray, offset: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(storage, start, stride) of the boxes that begin at global `offset` within rows `piece` of `world`."""
    stride = world.stride[piece]
    return world.storage[piece], world.start[piece] + ((offset - world.boxes.offset[piece]) * stride).sum(axis=1), stride


def make_plan(src: World, dst: World, staging_bytes: int = DEFAULT_STAGING_BYTES) -> Plan:
    """The checked plan from `src` to `dst`; a pure function, equal on every rank that is given equal worlds.

    Raises LayoutRefused where the destination needs what the source does not have. Ranks of the two worlds share one
    numbering; the sets may differ.
    """
    tensors = _common_tensors(src, dst)
    num_axes = max(src.boxes.offset.shape[1], dst.boxes.offset.shape[1])
    if src.boxes.offset.shape[1] != dst.boxes.offset.shape[1]:
        raise SpaceError(f"the layouts describe tensors of {src.boxes.offset.shape[1]} and {num_axes} axes")

    held, held_dst, held_src = _held_already(src, dst)
    missing, missing_dst = _missing(dst, held, held_dst)
    zeros, zeros_row, *_ = subtract(missing, whole_tensors(src.tensors, num_axes))
    main_rows = np.nonzero(src.is_main)[0]
    i, j = overlaps(missing, src.boxes[main_rows])
    remote = intersect(missing[i], src.boxes[main_rows[j]])
    remote_dst = missing_dst[i]
    remote, parent = split_large(remote, np.array([t.itemsize for t in tensors])[remote.tensor], staging_bytes)
    remote_dst, remote_main = remote_dst[parent], main_rows[j][parent]
    sizes = np.array([t.itemsize for t in tensors], np.int64)[remote.tensor] * remote.volume
    remote_src = _least_loaded_replica(src, remote_main, sizes)
    window = assign_windows(src.rank[remote_src], dst.rank[remote_dst], sizes, staging_bytes)

    boxes = concatenate([held, remote])
    src_piece = np.concatenate([held_src, remote_src])
    dst_piece = np.concatenate([held_dst, remote_dst])
    window = np.concatenate([np.full(len(held), LOCAL, np.int64), window])
    # Wide elements first in a message, so that every piece in it is aligned.
    itemsize = np.array([t.itemsize for t in tensors], np.int64)[boxes.tensor]
    order = np.lexsort((np.arange(len(boxes)), -itemsize, dst.rank[dst_piece], src.rank[src_piece], window))
    plan = Plan(src, dst, tensors, boxes[order], src_piece[order], dst_piece[order], window[order],
                zeros, missing_dst[zeros_row], _minimum_bytes(src, dst), staging_bytes)
    plan.check()
    return plan


def _common_tensors(src: World, dst: World) -> tuple[LogicalTensor, ...]:
    if src.tensors != dst.tensors:
        have, need = {t.name: t for t in src.tensors}, {t.name: t for t in dst.tensors}
        for name in sorted(have.keys() | need.keys()):
            if have.get(name) != need.get(name) and not _differ_in_padding(have.get(name), need.get(name)):
                say = lambda t: f"{t.shape} {t.dtype}" if t else "nothing"  # noqa: E731
                raise LayoutRefused(
                    f"the layouts disagree about {name}: the old one has {say(have.get(name))}, the new one needs "
                    f"{say(need.get(name))}; choose a layout that keeps the model and the kind of optimizer the same")
    return dst.tensors


def _differ_in_padding(a: LogicalTensor | None, b: LogicalTensor | None) -> bool:
    return (a is not None and b is not None and a.is_padded and b.is_padded and a.shape[1:] == b.shape[1:]
            and a.dtype == b.dtype)


def _with_rank(boxes: BoxTable, rank: np.ndarray) -> BoxTable:
    """Boxes that can only meet on the same rank: the rank becomes a first axis that is one wide."""
    return BoxTable(boxes.tensor, np.column_stack([rank, boxes.offset]), np.column_stack([np.ones_like(rank), boxes.shape]))


def _held_already(src: World, dst: World) -> tuple[BoxTable, np.ndarray, np.ndarray]:
    """(boxes, row of dst, row of src): the parts of destination pieces that lie on the rank that needs them."""
    _, _, inside, dst_row, src_row = subtract(_with_rank(dst.boxes, dst.rank), _with_rank(src.boxes, src.rank))
    return BoxTable(inside.tensor, inside.offset[:, 1:], inside.shape[:, 1:]), dst_row, src_row


def _missing(dst: World, held: BoxTable, held_dst: np.ndarray) -> tuple[BoxTable, np.ndarray]:
    """(boxes, row of dst): the parts of destination pieces that no `held` box fills."""
    by_piece = BoxTable(np.arange(len(dst)), dst.boxes.offset, dst.boxes.shape)
    rest, row, *_ = subtract(by_piece, BoxTable(held_dst, held.offset, held.shape))
    return BoxTable(dst.boxes.tensor[row], rest.offset, rest.shape), row


def _minimum_bytes(src: World, dst: World) -> int:
    """Bytes that ranks need and do not hold, counted without the plan: for each rank, the volume of what it needs and the
    source has, less the volume of its intersections with what it holds (the pieces that a rank holds are disjoint or equal)."""
    itemsize = np.array([t.itemsize for t in dst.tensors], np.int64)
    whole = whole_tensors(src.tensors, dst.boxes.offset.shape[1])[dst.boxes.tensor]
    extent = np.minimum(dst.boxes.offset + dst.boxes.shape, whole.shape) - dst.boxes.offset
    need = int((np.maximum(extent, 0).prod(axis=1, dtype=np.int64) * itemsize[dst.boxes.tensor]).sum())
    a, b = _with_rank(dst.boxes, dst.rank), _with_rank(src.boxes, src.rank)
    _, first = np.unique(np.column_stack([b.tensor, b.offset, b.shape]), axis=0, return_index=True)
    b = b[first]
    i, j = overlaps(a, b)
    common = intersect(a[i], b[j])
    return need - int((common.volume * itemsize[common.tensor]).sum())


def _least_loaded_replica(src: World, main: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """For each copy from main piece `main[i]`, the piece to take it from: of all pieces with the same box, the one whose
    rank has the least to send so far. Largest copies choose first; deterministic."""
    _, group = np.unique(np.column_stack([src.boxes.tensor, src.boxes.offset, src.boxes.shape]), axis=0,
                         return_inverse=True)
    order = np.argsort(group, kind="stable")
    starts = np.searchsorted(group[order], np.arange(group.max(initial=-1) + 2))
    chosen = main.copy()
    load = dict.fromkeys(src.ranks.tolist(), 0)
    rank = src.rank
    for copy in np.lexsort((np.arange(len(main)), -sizes)):
        g = group[main[copy]]
        replicas = order[starts[g]:starts[g + 1]]
        best = min(replicas.tolist(), key=lambda piece: (load[int(rank[piece])], int(rank[piece])))
        chosen[copy] = best
        load[int(rank[best])] += int(sizes[copy])
    return chosen
