"""Megatron's process groups for several layouts at once.

`megatron.core.parallel_state` keeps the groups of one layout in its module globals. Here those globals are taken out and
put back as a whole: one dictionary a layout, swapped in by assignment. New groups come from a pool, so that layouts share
the groups that they have in common and going back to a layout creates nothing.
"""

import copy
import sys

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_dynatrain.megatron import versions


class GroupPool:
    """Stands in for `parallel_state.create_group`: a group that exists already is handed out again.

    The key is (ranks, backend, description). Groups are collective to create, so all ranks must ask in the same order,
    as Megatron does. In any other default world than the one in which the pool was made (a dry one), nothing is pooled.
    """

    def __init__(self, create_group, parallel_state):
        self._create_group = create_group
        self._parallel_state = parallel_state
        self._world = None
        self._groups: dict[tuple, object] = {}
        self.asked: set[tuple] = set()  # keys asked for since it was last cleared

    def create_group(self, ranks=None, timeout=None, backend=None, *args, **kwargs):
        if self._world is None:
            self._world = distributed_c10d._world
        if self._world is not distributed_c10d._world or ranks is None or (backend == "mpi"):
            return self._create_group(ranks, timeout, backend, *args, **kwargs)
        key = (tuple(ranks), backend, kwargs.get("group_desc"))
        self.asked.add(key)
        if key not in self._groups:
            self._groups[key] = self._create_group(ranks, timeout, backend, *args, **kwargs)
        elif dist.get_rank() in ranks:
            # What the original does after creating one: the list serves update_pg_timeout.
            known = self._parallel_state._global_process_group_list
            self._parallel_state._global_process_group_list = (known or [None]) + [self._groups[key]]
        return self._groups[key]

    def destroy_except(self, keep: set[tuple]) -> None:
        """Destroy pooled groups that are not in `keep`. Collective: the same set on all ranks."""
        for key in sorted(self._groups.keys() - keep, key=repr):
            group = self._groups.pop(key)
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)


class ParallelStates:
    """The globals of `parallel_state` for each layout, by name."""

    def __init__(self, parallel_state, pool: GroupPool, initialize_distributed):
        """initialize_distributed: calls Megatron's own initialisation from the live arguments (no argument)."""
        self._module = parallel_state
        self._pool = pool
        self._initialize = initialize_distributed
        self._pristine = self.capture()
        self._of_layout: dict[str, dict] = {}
        self._keys_of_layout: dict[str, set] = {}

    def capture(self) -> dict:
        """The module globals that hold a layout."""
        return {name: value for name, value in vars(self._module).items()
                if name == "_global_process_group_list"
                or (name.startswith("_") and not name.startswith("__") and name.isupper())}

    def restore(self, state: dict) -> None:
        for name in self.capture():
            value = state.get(name)
            setattr(self._module, name, copy.copy(value) if isinstance(value, (list, dict)) else value)

    def remember(self, layout: str) -> None:
        """Take the groups that are live now as those of `layout`."""
        self._of_layout[layout] = self.capture()
        self._keys_of_layout[layout] = set(self._pool.asked)
        self._pool.asked.clear()

    def reset(self) -> None:
        """Make `parallel_state` as it was at import, without destroying a group."""
        self.restore(copy.deepcopy(self._pristine))

    def make(self, layout: str) -> None:
        """Create the groups of `layout` beside the live ones. Collective. The live arguments must be those of `layout`."""
        if layout in self._of_layout:
            return
        live = self.capture()
        self._pool.asked.clear()
        try:
            self.reset()
            self._initialize()
            self.remember(layout)
        finally:
            self.restore(live)

    def enter(self, layout: str) -> None:
        """Make the groups of `layout` the live ones. Not collective. The scratch buffers of the old layout are dropped."""
        self.restore(self._of_layout[layout])
        self._module.destroy_global_memory_buffer()
        self._module._set_global_memory_buffer()

    def forget(self, layout: str) -> None:
        """Destroy the groups that only `layout` uses. Collective."""
        self._of_layout.pop(layout, None)
        if self._keys_of_layout.pop(layout, None) is not None:
            self._pool.destroy_except(set().union(*self._keys_of_layout.values()))


def forget_groups() -> None:
    """Drop what Megatron keeps in module globals with process groups of the layout that is left: the collectors of the losses
    of experts, multi-token prediction and sparse-attention indexers, which the next forward pass makes anew. Not collective."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    versions.forget_losses_of_experts()
    MTPLossLoggingHelper.tracker = {}
    indexer = sys.modules.get("megatron.core.transformer.experimental_attention_variant.dsa")
    if indexer is not None:
        indexer.DSAIndexerLossLoggingHelper.tracker = {}
