"""Several default worlds of torch.distributed in one process, of which each thread sees one.

`torch.distributed` keeps one world: its default group, and tables of all groups made in it. Every function of it looks there
through `distributed_c10d._world`, a place that torch leaves open for replacement. What is put there answers with the world that
the calling thread has entered, and otherwise with the one of the process. So the groups of a generation to come are made in a
thread of their own while the loop trains in the present one, and taking the other is one assignment. (torch 2.14)
"""

import contextlib
import sys
import threading
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

_GROUPS_OF_A_WORLD = 1_000_000  # groups are numbered, and no number may occur in two worlds of a process


class TorchWorld(distributed_c10d._World):
    """A world that holds its own tables. number: other worlds of this process have others; 0 is the one that torch makes."""

    def __init__(self, number: int):
        super().__init__()
        self._maps = tuple({} for _ in range(6))
        self._count = number * _GROUPS_OF_A_WORLD

    pg_map = property(lambda self: self._maps[0])
    pg_names = property(lambda self: self._maps[1])
    pg_group_ranks = property(lambda self: self._maps[2])
    pg_backend_config = property(lambda self: self._maps[3])
    tags_to_pg = property(lambda self: self._maps[4])
    pg_to_tag = property(lambda self: self._maps[5])

    @property
    def group_count(self) -> int:
        return self._count

    @group_count.setter
    def group_count(self, value: int) -> None:
        self._count = value


class _Switchboard(distributed_c10d._World):
    """In the place of torch's own world: hands everything on to the world of the calling thread."""

    def __init__(self, of_process):
        super().__init__()
        self._of_process = of_process
        self._of_thread = threading.local()

    @property
    def world(self):
        return getattr(self._of_thread, "world", None) or self._of_process


def _handed_on(name: str) -> property:
    return property(lambda self: getattr(self.world, name), lambda self, value: setattr(self.world, name, value))


for _name in ("default_pg", "pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "group_count", "tags_to_pg", "pg_to_tag",
              "pg_coalesce_state", "comms"):
    setattr(_Switchboard, _name, _handed_on(_name))


def _switchboard() -> _Switchboard:
    if not isinstance(distributed_c10d._world, _Switchboard):
        distributed_c10d._world = _Switchboard(distributed_c10d._world)
    return distributed_c10d._world


def current():
    """The world that the calling thread sees."""
    return _switchboard().world


def of_process():
    """The world of all threads that have not entered another."""
    return _switchboard()._of_process


def take(world) -> None:
    """Make `world` the one of the process: of all threads that have not entered another. Not collective."""
    _switchboard()._of_process = world


@contextlib.contextmanager
def entered(world):
    """Inside, the calling thread sees `world`; other threads do not."""
    local = _switchboard()._of_thread
    before = getattr(local, "world", None)
    local.world = world
    try:
        yield world
    finally:
        local.world = before


def make(number: int, rank: int, size: int, backend: str, store, timeout: timedelta) -> TorchWorld:
    """A new world with its default group, beside those that there are. Collective over its `size` ranks; from any thread.

    store: shared by them, and by nobody else. timeout: of the default group's operations.
    """
    world = TorchWorld(number)
    hook, method = sys.excepthook, distributed_c10d._default_pg_init_method  # torch sets both for the process
    try:
        with entered(world):
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except BaseException:
        destroy(world)
        raise
    finally:
        sys.excepthook, distributed_c10d._default_pg_init_method = hook, method
    return world


def destroy(world) -> None:
    """Shut down every group of a world, the last made first. Not collective: whoever is still in an operation of it fails."""
    for group in reversed(list(world.pg_names)):
        with contextlib.suppress(Exception):  # a peer that has died
            group.shutdown()
        distributed_c10d._unregister_process_group(group.group_name)
    world.default_pg = None
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.tags_to_pg, world.pg_to_tag,
                  world.pg_coalesce_state):
        table.clear()
