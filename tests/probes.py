"""What tests put into ranks: recorders and faults. They wrap Megatron from outside and know nothing of the plugin, except
where a fault has to be put into it."""

import json
import os


def write(folder, name, rank, **record):
    with open(folder / f"{name}.{rank:03d}.jsonl", "a") as file:
        file.write(json.dumps(record) + "\n")


def record(rank, folder):
    """Write every step (exact floats) and every training sample that is drawn."""
    from megatron.core.datasets.gpt_dataset import GPTDataset
    from megatron.core.datasets.utils import Split
    from megatron.training import get_args, training

    log = training.training_log

    def training_log(loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, flag, skipped, grad_norm, *args, **kw):
        if rank == int(os.environ["WORLD_SIZE"]) - 1:
            write(folder, "steps", rank, iteration=iteration, lr=learning_rate, skipped=skipped, loss_scale=loss_scale,
                  grad_norm=None if grad_norm is None else float(grad_norm),
                  loss={k: float(v) for k, v in loss_dict.items()}.get("lm loss"))
        return log(loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, flag, skipped, grad_norm, *args, **kw)

    training.training_log = training_log
    get_item = GPTDataset.__getitem__

    def __getitem__(self, index):
        if self.index_split == Split.train and index is not None:
            write(folder, "samples", rank, iteration=get_args().curr_iteration + 1, sample=int(index))
        return get_item(self, index)

    GPTDataset.__getitem__ = __getitem__
