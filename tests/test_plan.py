"""The laws of a plan, element by element, on random pairs of worlds over different sets of ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import TENSORS, carried_out, elements_held, filled, strided, worlds

from megatron_dynatrain.errors import LayoutRefused, SpaceError
from megatron_dynatrain.planning import make_plan
from megatron_dynatrain.planning.plan import LOCAL
from megatron_dynatrain.planning.windows import MAX_PEERS, assign_windows

SMALL = 64  # bytes of staging: a few elements a message

pairs = st.tuples(worlds(ranks=[0, 1, 2, 3]), worlds(ranks=[1, 3, 4, 6, 7]))


@settings(max_examples=40, deadline=None)
@given(pairs)
def test_every_destination_element_gets_its_own_value(pair):
    src, dst = pair
    after = carried_out(make_plan(src, dst, SMALL), filled(src))
    for key, expected in filled(dst).items():
        assert np.array_equal(after[key], expected), key


@settings(max_examples=40, deadline=None)
@given(pairs)
def test_bytes_that_cross_are_exactly_what_ranks_need_and_do_not_hold(pair):
    src, dst = pair
    plan = make_plan(src, dst, SMALL)
    itemsize = {t.name: t.itemsize for t in TENSORS}
    held = elements_held(src)
    minimum = sum(itemsize[name] for rank, needed in elements_held(dst).items()
                  for name, _ in needed - held.get(rank, set()))
    # A rank that holds an element as a main piece and again as a replica of another box needs it in both places.
    twice = sum(int(v) * t for v, t in zip(dst.boxes.volume, [dst.tensors[i].itemsize for i in dst.boxes.tensor])) - sum(
        itemsize[name] for needed in elements_held(dst).values() for name, _ in needed)
    assert minimum <= plan.moved_bytes == plan.minimum_bytes <= minimum + twice
    assert plan.moved_bytes + plan.local_bytes == sum(
        int(v) * dst.tensors[t].itemsize for v, t in zip(dst.boxes.volume, dst.boxes.tensor))
    assert all(plan.src_rank[plan.window == LOCAL] == plan.dst_rank[plan.window == LOCAL])
    assert all(plan.src_rank[plan.window != LOCAL] != plan.dst_rank[plan.window != LOCAL])


@settings(max_examples=30, deadline=None)
@given(pairs)
def test_there_and_back_is_the_identity(pair):
    src, dst = pair
    memory = filled(src)
    back = carried_out(make_plan(dst, src, SMALL), carried_out(make_plan(src, dst, SMALL), memory))
    for key, expected in memory.items():
        assert np.array_equal(back[key], expected)


@settings(max_examples=30, deadline=None)
@given(worlds(ranks=[0, 2, 3]))
def test_to_the_same_layout_nothing_moves(world):
    plan = make_plan(world, world)
    assert plan.moved_bytes == plan.minimum_bytes == plan.num_windows == 0


@settings(max_examples=30, deadline=None)
@given(pairs, st.sampled_from([16, 64, 256]))
def test_windows_are_bounded_and_the_same_everywhere(pair, staging_bytes):
    src, dst = pair
    plan = make_plan(src, dst, staging_bytes)
    assert plan.digest == make_plan(src, dst, staging_bytes).digest
    for window in range(plan.num_windows):
        rows = plan.window == window
        assert rows.any()
        for side in (plan.src_rank, plan.dst_rank):
            for rank in np.unique(side[rows]):
                assert plan.nbytes[rows & (side == rank)].sum() <= staging_bytes
    # Within a window the bytes of one pair lie side by side, wide elements first.
    key = list(zip(plan.window.tolist(), plan.src_rank.tolist(), plan.dst_rank.tolist(), (-plan.itemsize).tolist()))
    assert key == sorted(key)


def test_a_rank_never_has_more_messages_in_a_window_than_the_bound():
    peers = 3 * MAX_PEERS + 1
    src, dst = np.zeros(peers, np.int64), np.arange(1, peers + 1)
    windows = assign_windows(src, dst, np.full(peers, 4), 1 << 20)
    assert np.bincount(windows).tolist() == [MAX_PEERS] * 3 + [1]


def test_load_is_spread_over_replicas():
    tensor = TENSORS[1]
    from megatron_dynatrain.geometry import Box, row_major_strides
    from megatron_dynatrain.space import Holdings, Piece, Storage, World

    def world(ranks, mains):
        box = Box((0, 0, 0), tensor.shape)
        return World.assemble({r: Holdings.from_pieces(
            [Piece(tensor, box, 0, 0, row_major_strides(tensor.shape), r in mains)],
            [Storage("w", tensor.numel, tensor.dtype)]) for r in ranks})

    plan = make_plan(world([0, 1, 2, 3], {0}), world([4, 5, 6, 7], {4}))
    assert sorted(set(plan.src_rank.tolist())) == [0, 1, 2, 3]
    assert plan.max_rank_bytes == tensor.numel * tensor.itemsize


def test_layouts_that_disagree_about_the_state_are_refused():
    from megatron_dynatrain.space import LogicalTensor
    from test_space import BOTTOM, TENSOR, TOP, world

    src = world((0, TOP, True), (1, BOTTOM, True))
    half = LogicalTensor(TENSOR.key, TENSOR.field, TENSOR.shape, "bfloat16", 2)
    with pytest.raises(LayoutRefused, match=r"disagree about .*exp_avg: .*\(4, 8\) float32, .* \(4, 8\) bfloat16"):
        make_plan(src, world((0, TOP, True), (1, BOTTOM, True), tensor=half))
    with pytest.raises(SpaceError, match="no rank holds"):
        make_plan(world((0, TOP, True)), src)


@pytest.mark.parametrize("src_rows, dst_rows", [(4, 6), (6, 4), (4, 5), (5, 5)])
def test_padding_grows_with_zeros_and_is_dropped(src_rows, dst_rows):
    from megatron_dynatrain.space import LogicalTensor
    from test_space import Box, world

    def padded(rows, *held):
        return world(*held, tensor=LogicalTensor("embedding.word_embeddings.weight", "weight", (rows, 8), "float32", 4, True))

    src = padded(src_rows, (0, Box((0, 0), (2, 8)), True), (1, Box((2, 0), (src_rows - 2, 8)), True))
    dst = padded(dst_rows, (0, Box((0, 0), (dst_rows - 1, 8)), True), (1, Box((dst_rows - 1, 0), (1, 8)), True))
    plan = make_plan(src, dst)
    after = carried_out(plan, filled(src))
    for rank in (0, 1):
        for storage, start, stride, shape in zip(*plan.zeros_of(rank)):
            strided(after[rank, int(storage)], start, stride, shape.tolist())[...] = 0
    expected = filled(dst)
    for rank, first in ((0, 0), (1, dst_rows - 1)):
        rows = first + np.arange(len(expected[rank, 0]) // 8)
        expected[rank, 0].reshape(-1, 8)[rows >= src_rows] = 0
        assert np.array_equal(after[rank, 0], expected[rank, 0])
    assert plan.moved_bytes == plan.minimum_bytes


def test_a_wrong_plan_is_caught_by_its_own_check():
    from test_space import BOTTOM, TOP, world

    plan = make_plan(world((0, TOP, True), (1, BOTTOM, True)), world((0, BOTTOM, True), (1, TOP, True)))
    plan.check()
    plan.dst_piece[0] = 1 - plan.dst_piece[0]
    with pytest.raises(SpaceError, match="elements would be written where rank 0 holds"):
        plan.check()


