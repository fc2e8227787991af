"""How evenly the sending of a switch could be spread over the ranks that hold what is needed: the yardstick for plans."""

import numpy as np

_SWEEPS = 60
_STEPS = 1 << 12  # shares are whole numbers of this many, so that they are equal wherever they are worked out


class Balance:
    """What is needed of what ranks hold, its sending spread over these ranks as evenly as can be.

    demand: bytes that are needed of what each set of ranks holds. loads: bytes that each rank sends. sent: what each rank of a
    set sends for it.

    The sets take turns in spreading their bytes over their ranks, on top of what these send for other sets, so that the lowest
    are filled first. This descends the sum of squares of the loads to its minimum, where the largest load is least, too.
    """

    def __init__(self, demand: dict[tuple[int, ...], int]):
        self.loads = np.zeros(1 + max((max(ranks) for ranks in demand), default=0))
        self.sent = {ranks: np.zeros(len(ranks)) for ranks in sorted(demand)}
        for _ in range(_SWEEPS if any(len(ranks) > 1 for ranks in demand) else 1):
            for ranks in self.sent:
                members = np.array(ranks)
                self.loads[members] -= self.sent[ranks]
                self.sent[ranks] = _filled(self.loads[members], demand[ranks])
                self.loads[members] += self.sent[ranks]

    def max_rank_bytes(self, received: np.ndarray) -> int:
        """The largest number of bytes that a rank sends or receives in an ideally balanced plan.

        received: bytes that each rank receives, which no choice of senders changes: int64 [num_ranks].
        """
        return int(max(self.loads.max(initial=0), received.max(initial=0)))

    @property
    def shares(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """How sets of ranks share the sending, as integers in proportion, where equal shares would not be even."""
        found = {}
        for ranks, sent in self.sent.items():
            if len(ranks) > 1:
                bounds = np.rint(np.cumsum(sent) / sent.sum() * _STEPS).astype(np.int64)
                parts = np.diff(bounds, prepend=0)
                if np.ptp(parts) > 1:
                    found[ranks] = tuple(parts.tolist())
        return found


def _filled(levels: np.ndarray, amount: float) -> np.ndarray:
    """What to pour onto each of `levels` so that `amount` in all makes the lowest ones equal: float64 [num_levels]."""
    ordered = np.sort(levels)
    counts = np.arange(1, len(ordered) + 1)
    surface = (amount + np.cumsum(ordered)) / counts  # if the first `count` levels are covered
    covered = np.nonzero(surface >= ordered)[0][-1]
    return np.maximum(surface[covered] - levels, 0)
