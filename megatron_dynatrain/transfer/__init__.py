"""Transfer: carries out a plan over torch.distributed, and checks what arrived. Knows nothing of Megatron."""

from megatron_dynatrain.transfer.execute import execute
from megatron_dynatrain.transfer.memory import Allocations, Exchange
from megatron_dynatrain.transfer.verify import Checksums, compare_bits

__all__ = ["Allocations", "Checksums", "Exchange", "compare_bits", "execute"]
