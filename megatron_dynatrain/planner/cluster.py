"""A cluster's links, and what a plan costs on them at least, and about.

A node has `gpus_per_node` neighbouring ranks. Inside it, every GPU sends and receives at the same time over NVLink; out of it,
its GPUs share the node's network cards, which send and receive at the same time, too. All speeds are for one direction.
"""

from dataclasses import dataclass

import numpy as np

from megatron_dynatrain.planning import Plan, num_ranks


@dataclass(frozen=True, slots=True)
class Cluster:
    """gpu_link: bytes a second of network that a node has for each of its GPUs. nvlink: bytes a second between the GPUs of a
    node, for each GPU. gpu_memory: bytes of each GPU. gpu_memory_speed: bytes a second that packing reads and writes at.
    window_seconds: what starting one window takes, however little it holds."""

    gpus_per_node: int = 8
    gpu_link: float = 200e9 / 8
    nvlink: float = 400e9
    gpu_memory: float = 80e9
    gpu_memory_speed: float = 1.5e12
    window_seconds: float = 200e-6

    @property
    def node_link(self) -> float:
        """Bytes a second of a node's network."""
        return self.gpu_link * self.gpus_per_node

    def bound(self, plan: Plan, numbers: np.ndarray | None = None) -> tuple[float, str]:
        """(seconds, the link that takes them): no switch that moves the bytes of this plan between the same ranks is faster.

        numbers: int64, where each rank of the plan sits, counted over all nodes; None where that is its own number.
        The busiest link at its full speed from beginning to end: bytes over the network of each node, and bytes inside of the
        node over the link of each GPU, sent and received apart.
        """
        links = [(seconds.max(initial=0.0), int(seconds.argmax()) if seconds.size else 0, what, does)
                 for what, does, seconds in self._busy(plan, np.arange(_num_ranks(plan)) if numbers is None else numbers)]
        seconds, number, what, does = max(links, key=lambda link: link[0], default=(0.0, 0, "", ""))
        return float(seconds), f"{what} {number} {does}" if seconds else "nothing moves"

    def estimate(self, plan: Plan, numbers: np.ndarray | None = None) -> float:
        """Seconds that the transfer of a plan takes, about: the bound, the starts of the windows of the rank that walks most, and
        one reading and one writing of each byte for packing, unpacking and local copies, on the rank that has most to do.

        Left out: ranks that wait for one another, building the new model, groups, data. numbers: as for `bound`.
        """
        size = _num_ranks(plan)
        touched = (np.bincount(plan.src_rank, plan.nbytes, size)
                   + np.bincount(plan.dst_rank[plan.crosses], plan.nbytes[plan.crosses], size)).max(initial=0)
        return self.bound(plan, numbers)[0] + plan.num_windows * self.window_seconds + float(2 * touched / self.gpu_memory_speed)

    def _busy(self, plan: Plan, numbers: np.ndarray):
        """(kind of link, direction, seconds [num_links]) of every kind of link and direction."""
        nbytes, src, dst = plan.nbytes[plan.crosses], *(numbers[side[plan.crosses]] for side in (plan.src_rank, plan.dst_rank))
        outside = src // self.gpus_per_node != dst // self.gpus_per_node
        num_ranks = int(numbers.max(initial=-1)) + 1
        num_nodes = -(-num_ranks // self.gpus_per_node)
        for what, does, rows, link, num_links, speed in (
                ("the network of node", "sends", outside, src // self.gpus_per_node, num_nodes, self.node_link),
                ("the network of node", "receives", outside, dst // self.gpus_per_node, num_nodes, self.node_link),
                ("NVLink of rank", "sends", ~outside, src, num_ranks, self.nvlink),
                ("NVLink of rank", "receives", ~outside, dst, num_ranks, self.nvlink)):
            yield what, does, np.bincount(link[rows], nbytes[rows], num_links) / speed


def _num_ranks(plan: Plan) -> int:
    return num_ranks(plan.src, plan.dst)
