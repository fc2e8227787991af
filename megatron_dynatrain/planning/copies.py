"""Which box goes from which rank to which: the copies between two worlds, worked out cell by cell.

A cell is a part of the space that no box of either world crosses: one expert of one layer of one logical tensor, say. What
happens in a cell depends on the pieces in it alone. So one rank's copies follow from the few cells in which it has pieces,
and the copies of all ranks are those of all cells: the same function, and the same answer, for one rank as for all.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_dynatrain.geometry import BoxTable, concatenate, expand, intersect, overlaps, subtract
from megatron_dynatrain.space import World, whole_tensors

MIN_PART_BYTES = 4096  # a copy is not cut into smaller parts than this only to spread them over replicas
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Boxes to be copied, and boxes to be filled with zeros, one row each.

    boxes: global coordinates. src_piece, dst_piece: rows of the two worlds; equal ranks mean a local copy.
    holders: for each copy between ranks the number of a set of ranks that all hold its box, -1 for a local copy.
    holder_sets: those sets. zeros, zeros_dst_piece: padding that the source does not have.
    """

    boxes: BoxTable
    src_piece: np.ndarray
    dst_piece: np.ndarray
    holders: np.ndarray
    holder_sets: tuple[tuple[int, ...], ...]
    zeros: BoxTable
    zeros_dst_piece: np.ndarray


