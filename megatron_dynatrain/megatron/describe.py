"""Describe one rank: what its model and its optimizer hold, in the coordinates of Megatron's checkpoints.

One function for live objects and for dry ones (built on the meta device in a fake world): it looks at shapes, strides and
storages, never at values, so both give the same description.

Where the boxes come from: `sharded_state_dict()` of the model says, for every parameter and persistent buffer, which box
of which logical tensor it is; factories (SwiGLU, fused projections) are expanded, and each of their children is found
again as a view of the parameter. Data parallelism is one more cut, read from the built optimizer: the flat interval of
each parameter that this rank owns. (megatron-core: `dist_checkpointing.mapping`, `optimizer.distrib_optimizer`.)
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from megatron_dynatrain import late
from megatron_dynatrain.errors import SpaceError, reason
from megatron_dynatrain.geometry import Box, flat_interval_boxes, row_major_strides
from megatron_dynatrain.space import Holdings, LogicalTensor, Memory, Piece, Storage

WEIGHT = "weight"  # field of parameters and persistent buffers
MASTER = "param"  # field of fp32 masters, as Megatron's optimizers name it


@dataclass(frozen=True, slots=True)
class LocalPiece:
    """A box of a local model tensor and the box of a logical tensor that it is.

    local_offset, shape: in the local tensor's own axes; global_offset has `num_prepended` axes more, each one wide.
    """

    key: str
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    local_offset: tuple[int, ...]
    shape: tuple[int, ...]
    replica_id: tuple[int, ...]
    is_padded: bool = False

    @property
    def num_prepended(self) -> int:
        return len(self.global_shape) - len(self.shape)


@dataclass(slots=True, eq=False)
class RankState:
    """The description of a rank and the objects that it describes.

    holdings: what the rank holds. storages: the flat tensors, numbered as in `holdings.storages`. allocations: what they lie
    in, numbered as in `holdings.memory`.
    params: for every parameter that an optimizer owns here, in the optimizer's order: its pieces, the optimizer, the
    tensor that the optimizer updates and the group that it is in.
    """

    holdings: Holdings
    storages: list[torch.Tensor]
    allocations: list[torch.UntypedStorage]
    owned: list["OwnedParam"] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class OwnedParam:
    """A parameter of which this rank's optimizer updates a part."""

    name: str
    pieces: tuple[LocalPiece, ...]
    main_param: torch.Tensor
    group: dict
    optimizer: object  # the torch optimizer that holds the state of `main_param`


@dataclass(frozen=True, slots=True, eq=False)
class LocatedTensor:
    """A parameter or persistent buffer of the model, and the pieces of logical tensors that it consists of."""

    name: str
    tensor: torch.Tensor
    pieces: tuple[LocalPiece, ...]


def describe(model: list, optimizer) -> RankState:
    """The state of this rank. Not collective; `parallel_state` must be that of the layout in which both were built.

    model: the chunks that Megatron's training loop holds. optimizer: a MegatronOptimizer whose states exist (see
    `ensure_states`), or None. Raises SpaceError for a tensor that cannot be placed in the space.
    """
    return describe_located(locate(model), leaf_optimizers(optimizer), gradient_bytes(model))


def grad_buffers(model: list) -> list:
    """The buffers in which Megatron's DDP holds the gradients of these chunks."""
    return [buffer for chunk in model if hasattr(chunk, "expert_parallel_buffers")
            for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers] if buffer.grad_data is not None]


def gradient_bytes(model: list) -> int:
    """What a rank with these chunks holds gradients in."""
    return sum(buffer.grad_data.nbytes for buffer in grad_buffers(model))


def locate(model: list) -> list[LocatedTensor]:
    """Where the tensors of all model chunks lie in the space. Raises SpaceError as `describe` does."""
    located = []
    for index, chunk in enumerate(unwrap(model)):
        prefix = f"chunk{index}." if len(model) > 1 else ""
        located += [LocatedTensor(prefix + name, tensor, pieces) for name, tensor, pieces in _model_tensors(chunk)]
    return located


def describe_located(located: list[LocatedTensor], optimizers: list, gradients: int) -> RankState:
    """The state of a rank with these model tensors, these optimizers (see `leaf_optimizers`) and as many bytes of gradients.
    Not collective."""
    with torch._C.DisableTorchFunction():  # only shapes are read; a device map would look at every call
        return _described(located, optimizers, gradients)


