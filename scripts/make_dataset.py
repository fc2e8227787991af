"""Build a byte-level Megatron indexed dataset from the sources of the Python standard library.

    python scripts/make_dataset.py runs/data/stdlib

writes `runs/data/stdlib.bin` and `.idx` with Megatron's own builder: one document a file, one token a byte, and the
end-of-document token 256. With `--tokenizer-type NullTokenizer --vocab-size 257` that is a complete data set.
"""

import sys
import sysconfig
from pathlib import Path

import numpy
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

END_OF_DOCUMENT = 256


def source_files(limit_bytes: int):
    """Files of the standard library in a stable order, up to `limit_bytes` in all; tests and packages left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    total = 0
    for path in sorted(root.rglob("*.py")):
        if {"test", "tests", "site-packages", "idlelib"} & set(path.relative_to(root).parts):
            continue
        total += path.stat().st_size
        if total > limit_bytes:
            return
        yield path


def build(prefix: str, limit_bytes: int = 8_000_000) -> int:
    """Write the data set unless it is there already; returns its number of tokens."""
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    if not Path(get_idx_path(prefix)).exists():
        builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype=numpy.uint16)
        for path in source_files(limit_bytes):
            tokens = numpy.frombuffer(path.read_bytes(), dtype=numpy.uint8).astype(numpy.int64)
            if len(tokens):
                builder.add_document(torch.from_numpy(numpy.append(tokens, END_OF_DOCUMENT)), [len(tokens) + 1])
        builder.finalize(get_idx_path(prefix))
    return Path(get_bin_path(prefix)).stat().st_size // 2


if __name__ == "__main__":
    prefix = sys.argv[1] if len(sys.argv) > 1 else "runs/data/stdlib"
    print(f"{prefix}: {build(prefix):,} tokens")
