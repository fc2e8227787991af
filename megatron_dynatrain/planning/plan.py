"""From two worlds to the plan of a switch, for one rank or for all.

In this order, `draft_plan` up to what is needed, `finish_plan` from there on:

1. In both worlds the main pieces cover every logical tensor exactly once (`World.assemble` sees to that).
2. What a rank needs and holds already is copied locally; the rest comes from the ranks that hold it, each element once for
   each rank that needs it; new padding is zero (`copies`). Replicas share the work so that the busiest rank sends as little
   as can be, and within that what can come from the same node does (`balance`).
3. Copies are packed into messages, and messages have one order in the whole job (`order`).
4. The plan is checked (`Plan.check`): every destination element is written once, and moved bytes equal the minimum.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_dynatrain.errors import LayoutRefused, SpaceError
from megatron_dynatrain.geometry import BoxTable, concatenate, overlaps
from megatron_dynatrain.planning import order
from megatron_dynatrain.planning.balance import Balance, Demand
from megatron_dynatrain.planning.copies import Cells, Needs, find_needs, minimum_bytes, share_among_replicas
from megatron_dynatrain.planning.order import DEFAULT_STAGING_BYTES
from megatron_dynatrain.space import LogicalTensor, World, whole_tensors


@dataclass(frozen=True, eq=False)
class Plan:
    """The copies of one switch, one row each, in the order of the job.

    rank: whose copies these are, or None for those of all ranks.
    tensors: those of the destination; the source's differ in their padding at most.
    boxes: the global coordinates; `boxes.tensor` indexes `tensors`.
    src_piece, dst_piece: rows of the source and of the destination world from which and into which the box is copied.
    batch: int64, non-decreasing: weights, then optimizer states layer by layer (`order`).
    message: int64; copies with the same number travel together, ascending in the order of the job; -1 for a local copy.
    is_direct: bool, whether the copy is contiguous on both sides and travels without being packed.
    demand: what ranks need of others; of a rank's plan, this rank alone. balance: how replicas share the sending.
    zeros, zeros_dst_piece: boxes that the source does not have, and the rows of the destination world that they fill.
    minimum_bytes: what has to cross between ranks in any plan: what ranks need and do not hold.
    staging_bytes: the bound on scratch of a rank.
    """

    src: World
    dst: World
    rank: int | None
    tensors: tuple[LogicalTensor, ...]
    boxes: BoxTable
    src_piece: np.ndarray
    dst_piece: np.ndarray
    batch: np.ndarray
    message: np.ndarray
    is_direct: np.ndarray
    demand: Demand
    balance: Balance
    zeros: BoxTable
    zeros_dst_piece: np.ndarray
    dst_rows: np.ndarray
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

    @cached_property
    def crosses(self) -> np.ndarray:
        """Whether a copy is between ranks: bool [num_copies]."""
        return self.message >= 0

    @property
    def moved_bytes(self) -> int:
        """Bytes that cross between ranks; of a rank's plan, those that it receives."""
        return int(self.nbytes[self.crosses & (self.rank is None or self.dst_rank == self.rank)].sum())

    @property
    def local_bytes(self) -> int:
        """Bytes that are copied within ranks."""
        return int(self.nbytes[~self.crosses].sum())

    def rank_bytes(self, side: str) -> np.ndarray:
        """Bytes that each rank sends ('src') or receives ('dst') from others: int64 [largest rank + 1]."""
        size = num_ranks(self.src, self.dst)
        rank = self.src_rank if side == "src" else self.dst_rank
        return np.bincount(rank[self.crosses], self.nbytes[self.crosses], size).astype(np.int64)

    @property
    def max_rank_bytes(self) -> int:
        """The most that any one rank sends or receives: no switch is faster than this over the rank's link."""
        if self.rank is not None:
            return int(max(self.rank_bytes(side)[self.rank] for side in ("src", "dst")))
        return int(max(self.rank_bytes(side).max(initial=0) for side in ("src", "dst")))

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

    def windows(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """(rows, window): the copies of `rank` in the order in which it carries them out, and the window of each.

        A local copy belongs to the window of the next message, so that it is made while that is in flight. Where more than the
        staging is copied locally, there are more windows, some of them without messages, as memory is turned over by windows.
        """
        return self._own_windows if rank == self.rank else self._windows_of(rank)

    @cached_property
    def _own_windows(self) -> tuple[np.ndarray, np.ndarray]:
        return self._windows_of(self.rank)  # kept, since a switch asks several times and a plan serves many

    def _windows_of(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        window = self._windows_of_messages(rank)
        rows = self._rows_by_rank.get(rank, np.empty(0, np.int64))
        local = self.message[rows] < 0
        starts = np.diff(self.message[rows[~local]], prepend=-1) != 0
        of_row = np.full(len(rows), window.max(initial=0))
        of_row[~local] = window[np.cumsum(starts) - 1]
        of_row = np.minimum.accumulate(of_row[::-1])[::-1]
        of_row += np.cumsum(np.where(local, self.nbytes[rows], 0)) // self.staging_bytes
        return rows, np.unique(of_row, return_inverse=True)[1]

    @cached_property
    def _rows_by_rank(self) -> dict[int, np.ndarray]:
        return _by_rank(self.src_rank, self.dst_rank)

    @cached_property
    def _messages_by_rank(self) -> dict[int, np.ndarray]:
        return _by_rank(*self.messages[:2])

    def _windows_of_messages(self, rank: int) -> np.ndarray:
        """The window of each message that `rank` sends or receives, in the order of the job."""
        src, _, _, packed = self.messages
        own = self._messages_by_rank.get(rank, np.empty(0, np.int64))
        sends, packed = src[own] == rank, packed[own]
        return order.windows(np.where(sends, packed, 0), np.where(sends, 0, packed), order.window_limit(self.staging_bytes))

    def num_windows_of(self, rank: int) -> int:
        """Windows that `rank` walks; none if it has nothing to send or to receive."""
        return int(self._windows_of_messages(rank).max(initial=-1)) + 1

    @cached_property
    def messages(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(source, destination, bytes, bytes that are packed) of each message, in the order of the job: int64 [num_messages]."""
        remote = np.nonzero(self.crosses)[0]
        starts = np.nonzero(np.diff(self.message[remote], prepend=-1))[0]
        first, nbytes = remote[starts], self.nbytes[remote]
        sums = [np.add.reduceat(column, starts) if len(starts) else nbytes
                for column in (nbytes, np.where(self.is_direct[remote], 0, nbytes))]
        return self.src_rank[first], self.dst_rank[first], *sums

    @cached_property
    def num_windows(self) -> int:
        """The most windows with messages that any rank walks (of a rank's plan: that rank)."""
        return max((self.num_windows_of(rank) for rank in self._messages_by_rank if self.rank in (None, rank)), default=0)

    @cached_property
    def digest(self) -> str:
        """A hash of what the plan follows from, and so of the plan: equal on every rank."""
        state = hashlib.blake2b(digest_size=16)
        nodes, shares = self.balance.nodes.tolist(), sorted(self.balance.shares.items())
        state.update(f"{self.src.digest} {self.dst.digest} {self.staging_bytes} {nodes} {shares}".encode())
        return state.hexdigest()

    def check(self) -> None:
        """Raise SpaceError unless every destination element is written exactly once and nothing moves needlessly."""
        own = slice(None) if self.rank is None else self.dst_rank == self.rank
        boxes, dst_piece = concatenate([self.boxes[own], self.zeros]), np.concatenate([self.dst_piece[own], self.zeros_dst_piece])
        written = np.bincount(dst_piece, boxes.volume, len(self.dst))[self.dst_rows]
        wrong = np.nonzero(written != self.dst.boxes.volume[self.dst_rows])[0]
        if len(wrong):
            row = int(self.dst_rows[wrong[0]])
            raise SpaceError(f"{int(written[wrong[0]])} of {int(self.dst.boxes.volume[row])} elements would be written where "
                             f"{self.dst.describe(row)} in the new layout")
        by_piece = BoxTable(dst_piece, boxes.offset, boxes.shape)
        i, j = overlaps(by_piece, by_piece)
        if (i != j).any():
            row = int(dst_piece[i[np.nonzero(i != j)[0][0]]])
            raise SpaceError(f"an element would be written twice where {self.dst.describe(row)} in the new layout")
        if self.moved_bytes != self.minimum_bytes:
            raise SpaceError(f"the plan moves {self.moved_bytes} bytes where {self.minimum_bytes} suffice")


def num_ranks(src: World, dst: World) -> int:
    """Of two worlds that share one numbering, from 0 to the largest rank of either."""
    return 1 + int(max(src.ranks.max(initial=-1), dst.ranks.max(initial=-1)))


def _by_rank(src: np.ndarray, dst: np.ndarray) -> dict[int, np.ndarray]:
    """{rank: the rows, ascending, of which it is `src` or `dst`}."""
    row = np.arange(len(src))
    between = src != dst
    rank, row = np.concatenate([src, dst[between]]), np.concatenate([row, row[between]])
    order = np.lexsort((row, rank))
    rank, row = rank[order], row[order]
    starts = np.nonzero(np.diff(rank, prepend=-1))[0]
    return dict(zip(rank[starts].tolist(), np.split(row, starts[1:]), strict=True)) if len(row) else {}


def _addresses(world: World, piece: np.ndarray, offset: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(storage, start, stride) of the boxes that begin at global `offset` within rows `piece` of `world`."""
    stride = world.stride[piece]
    return world.storage[piece], world.start[piece] + ((offset - world.boxes.offset[piece]) * stride).sum(axis=1), stride


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A plan but for who sends what replicas hold. `demand` of all ranks decides on that (`Balance`)."""

    src: World
    dst: World
    rank: int | None
    tensors: tuple[LogicalTensor, ...]
    needs: Needs
    dst_rows: np.ndarray
    demand: Demand
    minimum_bytes: int
    staging_bytes: int


def draft_plan(src: World, dst: World, staging_bytes: int = DEFAULT_STAGING_BYTES, rank: int | None = None,
               cells: Cells | None = None) -> Draft:
    """What ranks need from one another, for all ranks or for one.

    cells: `Cells(src, dst)`, if it is there already. Raises LayoutRefused where the destination needs what the source does not
    have. Ranks of the two worlds share one numbering; the sets may differ.
    """
    tensors = _common_tensors(src, dst)
    if src.boxes.offset.shape[1] != dst.boxes.offset.shape[1]:
        raise SpaceError(f"the layouts describe tensors of {src.boxes.offset.shape[1]} and {dst.boxes.offset.shape[1]} axes")
    cells = cells or Cells(src, dst)
    src_rows, dst_rows = cells.rows(cells.all() if rank is None else cells.of_rank(rank))
    needs = find_needs(src, dst, src_rows, dst_rows)
    own_rows = dst_rows if rank is None else dst_rows[dst.rank[dst_rows] == rank]
    own = np.ones(len(needs.boxes), bool) if rank is None else dst.rank[needs.dst_piece] == rank
    return Draft(src, dst, rank, tensors, needs, own_rows, needs.demand(own, dst.rank[needs.dst_piece]),
                 int(minimum_bytes(src, dst, src_rows, own_rows).sum()), staging_bytes)


def make_plan(src: World, dst: World, staging_bytes: int = DEFAULT_STAGING_BYTES, nodes: np.ndarray | None = None) -> Plan:
    """The checked plan of all ranks from `src` to `dst`; a pure function. Raises what `draft_plan` raises.

    nodes: the node of each rank, int64 [num_ranks]; all ranks are on one where it is None.
    """
    draft = draft_plan(src, dst, staging_bytes)
    return finish_plan(draft, Balance(draft.demand, np.zeros(num_ranks(src, dst), np.int64) if nodes is None else nodes))


def finish_plan(draft: Draft, balance: Balance) -> Plan:
    """The checked plan of a draft. balance: of what all ranks of a job need."""
    src, dst, rank, tensors, staging_bytes = draft.src, draft.dst, draft.rank, draft.tensors, draft.staging_bytes
    needs = draft.needs
    itemsize = np.array([t.itemsize for t in tensors], np.int64)
    remote, need, remote_src = share_among_replicas(dst, needs, balance)
    remote_dst = needs.dst_piece[need]
    if rank is not None:
        own = (src.rank[remote_src] == rank) | (dst.rank[remote_dst] == rank)
        remote, remote_src, remote_dst = remote[own], remote_src[own], remote_dst[own]
    remote, parent = order.split_large(remote, itemsize[remote.tensor], order.piece_limit(staging_bytes))
    held = np.arange(len(needs.held)) if rank is None else np.nonzero(dst.rank[needs.held_dst] == rank)[0]
    zeros = np.arange(len(needs.zeros)) if rank is None else np.nonzero(dst.rank[needs.zeros_dst_piece] == rank)[0]
    boxes = concatenate([needs.held[held], remote])
    src_piece = np.concatenate([needs.held_src[held], remote_src[parent]])
    dst_piece = np.concatenate([needs.held_dst[held], remote_dst[parent]])

    batch = order.batches(tensors, boxes, max(len(src.ranks), len(dst.ranks)), staging_bytes)
    src_rank, dst_rank = src.rank[src_piece], dst.rank[dst_piece]
    size = itemsize[boxes.tensor]
    nbytes = boxes.volume * size
    direct = ((src_rank != dst_rank) & (nbytes >= order.DIRECT_BYTES)
              & _contiguous(src, src_piece, boxes) & _contiguous(dst, dst_piece, boxes))
    # Within a message wide elements come first, so that every piece in it is aligned.
    columns = np.column_stack([boxes.tensor, boxes.offset])
    by_pair = np.lexsort((*columns.T[::-1], -size, direct, dst_rank, src_rank, batch))
    span = num_ranks(src, dst)
    pair = ((batch * span + src_rank) * span + dst_rank)[by_pair]
    turn = np.empty(len(boxes), np.int64)
    turn[by_pair] = order.turns(pair, nbytes[by_pair], direct[by_pair], order.window_limit(staging_bytes) // 2)
    turn = np.where(src_rank == dst_rank, -1, turn)  # local copies lead their batch
    in_order = by_pair[np.lexsort((src_rank[by_pair], ((dst_rank - src_rank) % span)[by_pair], turn[by_pair], batch[by_pair]))]
    key = np.column_stack([batch, turn, src_rank, dst_rank])[in_order]
    message = np.cumsum((key[1:] != key[:-1]).any(axis=1)) if len(key) else np.empty(0, np.int64)
    message = np.where(src_rank[in_order] == dst_rank[in_order], -1, np.append(0, message)[:len(key)])

    plan = Plan(src, dst, rank, tensors, boxes[in_order], src_piece[in_order], dst_piece[in_order], batch[in_order], message,
                direct[in_order], draft.demand, balance, needs.zeros[zeros], needs.zeros_dst_piece[zeros], draft.dst_rows,
                draft.minimum_bytes, staging_bytes)
    plan.check()
    return plan


def _contiguous(world: World, piece: np.ndarray, boxes: BoxTable) -> np.ndarray:
    """Whether each box is one stretch of memory where it lies in rows `piece` of `world`: bool [num_boxes]."""
    expected = np.ones(len(boxes), np.int64)
    contiguous = np.ones(len(boxes), bool)
    for axis in range(boxes.shape.shape[1] - 1, -1, -1):
        extent = boxes.shape[:, axis]
        contiguous &= (extent == 1) | (world.stride[piece, axis] == expected)
        expected = expected * extent
    return contiguous


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
