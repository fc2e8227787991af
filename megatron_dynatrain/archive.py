"""Holdings of many ranks in one file: plain columns, and texts as JSON. Nothing is pickled.

Ranks share most of their texts, and whole columns hold small numbers: both are stored once and narrow.
"""

import json
from dataclasses import astuple
from pathlib import Path

import numpy as np

from megatron_dynatrain.geometry import BoxTable
from megatron_dynatrain.space import Holdings, LogicalTensor, Memory, Storage

_PER_PIECE = ("tensor", "offset", "shape", "storage", "start", "stride", "is_main")
_WIDE = {"offset": 0, "shape": 1, "stride": 0}  # columns with one entry an axis, and what fills missing axes


def write(path: Path, holdings: dict[int, Holdings]) -> None:
    """Write the holdings of ranks to `path` (.npz)."""
    texts: dict[object, int] = {}  # tensors, names and dtypes of storages -> number
    number = lambda item: texts.setdefault(item, len(texts))  # noqa: E731
    columns: dict[str, list] = {name: [] for name in (
        *_PER_PIECE, "tensors", "storage_name", "storage_dtype", "storage_numel", "storage_allocation", "allocation_bytes")}
    num_axes = max((own.boxes.offset.shape[1] for own in holdings.values()), default=0)
    for own in holdings.values():
        columns["tensors"].append([number(tensor) for tensor in own.tensors])
        columns["storage_name"].append([number(storage.name) for storage in own.storages])
        columns["storage_dtype"].append([number(storage.dtype) for storage in own.storages])
        columns["storage_numel"].append([storage.numel for storage in own.storages])
        columns["storage_allocation"].append(own.memory.of_storage)
        columns["allocation_bytes"].append(own.memory.nbytes)
        for name in _PER_PIECE:
            values = getattr(own.boxes if name in ("tensor", "offset", "shape") else own, name)
            if name in _WIDE:
                values = np.pad(values, ((0, 0), (0, num_axes - values.shape[1])), constant_values=_WIDE[name])
            columns[name].append(values)
    counts = [[len(own.tensors), len(own.storages), len(own), len(own.memory.nbytes), own.boxes.offset.shape[1],
               own.memory.gradient_bytes] for own in holdings.values()]
    arrays = {name: _narrow(np.concatenate([np.asarray(part) for part in parts])) if parts else np.zeros(0, np.int64)
              for name, parts in columns.items()}
    listed = json.dumps([item if isinstance(item, str) else astuple(item) for item in texts])
    np.savez(path, ranks=np.array(list(holdings), np.int64), counts=np.array(counts, np.int64).reshape(-1, 6),
             texts=np.frombuffer(listed.encode(), np.uint8), **arrays)


def _narrow(values: np.ndarray) -> np.ndarray:
    """The same numbers in the smallest integer type that holds them. No number here is negative."""
    if values.dtype == bool or not values.size:
        return values
    return values.astype(np.min_scalar_type(int(values.max())))


def read(path: Path) -> dict[int, Holdings]:
    """What `write` was given."""
    with np.load(path, allow_pickle=False) as file:
        data = {name: file[name] for name in file.files}
    texts = [item if isinstance(item, str) else LogicalTensor(item[0], item[1], tuple(item[2]), *item[3:])
             for item in json.loads(data["texts"].tobytes())]
    holdings = {}
    at = np.zeros(4, np.int64)
    for rank, counts in zip(data["ranks"].tolist(), data["counts"], strict=True):
        tensors, storages, pieces, allocations = (slice(a, a + n) for a, n in zip(at.tolist(), counts[:4].tolist(), strict=True))
        at += counts[:4]
        column = {name: data[name][pieces, : counts[4]] if name in _WIDE else data[name][pieces] for name in _PER_PIECE}
        column = {name: values if name == "is_main" else values.astype(np.int64) for name, values in column.items()}
        holdings[rank] = Holdings(
            tuple(texts[i] for i in data["tensors"][tensors]),
            tuple(Storage(texts[name], int(numel), texts[dtype]) for name, numel, dtype in zip(
                *(data[f"storage_{field}"][storages] for field in ("name", "numel", "dtype")), strict=True)),
            BoxTable(column.pop("tensor"), column.pop("offset"), column.pop("shape")), **column,
            memory=Memory(data["storage_allocation"][storages].astype(np.int64),
                          data["allocation_bytes"][allocations].astype(np.int64), int(counts[5])))
    return holdings


def merge(parts: list[Path], path: Path) -> None:
    """Put the ranks of several files into one, in the order of ranks."""
    holdings = {rank: held for part in parts for rank, held in read(part).items()}
    write(path, dict(sorted(holdings.items())))
