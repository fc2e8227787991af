"""When a rank takes the memory of its new state and gives back that of its old state, and how much it holds meanwhile.

Memory comes and goes by allocations, window by window: an allocation of the new state is taken before the first window that
writes into it, one of the old state is given back after the last window that reads it. Nothing else is to be known, so the most
that a rank ever holds is known before anything happens.
"""

from dataclasses import dataclass

import numpy as np

from megatron_dynatrain.planning.plan import Plan
from megatron_dynatrain.space import Memory

BEFORE = -1  # the window of what is never read: it is given back before the first one


@dataclass(frozen=True, slots=True, eq=False)
class Turnover:
    """taken: int64 [allocations of the new state], the window before which each is taken. given: int64 [allocations of the old
    state], the window after which each is given back. num_windows: of the rank, at least one."""

    taken: np.ndarray
    given: np.ndarray
    num_windows: int

    @classmethod
    def of(cls, plan: Plan, rank: int, src: Memory, dst: Memory) -> "Turnover":
        """plan: that of all ranks or of `rank`. src, dst: the memory of `rank` in the two layouts, empty for no member."""
        rows, window = plan.windows(rank)
        last = int(window.max(initial=0))
        taken, given = np.full(len(dst.nbytes), last, np.int64), np.full(len(src.nbytes), BEFORE, np.int64)
        reads, writes = plan.src_rank[rows] == rank, plan.dst_rank[rows] == rank
        np.maximum.at(given, src.of_storage[plan.src.storage[plan.src_piece[rows[reads]]]], window[reads])
        np.minimum.at(taken, dst.of_storage[plan.dst.storage[plan.dst_piece[rows[writes]]]], window[writes])
        return cls(taken, given, last + 1)

    def held_bytes(self, src: Memory, dst: Memory) -> np.ndarray:
        """What the rank holds the old and the new state in during each window: int64 [num_windows], without scratch."""
        freed = np.bincount(self.given + 1, src.nbytes, self.num_windows + 1)[:self.num_windows]
        more = np.bincount(self.taken, dst.nbytes, self.num_windows)
        return (src.nbytes.sum() + np.cumsum(more - freed)).astype(np.int64)


def peak_bytes(plan: Plan, rank: int, src: Memory, dst: Memory, keeps_old: bool = False) -> int:
    """The most that `rank` holds at any time of the switch: state, scratch, and the gradients of the old or the new layout
    before and after it. keeps_old: whether the old state stays until the new one is there."""
    if keeps_old:
        held = src.state_bytes + dst.state_bytes
    else:
        held = int(Turnover.of(plan, rank, src, dst).held_bytes(src, dst).max())
    return max(held + plan.staging_bytes, at_rest(src, dst))


def at_rest(src: Memory, dst: Memory) -> int:
    """What a rank holds while it trains, in the larger of the two layouts."""
    return max(memory.state_bytes + memory.gradient_bytes for memory in (src, dst))
