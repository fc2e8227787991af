"""Planning: the descriptions of two layouts in, every copy that a switch needs out. No tensors, no communication."""

from megatron_dynatrain.planning.plan import Plan, make_plan
from megatron_dynatrain.planning.windows import DEFAULT_STAGING_BYTES

__all__ = ["DEFAULT_STAGING_BYTES", "Plan", "make_plan"]
