"""The laws of a plan, element by element, on random pairs of worlds over different sets of ranks."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import TENSORS, carried_out, elements_held, filled, strided, worlds

from megatron_dynatrain.errors import LayoutRefused, SpaceError
from megatron_dynatrain.geometry import Box, row_major_strides
from megatron_dynatrain.planning import Balance, draft_plan, finish_plan, make_plan, node_numbers, order
from megatron_dynatrain.planning.balance import equal_shares, group_of
from megatron_dynatrain.space import Holdings, LogicalTensor, Piece, Storage, World

SMALL = 64  # bytes of staging: a few elements a message
LARGE = LogicalTensor("decoder.final_layernorm.weight", "weight", (64, 64), "bfloat16", 2)

pairs = st.tuples(worlds(ranks=[0, 1, 2, 3]), worlds(ranks=[1, 3, 4, 6, 7]))
nodes_of_ranks = st.lists(st.integers(0, 3), min_size=8, max_size=8).map(node_numbers)


@settings(max_examples=40, deadline=None)
@given(pairs, nodes_of_ranks)
def test_every_destination_element_gets_its_own_value(pair, nodes):
    src, dst = pair
    after = carried_out(make_plan(src, dst, SMALL, nodes), filled(src))
    for key, expected in filled(dst).items():
        assert np.array_equal(after[key], expected), key


@settings(max_examples=40, deadline=None)
@given(pairs, nodes_of_ranks)
def test_bytes_that_cross_are_exactly_what_ranks_need_and_do_not_hold(pair, nodes):
    src, dst = pair
    plan = make_plan(src, dst, SMALL, nodes)
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
    assert ((plan.src_rank != plan.dst_rank) == plan.crosses).all()


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
@given(pairs, st.sampled_from([16, 256]), nodes_of_ranks)
def test_the_plan_of_one_rank_is_its_part_of_the_plan_of_all(pair, staging_bytes, nodes):
    src, dst = pair
    plan = make_plan(src, dst, staging_bytes, nodes)
    ranks = np.union1d(src.ranks, dst.ranks).tolist()
    drafts = [draft_plan(src, dst, staging_bytes, rank) for rank in ranks]
    demand = {rank: needs for draft in drafts for rank, needs in draft.demand.items()}
    assert demand == plan.demand
    for rank, draft in zip(ranks, drafts, strict=True):
        own = finish_plan(draft, Balance(demand, nodes))
        part = (plan.src_rank == rank) | (plan.dst_rank == rank)
        assert own.digest == plan.digest
        # The same copies, and the order of the job, restricted to the rank, is the order of the rank.
        for name in ("src_piece", "dst_piece", "batch", "is_direct", "crosses"):
            assert (getattr(own, name) == getattr(plan, name)[part]).all(), name
        assert (own.boxes.offset == plan.boxes.offset[part]).all() and (own.boxes.shape == plan.boxes.shape[part]).all()
        assert (np.diff(own.message) != 0).tolist() == (np.diff(plan.message[part]) != 0).tolist()
        assert own.num_windows == plan.num_windows_of(rank)
    assert sum(draft.minimum_bytes for draft in drafts) == plan.moved_bytes


@settings(max_examples=30, deadline=None)
@given(pairs, st.sampled_from([16, 64, 256]))
def test_windows_are_bounded_and_follow_the_order_of_the_job(pair, staging_bytes):
    src, dst = pair
    plan = make_plan(src, dst, staging_bytes)
    limit = max(order.window_limit(staging_bytes), max(t.itemsize for t in TENSORS))
    for rank in np.union1d(src.ranks, dst.ranks).tolist():
        rows, window = plan.windows(rank)
        assert (np.diff(rows) > 0).all() and (np.diff(window) >= 0).all()
        for number in range(plan.num_windows_of(rank)):
            here = rows[(window == number) & (plan.message[rows] >= 0) & ~plan.is_direct[rows]]
            for side in (plan.src_rank, plan.dst_rank):
                assert plan.nbytes[here[side[here] == rank]].sum() <= limit
    # Messages keep to one pair of ranks and to one batch, wide elements first.
    assert (np.diff(plan.batch) >= 0).all()
    for message in np.unique(plan.message[plan.crosses]):
        here = plan.message == message
        assert {len(set(column[here].tolist())) for column in (plan.src_rank, plan.dst_rank, plan.batch)} == {1}
        assert (np.diff(plan.itemsize[here]) <= 0).all()


@settings(max_examples=30, deadline=None)
@given(pairs, st.sampled_from([16, 64]))
def test_ranks_that_walk_their_windows_never_wait_for_one_another_in_a_circle(pair, staging_bytes):
    """Carried out with no buffering at all: a message arrives when both of its ranks are in its window."""
    plan = make_plan(*pair, staging_bytes)
    queues = {}
    for rank in np.union1d(plan.src.ranks, plan.dst.ranks).tolist():
        rows, window = plan.windows(rank)
        queues[rank] = [set(plan.message[rows[(window == w)]].tolist()) - {-1} for w in range(window.max(initial=-1) + 1)]
    while any(queues.values()):
        heads = [queue[0] for queue in queues.values() if queue]
        arrived = {m for head in heads for m in head if sum(m in other for other in heads) == 2}
        assert arrived or any(not head for head in heads)
        for rank in queues:
            if queues[rank]:
                queues[rank][0] -= arrived
                if not queues[rank][0]:
                    queues[rank].pop(0)


def test_a_rank_never_has_more_messages_in_a_window_than_the_bound():
    count = 3 * order.MAX_MESSAGES + 1
    windows = order.windows(np.full(count, 4), np.zeros(count, np.int64), 1 << 20)
    assert np.bincount(windows).tolist() == [order.MAX_MESSAGES] * 3 + [1]


@given(st.lists(st.tuples(st.sets(st.integers(0, 5), min_size=1, max_size=4), st.integers(6, 11), st.integers(1, 60)), min_size=1,
                max_size=7), st.lists(st.integers(0, 3), min_size=12, max_size=12).map(node_numbers))
def test_the_yardstick_of_balance_is_the_least_possible_maximum(demands, nodes):
    """By Hall's theorem for flows: the most that any set of ranks must send between them, a rank on average. Where ranks are
    has nothing to do with it, and no choice of who is near sends more."""
    demand = {}
    for ranks, needs, nbytes in demands:
        of_rank = demand.setdefault(needs, {})
        of_rank[tuple(sorted(ranks))] = of_rank.get(tuple(sorted(ranks)), 0) + nbytes
    everything = [(holders, nbytes) for needs in demand.values() for holders, nbytes in needs.items()]
    best = max(sum(nbytes for holders, nbytes in everything if set(holders) <= set(ranks)) / len(ranks)
               for size in range(1, 7) for ranks in itertools.combinations(range(6), size))
    best = max(best, *(sum(needs.values()) for needs in demand.values()))
    balance = Balance(demand, nodes)
    assert balance.max_rank_bytes == pytest.approx(best, abs=1.5)
    sent = np.zeros(12)
    for holders, group, nbytes in ((holders, group_of(holders, nodes[rank], nodes), nbytes)
                                   for rank, needs in demand.items() for holders, nbytes in needs.items()):
        shares = np.array(balance.shares.get(group) or equal_shares(group, nodes))
        sent[list(holders)] += nbytes * shares / shares.sum()
    assert sent.sum() == pytest.approx(sum(nbytes for _, nbytes in everything))
    assert sent.max() <= best * 1.01 + 1.5


def everywhere(ranks):
    """A world in which each of `ranks` holds all of one tensor, which is large enough to be cut."""
    place = Box((0, 0), LARGE.shape), 0, 0, row_major_strides(LARGE.shape)
    return World.assemble({rank: Holdings.from_pieces([Piece(LARGE, *place, rank == ranks[0])],
                                                      [Storage("w", LARGE.numel, LARGE.dtype)]) for rank in ranks})


def test_load_is_spread_over_replicas():
    plan = make_plan(everywhere([0, 1, 2, 3]), everywhere([4, 5, 6, 7]))
    assert sorted(set(plan.src_rank.tolist())) == [0, 1, 2, 3]
    assert plan.max_rank_bytes == LARGE.numel * LARGE.itemsize


@pytest.mark.parametrize("hosts, copies", [
    pytest.param("abcdabcd", 4, id="each from its node"),
    pytest.param("aabbbbaa", 4, id="those of a node share"),
    pytest.param("aabbaxyz", 1, id="only one has a replica near"),
    # Two are near rank 1, which may not send more than a rank receives: half of what they need comes from afar.
    pytest.param("xaxxaayy", 1, id="nobody near sends too much"),
])
def test_what_a_replica_on_the_same_node_has_comes_from_there(hosts, copies):
    nodes = node_numbers(hosts)
    plan = make_plan(everywhere([0, 1, 2, 3]), everywhere([4, 5, 6, 7]), nodes=nodes)
    size = LARGE.numel * LARGE.itemsize
    assert plan.moved_bytes == 4 * size and plan.max_rank_bytes <= 1.1 * size
    nearby = plan.nbytes[nodes[plan.src_rank] == nodes[plan.dst_rank]].sum()
    assert nearby == pytest.approx(copies * size, rel=0.1)


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


