"""Megatron's own ways to move state, timed on a running job: checkpoint, refit, and the steps around a restart.

Only the benchmark uses them. Every time is in seconds on this rank, taken after a barrier.
"""

import functools
import time
from pathlib import Path

import torch.distributed as dist

from megatron_dynatrain.import_hooks import after_import
from megatron_dynatrain.megatron.describe import unwrap
from megatron_dynatrain.megatron.quiet import quiet


def stamp_steps(started, ended) -> None:
    """Call `started()` before and `ended()` after every training step. Call before Megatron is imported."""

    def wrap(training):
        step = training.train_step

        @functools.wraps(step)
        def train_step(*args, **kwargs):
            started()
            result = step(*args, **kwargs)
            ended()
            return result

        training.train_step = train_step

    after_import("megatron.training.training", wrap)


def save(job, folder: Path, iteration: int) -> float:
    """Seconds of Megatron's `save_checkpoint` of the current state. Collective."""
    from megatron.training.checkpointing import save_checkpoint

    live = job.live
    return _timed(job.args, "save", folder, save_checkpoint, iteration, live.model, live.optimizer, live.scheduler,
                  job.args.num_floating_point_operations_so_far)


def load(job, folder: Path) -> float:
    """Seconds of Megatron's `load_checkpoint` into the current model and optimizer. Collective."""
    from megatron.training.checkpointing import load_checkpoint

    live = job.live
    return _timed(job.args, "load", folder, load_checkpoint, live.model, live.optimizer, live.scheduler)


def _timed(args, flag: str, folder: Path, action, *objects) -> float:
    """Seconds of a checkpoint action whose folder is the argument `flag`."""
    kept = getattr(args, flag)
    setattr(args, flag, str(folder))
    dist.barrier()
    start = time.perf_counter()
    try:
        with quiet():
            action(*objects, checkpointing_context={})
    finally:
        setattr(args, flag, kept)
    return time.perf_counter() - start


def refit(src_model: list, dst_model: list) -> tuple[float, float]:
    """(seconds of planning, seconds of moving) of Megatron's `megatron.core.resharding` over gloo, weights alone, between
    two models in memory. Collective."""
    from megatron.core import resharding  # noqa: F401 - its __init__ must run before refit
    from megatron.core.resharding import refit as megatron_refit

    world = dist.group.WORLD
    src, dst = unwrap(src_model), unwrap(dst_model)
    with quiet():
        dist.barrier()
        start = time.perf_counter()
        megatron_refit.prepare_swap_model_weights(src, dst, group=world)
        planned = time.perf_counter()
        dist.barrier()
        moving = time.perf_counter()
        megatron_refit.swap_model_weights(src, dst, "gloo", group=world)
        moved = time.perf_counter()
        megatron_refit.clear_all_caches()  # plans and groups of this pair; the next pair has others
    return planned - start, moved - moving
