"""A hybrid model (Mamba, attention, MLP) of local modules, for descriptions only: its kernels are not installed, so nothing
of it can run. In place of `mamba_ssm` stands what the construction of the model asks of it."""

import sys
import types

import torch


class RMSNorm(torch.nn.Module):
    """The gated norm's parameter."""

    def __init__(self, hidden_size, eps=1e-5, group_size=None, norm_before_gate=True, device=None, dtype=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))


def absent(*args, state_dtype=None, **kwargs):
    raise NotImplementedError("no kernel")


for name, contents in {"mamba_ssm": {}, "mamba_ssm.ops": {}, "mamba_ssm.ops.triton": {},
                       "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNorm},
                       "mamba_ssm.ops.triton.ssd_combined": {"mamba_chunk_scan_combined": absent,
                                                             "mamba_split_conv1d_scan_combined": absent}}.items():
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(contents)

from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add  # noqa: E402
from megatron.core.models.hybrid import hybrid_block  # noqa: E402
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules  # noqa: E402
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules  # noqa: E402
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules  # noqa: E402
from megatron.core.ssm.mlp_layer import MLPLayer  # noqa: E402
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.mlp import MLP, MLPSubmodules  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules  # noqa: E402
from megatron.training import pretrain  # noqa: E402
from megatron.training.argument_utils import hybrid_config_from_args, pretrain_cfg_container_from_args  # noqa: E402
from megatron.training.arguments import parse_and_validate_args  # noqa: E402

hybrid_block.TENorm = WrappedTorchNorm  # the norm after the stack is no part of a spec

SPEC = ModuleSpec(module=HybridStack, submodules=HybridStackSubmodules(
    mamba_layer=ModuleSpec(module=MambaLayer, submodules=MambaLayerSubmodules(
        norm=WrappedTorchNorm,
        mixer=ModuleSpec(module=MambaMixer, submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear,
                                                                            out_proj=RowParallelLinear)),
        mamba_bda=get_bias_dropout_add)),
    attention_layer=ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm,
        self_attention=ModuleSpec(module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal},
                                  submodules=SelfAttentionSubmodules(linear_qkv=ColumnParallelLinear,
                                                                     core_attention=DotProductAttention,
                                                                     linear_proj=RowParallelLinear)),
        self_attn_bda=get_bias_dropout_add)),
    mlp_layer=ModuleSpec(module=MLPLayer, submodules=TransformerLayerSubmodules(
        pre_mlp_layernorm=WrappedTorchNorm,
        mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)),
        mlp_bda=get_bias_dropout_add))))

if __name__ == "__main__":
    args = parse_and_validate_args()
    model = hybrid_config_from_args(args)
    model.hybrid_stack_spec = SPEC
    pretrain(pretrain_cfg_container_from_args(args, model), None, ModelType.encoder_or_decoder, None)
