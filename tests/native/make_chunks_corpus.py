"""Make the fuzzer's corpus of datasets in chunks, as the HDF5 library writes them.

    python tests/native/make_chunks_corpus.py fastpipe/native/fuzz/corpus/chunks

It needs h5py and hdf5plugin.  The bytes before the file are those that fuzz_chunks.cpp reads.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np

from fastpipe.hdf5.filters import described
from fastpipe.hdf5.layout import read_layout

# The filters' places in fuzz_chunks.cpp.
PLACES = {1: 0, 2: 1, 3: 2, 32000: 3, 32001: 4, 32004: 5, 32015: 6, 32008: 7}

KINDS: dict[str, Mapping[str, Any]] = {
    "plain": {},
    "gzip": {"compression": "gzip", "shuffle": True},
    "sum": {"compression": "gzip", "fletcher32": True},
    "lzf": {"compression": "lzf", "shuffle": True},
    "lz4": hdf5plugin.LZ4(nbytes=64),
    "zstd": hdf5plugin.Zstd(),
    "bitshuffle": hdf5plugin.Bitshuffle(nelems=16, cname="lz4"),
    "blosc": hdf5plugin.Blosc(cname="lz4", shuffle=hdf5plugin.Blosc.SHUFFLE),
}
SHAPES = {"rows": ((13, 20), (4, 20)), "parts": ((6, 9, 10), (4, 5, 7))}


def input_of(path: Path, sample_dims: int) -> bytes:
    """One input of the fuzzer: a file's dataset."""
    with h5py.File(path, "r") as file:
        layout = read_layout(file["x"])
    table, content, chunks = bytearray(), path.read_bytes(), bytearray()
    for offset, size, mask in zip(layout.offsets, layout.sizes, layout.masks, strict=True):
        if offset < 0:
            table += bytes(8)
            continue
        table += (
            (len(chunks) + 1).to_bytes(3, "little")
            + int(size).to_bytes(2, "little")
            + bytes([0, int(mask), 0])
        )
        chunks += content[offset : offset + size]
    steps = [described(step) for step in layout.filters]
    of_steps = b"".join(bytes([PLACES[code] | codec << 4, element]) for code, element, codec, _ in steps)
    dims = len(layout.shape)
    options = bytes([dims - 1, sample_dims - 1, layout.dtype.itemsize - 1, *layout.shape]).ljust(7, b"\0")
    options += bytes(side - 1 for side in layout.chunk).ljust(4, b"\0") + bytes([len(steps)])
    options += of_steps.ljust(8, b"\0") + bytes([2, 64, 5])
    return options.ljust(24, b"\0") + table + chunks


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    random, path = np.random.default_rng(7), folder / "new.h5"
    for kind, options in KINDS.items():
        for name, (shape, chunk) in SHAPES.items():
            data = np.cumsum(random.integers(-3, 4, shape), axis=-1).astype(np.int16)
            with h5py.File(path, "w") as file:
                dataset = file.create_dataset("x", shape, "i2", chunks=chunk, fillvalue=7, **options)
                dataset[: shape[0] - 3] = data[: shape[0] - 3]  # the last chunks of rows are holes
            (folder / f"{kind}-{name}").write_bytes(input_of(path, 1 if name == "rows" else 2))
    path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
