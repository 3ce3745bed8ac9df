"""Time to the first batch of patches, each time in a fresh process.

The parent calls `first_batches`; the child is ``python -m benchmarks.studies.volume_first``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastpipe
from benchmarks.studies import first
from fastpipe.bench.runner import touch
from fastpipe.bench.samples import ZarrPatches
from fastpipe.bench.volume import Scroll, Sizes, patch_dataset, patch_loader
from fastpipe.core.extras import require

__all__ = ["first_batches"]


def first_batches(
    compressed: Scroll,
    uncompressed: Scroll,
    batch_size: int,
    runs: int = first.RUNS,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Seconds from building the dataset to the first batch, in new processes.

    torch and fastpipe, or torch and zarr-python, are imported before the clock starts; ``import_s`` is what
    importing fastpipe took, in the same processes.  The chunks are in the page cache.

    Args:
        compressed, uncompressed: volumes of one size.
        batch_size: patches in a batch.
        runs: processes for each figure; one more comes before them and is not counted.
        say: told what is measured.

    Returns:
        For ``replaced``, ``blosc`` and ``plain`` what `first.first_batches` gives.

    Raises:
        ContenderError: a process did not end well.
    """
    rows = {}
    for name, label, scroll in (
        ("replaced", "zarr-python + DataLoader(num_workers=0), Blosc", compressed),
        ("blosc", "FastPatchDataset + FastLoader, Blosc", compressed),
        ("plain", "FastPatchDataset + FastLoader, uncompressed", uncompressed),
    ):
        scroll.warm()
        sizes = scroll.sizes
        job = {"folder": str(scroll.folder), "sizes": [sizes.shape, sizes.chunk, sizes.patch]}
        rows[name] = label, {**job, "is_fast": name != "replaced", "batch": batch_size}
    return first.first_batches("benchmarks.studies.volume_first", rows, runs, say)


def _child() -> None:
    """Read a job from standard input, print the seconds."""
    job = json.load(sys.stdin)
    data = require("torch.utils.data", extra="torch")
    scroll = Scroll(Path(job["folder"]), Sizes(*map(tuple, job["sizes"])))
    if not job["is_fast"]:
        require("zarr", extra="bench")
    start = time.perf_counter()
    if job["is_fast"]:
        fastpipe.FastLoader, fastpipe.FastPatchDataset  # noqa: B018 (which import what they need)
    imported = time.perf_counter()
    if job["is_fast"]:
        loader = patch_loader(patch_dataset(scroll, scroll.room), job["batch"], "tour")
    else:
        patches = ZarrPatches(scroll.paths, scroll.sizes.shape, scroll.sizes.patch, scroll.epoch)
        loader = data.DataLoader(patches, job["batch"], shuffle=True)
    touch(next(iter(loader)))
    print(json.dumps({"first_s": time.perf_counter() - imported, "import_s": imported - start}))


if __name__ == "__main__":
    _child()
