"""The memory of both states during a transfer: the new one's is taken as late, the old one's given back as early as can be."""

from collections.abc import Sequence

import torch

from megatron_dynatrain.planning.memory import BEFORE, Turnover
from megatron_dynatrain.space import Memory


class Allocations:
    """The allocations in which the storages of a rank's state lie.

    storages: the flat tensors of the state. held: what they lie in, numbered as in `memory`.
    """

    def __init__(self, storages: Sequence[torch.Tensor], held: Sequence[torch.UntypedStorage], memory: Memory):
        self._held, self._memory = held, memory
        self._extents: list[list[tuple[int, int]]] = [[] for _ in held]  # bytes, of the storages in each allocation
        for storage, number in zip(storages, memory.of_storage.tolist(), strict=True):
            begin, size = storage.storage_offset(), storage.element_size()
            self._extents[number].append((begin * size, (begin + storage.numel()) * size))

    def take_all(self) -> None:
        """Memory for every allocation that has none."""
        for number in range(len(self._held)):
            self.take(number)

    def take(self, number: int) -> None:
        """Memory for an allocation that has none. What lies between its storages is zero, the rest has any values."""
        allocation, nbytes = self._held[number], int(self._memory.nbytes[number])
        if allocation.nbytes() == nbytes:
            return
        allocation.resize_(nbytes)
        end = 0
        flat = torch.empty(0, dtype=torch.uint8, device=allocation.device).set_(allocation)
        for begin, stop in [*sorted(self._extents[number]), (nbytes, nbytes)]:
            if begin > end:
                flat[end:begin].zero_()
            end = max(end, stop)

    def give_back(self, number: int) -> None:
        """Free the memory of an allocation; the tensors that lie in it stay, without any. What was mapped from a file (by
        `torch.load`) cannot be freed so, and stays until the old state ends."""
        if self._held[number].resizable():
            self._held[number].resize_(0)


class Exchange:
    """Takes and gives back, window by window, what `turnover` says. src: None where the old state is to stay."""

    def __init__(self, turnover: Turnover, src: Allocations | None, dst: Allocations):
        self._turnover, self._src, self._dst = turnover, src, dst
        self.after(BEFORE)

    def before(self, window: int) -> None:
        for number in (self._turnover.taken == window).nonzero()[0].tolist():
            self._dst.take(number)

    def after(self, window: int) -> None:
        if self._src is not None:
            for number in (self._turnover.given == window).nonzero()[0].tolist():
                self._src.give_back(number)
