"""The releases of Megatron: which were tested, and where they differ beside the wrapped functions (those stand in `seams`)."""

import os
import sys
from argparse import Namespace
from types import ModuleType

from megatron_dynatrain.errors import LayoutRefused, UnsupportedMegatron

TESTED = {(0, 17): "0.17.1", (0, 18): "0.18.2", (0, 19): "0.19.2"}  # (major, minor): the release that the tests run on
OVERRIDE = "DYNATRAIN_TRY_MEGATRON"  # environment variable: the full version of one other release that is to be tried


def names() -> str:
    """The tested releases, for messages."""
    *others, last = TESTED.values()
    return f"{', '.join(others)} and {last}"


def check(package_info: ModuleType) -> None:
    """Raise UnsupportedMegatron unless `megatron.core.package_info` names a tested release, or the one that is to be tried."""
    found = package_info.__version__.split("+")[0]  # behind the + stands the commit of whatever git repository it lies in
    if (package_info.MAJOR, package_info.MINOR) in TESTED:
        return
    if os.environ.get(OVERRIDE) == found:
        if os.environ.get("RANK", "0") == "0":
            print(f"[dynatrain] megatron-core {found} is tried because {OVERRIDE} says so; tested are {names()}; verify: full "
                  "compares every bit of every switch", file=sys.stderr, flush=True)
        return
    raise UnsupportedMegatron(f"megatron-core {found} was found, but megatron_dynatrain was tested with {names()} only; install "
                              f"one of these, launch without megatron_dynatrain, or set {OVERRIDE}={found} to try it (all "
                              "functions that are wrapped are still checked)")


def release() -> tuple[int, int]:
    """(major, minor) of the tested release as which the Megatron of this process is treated: its own; for one that is tried the
    last one before it, or the first of all."""
    from megatron.core import package_info

    found = (package_info.MAJOR, package_info.MINOR)
    return max((tested for tested in TESTED if tested <= found), default=min(TESTED))


def uninitialised() -> dict:
    """Arguments under which parameters take their memory where they are to stay, and no values where Megatron can do without:
    before 0.18 its linear layers forget to mark a parameter as cut over TP if they do not initialise it, and then the gradient
    norm counts one rank's part of it alone."""
    on_device = {"use_cpu_initialization": False}
    return {**on_device, "perform_initialization": False} if release() >= (0, 18) else on_device


def check_experts(args: Namespace) -> None:
    """Raise LayoutRefused for a layout of experts that this release trains wrongly. args: Megatron's, validated."""
    ep, etp, tp = args.expert_model_parallel_size, args.expert_tensor_parallel_size, args.tensor_model_parallel_size
    if release() < (0, 19) and args.num_experts and ep == 1 and etp != tp:
        raise LayoutRefused(f"before megatron-core 0.19 experts at expert_model_parallel_size 1 are reduced over the data-parallel "
                            f"ranks of the dense layers, which are not theirs at expert_tensor_parallel_size {etp} and "
                            f"tensor_model_parallel_size {tp}; make the two equal, or take megatron-core 0.19")


def null_vocab_size(num_tokens: int) -> int:
    """The --vocab-size with which NullTokenizer has `num_tokens` tokens: before 0.18 it adds one of its own."""
    return num_tokens if release() >= (0, 18) else num_tokens - 1


def frees_outputs_early() -> bool:
    """Whether the interleaved pipeline schedule frees outputs that are still being sent: before 0.18 the next stage then gets
    other numbers now and then (seen on gloo, at TP 2)."""
    return release() < (0, 18)


def forget_losses_of_experts() -> None:
    """Drop the collector of the losses of experts, which holds process groups; the next forward pass makes it anew."""
    if release() >= (0, 18):
        from megatron.core.transformer.moe import moe_logging

        moe_logging.destroy_moe_metrics_tracker()
    else:
        from megatron.core.transformer.moe import moe_utils

        moe_utils.get_moe_layer_wise_logging_tracker().clear()


def pretrain_gpt() -> None:
    """Call Megatron's `pretrain` for the GPT of the command line, without data: for a process that stops at the model."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain

    kind = ModelType.encoder_or_decoder
    if release() < (0, 18):  # a function of the script builds the model, and pretrain parses the arguments
        pretrain(None, gpt_model, kind, None)
        return
    from megatron.training import argument_utils
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args()
    if release() < (0, 19):
        pretrain(argument_utils.pretrain_cfg_container_from_args(args), None, gpt_model, kind, None)
    else:  # Megatron builds the model from a configuration
        model = argument_utils.gpt_config_from_args(args)
        pretrain(argument_utils.pretrain_cfg_container_from_args(args, model), None, kind, None)


def gpt_model(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, config=None, pg_collection=None):
    """The chunk of the command line's GPT at one pipeline stage, as scripts build it for releases before 0.19."""
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    config = config or core_transformer_config_from_args(args)
    kind = {"use_transformer_engine": args.transformer_impl == "transformer_engine", "normalization": args.normalization}
    mtp = None
    if args.mtp_num_layers:
        last_layer = gpt_layer_specs.get_gpt_decoder_layer_specs(config, **kind)[-1]
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config, last_layer, kind["use_transformer_engine"], vp_stage=vp_stage)
    return GPTModel(config, gpt_layer_specs.get_gpt_decoder_block_spec(config, vp_stage=vp_stage, **kind),
                    args.padded_vocab_size, args.max_position_embeddings, pre_process=pre_process, post_process=post_process,
                    share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
                    position_embedding_type=args.position_embedding_type, rotary_percent=args.rotary_percent,
                    rotary_base=args.rotary_base, rope_scaling=args.use_rope_scaling, mtp_block_spec=mtp, vp_stage=vp_stage,
                    pg_collection=pg_collection)
