"""Holdings of many ranks in one file: plain columns, and texts as JSON. Nothing is pickled.

Ranks share most of their texts, and whole columns hold small numbers: both are stored once and narrow.
"""

import json
from dataclasses import astuple
from pathlib import Path

import numpy as np

from megatron_dynatrain.geometry import BoxTable
from megatron_dynatrain.space import Holdings, LogicalTensor, Storage

_PER_PIECE = ("tensor", "offset", "shape", "storage", "start", "stride", "is_main")
_WIDE = {"offset": 0, "shape": 1, "stride": 0}  # columns with one entry an axis, and what fills missing axes


def write(path: Path, holdings: dict[int, Holdings], gradient_bytes: dict[int, int]) -> None:
    """Write the holdings of ranks, and what each holds gradients in, to `path` (.npz)."""
    texts: dict[object, int] = {}  # tensors, names and dtypes of storages -> number
    number = lambda item: texts.setdefault(item, len(texts))  # noqa: E731
    columns: dict[str, list] = {name: [] for name in (*_PER_PIECE, "tensors", "storage_name", "storage_dtype", "storage_numel")}
    num_axes = max((own.boxes.offset.shape[1] for own in holdings.values()), default=0)
    for own in holdings.values():
        columns["tensors"].append([number(tensor) for tensor in own.tensors])
        columns["storage_name"].append([number(storage.name) for storage in own.storages])
        columns["storage_dtype"].append([number(storage.dtype) for storage in own.storages])
        columns["storage_numel"].append([storage.numel for storage in own.storages])
        for name in _PER_PIECE:
            values = getattr(own.boxes if name in ("tensor", "offset", "shape") else own, name)
            if name in _WIDE:
                values = np.pad(values, ((0, 0), (0, num_axes - values.shape[1])), constant_values=_WIDE[name])
            columns[name].append(values)
    counts = [[len(own.tensors), len(own.storages), len(own), own.boxes.offset.shape[1], gradient_bytes[rank]]
              for rank, own in holdings.items()]
    arrays = {name: _narrow(np.concatenate([np.asarray(part) for part in parts])) if parts else np.zeros(0, np.int64)
              for name, parts in columns.items()}
    listed = json.dumps([item if isinstance(item, str) else astuple(item) for item in texts])
    np.savez(path, ranks=np.array(list(holdings), np.int64), counts=np.array(counts, np.int64).reshape(-1, 5),
             texts=np.frombuffer(listed.encode(), np.uint8), **arrays)


def _narrow(values: np.ndarray) -> np.ndarray:
    """The same numbers in the smallest integer type that holds them. No number here is negative."""
    if values.dtype == bool or not values.size:
        return values
    return values.astype(np.min_scalar_type(int(values.max())))


def read(path: Path) -> tuple[dict[int, Holdings], dict[int, int]]:
    """What `write` was given."""
    with np.load(path, allow_pickle=False) as file:
        data = {name: file[name] for name in file.files}
    texts = [item if isinstance(item, str) else LogicalTensor(item[0], item[1], tuple(item[2]), *item[3:])
             for item in json.loads(data["texts"].tobytes())]
    holdings, gradient_bytes = {}, {}
    at = np.zeros(3, np.int64)
    for rank, counts in zip(data["ranks"].tolist(), data["counts"], strict=True):
        tensors, storages, pieces = (slice(a, a + n) for a, n in zip(at.tolist(), counts[:3].tolist(), strict=True))
        at += counts[:3]
        column = {name: data[name][pieces, : counts[3]] if name in _WIDE else data[name][pieces] for name in _PER_PIECE}
        column = {name: values if name == "is_main" else values.astype(np.int64) for name, values in column.items()}
        holdings[rank] = Holdings(
            tuple(texts[i] for i in data["tensors"][tensors]),
            tuple(Storage(texts[name], int(numel), texts[dtype]) for name, numel, dtype in zip(
                *(data[f"storage_{field}"][storages] for field in ("name", "numel", "dtype")), strict=True)),
            BoxTable(column.pop("tensor"), column.pop("offset"), column.pop("shape")), **column)
        gradient_bytes[rank] = int(counts[4])
    return holdings, gradient_bytes


def merge(parts: list[Path], path: Path) -> None:
    """Put the ranks of several files into one, in the order of ranks."""
    holdings, gradient_bytes = {}, {}
    for part in parts:
        more, bytes_of = read(part)
        holdings.update(more)
        gradient_bytes.update(bytes_of)
    write(path, dict(sorted(holdings.items())), gradient_bytes)
