"""Random state across a switch.

Megatron derives its streams from a rank's coordinates (seed, pipeline rank, tensor rank, expert ranks). The rule here, the
same on every rank: where a switch keeps tensor and pipeline parallelism, every stream goes on as it was, but for the stream
of the experts where their parallelism changes; where it does not, all are derived anew for the new coordinates by Megatron's
own function, from a seed that depends on the launch seed and the iteration only. So A -> B -> A is reproducible, and after a
switch ranks share a stream, or have distinct ones, as in a job that was launched in the new layout.
"""

import contextlib
import random
from argparse import Namespace

import numpy as np
import torch

_SEED_STEP = 1_000_003
_SEED_LIMIT = 1 << 31  # numpy takes 32 bits, and Megatron adds to the seed


def capture() -> dict:
    """All random states of this rank."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(), "tracker": dict(get_cuda_rng_tracker().get_states())}


def restore(state: dict) -> None:
    """Set all random states of this rank."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["tracker"])


@contextlib.contextmanager
def preserved_rng():
    """Random states after the block are those before it."""
    state = capture()
    try:
        yield
    finally:
        restore(state)


_DENSE = ("world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "use_tp_pp_dp_mapping")
_EXPERT = ("expert_model_parallel_size", "expert_tensor_parallel_size")


def settle(streams: dict | None, old: Namespace, new: Namespace, reseed) -> None:
    """Set the streams of the new layout: those whose coordinates stay go on from `streams`, the others are derived anew.

    streams: from `capture`, at the boundary; None to derive all anew. old, new: the arguments of both layouts. reseed: derives
    all streams for the live coordinates. Not collective; all ranks decide alike.
    """
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name

    same = lambda names: all(getattr(old, name) == getattr(new, name) for name in names)  # noqa: E731
    if streams is not None and same(_DENSE + _EXPERT):
        restore(streams)
        return
    reseed()
    if streams is not None and same(_DENSE):
        expert = get_expert_parallel_rng_tracker_name()
        anew = get_cuda_rng_tracker().get_states()[expert]
        restore({**streams, "tracker": {**streams["tracker"], expert: anew}})


def seed_after_switch(seed: int, iteration: int) -> int:
    """The seed from which streams are derived anew after `iteration` iterations."""
    return (seed + _SEED_STEP * (iteration + 1)) % _SEED_LIMIT or 1
