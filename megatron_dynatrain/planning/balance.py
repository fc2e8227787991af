"""How evenly the sending of a switch could be spread over the ranks that hold what is needed: the yardstick for plans."""

import numpy as np

_SWEEPS = 60


def balanced_max_rank_bytes(demand: dict[tuple[int, ...], int], received: np.ndarray) -> int:
    """The largest number of bytes that a rank sends or receives in an ideally balanced plan.

    demand: bytes that are needed of what each set of ranks holds. received: bytes that each rank receives, which no choice of
    senders changes: int64 [num_ranks].

    The sets take turns in spreading their bytes over their ranks, on top of what these send for other sets, so that the lowest
    are filled first. This descends the sum of squares of the loads to its minimum, where the largest load is least, too.
    """
    loads = np.zeros(max([len(received)] + [max(ranks) + 1 for ranks in demand]))
    shares = {ranks: np.zeros(len(ranks)) for ranks in demand}
    for _ in range(_SWEEPS if any(len(ranks) > 1 for ranks in demand) else 1):
        for ranks, nbytes in demand.items():
            members = np.array(ranks)
            loads[members] -= shares[ranks]
            shares[ranks] = _filled(loads[members], nbytes)
            loads[members] += shares[ranks]
    return int(max(loads.max(initial=0), received.max(initial=0)))


def _filled(levels: np.ndarray, amount: float) -> np.ndarray:
    """What to pour onto each of `levels` so that `amount` in all makes the lowest ones equal: float64 [num_levels]."""
    ordered = np.sort(levels)
    counts = np.arange(1, len(ordered) + 1)
    surface = (amount + np.cumsum(ordered)) / counts  # if the first `count` levels are covered
    covered = np.nonzero(surface >= ordered)[0][-1]
    return np.maximum(surface[covered] - levels, 0)
