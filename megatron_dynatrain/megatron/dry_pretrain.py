"""The pretraining script of a model file: Megatron's own GPT, up to where the model is built. It is never run any further.

What a job of the same arguments builds through `gpt_config_from_args` (see `scripts/pretrain_gpt.py`).
"""

from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

if __name__ == "__main__":
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, None, ModelType.encoder_or_decoder, None)
