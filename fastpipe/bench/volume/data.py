"""Which volume the benchmark reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe._extras import require
from fastpipe.bench.data import made_once
from fastpipe.testing.volumes import scroll_slabs, write_zarr

__all__ = ["FIRST", "FULL", "QUICK", "Scroll", "Sizes", "described", "made_scroll"]


@dataclass(frozen=True)
class Sizes:
    """Of the volume, its chunks and its patches: voxels along each dimension.

    Attributes:
        shape, chunk, patch: as named.
    """

    shape: tuple[int, int, int]
    chunk: tuple[int, int, int]
    patch: tuple[int, int, int]


FULL = Sizes((384, 768, 768), (64, 128, 128), (72, 136, 136))
# Sizes of the volumes on which the time to the first batch is measured; it does not depend on them.
FIRST = Sizes((128, 256, 256), FULL.chunk, FULL.patch)
QUICK = Sizes((64, 128, 128), (16, 32, 32), (18, 34, 34))


@dataclass(frozen=True)
class Scroll:
    """A volume and its labels on disk.

    Attributes:
        folder: in which they are.
        sizes: their sizes.
    """

    folder: Path
    sizes: Sizes

    @property
    def paths(self) -> tuple[str, str]:
        """The Zarr arrays of the values, uint16, and of the labels, uint8."""
        return str(self.folder / "values.zarr"), str(self.folder / "labels.zarr")

    @property
    def nbytes(self) -> int:
        """Bytes of both, decoded."""
        return 3 * math.prod(self.sizes.shape)

    @property
    def patch_nbytes(self) -> int:
        """Bytes of a patch and its labels."""
        return 3 * math.prod(self.sizes.patch)

    @property
    def epoch(self) -> int:
        """As many patches as have the volume's size; an even number."""
        return self.nbytes // self.patch_nbytes // 2 * 2

    @cached_property
    def arrays(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Both in memory, read by the library that wrote them."""
        tensorstore = require("tensorstore", extra="volume")
        stores = [{"driver": "file", "path": path} for path in self.paths]
        opened = [tensorstore.open({"driver": "zarr3", "kvstore": store}).result() for store in stores]
        values, labels = (np.asarray(one.read().result()) for one in opened)
        return values, labels

    def warm(self) -> None:
        """Read every file once, so that the page cache has them all."""
        for path in self.folder.rglob("*"):
            if path.is_file():
                path.read_bytes()


def made_scroll(
    sizes: Sizes,
    cache: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    *,
    compressed: bool = True,
) -> Scroll:
    """A made-up scroll, made once.

    Args:
        sizes: of it.
        cache: where, if not in the user's cache folder.
        say: told what takes long.
        compressed: as of `write_zarr`.
    """

    def fill(folder: Path) -> None:
        folder.mkdir()
        for place, name in enumerate(("values", "labels")):
            # Made twice, as both at once may be more than there is memory.
            parts = (slab[place] for slab in scroll_slabs(sizes.shape, sizes.chunk[0]))
            write_zarr(folder / f"{name}.zarr", parts, sizes.shape, sizes.chunk, compressed=compressed)

    shape, chunk = ("x".join(map(str, one)) for one in (sizes.shape, sizes.chunk))
    name = f"scroll-1-{shape}-{chunk}" + ("" if compressed else "-uncompressed")
    folder = made_once(name, fill, "a volume like a rolled scroll", cache, say)
    return Scroll(folder, sizes)


def described(scroll: Scroll) -> dict[str, Any]:
    """A volume for the JSON file."""
    sizes = scroll.sizes
    stored = sum(path.stat().st_size for path in scroll.folder.rglob("*") if path.is_file())
    shape, chunk, patch = ("×".join(map(str, one)) for one in (sizes.shape, sizes.chunk, sizes.patch))
    return {
        "text": f"a volume of {shape} uint16 with labels of uint8, {scroll.nbytes / 1e6:,.0f} MB, Zarr of"
        f" chunks of {chunk} in {stored / 1e6:,.0f} MB (blosc, zstd 5, bytes shuffled); patches of {patch}",
        "name": "made-up scroll",
        "shape": list(sizes.shape),
        "chunk": list(sizes.chunk),
        "patch": list(sizes.patch),
        "samples": scroll.epoch,
        "sample_bytes": scroll.patch_nbytes,
        "volume_bytes": scroll.nbytes,
        "bytes": stored,
    }
