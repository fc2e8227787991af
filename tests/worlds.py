"""Random worlds for property tests, and slow, plain oracles: every element by itself, as sets and numpy arrays."""

import itertools

import numpy as np
from hypothesis import strategies as st

from megatron_dynatrain.geometry import Box, flat_interval_boxes, row_major_strides
from megatron_dynatrain.space import Holdings, LogicalTensor, Piece, Storage, World

TENSORS = (
    LogicalTensor("decoder.layers.mlp.linear_fc1.weight", "exp_avg", (3, 4, 5), "float32", 4),
    LogicalTensor("decoder.layers.mlp.linear_fc1.weight", "weight", (3, 4, 5), "bfloat16", 2),
    LogicalTensor("embedding.word_embeddings.weight", "weight", (7, 6), "bfloat16", 2),
    LogicalTensor("router.expert_bias", "weight", (9,), "float32", 4),
)


@st.composite
def cuts(draw, extent):
    """Bounds of a partition of [0, extent): [0, ..., extent]."""
    inner = draw(st.sets(st.integers(1, extent - 1), max_size=3)) if extent > 1 else set()
    return [0, *sorted(inner), extent]


@st.composite
def holdings_of_tensor(draw, tensor, ranks):
    """{rank: [(box, is_main)]}: a grid of boxes, each on one rank or on several, or flat intervals over ranks."""
    held = {rank: [] for rank in ranks}
    if draw(st.booleans()):
        bounds = draw(cuts(int(np.prod(tensor.shape))))
        blocks = [flat_interval_boxes(tensor.shape, a, b) for a, b in itertools.pairwise(bounds)]
    else:
        axes = [list(itertools.pairwise(draw(cuts(extent)))) for extent in tensor.shape]
        blocks = [[Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell))] for cell in itertools.product(*axes)]
    for block in blocks:
        owners = draw(st.lists(st.sampled_from(ranks), min_size=1, max_size=3, unique=True))
        for number, rank in enumerate(owners):
            held[rank] += [(box, number == 0) for box in block]
    return held


@st.composite
def worlds(draw, ranks, tensors=TENSORS):
    """A legal world: every element of every tensor in exactly one main piece. Each piece in a storage of its own, with a
    gap before it and at least the strides of a contiguous tensor."""
    pieces = {rank: [] for rank in ranks}
    storages = {rank: [] for rank in ranks}
    for tensor in tensors:
        for rank, held in draw(holdings_of_tensor(tensor, ranks)).items():
            for box, is_main in held:
                gap, stretch = draw(st.integers(0, 2)), draw(st.integers(1, 2))
                strides = tuple(s * stretch for s in row_major_strides(box.shape))
                extent = gap + 1 + sum((n - 1) * s for n, s in zip(box.shape, strides, strict=True))
                storages[rank].append(Storage(f"storage {len(storages[rank])}", extent, tensor.dtype))
                pieces[rank].append(Piece(tensor, box, len(storages[rank]) - 1, gap, strides, is_main))
    return World.assemble({rank: Holdings.from_pieces(pieces[rank], storages[rank]) for rank in ranks})


def elements(offset, shape):
    """All coordinates of a box."""
    return set(itertools.product(*(range(o, o + s) for o, s in zip(offset, shape, strict=True))))


def elements_held(world):
    """{rank: {(tensor name, coordinate)}}, over main pieces and replicas."""
    held = {int(rank): set() for rank in world.ranks}
    for row in range(len(world)):
        tensor = world.tensors[world.boxes.tensor[row]]
        box = world.boxes.box(row, len(tensor.shape))
        held[int(world.rank[row])] |= {(tensor.name, c) for c in elements(box.offset, box.shape)}
    return held


def filled(world):
    """{(rank, storage): array}, every element naming its coordinate, everything else -1."""
    memory = blank(world)
    for row in range(len(world)):
        view(memory, world, row)[...] = numbers(world, row)
    return memory


def blank(world):
    memory = {}
    for row in range(len(world)):
        key = int(world.rank[row]), int(world.storage[row])
        extent = world.start[row] + 1 + ((world.boxes.shape[row] - 1) * world.stride[row]).sum()
        memory[key] = np.full(max(int(extent), len(memory.get(key, ()))), -1)
    return memory


def strided(memory, start, stride, shape):
    return np.lib.stride_tricks.as_strided(memory[int(start):], shape, [int(s) * memory.itemsize for s in stride])


def view(memory, world, row):
    return strided(memory[int(world.rank[row]), int(world.storage[row])], world.start[row], world.stride[row],
                   world.boxes.shape[row].tolist())


def numbers(world, row):
    tensor = world.tensors[world.boxes.tensor[row]]
    whole = np.arange(tensor.numel).reshape(tensor.shape + (1,) * (world.boxes.shape.shape[1] - len(tensor.shape)))
    box = world.boxes.offset[row], world.boxes.offset[row] + world.boxes.shape[row]
    return whole[tuple(slice(a, b) for a, b in zip(*box))] + 10_000_000 * world.boxes.tensor[row]


def carried_out(plan, memory):
    """What the destination holds after the plan: a plain executor over numpy arrays."""
    after = blank(plan.dst)
    rows = np.arange(len(plan))
    src, dst = plan.addresses("src", rows), plan.addresses("dst", rows)
    for row in rows:
        shape = plan.boxes.shape[row].tolist()
        source = strided(memory[int(plan.src_rank[row]), int(src[0][row])], src[1][row], src[2][row], shape)
        strided(after[int(plan.dst_rank[row]), int(dst[0][row])], dst[1][row], dst[2][row], shape)[...] = source
    return after
