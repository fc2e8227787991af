"""The cover check names what is wrong: key, coordinates, ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import TENSORS, elements_held, worlds

from megatron_dynatrain.errors import SpaceError
from megatron_dynatrain.geometry import Box, row_major_strides
from megatron_dynatrain.space import Holdings, LogicalTensor, Piece, Storage, World, check_cover

TENSOR = LogicalTensor("decoder.layers.mlp.linear_fc2.weight", "exp_avg", (4, 8), "float32", 4)


def world(*held, tensor=TENSOR):
    """A world from (rank, box, is_main)."""
    ranks = sorted({rank for rank, *_ in held})
    holdings = {}
    for rank in ranks:
        boxes = [(box, main) for r, box, main in held if r == rank]
        holdings[rank] = Holdings.from_pieces(
            [Piece(tensor, box, i, 0, row_major_strides(box.shape), main) for i, (box, main) in enumerate(boxes)],
            [Storage(str(i), 32, "float32") for i in range(len(boxes))])
    return World.assemble(holdings)


TOP, BOTTOM = Box((0, 0), (2, 8)), Box((2, 0), (2, 8))


@given(worlds(ranks=[0, 3, 5]))
def test_legal_worlds_pass(world):
    check_cover(world)
    assert set().union(*elements_held(world).values()) == {
        (t.name, tuple(c)) for t in TENSORS for c in np.ndindex(*t.shape)}


@pytest.mark.parametrize("held, message", [
    ([(0, TOP, True)], r"no rank holds .*linear_fc2.weight:exp_avg\[2:4, 0:8\] \(global shape \(4, 8\)\)"),
    ([(0, TOP, True), (1, BOTTOM, False)], r"no rank holds .*:exp_avg\[2:4, 0:8\]"),
    ([(0, TOP, True), (1, BOTTOM, True), (7, Box((3, 2), (1, 2)), True)],
     r"covered twice: rank 1 holds .*\[2:4, 0:8\] and rank 7 holds .*\[3:4, 2:4\], both as the main copy"),
    ([(0, TOP, True), (1, BOTTOM, True), (1, BOTTOM, True)], r"covered twice: rank 1 .* and rank 1 "),
    ([(0, TOP, True), (1, Box((2, 0), (3, 8)), True)], r"rank 1 holds .*\[2:5, 0:8\], which lies outside of its global shape"),
])
def test_violations_are_named(held, message):
    with pytest.raises(SpaceError, match=message):
        check_cover(world(*held))


def test_replicas_may_be_many():
    check_cover(world((0, TOP, True), (1, TOP, False), (2, BOTTOM, True), (3, Box((0, 0), (4, 8)), False)))


def test_ranks_that_disagree_about_a_tensor():
    def holdings(tensor):
        return Holdings.from_pieces([Piece(tensor, Box((0, 0), tensor.shape), 0, 0, (1, 1), True)], [Storage("s", 64, "x")])

    other = LogicalTensor(TENSOR.key, TENSOR.field, (4, 9), "float32", 4)
    with pytest.raises(SpaceError, match=r"disagree about .*exp_avg: .*\(4, 8\) float32, .*\(4, 9\) float32"):
        World.assemble({0: holdings(TENSOR), 1: holdings(other)})


@given(worlds(ranks=[0, 1]), st.data())
def test_a_missing_main_piece_is_always_found(world, data):
    row = data.draw(st.sampled_from([r for r in range(len(world)) if world.is_main[r]]))
    world.is_main[row] = False
    with pytest.raises(SpaceError, match="no rank holds " + world.tensors[world.boxes.tensor[row]].key):
        check_cover(world)


def test_digest_tells_descriptions_apart():
    def one(box, start=0, main=True):
        return Holdings.from_pieces([Piece(TENSOR, box, 0, start, (8, 1), main)], [Storage("s", 32, "float32")]).digest()

    assert one(TOP) == one(TOP)
    assert len({one(TOP), one(BOTTOM), one(TOP, start=1), one(TOP, main=False)}) == 4
