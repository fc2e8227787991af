"""Megatron's process groups for several layouts at once.

`megatron.core.parallel_state` keeps the groups of one layout in its module globals. Here those globals are taken out and
put back as a whole: one dictionary a layout, swapped in by assignment. New groups come from a pool, so that layouts share
the groups that they have in common and going back to a layout creates nothing. The groups of another world are made by a
second copy of the module, which touches none of the live globals.
"""

import copy
import importlib.util
import sys
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_dynatrain.elastic import pace, worlds
from megatron_dynatrain.megatron import versions


class GroupPool:
    """Stands in for `parallel_state.create_group` in one world: a group that exists already is handed out again.

    The key is (ranks, backend, description). Groups are collective to create, so all ranks must ask in the same order,
    as Megatron does.
    """

    def __init__(self, world):
        self.world = world
        self._groups: dict[tuple, object] = {}
        self.asked: set[tuple] = set()  # keys asked for since it was last cleared

    def create_group(self, module: ModuleType, original, ranks, timeout, backend, *args, **kwargs):
        """module: the copy of `parallel_state` that asks, `original` its function."""
        key = (tuple(ranks), backend, kwargs.get("group_desc"))
        self.asked.add(key)
        if key not in self._groups:
            self._groups[key] = original(ranks, timeout, backend, *args, **kwargs)
        elif dist.get_rank() in ranks:
            # What the original does after creating one: the list serves update_pg_timeout.
            module._global_process_group_list = (module._global_process_group_list or [None]) + [self._groups[key]]
        return self._groups[key]

    def destroy_except(self, keep: set[tuple]) -> None:
        """Destroy pooled groups that are not in `keep`. Collective: the same set on all ranks."""
        for key in sorted(self._groups.keys() - keep, key=repr):
            group = self._groups.pop(key)
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)


@dataclass(slots=True)
class WorldGroups:
    """The groups of one world: the globals of `parallel_state` and the keys in the pool, by the name of the layout."""

    pool: GroupPool
    of_layout: dict[str, dict]
    keys_of_layout: dict[str, set]


class ParallelStates:
    """The globals of `parallel_state` for each layout of the world in which the job trains, by name."""

    def __init__(self, parallel_state, create_group):
        """create_group: Megatron's own."""
        self._module = parallel_state
        self._create_group = create_group
        self.initialize = None  # calls Megatron's own initialisation from the live arguments (no argument)
        self.last_call: dict = {}  # the arguments of the last call of `initialize_model_parallel`, by name
        self._pristine = self.capture()
        self._live: WorldGroups | None = None

    def create_group(self, ranks=None, timeout=None, backend=None, *args, **kwargs):
        """Takes the place of `parallel_state.create_group`. In another world than that of the job nothing is pooled."""
        if self._live is None:
            self._live = WorldGroups(GroupPool(worlds.current()), {}, {})
        pool = self._live.pool
        if pool.world is not worlds.current() or ranks is None or backend == "mpi":
            return self._create_group(ranks, timeout, backend, *args, **kwargs)
        return pool.create_group(self._module, self._create_group, ranks, timeout, backend, *args, **kwargs)

    def capture(self) -> dict:
        """The module globals that hold a layout."""
        return _capture(self._module)

    def restore(self, state: dict) -> None:
        for name in self.capture():
            value = state.get(name)
            setattr(self._module, name, copy.copy(value) if isinstance(value, (list, dict)) else value)

    def remember(self, layout: str) -> None:
        """Take the groups that are live now as those of `layout`."""
        self._live.of_layout[layout] = self.capture()
        self._live.keys_of_layout[layout] = set(self._live.pool.asked)
        self._live.pool.asked.clear()

    def reset(self) -> None:
        """Make `parallel_state` as it was at import, without destroying a group."""
        self.restore(copy.deepcopy(self._pristine))

    def make(self, layout: str) -> None:
        """Create the groups of `layout` beside the live ones. Collective. The live arguments must be those of `layout`."""
        if layout in self._live.of_layout:
            return
        live = self.capture()
        self._live.pool.asked.clear()
        try:
            self.reset()
            self.initialize()
            self.remember(layout)
        finally:
            self.restore(live)

    def make_in(self, world, layout: str, call: dict, patience: timedelta) -> WorldGroups:
        """Create the groups of `layout` in another world, of which this process is a rank. Collective in it; from any thread.

        call: the arguments of `initialize_model_parallel`. patience: how long others may take to come; the timeout that
        Megatron wants for a group it gets afterwards.
        """
        module = _copy_of(self._module)
        original, pool = module.create_group, GroupPool(world)

        def create_group(ranks=None, timeout=None, backend=None, *args, **kwargs):
            group = pool.create_group(module, original, ranks, patience, backend, *args, **kwargs)
            if group is not dist.GroupMember.NON_GROUP_MEMBER and timeout is not None:
                distributed_c10d._set_pg_timeout(timeout, group)
            pace.rest()
            return group

        module.create_group = create_group
        with worlds.entered(world):
            module.initialize_model_parallel(**call)
        return WorldGroups(pool, {layout: _capture(module)}, {layout: set(pool.asked)})

    def take(self, groups: WorldGroups | None) -> None:
        """From now on the job trains in the world of `groups`, or in none. Not collective; the old ones are left to whoever ends
        their world."""
        if groups is not None:
            groups.pool.asked.clear()
        self._live = groups

    @property
    def live(self) -> WorldGroups:
        return self._live

    def enter(self, layout: str) -> None:
        """Make the groups of `layout` the live ones. Not collective. The scratch buffers of the old layout are dropped."""
        self.restore(self._live.of_layout[layout])
        self._module.destroy_global_memory_buffer()
        self._module._set_global_memory_buffer()

    def forget(self, layout: str) -> None:
        """Destroy the groups that only `layout` uses. Collective."""
        if self._live is None:  # of a process that does not train
            return
        self._live.of_layout.pop(layout, None)
        if self._live.keys_of_layout.pop(layout, None) is not None:
            self._live.pool.destroy_except(set().union(*self._live.keys_of_layout.values()))


def _capture(module: ModuleType) -> dict:
    return {name: value for name, value in vars(module).items()
            if name == "_global_process_group_list"
            or (name.startswith("_") and not name.startswith("__") and name.isupper())}


def _copy_of(module: ModuleType) -> ModuleType:
    """A module executed once more, under another name and in no table of modules."""
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_of_another_world", module.__file__)
    second = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(second)
    return second


def forget_groups() -> None:
    """Drop what Megatron keeps in module globals with process groups of the layout that is left: the collectors of the losses
    of experts, multi-token prediction and sparse-attention indexers, which the next forward pass makes anew. Not collective."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    versions.forget_losses_of_experts()
    MTPLossLoggingHelper.tracker = {}
    indexer = sys.modules.get("megatron.core.transformer.experimental_attention_variant.dsa")
    if indexer is not None:
        indexer.DSAIndexerLossLoggingHelper.tracker = {}
