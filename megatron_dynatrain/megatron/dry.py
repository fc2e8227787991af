"""A dry world: any rank of a world of any size, in this process, with Megatron's own code and no memory.

Torch's fake process group stands for the other ranks, the meta device for the memory. The live world of the process, its
groups and its random state are set aside and put back. (Measured for the design: rank 517 of 1,024 of a 235B MoE in 0.25 s.)
"""

import contextlib
import functools
from datetime import timedelta

from megatron_dynatrain.device_map import DeviceMap
from megatron_dynatrain.elastic import worlds
from megatron_dynatrain.megatron.quiet import quiet
from megatron_dynatrain.megatron.rng import preserved_rng

_NUMBER = 1_000_000  # of a dry world; it is gone before the next one is made


@contextlib.contextmanager
def dry_world(rank: int, world_size: int):
    """Inside, torch.distributed is a world of `world_size` in which this process is `rank`, and tensors have no memory."""
    world = fake_world(_NUMBER, rank, world_size)
    try:
        with worlds.entered(world), quiet(), preserved_rng(), DeviceMap("meta", by_default=True):
            yield
    finally:
        worlds.destroy(world)


def fake_world(number: int, rank: int, world_size: int):
    """A world whose groups hold this process alone, whatever they say."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return worlds.make(number, rank, world_size, "fake", FakeStore(), timedelta(minutes=10))


@functools.cache
def idle_world():
    """The world of a process that waits: it is neither the first nor the last rank, and nobody answers it."""
    return fake_world(_NUMBER + 1, 1, 3)
