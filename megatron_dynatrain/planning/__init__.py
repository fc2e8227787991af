"""Planning: the descriptions of two layouts in, every copy that a switch needs out. No tensors, no communication."""

from megatron_dynatrain.planning.balance import Balance, Demand, node_numbers
from megatron_dynatrain.planning.copies import Cells
from megatron_dynatrain.planning.memory import Turnover, peak_bytes
from megatron_dynatrain.planning.order import DEFAULT_STAGING_BYTES
from megatron_dynatrain.planning.plan import Plan, draft_plan, finish_plan, make_plan, num_ranks
from megatron_dynatrain.planning.totals import Part, Totals, total

__all__ = ["DEFAULT_STAGING_BYTES", "Balance", "Cells", "Demand", "Part", "Plan", "Totals", "Turnover", "draft_plan", "finish_plan",
           "make_plan", "node_numbers", "num_ranks", "peak_bytes", "total"]
