"""Ranks that differ in their data-parallel seat alone, described from one build of their model.

Such ranks hold the same weights, and two things differ: which copy of a piece is the main one, and which interval of its
parameters the distributed optimizer owns. Neither is worked out here. The number of a replica is the rank's position in the
data-parallel group that Megatron makes for it; and the interval comes from Megatron's `DistributedOptimizer`, constructed
once more over the same buffers, with a group in which the rank sits elsewhere. A test compares with a build for each rank.
(megatron-core: `parallel_state.create_group`, `optimizer.distrib_optimizer.DistributedOptimizer`.)
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch.distributed as dist

from megatron_dynatrain.megatron.describe import (LocatedTensor, describe_located, ensure_states, gradient_bytes,
                                                   leaf_optimizers, locate)
from megatron_dynatrain.space import Holdings


class Families:
    """The groups that Megatron makes for one layout, in families by their description: those of all ranks, not only of this
    one. In a family every rank is in one group at most."""

    def __init__(self):
        self._seats: dict[str, dict[int, tuple[int, int]]] = {}  # description -> rank -> (position, size)
        self._family_of: dict[int, str] = {}  # by the id of a group that this rank is in

    @contextlib.contextmanager
    def recorded(self):
        """Inside, what `parallel_state` makes is written down. In a dry world only: groups without this rank are not made."""
        from megatron.core import parallel_state

        create_group = parallel_state.create_group

        def recording(ranks=None, timeout=None, backend=None, *args, **kwargs):
            members = list(range(dist.get_world_size()) if ranks is None else ranks)
            family = str(kwargs.get("group_desc"))
            self._seats.setdefault(family, {}).update({rank: (i, len(members)) for i, rank in enumerate(members)})
            if dist.get_rank() not in members:
                return dist.GroupMember.NON_GROUP_MEMBER
            group = create_group(ranks, timeout, backend, *args, **kwargs)
            self._family_of[id(group)] = family
            return group

        parallel_state.create_group = recording
        try:
            yield
        finally:
            parallel_state.create_group = create_group

    def knows(self, group) -> bool:
        return id(group) in self._family_of

    def position(self, group, rank: int) -> int:
        """The position of `rank` in its own group of the family that `group` is in."""
        return self._seats[self._family_of[id(group)]][rank][0]

    def ranks_alike(self, args) -> list[list[int]]:
        """All ranks, in lists of those that share their place in the model: tensor, pipeline and expert ranks. Each list, and
        the lists among themselves, in the order of ranks. `args`: Megatron's arguments of the layout."""
        from megatron.core import parallel_state

        ranks = range(args.world_size)
        groups = [parallel_state.get_tensor_model_parallel_group(), parallel_state.get_pipeline_model_parallel_group(),
                  parallel_state.get_expert_model_parallel_group(), parallel_state.get_expert_tensor_parallel_group()]
        if args.num_distributed_optimizer_instances > 1 or not all(map(self.knows, groups)):
            return [[rank] for rank in ranks]  # the seat in an instance has more to it than one group
        lists: dict[tuple, list[int]] = {}
        for rank in ranks:
            lists.setdefault(tuple(self.position(group, rank) for group in groups), []).append(rank)
        return list(lists.values())


class _Seat:
    """A process group as another of its members sees it: for code that asks for rank and size only."""

    def __init__(self, group, rank: int):
        self._group, self._rank = group, rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._group.size()


@dataclass(slots=True, eq=False)
class _Construction:
    """One call of DistributedOptimizer(), to be made again: the optimizer inside, its parameter groups as they were before,
    and the other arguments."""

    made: object
    inner: object
    groups: list[dict]
    args: tuple
    kwargs: dict


@contextlib.contextmanager
def recorded_optimizers():
    """Inside, calls of DistributedOptimizer() are written down in the list that is yielded."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    constructions: list[_Construction] = []
    construct = DistributedOptimizer.__init__

    def __init__(self, optimizer, *args, **kwargs):
        if optimizer is not None:
            constructions.append(_Construction(self, optimizer, _copied(optimizer.param_groups), args, kwargs))
        construct(self, optimizer, *args, **kwargs)

    DistributedOptimizer.__init__ = __init__
    try:
        yield constructions
    finally:
        DistributedOptimizer.__init__ = construct


def _copied(groups: list[dict]) -> list[dict]:
    return [{**group, "params": list(group["params"])} for group in groups]


def describe_alike(model: list, optimizer, constructions: list[_Construction], families: Families,
                   ranks: list[int]) -> dict[int, Holdings] | None:
    """What each of `ranks` holds, given the model and the optimizer of the last of them; the process is in its dry world.

    None where more than the data-parallel seat could differ: then each must be built. Not collective.
    """
    from megatron.core import parallel_state

    builder = ranks[-1]
    located = locate(model)
    gradients = gradient_bytes(model)
    own = describe_located(located, leaf_optimizers(optimizer), gradients).holdings
    groups = [parallel_state.get_data_parallel_group(with_context_parallel=True),
              parallel_state.get_expert_data_parallel_group()]
    rebuilt = {id(construction.made): construction for construction in constructions}
    parts = leaf_optimizers(optimizer)
    buffers = [buffer for part in parts if id(part) in rebuilt for buffer in part.buffers]
    if not all(map(families.knows, [*groups, *(buffer.data_parallel_group for buffer in buffers)])):
        return None if len(ranks) > 1 else {builder: own}
    holdings = {}
    for rank in ranks[:-1]:
        numbers = {families.position(group, builder): families.position(group, rank) for group in groups}
        seated = list(_with_replica_numbers(located, numbers))
        if len(seated) != len(located) or len(numbers) < len(set(families.position(g, rank) for g in groups)):
            return None
        optimizers = [_at_another_seat(rebuilt[id(part)], families, rank) if id(part) in rebuilt else part for part in parts]
        holdings[rank] = describe_located(seated, optimizers, gradients).holdings
    return {**holdings, builder: own}


def _with_replica_numbers(located: list[LocatedTensor], numbers: dict[int, int]) -> Iterator[LocatedTensor]:
    """The tensors with the last entry of each replica id, the data-parallel one, translated by `numbers`; those that have
    another number are left out."""
    for item in located:
        if all(piece.replica_id[-1] in numbers for piece in item.pieces):
            yield replace(item, pieces=tuple(
                replace(piece, replica_id=(*piece.replica_id[:-1], numbers[piece.replica_id[-1]])) for piece in item.pieces))


def _at_another_seat(construction: _Construction, families: Families, rank: int):
    """The DistributedOptimizer that Megatron makes for `rank` from the same parameters and buffers."""
    inner, buffers = construction.inner, construction.made.buffers
    kept = [buffer.data_parallel_group for buffer in buffers]
    inner.state.clear()
    inner.param_groups = _copied(construction.groups)
    for buffer, group in zip(buffers, kept, strict=True):
        buffer.data_parallel_group = _Seat(group, families.position(group, rank))
    try:
        optimizer = type(construction.made)(inner, *construction.args, **construction.kwargs)
    finally:
        for buffer, group in zip(buffers, kept, strict=True):
            buffer.data_parallel_group = group
    ensure_states(optimizer)
    return optimizer
