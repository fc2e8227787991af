"""Windows: how the copies between ranks are cut into rounds that every rank walks in the same order.

In one window a rank sends at most `staging_bytes` and receives at most `staging_bytes`, in at most MAX_PEERS messages
each way; all its sends and receives are posted together. Pieces from one rank to another travel as one message. All of it
follows from the list of copies alone, so the windows are the same on every rank.
"""

import numpy as np

from megatron_dynatrain.geometry import BoxTable

DEFAULT_STAGING_BYTES = 64 << 20
MAX_PEERS = 64  # messages a rank sends, and receives, in one window
MESSAGES_PER_WINDOW = 4  # a message is at most this part of the staging budget, so that several peers fit in a window


def message_limit(staging_bytes: int) -> int:
    """The most bytes that one rank sends to another in one window."""
    return max(staging_bytes // MESSAGES_PER_WINDOW, 1)


def split_large(boxes: BoxTable, itemsize: np.ndarray, staging_bytes: int) -> tuple[BoxTable, np.ndarray]:
    """Cut boxes of more than one message's bytes along their outer axes.

    Returns (parts, parent): disjoint boxes of at most `message_limit(staging_bytes)` bytes, or of a single element, and
    the row of `boxes` that each is a part of.
    """
    limit = message_limit(staging_bytes)
    parent = np.arange(len(boxes))
    for axis in range(boxes.shape.shape[1]):
        row_bytes = boxes.shape[:, axis + 1:].prod(axis=1, dtype=np.int64) * itemsize
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


def assign_windows(src_rank: np.ndarray, dst_rank: np.ndarray, sizes: np.ndarray, staging_bytes: int) -> np.ndarray:
    """The window of each copy, int64 [num_copies].

    Copies of one pair of ranks are packed, in order, into messages of at most one message's bytes; then each message goes
    into the earliest window in which its sender and its receiver both have room.
    """
    window = np.zeros(len(sizes), np.int64)
    if not len(sizes):
        return window
    limit = message_limit(staging_bytes)
    order = np.lexsort((np.arange(len(sizes)), dst_rank, src_rank))
    messages: list[tuple[int, int, int, list[int]]] = []  # part of the pair's stream, src, dst, copies
    loads: list[int] = []
    previous = None
    for copy in order.tolist():
        pair = (int(src_rank[copy]), int(dst_rank[copy]))
        size = int(sizes[copy])
        if pair != previous or loads[-1] + size > limit:
            messages.append((messages[-1][0] + 1 if pair == previous else 0, *pair, []))
            loads.append(0)
            previous = pair
        messages[-1][3].append(copy)
        loads[-1] += size
    sent, received = _Rooms(staging_bytes), _Rooms(staging_bytes)
    # Pairs take turns: first messages first, and of those (src, dst) by distance, so that no rank is everybody's first.
    turns = sorted(range(len(messages)),
                   key=lambda m: (messages[m][0], messages[m][2] - messages[m][1], messages[m][1]))
    for m in turns:
        _, src, dst, copies = messages[m]
        w = 0
        while not (sent.has_room(src, w, loads[m]) and received.has_room(dst, w, loads[m])):
            w += 1
        sent.take(src, w, loads[m])
        received.take(dst, w, loads[m])
        window[copies] = w
    return window


class _Rooms:
    """Bytes and messages that each rank has taken in each window, in one direction."""

    def __init__(self, staging_bytes: int):
        self.staging_bytes = staging_bytes
        self.taken: dict[tuple[int, int], tuple[int, int]] = {}

    def has_room(self, rank: int, window: int, size: int) -> bool:
        nbytes, count = self.taken.get((rank, window), (0, 0))
        return count == 0 or (nbytes + size <= self.staging_bytes and count < MAX_PEERS)

    def take(self, rank: int, window: int, size: int) -> None:
        nbytes, count = self.taken.get((rank, window), (0, 0))
        self.taken[rank, window] = (nbytes + size, count + 1)
