"""The numbers of a whole switch, put together from the plans of single ranks."""

from dataclasses import dataclass

from megatron_dynatrain.planning.balance import Balance
from megatron_dynatrain.planning.memory import at_rest, peak_bytes
from megatron_dynatrain.planning.plan import Plan
from megatron_dynatrain.space import Memory


@dataclass(frozen=True, slots=True)
class Totals:
    """Bytes and counts of a switch, over all ranks.

    moved_bytes cross between ranks, local_bytes are copied within; minimum_bytes have to cross in any plan. max_rank_bytes: the
    most that one rank sends or receives; balanced_max_rank_bytes: the same of an ideally balanced plan. num_windows: the most
    that one rank walks. num_copies: of all ranks that receive. peak_bytes: the most that a rank holds during the switch;
    peak_extra_bytes: the most that a rank holds beyond what it holds in the larger of the two layouts.
    """

    moved_bytes: int
    minimum_bytes: int
    local_bytes: int
    max_rank_bytes: int
    balanced_max_rank_bytes: int
    num_windows: int
    num_copies: int
    peak_bytes: int
    peak_extra_bytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank contributes: plain values, small."""

    rank: int
    sent: int
    received: int
    minimum: int
    local: int
    num_windows: int
    num_copies: int
    peak_bytes: int
    peak_extra_bytes: int

    @classmethod
    def of(cls, plan: Plan, src: Memory, dst: Memory, keeps_old: bool) -> "Part":
        """Of the plan of one rank, its memory in both layouts, and whether it keeps the old state."""
        peak = peak_bytes(plan, plan.rank, src, dst, keeps_old)
        sent, received = (int(plan.rank_bytes(side)[plan.rank]) for side in ("src", "dst"))
        return cls(plan.rank, sent, received, plan.minimum_bytes, plan.local_bytes, plan.num_windows,
                   int((plan.dst_rank == plan.rank).sum()), peak, peak - at_rest(src, dst))


def total(parts: list[Part], balance: Balance) -> Totals:
    """The totals of all ranks of both worlds. balance: of the demand of all ranks."""
    return Totals(sum(p.received for p in parts), sum(p.minimum for p in parts), sum(p.local for p in parts),
                  max(max(p.sent, p.received) for p in parts), balance.max_rank_bytes,
                  max(p.num_windows for p in parts), sum(p.num_copies for p in parts), max(p.peak_bytes for p in parts),
                  max(p.peak_extra_bytes for p in parts))