def _described(located: list[LocatedTensor], optimizers: list, gradients: int) -> RankState:
    storages: list[Storage] = []
    tensors: list[torch.Tensor] = []
    pieces: list[Piece] = []
    by_param: dict[int, tuple[LocalPiece, ...]] = {}
    names: dict[int, str] = {}
    allocations: dict[int, tuple[torch.UntypedStorage, int]] = {}  # by address: the object and its number
    allocation_of: list[int] = []

    def add_storage(name: str, tensor: torch.Tensor) -> int:
        storages.append(Storage(name, tensor.numel(), _dtype_name(tensor)))
        tensors.append(tensor.detach().view(-1))
        allocation = tensor.untyped_storage()
        allocation_of.append(allocations.setdefault(allocation._cdata, (allocation, len(allocations)))[1])
        return len(storages) - 1

    for item in located:
        tensor = item.tensor
        number = add_storage(item.name, tensor)
        by_param[id(tensor)], names[id(tensor)] = item.pieces, item.name
        strides = row_major_strides(tuple(tensor.shape))
        for local in item.pieces:
            start = sum(o * s for o, s in zip(local.local_offset, strides, strict=True))
            pieces.append(_piece(local, WEIGHT, tensor, Box(local.global_offset, _global_shape_of(local, local.shape)),
                                 number, start, strides, not any(local.replica_id)))

    owned = []
    for part in optimizers:
        instance = getattr(part, "distributed_optimizer_instance_id", 0)
        for param, main_param, interval, group in _owned_params(part):
            local_pieces, name = by_param[id(param)], names[id(param)]
            owned.append(OwnedParam(name, local_pieces, main_param, group, part.optimizer))
            for field_name, state in _state_tensors(part, param, main_param):
                number = add_storage(f"{name}:{field_name}", state)
                for local in local_pieces:
                    # The distributed optimizer cuts over data parallelism, so there the last entry of the replica id,
                    # the data-parallel rank, tells pieces apart that are different; instances of it are replicas.
                    replica = (*local.replica_id[:-1], instance) if interval is not None else local.replica_id
                    for box, start in _owned_boxes(local, tuple(param.shape), interval):
                        pieces.append(_piece(local, field_name, state, box, number, start,
                                             row_major_strides(tuple(param.shape)), not any(replica)))
    held = [allocation for allocation, _ in allocations.values()]
    nbytes = [late.nominal_bytes(allocation) for allocation in held]
    memory = Memory(np.array(allocation_of, np.int64), np.array(nbytes, np.int64), gradients)
    return RankState(Holdings.from_pieces(pieces, storages, memory), tensors, held, owned)


def unwrap(model: list) -> list:
    """The chunks without DDP and precision wrappers."""
    from megatron.core.utils import unwrap_model

    return unwrap_model(model)


def leaf_optimizers(optimizer) -> list:
    """The optimizers that own parameters: those chained in a ChainedOptimizer, without stubs."""
    if optimizer is None:
        return []
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in chained if not getattr(part, "is_stub_optimizer", False)]


def ensure_states(optimizer) -> None:
    """Create the optimizer states that a first step would create, so that they can be described and filled."""
    for part in leaf_optimizers(optimizer):
        if part.init_state_fn is not None:
            part.init_state_fn(part.optimizer, part.config)
        if isinstance(part.optimizer, (torch.optim.AdamW, torch.optim.Adam)):
            # torch keeps the step with each parameter, and finds states without one broken.
            for group in part.optimizer.param_groups:
                for param in group["params"]:
                    part.optimizer.state[param].setdefault("step", torch.tensor(0.0, dtype=torch.float32, device="cpu"))
        for group in part.optimizer.param_groups:
            if group.get("momentum"):  # SGD, of torch and of Apex: a first step on a zero buffer is the first step
                for param in group["params"]:
                    if part.optimizer.state[param].get("momentum_buffer") is None:
                        part.optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _global_shape_of(local: LocalPiece, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1,) * local.num_prepended + tuple(shape)


def _piece(local, field_name, tensor, box, storage, start, strides, is_main) -> Piece:
    logical = LogicalTensor(local.key, field_name, local.global_shape, _dtype_name(tensor), tensor.element_size(),
                            local.is_padded)
    return Piece(logical, box, storage, start, (0,) * local.num_prepended + tuple(strides), is_main)


def _model_tensors(chunk) -> Iterator[tuple[str, torch.Tensor, tuple[LocalPiece, ...]]]:
    """(name, tensor, its pieces) for every parameter and persistent buffer of a model chunk."""
    from megatron.core import parallel_state

    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
                "singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    persistent = {id(tensor) for tensor in chunk.state_dict(keep_vars=True).values() if isinstance(tensor, torch.Tensor)}
    named = {id(tensor): (name, tensor) for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]
             if id(tensor) in persistent}
    located: dict[int, list[LocalPiece]] = {identity: [] for identity in named}
    try:
        tree = chunk.sharded_state_dict(metadata=metadata)
    except Exception as error:
        raise SpaceError("Megatron cannot make a sharded_state_dict of this model in this layout, so it could not save a "
                         f"checkpoint either: {reason(error)}") from error
    for owner, sharded in _sharded_tensors(tree):
        if owner is None or id(owner) not in named:
            raise SpaceError(f"{sharded.key} in Megatron's sharded_state_dict is no view of a parameter or buffer, so it "
                             "cannot be moved in place; this kind of module is not supported")
        located[id(owner)].append(_locate(owner, sharded))
    for identity, (name, tensor) in named.items():
        covered = sum(torch.Size(local.shape).numel() for local in located[identity])
        if covered != tensor.numel():
            raise SpaceError(f"Megatron's sharded_state_dict places {covered} of the {tensor.numel()} elements of {name}; "
                             "a switch would lose the others; this kind of module is not supported")
        yield name, tensor, tuple(located[identity])


