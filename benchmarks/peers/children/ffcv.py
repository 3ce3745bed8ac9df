"""FFCV: the folder is converted into a ``.beton`` file first, then read with compiled threads.

``options["mode"]`` is ``"jpg"`` or ``"raw"``; ``options["shorter_side"]``, with ``"raw"``, is how
long the shorter side of the stored pixels should be.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.children.protocol import Batches, Job, Stream, repeats

__all__ = ["Photos", "largest_side", "stream"]


BATCHES_AHEAD = 3


class Photos:
    """The dataset for FFCV's writer: (image, label) by index, opened as torchvision does."""

    def __init__(self, job: Job) -> None:
        self._samples = list(zip(job.files, job.labels, strict=True))

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, place: int) -> tuple[Any, int]:
        from PIL import Image

        file, label = self._samples[place]
        with open(file, "rb") as opened:
            return Image.open(opened).convert("RGB"), label


def largest_side(job: Job, shorter: int) -> int:
    """FFCV's ``max_resolution`` for which the shorter side is as near to ``shorter`` as it can be.

    It limits the longer side of all images alike, so the median of the photos' shapes decides.
    """
    from PIL import Image

    shapes = []
    for file in job.files:
        with Image.open(file) as image:
            shapes.append(max(image.size) / min(image.size))
    return round(shorter * statistics.median(shapes))


def stream(job: Job) -> Stream:
    """Convert the photos, then an FFCV ``Loader``, epoch after epoch."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    raw = job.options["mode"] == "raw"
    limit = largest_side(job, job.options["shorter_side"]) if raw else None
    field = RGBImageField(write_mode=job.options["mode"], max_resolution=limit)
    file = Path(job.scratch) / "photos.beton"
    start = time.perf_counter()
    writer = DatasetWriter(str(file), {"image": field, "label": IntField()}, num_workers=job.threads)
    writer.from_indexed_dataset(Photos(job))
    seconds = time.perf_counter() - start
    return Stream(
        _batches(job, file),
        BATCHES_AHEAD,
        ("ffcv", "numpy", "torch", "numba", "pillow", "opencv-python"),
        note=f"max_resolution={limit}" if raw else f"encoded anew at quality {field.jpeg_quality}",
        prepared_s=seconds,
        prepared_bytes=file.stat().st_size,
    )


def _batches(job: Job, file: Path) -> Batches:
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, Squeeze, ToTensor, ToTorchImage

    # On the CPU normalisation is compiled with what precedes it, so it stands before `ToTensor`.
    scale = 255 * np.array([job.mean, job.std])
    normalise = [NormalizeImage(scale[0], scale[1], np.float32)] if job.output == "float32" else []
    crop = RandomResizedCropRGBImageDecoder((job.side, job.side))
    loader = Loader(
        str(file),
        batch_size=job.batch_size,
        num_workers=job.threads,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=True,
        batches_ahead=BATCHES_AHEAD,
        indices=np.tile(np.arange(len(job.files)), repeats(job)),
        pipelines={
            "image": [crop, RandomHorizontalFlip(), *normalise, ToTensor(), ToTorchImage()],
            "label": [IntDecoder(), ToTensor(), Squeeze()],
        },
    )
    while True:
        yield from loader
