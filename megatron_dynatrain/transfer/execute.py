"""Carry out the copies of a plan: pack, exchange and unpack, window by window.

While one window is in flight, the next one is packed, local copies are made, and the last one is unpacked. Pieces that are
contiguous on both sides travel as they lie; the others are packed, those of one window and one dtype by one call.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from megatron_dynatrain.errors import TransferError
from megatron_dynatrain.planning.plan import Plan
from megatron_dynatrain.transfer.memory import Exchange

DEFAULT_TIMEOUT = timedelta(minutes=10)


def execute(plan: Plan, rank: int, src_storages: Sequence[torch.Tensor], dst_storages: Sequence[torch.Tensor],
            timeout: timedelta = DEFAULT_TIMEOUT, exchange: Exchange | None = None) -> int:
    """Copy every piece of `plan` that `rank` sends, receives or keeps; returns the bytes that it received from others.

    Collective over all ranks of both worlds, on the default process group, whose ranks are the plan's ranks.

    plan: that of all ranks or of `rank`. src_storages, dst_storages: this rank's flat 1-D tensors, numbered as in the
    descriptions; empty for a rank that is not a member. The two sets must not share memory. exchange: takes and gives back
    their memory on the way; without it all of it is there, and stays. Scratch is at most `plan.staging_bytes`. Raises
    TransferError, naming the ranks that did not answer, where a window takes longer than `timeout`.
    """
    received = 0
    with torch.no_grad():
        rows, window = plan.windows(rank)
        of_windows = np.split(rows, np.nonzero(np.diff(window))[0] + 1)
        steps = [_Step(plan, rank, of_window, src_storages, dst_storages) for of_window in of_windows]
        previous = None
        for number, step in enumerate(steps):
            if number == 0:
                step.pack()
            if exchange is not None:
                exchange.before(number)
            step.post()
            step.copy_locally()
            if previous is not None:
                previous.unpack()
            if number + 1 < len(steps):
                steps[number + 1].pack()
            step.wait(timeout, number)
            received += step.received
            if exchange is not None:
                exchange.after(number)
            previous, steps[number] = step, None
        if previous is not None:
            previous.unpack()
        _fill_padding(plan, rank, dst_storages)
    return received


def views(plan: Plan, side: str, rows: np.ndarray, storages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensor views, shaped as their boxes, in which the copies `rows` lie on one side ('src' or 'dst')."""
    return _strided(storages, *plan.addresses(side, rows), plan.boxes.shape[rows])


def _strided(storages, storage, start, stride, shape) -> list[torch.Tensor]:
    return [torch.as_strided(storages[s], extent, step, storages[s].storage_offset() + begin)
            for s, begin, step, extent in zip(*(column.tolist() for column in (storage, start, stride, shape)), strict=True)]


def _fill_padding(plan, rank, dst_storages):
    for piece in _strided(dst_storages, *plan.zeros_of(rank)):
        piece.zero_()


def _copy(parts: list[torch.Tensor], pieces: list[torch.Tensor]) -> None:
    """parts[i] <- pieces[i]; one call for all of one dtype."""
    by_dtype: dict[torch.dtype, tuple[list, list]] = {}
    for part, piece in zip(parts, pieces, strict=True):
        to, of = by_dtype.setdefault(part.dtype, ([], []))
        to.append(part)
        of.append(piece)
    for to, of in by_dtype.values():
        torch._foreach_copy_(to, of)


