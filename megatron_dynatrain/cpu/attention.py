"""Attention of the local layer specs with what only Transformer Engine's has: context parallelism, and heads whose keys and
values differ in width (multi-latent attention).

Keys and values are gathered over the context-parallel group and the rank's own queries attend to all of them: the
arithmetic of the single-rank attention, row by row, at the price of whole keys and values on each rank.
"""

import torch
import torch.distributed as dist


class GatherSequence(torch.autograd.Function):
    """[s / cp, ...] on each rank of `group` -> [s, ...] on all, in the order of ranks; gradients are summed and scattered.

    Collective over `group`, forward and backward.
    """

    @staticmethod
    def forward(ctx, local, group):
        ctx.group = group
        gathered = local.new_empty(group.size() * local.shape[0], *local.shape[1:])
        dist.all_gather_into_tensor(gathered, local.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx, gradient):
        local = gradient.new_empty(gradient.shape[0] // ctx.group.size(), *gradient.shape[1:])
        dist.reduce_scatter_tensor(local, gradient.contiguous(), group=ctx.group)
        return local, None


def sequence_positions(cp_rank: int, cp_size: int, length: int) -> torch.Tensor:
    """Positions in the sequence of the tokens of `cp_rank`: int64 [length / cp_size]. Megatron gives each rank a chunk from
    the front and one from the back, so that causal work is balanced: of 8 tokens, rank 0 of 2 has 0, 1, 6, 7."""
    chunk = length // (2 * cp_size)
    last = 2 * cp_size - 1 - cp_rank
    return torch.cat([torch.arange(cp_rank * chunk, (cp_rank + 1) * chunk),
                      torch.arange(last * chunk, (last + 1) * chunk)])


def extend(module) -> None:
    """Replace construction and forward of `DotProductAttention` in Megatron's module of that name."""
    from megatron.core.transformer.enums import AttnMaskType

    core = module.DotProductAttention
    build, attend = core.__init__, core.forward

    def __init__(self, config, *args, k_channels=None, v_channels=None, **kwargs):
        cp_size, config.context_parallel_size = config.context_parallel_size, 1
        try:
            build(self, config, *args, **kwargs)
        finally:
            config.context_parallel_size = cp_size
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
        if cp_size > 1 and self.scale_mask_softmax.window_size is not None:
            raise NotImplementedError("the CPU backend has no sliding-window attention with context parallelism")

    def forward(self, query, key, value, attention_mask, *args, **kwargs):
        """query, key, value: [s / cp, b, heads, channels]; returns [s / cp, b, heads * channels]."""
        if self.config.context_parallel_size > 1:
            from megatron.core import parallel_state

            group = parallel_state.get_context_parallel_group()
            length = query.shape[0] * group.size()
            positions = [sequence_positions(rank, group.size(), length) for rank in range(group.size())]
            natural = torch.argsort(torch.cat(positions))
            key, value = (GatherSequence.apply(tensor, group)[natural] for tensor in (key, value))
            if attention_mask is None and self.attn_mask_type == AttnMaskType.causal:
                attention_mask = torch.arange(length)[None, :] > positions[group.rank()][:, None]  # [s / cp, s]
        return attend(self, query, key, value, attention_mask, *args, **kwargs)

    core.__init__, core.forward = __init__, forward
