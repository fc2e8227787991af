"""Tensors whose memory comes later: a model is built whole, and takes its memory piece by piece when it is filled.

Inside `LateMemory`, large new tensors have a storage of no bytes. What would write into them is left out, since every element is
about to be written; what is computed from them is late, too; views are made as ever. `torch.UntypedStorage.resize_` gives a
storage its memory, and takes it away, under all tensors that lie in it. (torch 2.14; Megatron frees its gradient buffers so.)
"""

from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

_FACTORIES = {f"aten::{name}{kind}" for name in ("empty", "zeros", "ones", "full", "rand", "randn") for kind in ("", "_like")} | {
    f"aten::new_{name}" for name in ("empty", "zeros", "ones", "full", "empty_strided")} | {"aten::empty_strided"}

_sizes: dict[int, int] = {}  # bytes to come, by the address of the storage, inside `LateMemory`


class MemoryNeeded(Exception):
    """Something cannot be built without memory."""


def is_late(tensor: torch.Tensor) -> bool:
    """Whether the tensor has elements and no memory."""
    return tensor.device.type != "meta" and tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def nominal_bytes(storage: torch.UntypedStorage) -> int:
    """The size of a storage; inside `LateMemory` also of one that is late."""
    return storage.nbytes() or _sizes.get(storage._cdata, 0)


@dataclass(slots=True)
class _Made:
    """A late storage. again: the call that made its values, or None where others were to be written."""

    storage: StorageWeakRef
    like: torch.Tensor  # a meta tensor
    device: torch.device
    again: tuple | None

    def fill(self) -> None:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        func, args, kwargs = self.again
        values = func(*args, **kwargs)
        storage.resize_(_sizes.pop(storage._cdata))
        torch.empty(0, dtype=values.dtype, device=values.device).set_(storage, 0, values.shape, values.stride()).copy_(values)


class LateMemory(TorchDispatchMode):
    """Inside, new tensors of `device_type` with at least `threshold` bytes are late. Not to be nested.

    Raises MemoryNeeded where values of a late tensor are asked for, at once or in `settle`.
    """

    def __init__(self, device_type: str, threshold: int = 4 << 10):
        super().__init__()
        self._device_type, self._threshold = device_type, threshold
        self._made: dict[int, _Made] = {}  # by the address of the storage
        self._lost: str | None = None

    def __exit__(self, *error):
        _sizes.clear()
        return super().__exit__(*error)

    def settle(self, awaited: set[int]) -> None:
        """At the end: memory and values for late tensors that are in use and will not be filled by others.

        awaited: addresses (`_cdata`) of the storages that will. Raises MemoryNeeded where values are lost.
        """
        with _disable_current_modes():
            for address, made in self._made.items():
                if address not in awaited and not made.storage.expired():
                    if made.again is None:
                        self._lost = self._lost or f"a tensor of shape {tuple(made.like.shape)} that was written or computed"
                    else:
                        made.fill()
        if self._lost:
            raise MemoryNeeded(f"the model keeps {self._lost}")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        late = {tensor.untyped_storage()._cdata: tensor for tensor in tensors if is_late(tensor)}
        if late:
            return self._with_late(func, args, kwargs, tensors, late)
        if func._schema.name in _FACTORIES:
            return self._new(func, args, kwargs, tensors)
        return func(*args, **kwargs)

    def _new(self, func, args, kwargs, tensors):
        device = torch.device(kwargs.get("device") or (tensors[0].device if tensors else "cpu"))
        if device.type != self._device_type or kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        args, kwargs = _on_meta((args, {**kwargs, "device": device}))
        like = func(*args, **{**kwargs, "device": "meta"})
        if like.numel() * like.element_size() < self._threshold:
            return func(*args, **kwargs)
        return self._late(like, device, (func, args, kwargs))

    def _with_late(self, func, args, kwargs, tensors, late):
        schema = func._schema
        if schema.is_mutable:
            return self._unwritten(func, args, kwargs)
        if schema.returns and all(returned.alias_info is not None for returned in schema.returns):
            return _view(func, args, kwargs, late)
        device = torch.device(kwargs.get("device") or next(iter(late.values())).device)
        args, kwargs = _on_meta((args, {**kwargs, "device": "meta"} if "device" in kwargs else kwargs))
        try:
            made = func(*args, **kwargs)
        except Exception as error:
            raise MemoryNeeded(f"{schema.name} needs the values of a tensor that is being built: {error}") from error
        return tree_map_only(torch.Tensor, lambda like: self._late(like, device, None), made)

    def _unwritten(self, func, args, kwargs):
        """Leave out an operation that writes into some of its arguments."""
        schema, written = func._schema, []
        given = dict(zip((argument.name for argument in schema.arguments), args)) | kwargs
        for argument in schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name in given:
                for tensor in tree_leaves(given[argument.name]):
                    written.append(tensor)
                    made = self._made.get(tensor.untyped_storage()._cdata)
                    if made is not None:
                        made.again = None
                    if not is_late(tensor):
                        self._lost = self._lost or f"a tensor of shape {tuple(tensor.shape)} that is written from a larger one"
        returned = schema.returns
        return None if not returned else written[0] if len(returned) == 1 else tuple(written)

    def _late(self, like: torch.Tensor, device: torch.device, again: tuple | None) -> torch.Tensor:
        """A late tensor shaped as a meta tensor."""
        tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
        storage = tensor.untyped_storage()
        _sizes[storage._cdata] = storage.nbytes()
        self._made[storage._cdata] = _Made(StorageWeakRef(storage), like, device, again)
        storage.resize_(0)
        return tensor


def _on_meta(tree):
    return tree_map_only(torch.Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"), tree)


def _view(func, args, kwargs, late):
    """Views are checked against the size of the storage, so that it has its size for a moment. Nothing is written to it."""
    storages = [tensor.untyped_storage() for tensor in late.values()]
    for storage in storages:
        storage.resize_(_sizes[storage._cdata])
    try:
        return func(*args, **kwargs)
    finally:
        for storage in storages:
            storage.resize_(0)
