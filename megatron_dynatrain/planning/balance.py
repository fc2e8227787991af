"""Who of those that hold the same sends it: from nearby where that can be, and as evenly as can be.

What the ranks of a node need of what a set of ranks holds is one group, where some of the set are on that node. What is needed on
nodes without any of them is one group more, for all these nodes together.
"""

from collections.abc import Sequence

import numpy as np

Holders = tuple[int, ...]  # the ranks that all hold something, ascending
Demand = dict[int, dict[Holders, int]]  # {rank: {ranks that hold something: bytes of it that the rank needs}}
Group = tuple[Holders, int]  # the ranks that hold something, and the node on which it is needed, or FAR

FAR = -1  # all nodes on which none of the holders is

_SWEEPS = 60
_STEPS = 1 << 12  # shares are whole numbers of this many, so that they are equal wherever they are worked out
_EVEN_ENOUGH = 1.01  # of the most that a rank sends or receives; the sweeps get there, not to the last byte
_HALVINGS = 6  # of what nearness is worth, before it is worth nothing


def node_numbers(hosts: Sequence) -> np.ndarray:
    """The node of each rank, int64 [num_ranks], out of what is equal for ranks on one node; counted as they come."""
    numbers: dict = {}
    return np.array([numbers.setdefault(host, len(numbers)) for host in hosts], np.int64)


def group_of(holders: Holders, node: int, nodes: np.ndarray) -> Group:
    """The group to which the need of a rank on `node` belongs. nodes: that of each rank."""
    return holders, node if len(holders) > 1 and node in nodes[list(holders)] else FAR


def equal_shares(group: Group, nodes: np.ndarray) -> tuple[int, ...]:
    """Those of a group of which nothing else is said: the holders on its node send alike, or all do."""
    holders, node = group
    return tuple(int(node in (FAR, of_holder)) for of_holder in nodes[list(holders)].tolist())


class Balance:
    """What is needed of what ranks hold, its sending spread over these ranks.

    demand: of all ranks. nodes: the node of each rank, int64 [num_ranks]. max_rank_bytes: the most that a rank sends or receives
    where sending is as even as can be. shares: how the holders of a group share its sending, as integers in proportion, where not
    equally.

    No rank sends more than 1 % above `max_rank_bytes` to spare a node's network; below that, what can come from the same node does.
    """

    def __init__(self, demand: Demand, nodes: np.ndarray):
        self.nodes = nodes
        received = np.zeros(len(nodes), np.int64)
        groups: dict[Group, int] = {}
        for rank, needs in demand.items():
            received[rank] = sum(needs.values())
            for holders, nbytes in needs.items():
                group = group_of(holders, int(nodes[rank]), nodes)
                groups[group] = groups.get(group, 0) + nbytes
        sent, loads = _spread(groups, nodes)
        self.max_rank_bytes = int(max(loads.max(initial=0), received.max(initial=0)))
        for halving in range(_HALVINGS if (nodes != nodes[0]).any() else 0):
            near, loads = _spread(groups, nodes, self.max_rank_bytes / 2**halving, self.max_rank_bytes)
            if loads.max(initial=0) <= self.max_rank_bytes * _EVEN_ENOUGH:
                sent = near
                break
        shares = {group: _in_proportion(of_group) for group, of_group in sent.items()}
        self.shares = {group: parts for group, parts in shares.items() if not _are_equal(parts, equal_shares(group, nodes))}


def _spread(groups: dict[Group, int], nodes: np.ndarray, nearness: float = 0,
            most: float = np.inf) -> tuple[dict[Group, np.ndarray], np.ndarray]:
    """(what each holder of a group sends of it, what each rank sends).

    Groups take turns in spreading their bytes over their holders, on top of what these send for other groups, so that the lowest
    are filled first; a holder on another node counts as higher by `nearness` bytes, one that has sent more than `most` by what it
    has been above that so far. This goes to the minimum of half the sum of the squares of what ranks send and `nearness` times
    what is sent to another node than need be, with no rank above `most` (by dual ascent, of Uzawa).
    """
    loads, above = np.zeros(len(nodes)), np.zeros(len(nodes))
    sent = {group: np.zeros(len(group[0])) for group in sorted(groups)}
    members = {group: np.array(group[0]) for group in sent}
    extra = {group: nearness * ((group[1] != FAR) & (nodes[ranks] != group[1])) for group, ranks in members.items()}
    for _ in range(_SWEEPS if any(len(ranks) > 1 for ranks in members.values()) else 1):
        for group, ranks in members.items():
            loads[ranks] -= sent[group]
            sent[group] = _filled(loads[ranks] + above[ranks] + extra[group], groups[group])
            loads[ranks] += sent[group]
        above = np.maximum(above + loads - most, 0)
    return sent, loads


def _in_proportion(sent: np.ndarray) -> tuple[int, ...]:
    bounds = np.rint(np.cumsum(sent) / sent.sum() * _STEPS).astype(np.int64)
    return tuple(np.diff(bounds, prepend=0).tolist())


def _are_equal(shares: tuple[int, ...], equal: tuple[int, ...]) -> bool:
    """Whether `shares` are those of `equal`, whose elements are 0 and 1, but for rounding."""
    sends = np.array(equal, bool)
    return not np.array(shares)[~sends].any() and np.ptp(np.array(shares)[sends]) <= 1


def _filled(levels: np.ndarray, amount: float) -> np.ndarray:
    """What to pour onto each of `levels` so that `amount` in all makes the lowest ones equal: float64 [num_levels]."""
    ordered = np.sort(levels)
    counts = np.arange(1, len(ordered) + 1)
    surface = (amount + np.cumsum(ordered)) / counts  # if the first `count` levels are covered
    covered = np.nonzero(surface >= ordered)[0][-1]
    return np.maximum(surface[covered] - levels, 0)
