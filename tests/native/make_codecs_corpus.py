"""Make the fuzzers' corpus of stored chunks, by the libraries that write such files.

    python tests/native/make_codecs_corpus.py fastpipe/native/fuzz/corpus/codecs

It needs h5py, hdf5plugin and numcodecs.  The 16 bytes before each chunk are those that fuzz_codecs.cpp reads.
"""

from __future__ import annotations

import gzip
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numcodecs
import numpy as np

# The filters' places in fuzz_codecs.cpp.
PLACES = {1: 0, 2: 1, 3: 2, 32000: 3, 32001: 4, 32004: 5, 32008: 6, 32015: 7}
BITSHUFFLE, SHUFFLE = 32008, 2
MOST_STEPS = 4

Step = tuple[int, int, int]  # place of the filter, bytes of an element, codec of bitshuffle


def contents() -> dict[str, np.ndarray]:
    """Small arrays as datasets have them."""
    rng = np.random.default_rng(7)
    smooth = np.cumsum(rng.normal(size=(10, 23)), axis=1)
    return {
        "float32": smooth.astype(np.float32),
        "uint16": (smooth * 40 + 900).astype(np.uint16),
        "labels": (rng.integers(0, 3, (9, 31)) * (np.arange(31) > 12)).astype(np.uint8),
        "float64": np.round(smooth, 1),
    }


def input_of(steps: list[Step], nbytes: int, stored: bytes, mask: int = 0, block: int = 0) -> bytes:
    """One input of the fuzzer."""
    of_steps = b"".join(bytes([place | codec << 4, element]) for place, element, codec in steps)
    options = bytes([len(steps), mask]) + of_steps.ljust(2 * MOST_STEPS, b"\0")
    return options + nbytes.to_bytes(3, "little") + bytes([block // 8, 1, 0]) + stored


def hdf5_inputs() -> dict[str, bytes]:
    """Chunks that the HDF5 library wrote."""
    kinds: dict[str, Mapping[str, Any]] = {
        "gzip": {"compression": "gzip", "shuffle": True},
        "sum": {"compression": "gzip", "shuffle": True, "fletcher32": True},
        "lzf": {"compression": "lzf", "shuffle": True},
        "lz4": hdf5plugin.LZ4(nbytes=256),
        "zstd": hdf5plugin.Zstd(),
        "bitshuffle": hdf5plugin.Bitshuffle(cname="none"),
        "bitshuffle-lz4": hdf5plugin.Bitshuffle(nelems=64, cname="lz4"),
        "bitshuffle-zstd": hdf5plugin.Bitshuffle(nelems=64, cname="zstd"),
        "blosc": hdf5plugin.Blosc(cname="lz4", shuffle=hdf5plugin.Blosc.BITSHUFFLE),
    }
    made = {}
    for kind, options in kinds.items():
        for name, content in contents().items():
            with h5py.File("memory", "w", driver="core", backing_store=False) as file:
                dataset = file.create_dataset("x", data=content, chunks=content.shape, **options)
                mask, stored = dataset.id.read_direct_chunk((0, 0))
                plist = dataset.id.get_create_plist()
                steps, block = [], 0
                for number in range(plist.get_nfilters()):
                    code, _, values, _ = plist.get_filter(number)
                    element = values[0] if code == SHUFFLE else values[2] if code == BITSHUFFLE else 1
                    codec = values[4] if code == BITSHUFFLE and len(values) > 4 else 0
                    block = values[3] if code == BITSHUFFLE else block
                    steps.append((PLACES[code], element, codec))
            made[f"{kind}-{name}"] = input_of(steps, content.nbytes, stored, mask, block)
    return made


def blosc_inputs() -> dict[str, bytes]:
    """Buffers that Blosc made, of several blocks."""
    made = {}
    wide = np.tile(contents()["uint16"], 6)
    for codec in ("blosclz", "lz4", "zlib", "zstd"):
        for shuffle in (0, 1, 2):
            stored = numcodecs.Blosc(codec, 5, shuffle, 512).encode(wide)
            made[f"buffer-{codec}-{shuffle}"] = input_of([(PLACES[32001], 1, 0)], wide.nbytes, stored)
    noise = np.random.default_rng(0).bytes(300)
    noisy = (wide & 0xFF00) | np.random.default_rng(1).integers(0, 256, wide.shape).astype(np.uint16)
    stored = numcodecs.Blosc("lz4", 5, 1, 512).encode(noisy)  # parts of blocks gain nothing
    made["buffer-noisy"] = input_of([(PLACES[32001], 1, 0)], noisy.nbytes, stored)
    made["buffer-copied"] = input_of([(PLACES[32001], 1, 0)], 300, numcodecs.Blosc("lz4", 5, 0).encode(noise))
    made["gzip-member"] = input_of([], wide.nbytes, gzip.compress(wide.tobytes(), 6, mtime=0))
    return made


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (hdf5_inputs() | blosc_inputs()).items():
        (folder / name).write_bytes(content)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
