"""Which box goes from which rank to which: the copies between two worlds, worked out cell by cell.

A cell is a part of the space that no box of either world crosses: one expert of one layer of one logical tensor, say. What
happens in a cell depends on the pieces in it alone. So one rank's copies follow from the few cells in which it has pieces,
and the copies of all ranks are those of all cells: the same function, and the same answer, for one rank as for all.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_dynatrain.geometry import BoxTable, concatenate, expand, intersect, number_cells, overlaps, subtract
from megatron_dynatrain.planning.balance import Balance, Demand, Group, Holders, equal_shares, group_of
from megatron_dynatrain.space import World, whole_tensors

MIN_PART_BYTES = 256  # a copy is not cut into smaller parts than this only to spread them over replicas
GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, spread evenly however many are taken


@dataclass(frozen=True, slots=True, eq=False)
class Needs:
    """What pieces of the new world need, before it is said which replica sends.

    held, held_src, held_dst: what the rank that needs it holds itself, and the rows of the two worlds.
    boxes, dst_piece: what comes from other ranks, each within one box of the source. holders: for each, the number of the
    ranks that hold that box; holder_sets: those. box_of: the number of the box; pieces, first_piece: the rows of the source that
    hold box k, one a rank and in the order of ranks, are pieces[first_piece[k]:first_piece[k + 1]].
    zeros, zeros_dst_piece: padding that the source does not have.
    """

    held: BoxTable
    held_src: np.ndarray
    held_dst: np.ndarray
    boxes: BoxTable
    nbytes: np.ndarray
    dst_piece: np.ndarray
    box_of: np.ndarray
    pieces: np.ndarray
    first_piece: np.ndarray
    holders: np.ndarray
    holder_sets: tuple[Holders, ...]
    zeros: BoxTable
    zeros_dst_piece: np.ndarray

    def demand(self, of: np.ndarray, rank: np.ndarray) -> Demand:
        """What the needs `of` (bool) come to. rank: that of each need."""
        key, number = np.unique(rank[of] * len(self.holder_sets) + self.holders[of], return_inverse=True)
        found: Demand = {int(one): {} for one in np.unique(rank[of])}
        for of_rank, of_set, total in zip(*(column.tolist() for column in np.divmod(key, max(len(self.holder_sets), 1))),
                                          np.bincount(number, self.nbytes[of], len(key)).tolist(), strict=True):
            found[of_rank][self.holder_sets[of_set]] = int(total)
        return found

    def groups(self, rank: np.ndarray, nodes: np.ndarray) -> tuple[np.ndarray, list[Group]]:
        """(for each need the number of the group to which it belongs, the groups). rank: that of each need."""
        sets, node = np.unique(np.column_stack([self.holders, nodes[rank]]), axis=0, return_inverse=True)
        numbers: dict[Group, int] = {}
        of_pair = np.array([numbers.setdefault(group_of(self.holder_sets[of_set], of_node, nodes), len(numbers))
                            for of_set, of_node in sets.tolist()], np.int64)
        return of_pair[node.reshape(-1)], list(numbers)


class Cells:
    """The pieces of two worlds, sorted by cell."""

    def __init__(self, src: World, dst: World):
        self.src, self.dst = src, dst
        self.src_cell, self.dst_cell = np.split(number_cells(concatenate([src.boxes, dst.boxes])), [len(src)])

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


def find_needs(src: World, dst: World, src_rows: np.ndarray, dst_rows: np.ndarray) -> Needs:
    """What fills the pieces `dst_rows` out of the pieces `src_rows`, which must be all pieces of some cells.

    A part that lies on the rank that needs it is copied there; the rest comes from other ranks, each element once.
    """
    a, b = dst.boxes[dst_rows], src.boxes[src_rows]
    missing, missing_row, held, held_dst, held_src = subtract(_with_rank(a, dst.rank[dst_rows]), _with_rank(b, src.rank[src_rows]))
    missing, held = _without_rank(missing), _without_rank(held)

    padded = np.nonzero(np.array([t.is_padded for t in src.tensors], bool)[missing.tensor])[0]
    zeros, zeros_row, *_ = subtract(missing[padded], whole_tensors(src.tensors, b.offset.shape[1]))

    main = np.nonzero(src.is_main[src_rows])[0]
    i, j = overlaps(missing, b[main])
    boxes = intersect(missing[i], b[main[j]])
    nbytes = boxes.volume * np.array([t.itemsize for t in dst.tensors], np.int64)[boxes.tensor]

    number = group_equal(b)
    pieces = np.lexsort((src.rank[src_rows], number))
    again = np.zeros(len(pieces), bool)  # a rank may hold a box twice
    again[1:] = (number[pieces[1:]] == number[pieces[:-1]]) & (
        src.rank[src_rows[pieces[1:]]] == src.rank[src_rows[pieces[:-1]]])
    pieces = pieces[~again]
    first_piece = np.searchsorted(number[pieces], np.arange(number.max(initial=-1) + 2))
    box_of = number[main[j]]
    holders, holder_sets = _sets_of_ranks(src.rank[src_rows[pieces]], first_piece, box_of)
    return Needs(held, src_rows[held_src], dst_rows[held_dst], boxes, nbytes, dst_rows[missing_row[i]], box_of, src_rows[pieces],
                 first_piece, holders, holder_sets, zeros, dst_rows[missing_row[padded[zeros_row]]])


def share_among_replicas(dst: World, needs: Needs, balance: Balance):
    """Choose for each need the piece that it is taken from, cutting needs where the work is shared as `balance` says.

    Returns (boxes, need, src_piece): the needs after cutting, the row that each is a part of, and the row of the source.

    What is needed of one box by one group lies side by side on a line, by destination. The line is cut in proportion to the
    shares, in the order of ranks, so that ranks near to one another in number serve one another. Small boxes are not cut: each
    goes to one replica, in turns that spread well whichever of them are needed.
    """
    rank = dst.rank[needs.dst_piece]
    group, groups = needs.groups(rank, balance.nodes)
    line = np.lexsort((np.arange(len(needs.boxes)), rank, group, needs.box_of))
    boxes, nbytes, box, group = needs.boxes[line], needs.nbytes[line], needs.box_of[line], group[line]
    if not len(line):
        return boxes, line, np.empty(0, np.int64)
    is_first = np.append(True, (np.diff(box) != 0) | (np.diff(group) != 0))
    starts, of_line = np.nonzero(is_first)[0], np.cumsum(is_first) - 1
    before = np.cumsum(nbytes) - nbytes
    before = before - before[starts][of_line]  # on the line
    total = np.bincount(of_line, nbytes)[of_line]
    # The cuts of all groups on one longer line: those of group k in [k, k + 1].
    shares = [balance.shares.get(one) or equal_shares(one, balance.nodes) for one in groups]
    edge = np.concatenate([k + _cuts(of_group)[:-1] for k, of_group in enumerate(shares)])
    first_edge = np.concatenate([[0], np.cumsum([len(of_group) for of_group in shares])])
    replicas = np.array([np.count_nonzero(of_group) for of_group in shares], np.int64)[group]

    def server(place):
        """The replica that serves a place in [0, 1) of the line of each need, counted over all groups."""
        return np.searchsorted(edge, group + np.clip(place, 0, 1 - 1e-9), "right") - 1

    shared = (replicas > 1) & (total >= replicas * MIN_PART_BYTES)
    turn = (before + nbytes / 2) / total + _fraction(boxes)
    low = np.where(shared, server(before / total + 1e-12), server(turn % 1.0))
    high = np.where(shared, server((before + nbytes) / total - 1e-12), low)
    num_parts = high - low + 1
    rows = np.repeat(np.arange(len(line)), num_parts)
    part = np.arange(len(rows)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    replica = low[rows] + part
    axis = _axis_to_cut(boxes.shape, num_parts)[rows]
    extent = boxes.shape[rows, axis]
    begin = ((edge[replica] - group[rows]) * total[rows] - before[rows]) / nbytes[rows]
    start = np.where(part == 0, 0, np.rint(np.clip(begin, 0, 1) * extent).astype(np.int64))
    stop = np.append(start[1:], 0)
    last = part == num_parts[rows] - 1
    stop[last] = extent[last]
    keep = stop > start
    rows, axis, start, stop, replica = (column[keep] for column in (rows, axis, start, stop, replica))
    offset, shape = boxes.offset[rows].copy(), boxes.shape[rows].copy()
    every = np.arange(len(rows))
    offset[every, axis] += start
    shape[every, axis] = stop - start
    piece = needs.pieces[needs.first_piece[box[rows]] + replica - first_edge[group[rows]]]
    return BoxTable(boxes.tensor[rows], offset, shape), line[rows], piece


def _cuts(shares: tuple[int, ...]) -> np.ndarray:
    """(1, 1, 2) -> [0, 0.25, 0.5, 1]."""
    return np.concatenate([[0], np.cumsum(shares)]) / sum(shares)


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


def _axis_to_cut(shape: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """The outermost axis that is long enough to be cut evenly, else the longest: int64 [num_boxes]."""
    long = shape >= 8 * parts[:, None]
    return np.where(long.any(axis=1), long.argmax(axis=1), shape.argmax(axis=1))


def _fraction(boxes: BoxTable) -> np.ndarray:
    """A number in [0, 1) for each box that jumps evenly over the interval from one box to the next."""
    mix = boxes.tensor.astype(np.int64)
    for axis in range(boxes.offset.shape[1]):
        mix = mix * 31 + boxes.offset[:, axis] // np.maximum(boxes.shape[:, axis], 1)
    return (mix % (1 << 30)) * GOLDEN % 1.0


def _sets_of_ranks(ranks: np.ndarray, first: np.ndarray, boxes: np.ndarray) -> tuple[np.ndarray, tuple[Holders, ...]]:
    """(for each of `boxes` the number of the set of ranks that hold it, the sets)."""
    sets: dict[Holders, int] = {}
    used, inverse = np.unique(boxes, return_inverse=True)
    numbers = np.array([sets.setdefault(tuple(ranks[first[k]:first[k + 1]].tolist()), len(sets)) for k in used.tolist()], np.int64)
    return numbers[inverse], tuple(sets)
