"""Pretrain a GPT with Megatron: a plain script on Megatron's public API. It knows nothing of megatron_dynatrain.

    torchrun --nproc-per-node 8 -m megatron_dynatrain.launch --cpu scripts/pretrain_gpt.py <Megatron arguments>

It runs on megatron-core 0.17, 0.18 and 0.19, whose APIs for scripts differ. NVIDIA's own `pretrain_gpt.py` of the same release
runs in its place.
"""

from functools import partial

import torch
from megatron.core import mpu, package_info
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt import gpt_layer_specs as specs
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

RELEASE = (package_info.MAJOR, package_info.MINOR)
if RELEASE >= (0, 18):
    from megatron.core.utils import get_batch_on_this_tp_rank
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args
else:
    from megatron.training.utils import get_batch_on_this_tp_rank
if RELEASE >= (0, 19):
    from megatron.training.argument_utils import gpt_config_from_args

BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")  # each [micro_batch_size, seq_length]


def holds_mtp(vp_stage):
    config = core_transformer_config_from_args(get_args())
    if RELEASE < (0, 18):
        return mtp_on_this_rank(config, ignore_virtual=False, vp_stage=vp_stage)
    return mtp_on_this_rank(layout=config.pipeline_model_parallel_layout, mtp_num_layers=config.mtp_num_layers,
                            ignore_virtual=False, vp_stage=vp_stage)


def get_batch(data_iterator, vp_stage):
    """The micro-batch of this rank as a tuple in the order of BATCH_KEYS; Nones on pipeline stages that need no data."""
    if not is_first_or_last_pipeline_stage(vp_stage) and not holds_mtp(vp_stage):
        return (None,) * len(BATCH_KEYS)
    if RELEASE < (0, 18):
        batch = get_batch_on_this_tp_rank(data_iterator, mtp_on_this_rank=holds_mtp(vp_stage))
        batch = get_batch_on_this_cp_rank({key: batch[key] for key in BATCH_KEYS})
    else:
        batch = get_batch_on_this_cp_rank(broadcast_over_tp(data_iterator, vp_stage), is_hybrid_cp=False,
                                          cp_group=mpu.get_context_parallel_group())
    return tuple(batch.get(key) for key in BATCH_KEYS)


def broadcast_over_tp(data_iterator, vp_stage):
    """The next micro-batch, from the first rank of the tensor-parallel group."""
    args = get_args()
    batch = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        batch = {key: value.cuda(non_blocking=True) for key, value in next(data_iterator).items() if key in BATCH_KEYS}
    packed = "has_cu_seqlens" if RELEASE >= (0, 19) else "is_sft"
    return get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=holds_mtp(vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
        **{packed: False},
    )


def loss_func(loss_mask, output_tensor):
    """The summed loss of the micro-batch, its number of tokens, and both for the log."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output_tensor.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.cat([loss.detach().view(1), num_tokens.view(1)])}


def forward_step(data_iterator, model):
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    tokens, labels, loss_mask, attention_mask, position_ids = get_batch(data_iterator, vp_stage)
    output = model(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask)
    return output, partial(loss_func, loss_mask)


def train_valid_test_datasets_provider(num_samples, vp_stage=None):
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed, sequence_length=args.seq_length, blend=blend, blend_per_split=blend_per_split,
        split=args.split, path_to_cache=args.data_cache_path, tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids, reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss, create_attention_mask=args.create_attention_mask_in_dataloader,
        num_dataset_builder_threads=args.num_dataset_builder_threads, mmap_bin_files=args.mmap_bin_files,
    )

    def is_built_on_rank():
        return mpu.get_tensor_model_parallel_rank() == 0 and (
            is_first_or_last_pipeline_stage(vp_stage) or holds_mtp(vp_stage))

    dataset_type = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(dataset_type, num_samples, is_built_on_rank, config).build()


train_valid_test_datasets_provider.is_distributed = True  # every rank calls it


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    """The chunk of the model at one pipeline stage, for releases before 0.19; since then Megatron builds it from arguments."""
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    kind = dict(use_transformer_engine=args.transformer_impl == "transformer_engine")
    mtp = None
    if args.mtp_num_layers:
        last_layer = specs.get_gpt_decoder_layer_specs(config, normalization=args.normalization, **kind)[-1]
        mtp = specs.get_gpt_mtp_block_spec(config, last_layer, vp_stage=vp_stage, **kind)
    return GPTModel(
        config=config, vocab_size=args.padded_vocab_size, max_sequence_length=args.max_position_embeddings,
        transformer_layer_spec=specs.get_gpt_decoder_block_spec(config, normalization=args.normalization, vp_stage=vp_stage,
                                                                **kind),
        mtp_block_spec=mtp, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage, pg_collection=pg_collection,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type, rotary_percent=args.rotary_percent, rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling, fp16_lm_cross_entropy=args.fp16_lm_cross_entropy, parallel_output=True)


def main():
    provider, model_type = train_valid_test_datasets_provider, ModelType.encoder_or_decoder
    if RELEASE < (0, 18):
        pretrain(provider, model_provider, model_type, forward_step)
    elif RELEASE < (0, 19):
        pretrain(pretrain_cfg_container_from_args(parse_and_validate_args()), provider, model_provider, model_type, forward_step)
    else:
        args = parse_and_validate_args()
        pretrain(pretrain_cfg_container_from_args(args, gpt_config_from_args(args)), provider, model_type, forward_step)


if __name__ == "__main__":
    main()
