"""The order in which copies travel: one order for the whole job, which every rank can work out for itself.

Copies are packed into messages from one rank to another, and messages have a place in one order of the whole job: by batch,
then by turn, then by distance between the two ranks. Each rank walks its own messages in that order, in windows that are
bounded in bytes and in messages by limits that are the same on all ranks; all sends and receives of a window are posted
together. That cannot deadlock: take the first message of the order that has not arrived. On both of its ranks all earlier
windows hold earlier messages only, so both have come to the window that holds it.

Batches are the steps in which memory is taken and given back (`memory`). Weights come first, into the room that the gradients
left. Optimizer states follow layer by layer, one kind of state after the other and layers of all pipeline stages taking turns,
so that every rank comes to need new storage as fast as its old storage has been read.
"""

import numpy as np

from megatron_dynatrain.geometry import BoxTable
from megatron_dynatrain.planning.copies import GOLDEN
from megatron_dynatrain.space import LogicalTensor

DEFAULT_STAGING_BYTES = 64 << 20
MAX_MESSAGES = 64  # messages that a rank sends, and receives, in one window
DIRECT_BYTES = 256 << 10  # from this size on, a piece that is contiguous on both sides travels without being packed
_IN_FLIGHT = 4  # a window's sends and receives, while the window before or after it is still packed or unpacked


def window_limit(staging_bytes: int) -> int:
    """The most bytes that a rank packs for sending, and unpacks after receiving, in one window."""
    return max(staging_bytes // _IN_FLIGHT, 1)


def piece_limit(staging_bytes: int) -> int:
    """The most bytes of one copy: two of them fit into a message, two messages into a window."""
    return max(window_limit(staging_bytes) // 4, 1)


def split_large(boxes: BoxTable, itemsize: np.ndarray, limit: int) -> tuple[BoxTable, np.ndarray]:
    """Cut boxes of more than `limit` bytes along their outer axes.

    Returns (parts, parent): disjoint boxes of at most `limit` bytes, or of a single element, and the row of `boxes` that each
    is a part of.
    """
    parent = np.arange(len(boxes))
    for axis in range(boxes.shape.shape[1]):
        row_bytes = boxes.shape[:, axis + 1:].prod(axis=1, dtype=np.int64) * itemsize
        if (row_bytes * boxes.shape[:, axis] <= limit).all():
            break
        rows_per_part = np.maximum(limit // np.maximum(row_bytes, 1), 1)
        num_parts = np.where(row_bytes * boxes.shape[:, axis] > limit, -(-boxes.shape[:, axis] // rows_per_part), 1)
        rows = np.repeat(np.arange(len(boxes)), num_parts)
        part = np.arange(len(rows)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
        begin = part * np.where(num_parts > 1, rows_per_part, 0)[rows]
        offset, shape = boxes.offset[rows].copy(), boxes.shape[rows].copy()
        width = np.where(num_parts[rows] > 1, np.minimum(rows_per_part[rows], shape[:, axis] - begin), shape[:, axis])
        offset[:, axis] += begin
        shape[:, axis] = width
        boxes, itemsize, parent = BoxTable(boxes.tensor[rows], offset, shape), itemsize[rows], parent[rows]
    return boxes, parent


def batches(tensors: tuple[LogicalTensor, ...], boxes: BoxTable, num_ranks: int, staging_bytes: int) -> np.ndarray:
    """The batch of each box, int64 [num_boxes]: 0 for weights, from 1 on for optimizer states, layer by layer.

    There are as many as keep what a rank moves in one of them near the bytes of a window.
    """
    is_state = np.array([t.field != "weight" for t in tensors], bool)
    state_bytes = sum(t.numel * t.itemsize for t in tensors if t.field != "weight")
    num_layers = np.array([t.shape[0] if t.key.count(".layers.") and len(t.shape) > 1 else 1 for t in tensors], np.int64)
    # Layers in the order in which their numbers jump evenly, tensors without layers spread among them.
    keys = {key: i for i, key in enumerate(sorted({t.key for t in tensors}))}
    start = np.array([keys[t.key] * GOLDEN % 1.0 if n == 1 else 0.0 for t, n in zip(tensors, num_layers.tolist(), strict=True)])
    layer = np.where(num_layers[boxes.tensor] > 1, boxes.offset[:, 0], 0)
    places = np.unique(np.concatenate([np.arange(num_layers.max(initial=1)) * GOLDEN % 1.0, start]))
    place = np.searchsorted(places, (start[boxes.tensor] + layer * GOLDEN) % 1.0)
    # The states of one layer come one after the other, so that the steps are small where layers are few.
    fields = {field: i for i, field in enumerate(sorted({t.field for t in tensors if t.field != "weight"} or {"weight"}))}
    field = np.array([fields.get(t.field, 0) for t in tensors], np.int64)[boxes.tensor]
    num_steps = len(places) * len(fields)
    num_batches = int(np.clip(state_bytes // max(num_ranks * window_limit(staging_bytes), 1), 1, num_steps))
    return np.where(is_state[boxes.tensor], 1 + (place * len(fields) + field) * num_batches // num_steps, 0)


def turns(pair: np.ndarray, nbytes: np.ndarray, is_direct: np.ndarray, limit: int) -> np.ndarray:
    """The message, within its pair of ranks and batch, in which each copy travels: int64 [num_copies], from 0 on.

    pair: a number for each (batch, source, destination), in blocks. A direct copy is a message of its own; others are packed,
    in order, while they fit into `limit` bytes; each copy is at most half of that, or alone.
    """
    turn = np.zeros(len(pair), np.int64)
    if not len(pair):
        return turn
    first = np.ones(len(pair), bool)
    first[1:] = pair[1:] != pair[:-1]
    new = first | is_direct
    new[1:] |= is_direct[:-1]
    run = np.cumsum(new) - 1  # stretches of packed copies, and direct copies
    starts = np.nonzero(new)[0]
    before = np.cumsum(nbytes) - nbytes
    filled = (before - before[starts][run]) // max(limit // 2, 1)
    new[1:] |= (filled[1:] != filled[:-1]) & ~new[1:]
    message = np.cumsum(new) - 1
    return message - np.repeat(message[first], np.diff(np.append(np.nonzero(first)[0], len(pair))))


def windows(sent: np.ndarray, received: np.ndarray, limit: int) -> np.ndarray:
    """The window of each of a rank's messages, int64 [num_messages], non-decreasing.

    sent, received: bytes that each message, in the order of the job, needs to be packed or unpacked; 0 where it travels
    directly. A window is closed when the next message would take more than `limit` bytes in its direction, or when it holds
    MAX_MESSAGES.
    """
    window = np.zeros(len(sent), np.int64)
    number = out = into = count = 0
    for m, (s, r) in enumerate(zip(sent.tolist(), received.tolist(), strict=True)):
        if count and (out + s > limit or into + r > limit or count == MAX_MESSAGES):
            number, out, into, count = number + 1, 0, 0, 0
        window[m] = number
        out, into, count = out + s, into + r, count + 1
    return window
