"""LitData: the folder is "optimised" into chunks of JPEG bytes first, then streamed from the disk."""

from __future__ import annotations

import functools
import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.children.protocol import Batches, Job, Stream, folder_bytes, is_jpeg, repeats

__all__ = ["sample", "stream"]


PREFETCH = 2


def sample(files: Sequence[str], labels: Sequence[int], place: int) -> dict[str, Any]:
    """Return the bytes to store for a photo: its own, or those of a JPEG made from it, as LitData advises."""
    from PIL import Image

    file = files[place]
    if is_jpeg(file):
        return {"image": Image.open(file), "label": labels[place]}
    encoded = io.BytesIO()
    with Image.open(file) as image:
        image.convert("RGB").save(encoded, format="JPEG", quality=95)
    return {"image": Image.open(encoded), "label": labels[place]}


def stream(job: Job) -> Stream:
    """Convert the photos, then a ``StreamingDataLoader``, epoch after epoch."""
    import litdata

    chunks = Path(job.scratch) / "chunks"
    start = time.perf_counter()
    litdata.optimize(
        fn=functools.partial(sample, list(job.files), list(job.labels)),
        inputs=list(range(len(job.files))),
        output_dir=str(chunks),
        chunk_bytes="64MB",
        num_workers=job.threads,
        start_method="fork",
        verbose=False,
    )
    seconds = time.perf_counter() - start
    return Stream(
        _batches(job, chunks),
        PREFETCH * job.threads,
        ("litdata", "numpy", "torch", "torchvision", "pillow"),
        prepared_s=seconds,
        prepared_bytes=folder_bytes(chunks),
    )


def _batches(job: Job, chunks: Path) -> Batches:
    import litdata
    import torch
    from torchvision.transforms import v2

    # LitData hands out tensors, which is why the transform is the one for tensors.
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(job.side, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(list(job.mean), list(job.std)),
        ]
    )

    def finish(stored: dict[str, Any]) -> tuple[Any, int]:
        return transform(stored["image"]), stored["label"]

    dataset = litdata.StreamingDataset(
        str(chunks),
        cache_dir=str(Path(job.scratch) / "cache"),
        shuffle=True,
        drop_last=True,
        subsample=float(repeats(job)),
        transform=finish,
    )
    loader = litdata.StreamingDataLoader(
        dataset,
        batch_size=job.batch_size,
        num_workers=job.threads,
        prefetch_factor=PREFETCH,
        drop_last=True,
        persistent_workers=True,
    )
    while True:
        yield from loader
