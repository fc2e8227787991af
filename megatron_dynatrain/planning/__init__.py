"""Planning: the descriptions of two layouts in, every copy that a switch needs out. No tensors, no communication."""

from megatron_dynatrain.planning.balance import Balance
from megatron_dynatrain.planning.copies import Cells
from megatron_dynatrain.planning.memory import Turnover, peak_bytes
from megatron_dynatrain.planning.order import DEFAULT_STAGING_BYTES
from megatron_dynatrain.planning.plan import Plan, draft_plan, finish_plan, make_plan
from megatron_dynatrain.planning.totals import Part, Totals, summed, total

__all__ = ["DEFAULT_STAGING_BYTES", "Balance", "Cells", "Part", "Plan", "Totals", "Turnover", "draft_plan", "finish_plan",
           "make_plan", "peak_bytes", "summed", "total"]