@dataclass(slots=True, eq=False)
class _Step:
    """What one rank does in one window."""

    plan: Plan
    rank: int
    rows: np.ndarray
    src_storages: Sequence[torch.Tensor]
    dst_storages: Sequence[torch.Tensor]
    received: int = 0
    _sends: list = field(default_factory=list)
    _arrivals: list = field(default_factory=list)
    _works: list = field(default_factory=list)

    def _messages(self, side_rank) -> list[np.ndarray]:
        """The rows of each message that this rank sends (`plan.src_rank`) or receives (`plan.dst_rank`), in order."""
        rows = self.rows[(self.plan.message[self.rows] >= 0) & (side_rank[self.rows] == self.rank)]
        return np.split(rows, np.nonzero(np.diff(self.plan.message[rows]))[0] + 1) if len(rows) else []

    def pack(self) -> None:
        """Make what is to be sent."""
        parts, pieces = [], []
        for rows in self._messages(self.plan.src_rank):
            here = views(self.plan, "src", rows, self.src_storages)
            if self.plan.is_direct[rows[0]]:
                message = here[0].reshape(-1).view(torch.uint8)
            else:
                message = self._buffer(rows, self.src_storages)
                parts += self._parts(rows, message)
                pieces += here
            self._sends.append((int(self.plan.dst_rank[rows[0]]), message))
        _copy(parts, pieces)

    def post(self) -> None:
        """Post all sends and receives together."""
        operations = []
        for rows in self._messages(self.plan.dst_rank):
            there = views(self.plan, "dst", rows, self.dst_storages)
            if self.plan.is_direct[rows[0]]:
                message = there[0].reshape(-1).view(torch.uint8)
            else:
                message = self._buffer(rows, self.dst_storages)
                self._arrivals.append((self._parts(rows, message), there))
            self.received += message.numel()
            operations.append(dist.P2POp(dist.irecv, message, int(self.plan.src_rank[rows[0]])))
        operations += [dist.P2POp(dist.isend, message, peer) for peer, message in self._sends]
        if operations:
            works = dist.batch_isend_irecv(operations)
            # One work for each operation, or one for all of them.
            peers = [[operation.peer] for operation in operations]
            self._works = list(zip(works, peers if len(works) == len(peers) else [sum(peers, [])] * len(works), strict=True))

    def wait(self, timeout: timedelta, number: int) -> None:
        """Until all has arrived."""
        deadline = time.monotonic() + timeout.total_seconds()
        silent, cause = set(), None
        for work, peers in self._works:
            try:  # when time is up, those that have arrived are still told from those that have not
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.01)))
            except RuntimeError as error:
                silent.update(peers)
                cause = error
        if cause is not None:
            is_late = time.monotonic() >= deadline
            said = f"waited {timeout.total_seconds():g} s in window {number} of a switch for" if is_late else (
                f"lost its connection in window {number} of a switch with")
            more_time = ", or raise `transfer.timeout_seconds`" if is_late else ""
            raise TransferError(f"rank {self.rank} {said} ranks {sorted(silent)}; look for what stopped them{more_time}; the job "
                                "cannot go on, start it again from its last checkpoint") from cause
        self._works, self._sends = [], []

    def unpack(self) -> None:
        """Put what has arrived where it belongs."""
        _copy([piece for _, pieces in self._arrivals for piece in pieces], [part for parts, _ in self._arrivals for part in parts])
        self._arrivals = []

    def copy_locally(self) -> None:
        rows = self.rows[self.plan.message[self.rows] < 0]
        _copy(views(self.plan, "dst", rows, self.dst_storages), views(self.plan, "src", rows, self.src_storages))

    def _buffer(self, rows, storages) -> torch.Tensor:
        return torch.empty(int(self.plan.nbytes[rows].sum()), dtype=torch.uint8, device=storages[0].device)

    def _parts(self, rows, message) -> list[torch.Tensor]:
        """Views into `message`, one per copy, typed and shaped as the piece that travels there."""
        parts, begin = [], 0
        for row, nbytes in zip(rows.tolist(), self.plan.nbytes[rows].tolist(), strict=True):
            dtype = getattr(torch, self.plan.tensors[self.plan.boxes.tensor[row]].dtype)
            parts.append(message[begin:begin + nbytes].view(dtype).view(self.plan.boxes.shape[row].tolist()))
            begin += nbytes
        return parts
