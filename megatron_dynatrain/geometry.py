"""Boxes, flat intervals and their intersections: the arithmetic under the Virtual Parameter Space.

A box is a half-open block of a tensor's index space: an offset and a shape, in elements. Many boxes are held as a
`BoxTable`: integer columns, one row a box, so that millions of them are handled by a handful of numpy passes. Nothing
here knows about ranks, torch or Megatron.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Box:
    """The readable view of one box. Example: `Box((2, 0), (2, 8))` is rows 2 and 3 of an [N, 8] matrix."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        """Half-open ranges per axis: '[2:4, 0:8]'."""
        return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(self.offset, self.shape, strict=True)) + "]"


def flat_interval_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The boxes that make up elements [start, stop) of a row-major tensor of `shape`, in flat order, disjoint.

    At most `2 * len(shape) - 1` of them. Example: elements [5, 14) of a [4, 4] matrix are the rest of row 1, the whole
    of row 2, and the head of row 3:

    >>> [str(box) for box in flat_interval_boxes((4, 4), 5, 14)]
    ['[1:2, 1:4]', '[2:3, 0:4]', '[3:4, 0:2]']
    """
    if not 0 <= start <= stop <= int(np.prod(shape, dtype=np.int64)):
        raise ValueError(f"flat interval [{start}, {stop}) does not lie in a tensor of shape {shape}")
    if start == stop:
        return []
    if len(shape) == 0:
        return [Box((), ())]
    row = int(np.prod(shape[1:], dtype=np.int64))
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        return [_under(first, box) for box in flat_interval_boxes(shape[1:], head, tail)]
    boxes = []
    if head:
        boxes += [_under(first, box) for box in flat_interval_boxes(shape[1:], head, row)]
        first += 1
    if first < last:
        boxes.append(Box((first,) + (0,) * (len(shape) - 1), (last - first,) + tuple(shape[1:])))
    if tail:
        boxes += [_under(last, box) for box in flat_interval_boxes(shape[1:], 0, tail)]
    return boxes


def _under(index: int, box: Box) -> Box:
    return Box((index, *box.offset), (1, *box.shape))


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a contiguous tensor: (2, 3, 4) -> (12, 4, 1)."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


@dataclass(frozen=True, slots=True)
class BoxTable:
    """Boxes of many tensors, one row each.

    tensor: int64 [num_boxes], which tensor the box belongs to; boxes of different tensors never meet.
    offset, shape: int64 [num_boxes, num_axes]; a tensor of fewer axes is padded on the right with offset 0, shape 1.
    """

    tensor: np.ndarray
    offset: np.ndarray
    shape: np.ndarray

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, rows) -> "BoxTable":
        return BoxTable(self.tensor[rows], self.offset[rows], self.shape[rows])

    @property
    def volume(self) -> np.ndarray:
        """Number of elements of each box, int64 [num_boxes]."""
        return self.shape.prod(axis=1, dtype=np.int64)

    def box(self, row: int, num_axes: int) -> Box:
        """Row `row` as a `Box` of `num_axes` axes."""
        return Box(tuple(self.offset[row, :num_axes].tolist()), tuple(self.shape[row, :num_axes].tolist()))


def concatenate(tables: list[BoxTable]) -> BoxTable:
    """The rows of all `tables`, in order. All must have the same number of axes; at least one table."""
    return BoxTable(*(np.concatenate([getattr(t, name) for t in tables]) for name in ("tensor", "offset", "shape")))


def intersect(a: BoxTable, b: BoxTable) -> BoxTable:
    """Row-wise intersection of two tables of equal length whose rows are known to meet."""
    offset = np.maximum(a.offset, b.offset)
    return BoxTable(a.tensor, offset, np.minimum(a.offset + a.shape, b.offset + b.shape) - offset)


def interval_overlaps(a_start, a_stop, b_start, b_stop) -> tuple[np.ndarray, np.ndarray]:
    """Index pairs (i, j) with [a_start[i], a_stop[i]) meeting [b_start[j], b_stop[j]); intervals are not empty.

    Two intervals meet if and only if one contains the start of the other, so each kind of pair is a contiguous range
    in the sorted starts of the other side: a sort and four binary searches, whatever the number of pairs.
    """
    # b starts inside a (or with it) ...
    order = np.argsort(b_start, kind="stable")
    starts = b_start[order]
    i1, j1 = expand(np.searchsorted(starts, a_start, "left"), np.searchsorted(starts, a_stop, "left"))
    # ... or a starts strictly inside b.
    order_a = np.argsort(a_start, kind="stable")
    starts_a = a_start[order_a]
    j2, i2 = expand(np.searchsorted(starts_a, b_start, "right"), np.searchsorted(starts_a, b_stop, "left"))
    return np.concatenate([i1, order_a[i2]]), np.concatenate([order[j1], j2])