def _sharded_tensors(tree) -> Iterator[tuple[torch.Tensor | None, object]]:
    """(the model tensor, a ShardedTensor of it) for all leaves of a sharded state dict, factories expanded."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    if isinstance(tree, ShardedTensor):
        yield tree.data, tree
    elif isinstance(tree, ShardedTensorFactory):
        for _, child in _sharded_tensors(tree.build()):
            yield tree.data, child
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _sharded_tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _sharded_tensors(value)


def _locate(owner: torch.Tensor, sharded) -> LocalPiece:
    """Where a ShardedTensor lies in the model tensor that it was made from."""
    view = sharded.data
    same_storage = view.untyped_storage()._cdata == owner.untyped_storage()._cdata
    if not owner.is_contiguous() or not same_storage or view.stride() != owner.stride():
        raise SpaceError(f"{sharded.key} is a copy or a transposed view of its parameter in Megatron's sharded_state_dict; "
                         "this kind of module is not supported")
    rest = view.storage_offset() - owner.storage_offset()
    local_offset = []
    for stride in owner.stride():
        index, rest = divmod(rest, stride)
        local_offset.append(index)
    replica_id = sharded.replica_id if isinstance(sharded.replica_id, tuple) else (sharded.replica_id,)
    return LocalPiece(sharded.key, tuple(sharded.global_shape), tuple(sharded.global_offset), tuple(local_offset),
                      tuple(view.shape), replica_id, bool(sharded.allow_shape_mismatch))


def _owned_params(part) -> Iterator[tuple[torch.Tensor, torch.Tensor, tuple[int, int] | None, dict]]:
    """(model parameter, tensor that the optimizer updates, flat interval of the parameter or None for all, group)."""
    groups = part.optimizer.param_groups
    if hasattr(part, "model_param_group_index_map"):  # DistributedOptimizer
        for param, (group, order) in part.model_param_group_index_map.items():
            owned = part._get_model_param_range_map(param)["param"]
            yield param, groups[group]["params"][order], (owned.start, owned.end), groups[group]
        return
    model_param = {}
    if hasattr(part, "float16_groups"):  # Float16OptimizerWithFloat16Params
        for params, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            model_param.update({id(main): param for param, main in zip(params, mains, strict=True)})
    for group in groups:
        for main_param in group["params"]:
            yield model_param.get(id(main_param), main_param), main_param, None, group


def _state_tensors(part, param: torch.Tensor, main_param: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(field, tensor) for the master, where it has memory of its own, and for every state of the size of the master."""
    if main_param.untyped_storage()._cdata != param.untyped_storage()._cdata:
        yield MASTER, main_param
    for name, state in sorted(part.optimizer.state.get(main_param, {}).items()):
        if isinstance(state, torch.Tensor) and state.dim() > 0:
            if state.numel() != main_param.numel() or not state.is_contiguous():
                raise SpaceError(f"the optimizer state {name} of shape {tuple(state.shape)} is not shaped like its parameter "
                                 f"({tuple(main_param.shape)}); this optimizer is not supported")
            yield name, state


def _owned_boxes(local: LocalPiece, shape: tuple[int, ...], interval: tuple[int, int] | None):
    """(global box, start in the flat state) for the parts of a piece that a flat interval of the parameter owns."""
    strides = row_major_strides(shape)
    begin = 0
    boxes = [Box((0,) * len(shape), shape)]
    if interval is not None:
        begin = interval[0]
        boxes = flat_interval_boxes(shape, *interval)
    prepended = local.num_prepended
    for box in boxes:
        low = [max(a, b) for a, b in zip(box.offset, local.local_offset, strict=True)]
        high = [min(a + s, b + t) for a, s, b, t in zip(box.offset, box.shape, local.local_offset, local.shape, strict=True)]
        if all(h > lo for lo, h in zip(low, high, strict=True)):
            offset = local.global_offset[:prepended] + tuple(
                g + lo - o for g, lo, o in zip(local.global_offset[prepended:], low, local.local_offset, strict=True))
            extent = tuple(h - lo for lo, h in zip(low, high, strict=True))
            yield (Box(offset, _global_shape_of(local, extent)),
                   sum(lo * s for lo, s in zip(low, strides, strict=True)) - begin)
