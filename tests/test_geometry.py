"""Boxes and intervals, against sets of coordinates."""

import doctest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import elements

from megatron_dynatrain import geometry
from megatron_dynatrain.geometry import Box, BoxTable, flat_interval_boxes, interval_overlaps, overlaps, subtract


@st.composite
def tables(draw, max_boxes=12):
    """Boxes of a few tensors of two axes, in a space so small that they often meet."""
    rows = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(0, 4), st.integers(1, 3), st.integers(1, 3)),
                         min_size=1, max_size=max_boxes))
    rows = np.array(rows, np.int64)
    return BoxTable(rows[:, 0], rows[:, 1:3], rows[:, 3:5])


def cells(table, row):
    return {(int(table.tensor[row]), *c) for c in elements(table.offset[row].tolist(), table.shape[row].tolist())}


def test_examples_in_docstrings():
    assert doctest.testmod(geometry).attempted > 0
    assert doctest.testmod(geometry).failed == 0


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_flat_interval_is_the_union_of_its_boxes_in_order(shape, data):
    shape = tuple(shape)
    numel = int(np.prod(shape))
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    boxes = flat_interval_boxes(shape, start, stop)
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    index = np.arange(numel).reshape(shape)
    found = [i for box in boxes for i in index[tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape))].ravel().tolist()]
    assert found == list(range(start, stop))


def test_flat_interval_outside_of_its_tensor():
    with pytest.raises(ValueError, match=r"\[3, 9\) does not lie in a tensor of shape \(2, 4\)"):
        flat_interval_boxes((2, 4), 3, 9)


@given(*2 * [st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), max_size=15)])
def test_interval_overlaps_are_all_and_only_those_that_meet(a, b):
    a_start, b_start = (np.array([s for s, _ in x], np.int64) for x in (a, b))
    a_stop, b_stop = (np.array([s + n for s, n in x], np.int64) for x in (a, b))
    found = sorted(zip(*(rows.tolist() for rows in interval_overlaps(a_start, a_stop, b_start, b_stop))))
    assert found == sorted((i, j) for i, (s, n) in enumerate(a) for j, (t, m) in enumerate(b) if s < t + m and t < s + n)


@given(tables(), tables())
def test_overlaps_are_all_and_only_those_that_meet(a, b):
    i, j = overlaps(a, b)
    expected = [(x, y) for x in range(len(a)) for y in range(len(b)) if cells(a, x) & cells(b, y)]
    assert list(zip(i.tolist(), j.tolist())) == expected  # sorted, too


@given(tables(), tables())
def test_subtract_partitions_each_box(boxes, holes):
    rest, rest_row, inside, inside_row, inside_hole = subtract(boxes, holes)
    all_holes = set().union(*(cells(holes, j) for j in range(len(holes))))
    for row in range(len(boxes)):
        outer = [cells(rest, k) for k in np.nonzero(rest_row == row)[0]]
        inner = [cells(inside, k) for k in np.nonzero(inside_row == row)[0]]
        assert sum(map(len, outer + inner)) == len(cells(boxes, row))  # disjoint
        assert set().union(*outer) == cells(boxes, row) - all_holes
        assert set().union(*inner) == cells(boxes, row) & all_holes
    for k in range(len(inside)):
        assert cells(inside, k) <= cells(holes, int(inside_hole[k]))


def test_box_reads_as_half_open_ranges():
    assert str(Box((2, 0), (2, 8))) == "[2:4, 0:8]"
