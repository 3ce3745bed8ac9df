"""Which HDF5 files the benchmark reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe._extras import require
from fastpipe.bench.data import made_once
from fastpipe.errors import OptionError
from fastpipe.testing.mels import log_mels, mel_rows, read_wav, write_table

__all__ = [
    "BITSHUFFLE",
    "CELLS",
    "FEW",
    "LAYOUTS",
    "Sizes",
    "Table",
    "described",
    "look",
    "made_cells",
    "made_chunks",
    "made_tables",
    "wav_rows",
]

SHAPE = (64, 128)
ROWS_IN_CHUNK = 16
# Segments of a file: (long, short, bands, frames), 1 KiB each; in another file fewer.
CELLS, FEW = (10, 20, 16, 16), (3, 4, 16, 16)
_AT_ONCE = 1024

# Section → its name, how its chunks are compressed (None: not), whether there are chunks.
LAYOUTS: dict[str, tuple[str, str | None, bool]] = {
    "gzip": ("gzip(4) + shuffle", "gzip", True),
    "lzf": ("LZF + shuffle", "lzf", True),
    "plain": ("chunks, uncompressed", None, True),
    "contiguous": ("contiguous", None, False),
}
# Where hdf5plugin is there, which h5py reads it by.
BITSHUFFLE = "bitshuffle"


@dataclass(frozen=True)
class Sizes:
    """How much data is made up.

    Attributes:
        rows: of each of the four layouts.
        files: in the file of cells.
        few: in that of few cells each.
        chunks: of the file with many chunks.
    """

    rows: int = 16_384
    files: int = 704
    few: int = 8192
    chunks: int = 100_000


@dataclass(frozen=True)
class Table:
    """A dataset of a file.

    Attributes:
        key: the section of the result.
        label: what the report calls it.
        path: the file.
        dataset: the dataset's path in it.
        shape, dtype: the dataset's.
        chunk: of its chunks; None where it is contiguous.
        is_packed: whether chunks have to be decoded.
        sample_dims: how many dimensions count samples.
        labels: another dataset, of a number for each sample.
        bytes: what the file's dataset takes.
    """

    key: str
    label: str
    path: Path
    dataset: str
    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...] | None
    is_packed: bool
    sample_dims: int = 1
    labels: str | None = None
    bytes: int = 0

    @property
    def samples(self) -> int:
        """How many there are."""
        return math.prod(self.shape[: self.sample_dims])

    @property
    def group(self) -> int:
        """Samples of a chunk along the first dimension, or as many as a chunk would have."""
        return self.chunk[0] if self.chunk else ROWS_IN_CHUNK

    @property
    def sample_bytes(self) -> int:
        """Bytes of a sample."""
        return math.prod(self.shape[self.sample_dims :]) * np.dtype(self.dtype).itemsize

    def opened(self, **options: Any) -> Any:
        """The file, opened by h5py with these options, and with the filters that it needs."""
        if self.key == BITSHUFFLE:
            require("hdf5plugin", extra="hdf5")
        return require("h5py", extra="hdf5").File(self.path, "r", **options)

    def warm(self) -> None:
        """Read the file once, so that the page cache has it."""
        with open(self.path, "rb") as file:
            while file.read(1 << 24):
                pass


def look(
    path: Path, dataset: str, key: str, label: str = "", *, sample_dims: int = 1, labels: str | None = None
) -> Table:
    """A dataset of an existing file.

    Raises:
        OptionError: it is not there, or has nothing to read.
    """
    h5py = require("h5py", extra="hdf5")
    try:
        with h5py.File(path, "r") as file:
            found = file.get(dataset)
            if not isinstance(found, h5py.Dataset):
                known = ", ".join(name for name, value in file.items() if isinstance(value, h5py.Dataset))
                raise OptionError(f"{path.name!r} has no dataset {dataset!r}; it has: {known or 'none'}")
            is_plain = found.dtype.kind in "iuf" and found.dtype.isnative
            if not is_plain or found.ndim < 2 or found.size == 0:
                raise OptionError(
                    f"dataset {dataset!r} must have rows of numbers as torch has them, got {found.dtype}"
                    f" of shape {found.shape}"
                )
            filters = [name for name in (found.compression, found.shuffle and "shuffle") if name]
            words = " + ".join(filters) or ("chunks, uncompressed" if found.chunks else "contiguous")
            is_packed = found.id.get_create_plist().get_nfilters() > 0
            return Table(
                key, label or words, path, dataset, found.shape, str(found.dtype), found.chunks, is_packed,
                sample_dims, labels, found.id.get_storage_size(),
            )  # fmt: skip
    except OSError as error:
        raise OptionError(f"{str(path)!r} cannot be read as HDF5: {error}") from None


def wav_rows(folder: Path) -> Callable[[np.random.Generator, int], npt.NDArray[np.float32]]:
    """A maker of rows like those of `mel_rows`, cut anywhere from the WAV files of a folder.

    Raises:
        OptionError: there are too few.
    """
    files = sorted(folder.glob("*.wav"))
    sounds = [log_mels(*read_wav(file), bands=SHAPE[0]) for file in files]
    whole = np.concatenate(sounds, axis=1) if sounds else np.empty((SHAPE[0], 0), np.float32)
    if whole.shape[1] < 2 * SHAPE[1]:
        raise OptionError(f"{str(folder)!r} must have WAV files of some seconds, got {len(files)} files")

    def rows(rng: np.random.Generator, count: int) -> npt.NDArray[np.float32]:
        starts = rng.integers(0, whole.shape[1] - SHAPE[1], count)
        return np.stack([whole[:, start : start + SHAPE[1]] for start in starts.tolist()])

    return rows


def made_tables(
    sizes: Sizes,
    cache: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    wav: Path | None = None,
    layouts: Collection[str] = tuple(LAYOUTS),
) -> list[Table]:
    """Log-mel rows in some layouts, made once.

    Args:
        sizes: how many.
        cache: where, if not in the user's cache folder.
        say: told what takes long.
        wav: take them from WAV files.
        layouts: keys of ``LAYOUTS``, or ``BITSHUFFLE``.
    """
    every = {**LAYOUTS, BITSHUFFLE: ("bitshuffle + LZ4", BITSHUFFLE, True)}
    chosen = {key: every[key] for key in layouts}
    rows = mel_rows if wav is None else wav_rows(wav)
    shape = (sizes.rows, *SHAPE)

    def parts() -> Iterator[npt.NDArray[np.float32]]:
        rng = np.random.default_rng(0)
        for first in range(0, sizes.rows, _AT_ONCE):
            yield rows(rng, min(_AT_ONCE, sizes.rows - first))

    def fill(folder: Path) -> None:
        folder.mkdir()
        for key, (_, compression, is_chunked) in chosen.items():
            chunk = (ROWS_IN_CHUNK, *SHAPE) if is_chunked else None
            write_table(folder / f"{key}.h5", "mels", parts(), shape, chunk=chunk, compression=compression)

    name = f"mels-1-{sizes.rows}" + ("" if wav is None else f"-{wav.resolve().name}")
    name += "" if list(chosen) == list(LAYOUTS) else f"-{'-'.join(chosen)}"
    what = "four layouts" if list(chosen) == list(LAYOUTS) else ", ".join(chosen)
    folder = made_once(name, fill, f"{sizes.rows:,} log-mels in {what}", cache, say)
    return [look(folder / f"{key}.h5", "mels", key, label) for key, (label, *_) in chosen.items()]


def made_cells(
    files: int,
    shape: tuple[int, int, int, int],
    key: str,
    cache: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Table:
    """Segments of 1 KiB, with a label each, in chunks of those of the same file and long one.

    Args:
        files: how many.
        shape: of a file's: (long, short, bands, frames).
        key: the section of the result.
        cache: where, if not in the user's cache folder.
        say: told what takes long.
    """
    rng = np.random.default_rng(0)
    labels = np.repeat(rng.integers(0, 4, files), math.prod(shape[:2]))

    def parts() -> Iterator[npt.NDArray[np.float32]]:
        for _ in range(files):
            yield mel_rows(rng, math.prod(shape[:2]), shape[2:]).reshape(1, *shape)

    def fill(folder: Path) -> None:
        folder.mkdir()
        write_table(
            folder / "cells.h5", "segments", parts(), (files, *shape), chunk=(1, 1, *shape[1:]),
            compression="gzip", labels=labels.reshape(files, *shape[:2]),
        )  # fmt: skip

    folder = made_once(f"{key}-1-{files}", fill, f"segments of {files:,} files", cache, say)
    label = "segments of 1 KiB, gzip(4) + shuffle"
    return look(folder / "cells.h5", "segments", key, label, sample_dims=3, labels="labels")


def made_chunks(
    sizes: Sizes, cache: Path | None = None, say: Callable[[str], None] = lambda text: None
) -> Table:
    """Rows of 1 KiB, each a chunk of its own."""

    def parts() -> Iterator[npt.NDArray[np.float32]]:
        rng = np.random.default_rng(0)
        for first in range(0, sizes.chunks, _AT_ONCE):
            yield mel_rows(rng, min(_AT_ONCE, sizes.chunks - first), CELLS[2:])

    def fill(folder: Path) -> None:
        folder.mkdir()
        write_table(
            folder / "chunks.h5", "mels", parts(), (sizes.chunks, *CELLS[2:]), chunk=(1, *CELLS[2:]),
            compression="gzip",
        )  # fmt: skip

    folder = made_once(f"chunks-1-{sizes.chunks}", fill, f"a file of {sizes.chunks:,} chunks", cache, say)
    return look(folder / "chunks.h5", "mels", "rows", "rows of 1 KiB, gzip(4), a chunk each")


def described(table: Table) -> dict[str, Any]:
    """A table for the JSON file."""
    return {
        "label": table.label,
        "shape": list(table.shape),
        "dtype": table.dtype,
        "chunk": None if table.chunk is None else list(table.chunk),
        "samples": table.samples,
        "sample_bytes": table.sample_bytes,
        "bytes": table.bytes,
    }
