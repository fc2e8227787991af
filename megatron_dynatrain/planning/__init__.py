"""Planning: the descriptions of two layouts in, every copy that a switch needs out. No tensors, no communication."""

from megatron_dynatrain.planning.balance import balanced_max_rank_bytes, shares
from megatron_dynatrain.planning.copies import Cells
from megatron_dynatrain.planning.order import DEFAULT_STAGING_BYTES
from megatron_dynatrain.planning.plan import Plan, draft_plan, finish_plan, make_plan
from megatron_dynatrain.planning.totals import Part, Totals, summed, total

__all__ = ["DEFAULT_STAGING_BYTES", "Cells", "Part", "Plan", "Totals", "balanced_max_rank_bytes", "draft_plan", "finish_plan",
           "make_plan", "shares", "summed", "total"]