class Cells:
    """The pieces of two worlds, sorted by cell."""

    def __init__(self, src: World, dst: World):
        self.src, self.dst = src, dst
        self.src_cell, self.dst_cell = _number_cells(src.boxes, dst.boxes)

    @cached_property
    def _sorted(self):
        orders = [np.argsort(cell, kind="stable") for cell in (self.src_cell, self.dst_cell)]
        return [(order, cell[order]) for order, cell in zip(orders, (self.src_cell, self.dst_cell), strict=True)]

    def of_rank(self, rank: int) -> np.ndarray:
        """The cells in which `rank` has a piece in either world, sorted."""
        return np.unique(np.concatenate([self.src_cell[self.src.rank == rank], self.dst_cell[self.dst.rank == rank]]))

    def all(self) -> np.ndarray:
        """All cells, sorted."""
        return np.unique(np.concatenate([self.src_cell, self.dst_cell]))

    def rows(self, cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(rows of src, rows of dst) that lie in `cells`, ascending by cell."""
        return tuple(order[expand(np.searchsorted(keys, cells, "left"), np.searchsorted(keys, cells, "right"))[1]]
                     for order, keys in self._sorted)


def _number_cells(*tables: BoxTable) -> list[np.ndarray]:
    """A number for each box, equal if and only if two boxes are of one tensor and agree on all axes on which every box of that
    tensor is one wide: int64 [num_boxes] for each table."""
    num_axes = tables[0].offset.shape[1]
    num_tensors = 1 + max(int(t.tensor.max(initial=-1)) for t in tables)
    cells = [t.tensor.astype(np.int64) for t in tables]
    for axis in range(num_axes):
        width = np.zeros(num_tensors, np.int64)
        for table in tables:
            np.maximum.at(width, table.tensor, table.shape[:, axis])
        if not (width == 1).any():
            continue
        offsets = [np.where(width[t.tensor] == 1, t.offset[:, axis], 0) for t in tables]
        span = 1 + max(int(o.max(initial=0)) for o in offsets)
        if span == 1:
            continue
        if max(int(c.max(initial=0)) for c in cells) >= (1 << 62) // span:
            _, numbers = np.unique(np.concatenate(cells), return_inverse=True)
            cells = np.split(numbers.astype(np.int64), np.cumsum([len(c) for c in cells])[:-1])
        cells = [c * span + o for c, o in zip(cells, offsets, strict=True)]
    return cells


def find_copies(src: World, dst: World, src_rows: np.ndarray, dst_rows: np.ndarray) -> Copies:
    """The copies that fill the pieces `dst_rows` from the pieces `src_rows`, which must be all pieces of some cells.

    A part that lies on the rank that needs it is copied there; the rest comes from other ranks, each element once. Where
    replicas hold it, they share the work: each serves the same number of bytes of every box, or of every few small ones.
    """
    a, b = dst.boxes[dst_rows], src.boxes[src_rows]
    missing, missing_row, held, held_dst, held_src = subtract(_with_rank(a, dst.rank[dst_rows]), _with_rank(b, src.rank[src_rows]))
    missing, held = _without_rank(missing), _without_rank(held)

    padded = np.nonzero(np.array([t.is_padded for t in src.tensors], bool)[missing.tensor])[0]
    zeros, zeros_row, *_ = subtract(missing[padded], whole_tensors(src.tensors, b.offset.shape[1]))

    main = np.nonzero(src.is_main[src_rows])[0]
    i, j = overlaps(missing, b[main])
    remote = intersect(missing[i], b[main[j]])
    remote_dst = missing_row[i]
    remote, parent, remote_src, holders, holder_sets = _share_among_replicas(
        src, src_rows, main[j], remote, dst.rank[dst_rows[remote_dst]],
        remote.volume * np.array([t.itemsize for t in dst.tensors], np.int64)[remote.tensor])
    return Copies(concatenate([held, remote]), np.concatenate([src_rows[held_src], remote_src]),
                  np.concatenate([dst_rows[held_dst], dst_rows[remote_dst[parent]]]),
                  np.concatenate([np.full(len(held), -1, np.int64), holders]), holder_sets,
                  zeros, dst_rows[missing_row[padded[zeros_row]]])


def minimum_bytes(src: World, dst: World, src_rows: np.ndarray, dst_rows: np.ndarray) -> np.ndarray:
    """Bytes that the rank of each piece of `dst_rows` needs for it and does not hold: int64 [len(dst_rows)].

    Counted without the copies, from the volumes of intersections (the pieces that a rank holds are disjoint or equal).
    """
    a, b = dst.boxes[dst_rows], src.boxes[src_rows]
    itemsize = np.array([t.itemsize for t in dst.tensors], np.int64)[a.tensor]
    whole = whole_tensors(src.tensors, a.offset.shape[1])[a.tensor]
    extent = np.minimum(a.offset + a.shape, whole.shape) - a.offset
    need = np.maximum(extent, 0).prod(axis=1, dtype=np.int64)
    a, b = _with_rank(a, dst.rank[dst_rows]), _with_rank(b, src.rank[src_rows])
    b = b[_first_of_equal(b)]
    i, j = overlaps(a, b)
    return (need - np.bincount(i, intersect(a[i], b[j]).volume, len(a)).astype(np.int64)) * itemsize


def _with_rank(boxes: BoxTable, rank: np.ndarray) -> BoxTable:
    """Boxes that can only meet on the same rank: the rank becomes a first axis that is one wide."""
    return BoxTable(boxes.tensor, np.column_stack([rank, boxes.offset]), np.column_stack([np.ones_like(rank), boxes.shape]))


def _without_rank(boxes: BoxTable) -> BoxTable:
    return BoxTable(boxes.tensor, boxes.offset[:, 1:], boxes.shape[:, 1:])


def group_equal(boxes: BoxTable) -> np.ndarray:
    """The number of each box, int64 [num_boxes], equal for equal boxes; numbers follow tensor, offset and shape."""
    columns = np.column_stack([boxes.tensor, boxes.offset, boxes.shape])
    order = np.lexsort(columns.T[::-1])
    new = np.ones(len(order), bool)
    new[1:] = (columns[order[1:]] != columns[order[:-1]]).any(axis=1)
    number = np.empty(len(order), np.int64)
    number[order] = np.cumsum(new) - 1
    return number


def _first_of_equal(boxes: BoxTable) -> np.ndarray:
    """Rows of `boxes` without repetitions, ascending."""
    return np.sort(np.unique(group_equal(boxes), return_index=True)[1])


def _share_among_replicas(src, src_rows, main, boxes, dst_rank, nbytes):
    """Choose for each copy the piece that it is taken from, cutting copies where the work is shared.

    main: for each copy the main piece that holds it, as a position in `src_rows`. Returns (boxes, parent, src_piece, holders,
    holder_sets): the copies after cutting, the row that each is a part of, the piece and the set of ranks that it came from.

    The copies out of one box lie side by side on a line, by destination; the line is cut into as many equal parts as there
    are replicas, in the order of ranks, so that ranks near to one another in number serve one another.
    """
    if not len(boxes):
        return boxes, np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64), ()
    group = group_equal(src.boxes[src_rows])
    members = np.lexsort((src.rank[src_rows], group))  # positions in src_rows, group by group
    first = np.searchsorted(group[members], np.arange(group.max() + 1))
    # One replica a rank: a rank may hold a box twice.
    again = np.zeros(len(members), bool)
    again[1:] = (group[members[1:]] == group[members[:-1]]) & (src.rank[src_rows[members[1:]]] == src.rank[src_rows[members[:-1]]])
    members = members[~again]
    first = np.searchsorted(group[members], np.arange(len(first)))
    count = np.diff(np.append(first, len(members)))

    g = group[main]
    order = np.lexsort((np.arange(len(boxes)), dst_rank, g))
    g, boxes, nbytes = g[order], boxes[order], nbytes[order]
    begins = np.ones(len(g), bool)
    begins[1:] = g[1:] != g[:-1]
    before = np.cumsum(nbytes) - nbytes
    before = before - np.repeat(before[begins], np.diff(np.append(np.nonzero(begins)[0], len(g))))  # within the group
    total = np.bincount(g, nbytes, len(count))[g]
    replicas = count[g]
    part = total / replicas

    share = (replicas > 1) & (part >= MIN_PART_BYTES)
    low = np.where(share, (before / part + 1e-9).astype(np.int64), 0)
    high = np.where(share, np.ceil((before + nbytes) / part - 1e-9).astype(np.int64), 1)
    rows = np.repeat(np.arange(len(g)), high - low)
    k = np.arange(len(rows)) - np.repeat(np.cumsum(high - low) - (high - low), high - low)
    axis = _axis_to_cut(boxes.shape, high - low)[rows]
    extent = boxes.shape[rows, axis]

    def bound(number):
        fraction = np.clip(((low[rows] + number) * part[rows] - before[rows]) / nbytes[rows], 0, 1)
        return np.where(share[rows], np.rint(fraction * extent).astype(np.int64), np.where(number > 0, extent, 0))

    start, stop = bound(k), bound(k + 1)
    keep = stop > start
    rows, k, axis, start, stop = rows[keep], k[keep], axis[keep], start[keep], stop[keep]
    offset, shape = boxes.offset[rows].copy(), boxes.shape[rows].copy()
    cut = np.arange(len(rows))
    offset[cut, axis] += start
    shape[cut, axis] = stop - start
    # Small boxes go to one replica each, in turns that spread well whichever of them are asked for.
    turn = ((before[rows] + nbytes[rows] / 2) / part[rows] + _fraction(src, boxes[rows]) * replicas[rows]).astype(np.int64)
    number = np.where(share[rows], low[rows] + k, turn) % replicas[rows]
    src_piece = src_rows[members[first[g[rows]] + number]]
    holders, holder_sets = _sets_of_ranks(src.rank[src_rows[members]], first, count, g[rows])
    return BoxTable(boxes.tensor[rows], offset, shape), order[rows], src_piece, holders, holder_sets


def _axis_to_cut(shape: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """The outermost axis that is long enough to be cut evenly, else the longest: int64 [num_boxes]."""
    long = shape >= 8 * parts[:, None]
    return np.where(long.any(axis=1), long.argmax(axis=1), shape.argmax(axis=1))


def _fraction(src: World, boxes: BoxTable) -> np.ndarray:
    """A number in [0, 1) for each box that jumps evenly over the interval from one box to the next."""
    mix = boxes.tensor.astype(np.int64)
    for axis in range(boxes.offset.shape[1]):
        mix = mix * 31 + boxes.offset[:, axis] // np.maximum(boxes.shape[:, axis], 1)
    return (mix % (1 << 30)) * _GOLDEN % 1.0


def _sets_of_ranks(ranks, first, count, groups):
    """(number of the set of ranks of each of `groups`, the sets)."""
    sets: dict[tuple[int, ...], int] = {}
    used, inverse = np.unique(groups, return_inverse=True)
    numbers = np.array([sets.setdefault(tuple(ranks[first[g]:first[g] + count[g]].tolist()), len(sets))
                        for g in used.tolist()], np.int64)
    return numbers[inverse], tuple(sets)
