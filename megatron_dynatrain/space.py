"""The Virtual Parameter Space: what exists in a job, independent of any layout, and who holds which part of it.

A `LogicalTensor` is one tensor of the whole job: a weight, a persistent buffer, a master weight, one kind of optimizer
state. Its coordinates are those of Megatron's checkpoints. A rank holds pieces: boxes of logical tensors that lie,
strided, in flat rank-local storages. `Holdings` lists the pieces of one rank, `World` those of all ranks of a layout.
The space knows neither Megatron nor how anything travels.
"""

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from megatron_dynatrain.errors import SpaceError
from megatron_dynatrain.geometry import Box, BoxTable, concatenate, overlaps, subtract


@dataclass(frozen=True, slots=True, order=True)
class LogicalTensor:
    """One tensor of the job. Example: key 'decoder.layers.mlp.linear_fc2.weight', field 'exp_avg', shape (24, 512, 2048).

    field: 'weight' for parameters and buffers of the model, else the optimizer's name of the state ('param' is the
    fp32 master). dtype: the torch name without prefix ('float32'). is_padded: whether the last rows of the first axis
    are padding, of which layouts may have more or fewer (a vocabulary padded to a multiple of the TP size).
    """

    key: str
    field: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    is_padded: bool = False

    @property
    def name(self) -> str:
        return f"{self.key}:{self.field}"

    @property
    def numel(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Storage:
    """A flat rank-local tensor in which pieces lie: `numel` elements of `dtype`. `name` is for messages only."""

    name: str
    numel: int
    dtype: str


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """In which allocations the storages of a rank lie: Megatron's DDP holds many parameters in one.

    of_storage: int64 [num_storages], the allocation of each storage. nbytes: int64 [num_allocations]. gradient_bytes: what the
    rank holds gradients in while it trains, which takes no memory during a switch.
    """

    of_storage: np.ndarray
    nbytes: np.ndarray
    gradient_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        """What the rank holds weights, persistent buffers, masters and optimizer states in."""
        return int(self.nbytes.sum())


@dataclass(frozen=True, slots=True)
class Piece:
    """The readable view of one row of `Holdings`: `box` of `tensor`, at `start` with `strides` in storage `storage`."""

    tensor: LogicalTensor
    box: Box
    storage: int
    start: int
    strides: tuple[int, ...]
    is_main: bool


@dataclass(frozen=True, slots=True, eq=False)
class Holdings:
    """What one rank holds in one layout.

    tensors: the logical tensors of which it holds a part, sorted.
    storages: the local flat tensors, numbered by position.
    boxes: one row a piece; `boxes.tensor` indexes `tensors`.
    storage, start: int64 [num_pieces]; stride: int64 [num_pieces, num_axes]; all in elements.
    is_main: bool [num_pieces], whether this copy is the one that stands for the element (the others are replicas).
    memory: in what the storages lie. It is not part of the digest: a checkpoint that was loaded may leave it different.
    """

    tensors: tuple[LogicalTensor, ...]
    storages: tuple[Storage, ...]
    boxes: BoxTable
    storage: np.ndarray
    start: np.ndarray
    stride: np.ndarray
    is_main: np.ndarray
    memory: Memory

    @classmethod
    def from_pieces(cls, pieces: list[Piece], storages: list[Storage], memory: Memory | None = None) -> "Holdings":
        """Build the columns from readable pieces, in the order of (tensor, box). Without `memory`, storages lie apart."""
        tensors = tuple(sorted({piece.tensor for piece in pieces}))
        number = {tensor: i for i, tensor in enumerate(tensors)}
        pieces = sorted(pieces, key=lambda p: (number[p.tensor], p.box.offset, p.storage, p.start))
        num_axes = max((len(t.shape) for t in tensors), default=0)

        def padded(rows, fill):
            table = np.full((len(pieces), num_axes), fill, np.int64)
            for i, row in enumerate(rows):
                table[i, : len(row)] = row
            return table

        column = lambda values, dtype=np.int64: np.array(list(values), dtype)  # noqa: E731
        return cls(
            tensors, tuple(storages),
            BoxTable(column(number[p.tensor] for p in pieces), padded([p.box.offset for p in pieces], 0),
                     padded([p.box.shape for p in pieces], 1)),
            column(p.storage for p in pieces), column(p.start for p in pieces),
            padded([p.strides for p in pieces], 0), column((p.is_main for p in pieces), bool),
            memory or _apart(pieces, storages))

    def __len__(self) -> int:
        return len(self.boxes)

    def digest(self) -> str:
        """A hash of everything in it: equal on two ranks, or live and dry, if and only if the descriptions are equal."""
        state = hashlib.blake2b(digest_size=16)
        state.update(repr((self.tensors, self.storages)).encode())
        for column in (self.boxes.tensor, self.boxes.offset, self.boxes.shape, self.storage, self.start, self.stride,
                       self.is_main):
            state.update(np.ascontiguousarray(column).tobytes())
        return state.hexdigest()


def nothing() -> Holdings:
    """What a rank holds that is no member."""
    return Holdings.from_pieces([], [])


def _apart(pieces: list[Piece], storages: list[Storage]) -> Memory:
    """Every storage in an allocation of its own."""
    itemsize = {piece.storage: piece.tensor.itemsize for piece in pieces}
    nbytes = [storage.numel * itemsize.get(number, 0) for number, storage in enumerate(storages)]
    return Memory(np.arange(len(nbytes)), np.array(nbytes, np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class World:
    """What all ranks of a layout hold: the holdings of every rank in one table.

    ranks: global ranks of the members, int64 [num_ranks], in the order in which their pieces follow.
    tensors: all logical tensors, sorted; `boxes.tensor` indexes it.
    rank: int64 [num_pieces], the global rank that holds the piece; other columns as in `Holdings`.
    digest: a hash of the digests of all ranks.
    """

    ranks: np.ndarray
    tensors: tuple[LogicalTensor, ...]
    boxes: BoxTable
    rank: np.ndarray
    storage: np.ndarray
    start: np.ndarray
    stride: np.ndarray
    is_main: np.ndarray
    digest: str

    @classmethod
    def assemble(cls, holdings: dict[int, Holdings]) -> "World":
        """The world of `{global rank: its holdings}`. Raises SpaceError where ranks disagree about a tensor, or do not cover
        the space exactly once (`check_cover`)."""
        ranks = sorted(holdings)
        tensors = tuple(sorted({tensor for rank in ranks for tensor in holdings[rank].tensors}))
        by_name: dict[str, LogicalTensor] = {}
        for tensor in tensors:
            other = by_name.setdefault(tensor.name, tensor)
            if other != tensor:
                raise SpaceError(f"ranks disagree about {tensor.name}: some describe it as {other.shape} {other.dtype}, "
                                 f"others as {tensor.shape} {tensor.dtype}; a layout in which they do cannot be switched")
        number = {tensor: i for i, tensor in enumerate(tensors)}
        num_axes = max((len(t.shape) for t in tensors), default=0)
        tables, columns = [], {name: [] for name in ("rank", "storage", "start", "stride", "is_main")}
        for rank in ranks:
            own = holdings[rank]
            renumber = np.array([number[t] for t in own.tensors], np.int64)
            tables.append(BoxTable(renumber[own.boxes.tensor], _widen(own.boxes.offset, num_axes, 0),
                                   _widen(own.boxes.shape, num_axes, 1)))
            columns["rank"].append(np.full(len(own), rank, np.int64))
            columns["storage"].append(own.storage)
            columns["start"].append(own.start)
            columns["stride"].append(_widen(own.stride, num_axes, 0))
            columns["is_main"].append(own.is_main)
        world = cls(np.array(ranks, np.int64), tensors, concatenate(tables),
                    **{name: np.concatenate(parts) for name, parts in columns.items()},
                    digest=_digest((rank, holdings[rank].digest()) for rank in ranks))
        check_cover(world)
        return world

    def renumbered(self, ranks) -> "World":
        """The same world, its ranks known by other numbers: rank i becomes `ranks[i]`, ascending."""
        number = np.asarray(ranks, np.int64)
        return replace(self, ranks=number[self.ranks], rank=number[self.rank], digest=_digest([self.digest, number.tolist()]))

    def __len__(self) -> int:
        return len(self.boxes)

    def describe(self, row: int) -> str:
        """One piece for a message: 'rank 3 holds decoder...weight:exp_avg[2:4, 0:8]'."""
        tensor = self.tensors[self.boxes.tensor[row]]
        return f"rank {self.rank[row]} holds {tensor.name}{self.boxes.box(row, len(tensor.shape))}"


def _digest(parts) -> str:
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(repr(part).encode())
    return state.hexdigest()


def _widen(table: np.ndarray, num_axes: int, fill: int) -> np.ndarray:
    return np.pad(table, ((0, 0), (0, num_axes - table.shape[1])), constant_values=fill)


def whole_tensors(tensors: tuple[LogicalTensor, ...], num_axes: int) -> BoxTable:
    """One box per tensor that covers it: row i is tensor i."""
    shape = np.ones((len(tensors), num_axes), np.int64)
    for i, tensor in enumerate(tensors):
        shape[i, : len(tensor.shape)] = tensor.shape
    return BoxTable(np.arange(len(tensors)), np.zeros_like(shape), shape)


def check_cover(world: World) -> None:
    """Raise SpaceError unless the main pieces cover every element of every logical tensor exactly once.

    Also unless every replica lies where main pieces are, which the cover implies. The message names the key, the
    coordinates and the ranks.
    """
    main_rows = np.nonzero(world.is_main)[0]
    main = world.boxes[main_rows]
    whole = whole_tensors(world.tensors, main.offset.shape[1])
    outside = (world.boxes.offset + world.boxes.shape > whole.shape[world.boxes.tensor]).any(axis=1)
    if outside.any():
        raise SpaceError(f"{world.describe(int(np.nonzero(outside)[0][0]))}, which lies outside of its global shape")
    i, j = overlaps(main, main)
    twice = np.nonzero(i < j)[0]
    if len(twice):
        a, b = (int(main_rows[rows[twice[0]]]) for rows in (i, j))
        raise SpaceError(f"an element is covered twice: {world.describe(a)} and {world.describe(b)}, both as the main copy")
    # Disjoint and inside: if the volumes add up, nothing is missing. Only a gap needs to be searched for.
    covered = np.bincount(main.tensor, main.volume, len(world.tensors))
    lacking = np.nonzero(covered != whole.volume)[0]
    if len(lacking):
        gap, gap_row, *_ = subtract(whole[lacking], main)
        gap_row = lacking[gap_row]
        tensor = world.tensors[gap_row[0]]
        raise SpaceError(f"no rank holds {tensor.name}{gap.box(0, len(tensor.shape))} (global shape {tensor.shape}); "
                         "a switch would lose these elements")