def expand(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All (row, k) with low[row] <= k < high[row]."""
    counts = np.maximum(high - low, 0)
    rows = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows, low[rows] + within


def overlaps(a: BoxTable, b: BoxTable) -> tuple[np.ndarray, np.ndarray]:
    """Index pairs (i, j) of boxes of the same tensor that meet, sorted by i, then j.

    Candidates come from a one-dimensional join along the axis on which the tensor is cut most often; axes on which
    every box is one wide (layers, experts) tell tensors apart instead. The other axes only filter.
    """
    if len(a) == 0 or len(b) == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    both = concatenate([a, b])
    tensors, tensor = np.unique(both.tensor, return_inverse=True)
    both = BoxTable(tensor, both.offset, both.shape)
    width = _widths(both)
    axis = _most_cut_axis(both, tensor, len(tensors), width)[tensor]
    rows = np.arange(len(both))
    start = _numbered(number_cells(both, width), both.offset[rows, axis], int((both.offset + both.shape).max()) + 1)
    stop = start + both.shape[rows, axis]
    n = len(a)
    i, j = interval_overlaps(start[:n], stop[:n], start[n:], stop[n:])
    meet = ((a.offset[i] < b.offset[j] + b.shape[j]) & (b.offset[j] < a.offset[i] + a.shape[i])).all(axis=1)
    i, j = i[meet], j[meet]
    order = np.lexsort((j, i))
    return i[order], j[order]


def number_cells(boxes: BoxTable, width: np.ndarray | None = None) -> np.ndarray:
    """A number for each box, int64 [num_boxes], equal if and only if two boxes are of one tensor and agree on all axes on which
    every box of that tensor is one wide: boxes in different cells cannot meet. width: `_widths(boxes)`, if it is there."""
    width = _widths(boxes) if width is None else width
    cell = boxes.tensor.astype(np.int64)
    for axis in range(boxes.offset.shape[1]):
        single = np.where(width[boxes.tensor, axis] == 1, boxes.offset[:, axis], 0)
        if single.any():
            cell = _numbered(cell, single)
    return cell


def _widths(boxes: BoxTable) -> np.ndarray:
    """How wide the widest box of each tensor is: int64 [largest tensor + 1, num_axes]."""
    width = np.zeros((int(boxes.tensor.max(initial=-1)) + 1, boxes.shape.shape[1]), np.int64)
    np.maximum.at(width, boxes.tensor, boxes.shape)
    return width


def _numbered(cell: np.ndarray, offset: np.ndarray, span: int | None = None) -> np.ndarray:
    """One number for each pair (cell, offset): int64, ordered by cell, then offset. span: more than any offset."""
    span = int(offset.max()) + 1 if span is None else span
    if (int(cell.max()) + 1) * span >= 1 << 62:
        cell = np.unique(cell, return_inverse=True)[1].astype(np.int64)
    return cell * span + offset


def _most_cut_axis(boxes: BoxTable, tensor: np.ndarray, num_tensors: int, width: np.ndarray) -> np.ndarray:
    """For each tensor the axis with the most distinct offsets among those that are not one wide: int64 [num_tensors]."""
    num_axes = boxes.offset.shape[1]
    cuts = np.zeros((num_tensors, num_axes), np.int64)
    for axis in range(num_axes):
        span = int(boxes.offset[:, axis].max()) + 1
        distinct = np.unique(_numbered(tensor.astype(np.int64), boxes.offset[:, axis], span))
        cuts[:, axis] = np.bincount(distinct // span, minlength=num_tensors)
    return np.where(width == 1, -1, cuts).argmax(axis=1)


def subtract(boxes: BoxTable, holes: BoxTable) -> tuple[BoxTable, np.ndarray, BoxTable, np.ndarray, np.ndarray]:
    """Cut `holes` out of `boxes`.

    Returns (rest, rest_row, inside, inside_row, inside_hole): `rest` are disjoint boxes that no hole meets, each a part
    of row `rest_row` of `boxes`; `inside` are disjoint boxes, each the part of row `inside_row` that was cut out by
    hole `inside_hole` (where holes overlap one another, by the first of them only).
    """
    fragments, row = boxes, np.arange(len(boxes))
    rest, rest_row, inside, inside_row, inside_hole = [], [], [], [], []
    while len(fragments):
        i, j = overlaps(fragments, holes)
        first = np.ones(len(i), bool)
        first[1:] = i[1:] != i[:-1]
        i, j = i[first], j[first]
        untouched = np.ones(len(fragments), bool)
        untouched[i] = False
        rest.append(fragments[untouched])
        rest_row.append(row[untouched])
        cut = intersect(fragments[i], holes[j])
        inside.append(cut)
        inside_row.append(row[i])
        inside_hole.append(j)
        fragments, parent = _slabs_around(fragments[i], cut)
        row = row[i][parent]
    if not rest:
        return boxes, row, boxes, row, row
    return (concatenate(rest), np.concatenate(rest_row), concatenate(inside), np.concatenate(inside_row),
            np.concatenate(inside_hole))


def _slabs_around(outer: BoxTable, inner: BoxTable) -> tuple[BoxTable, np.ndarray]:
    """What is left of each `outer` box around its `inner` one: up to two slabs an axis, and the row of each."""
    slabs, rows = [], []
    offset, shape = outer.offset.copy(), outer.shape.copy()
    all_rows = np.arange(len(outer))
    for axis in range(offset.shape[1]):
        low, high = inner.offset[:, axis], inner.offset[:, axis] + inner.shape[:, axis]
        for start, stop in ((offset[:, axis], low), (high, offset[:, axis] + shape[:, axis])):
            keep = stop > start
            slab_offset, slab_shape = offset[keep].copy(), shape[keep].copy()
            slab_offset[:, axis], slab_shape[:, axis] = start[keep], (stop - start)[keep]
            slabs.append(BoxTable(outer.tensor[keep], slab_offset, slab_shape))
            rows.append(all_rows[keep])
        offset[:, axis], shape[:, axis] = low, high - low
    return concatenate(slabs), np.concatenate(rows)
