"""The pretraining script of a model file: Megatron's own GPT, up to where the model is built. It is never run any further.

It builds what `scripts/pretrain_gpt.py` builds from the same arguments.
"""

from megatron_dynatrain.megatron.versions import pretrain_gpt

if __name__ == "__main__":
    pretrain_gpt()
