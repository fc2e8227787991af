"""A dry world: any rank of a world of any size, in this process, with Megatron's own code and no memory.

Torch's fake process group stands for the other ranks, the meta device for the memory. The live world of the process, its
groups and its random state are set aside and put back. (Measured for the design: rank 517 of 1,024 of a 235B MoE in 0.25 s.)
"""

import contextlib
import sys

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_dynatrain.device_map import DeviceMap
from megatron_dynatrain.megatron.quiet import quiet
from megatron_dynatrain.megatron.rng import preserved_rng

_FIRST_GROUP_NUMBER = 1_000_000_000  # group names are numbers; those of a dry world must not meet live ones
_TABLES = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag")
_VALUES = ("_world", "_group_count", "_backend", "_default_pg_init_method")


@contextlib.contextmanager
def dry_world(rank: int, world_size: int):
    """Inside, torch.distributed is a world of `world_size` in which this process is `rank`, and tensors have no memory."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with _world_set_aside(), quiet(), preserved_rng():
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        with DeviceMap("meta", by_default=True):
            yield


@contextlib.contextmanager
def _world_set_aside():
    """Give torch.distributed an empty world for the block. (The second world beside a live one: torch 2.14.)"""
    kept = {name: getattr(distributed_c10d, name) for name in (*_TABLES, *_VALUES)}
    hook = sys.excepthook
    try:
        for name in _TABLES:
            setattr(distributed_c10d, name, {})
        distributed_c10d._world = distributed_c10d._World()
        distributed_c10d._group_count = _FIRST_GROUP_NUMBER
        yield
    finally:
        for name in distributed_c10d._pg_names.values():
            distributed_c10d._unregister_process_group(name)
        for name, value in kept.items():
            setattr(distributed_c10d, name, value)
        sys.excepthook = hook
