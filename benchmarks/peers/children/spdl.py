"""SPDL: threads that decode whole photos with FFmpeg, whose filters crop, scale and mirror."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.peers.children.protocol import Batches, Job, PeerError, Stream, endless_order

__all__ = ["crop_box", "filters", "stream"]


# ---- Crops, drawn as torchvision's ``RandomResizedCrop`` draws them ---------------------------------
#
# For what leaves the choice of a crop to its user. The process of a peer imports this file too, so it
# needs nothing but numpy.


def crop_box(height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Top, left, height and width of a crop distributed as that of ``RandomResizedCrop``.

    Ten tries at an area of 8 to 100 % and a ratio of 3:4 to 4:3, else the centre.
    """
    for _ in range(10):
        area = height * width * rng.uniform(0.08, 1.0)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    return (height - h) // 2, (width - w) // 2, h, w


# ----------------------------------------------------------------------------------------------------
# SPDL: threads that decode whole photos with FFmpeg, whose filters crop, scale and mirror.
#
# As in its example for ImageNet, a thread makes a whole batch; the crop is drawn for each photo and given
# to FFmpeg's filters as text.

BUFFERED = 3


def filters(height: int, width: int, side: int, rng: np.random.Generator) -> str:
    """FFmpeg's filters for a random crop of an image of that size.

    >>> filters(100, 100, 224, np.random.default_rng(1))
    'crop=w=84:h=65:x=2:y=1,scale=w=224:h=224:flags=bilinear,format=pix_fmts=rgb24'
    """
    top, left, h, w = crop_box(height, width, rng)
    text = f"crop=w={w}:h={h}:x={left}:y={top},scale=w={side}:h={side}:flags=bilinear,format=pix_fmts=rgb24"
    return f"{text},hflip" if rng.random() < 0.5 else text


def stream(job: Job) -> Stream:
    """SPDL's pipeline over an endless source."""
    import spdl.io

    try:
        ffmpeg = spdl.io.utils.get_ffmpeg_versions()["libavcodec"]
    except RuntimeError:
        raise PeerError(
            "FFmpeg's shared libraries, version 4 to 9, are not here: apt-get install ffmpeg"
        ) from None
    return Stream(
        _batches(job),
        BUFFERED + job.threads,
        ("spdl-io", "spdl-core", "numpy", "torch"),
        note=f"libavcodec {'.'.join(map(str, ffmpeg))}",
    )


def _batches(job: Job) -> Batches:
    import spdl.io
    import torch
    from spdl.pipeline import PipelineBuilder

    # Batches are normalised in SPDL's threads: torch's own would be too many.
    torch.set_num_threads(1)
    mean, std = (255 * torch.tensor(list(values)).view(1, 3, 1, 1) for values in (job.mean, job.std))
    seeds = np.random.SeedSequence()

    def source() -> Iterator[tuple[str, int]]:
        for place in endless_order(job):
            yield job.files[place], job.labels[place]

    def make(samples: Sequence[tuple[str, int]]) -> tuple[Any, Any]:
        rng = np.random.default_rng(seeds.spawn(1)[0])
        frames = []
        for file, _ in samples:
            packets = spdl.io.demux_image(file)
            codec = packets.codec
            text = filters(codec.height, codec.width, job.side, rng)
            frames.append(spdl.io.decode_packets(packets, filter_desc=text))
        images = spdl.io.to_torch(spdl.io.convert_frames(frames)).permute(0, 3, 1, 2)
        return images.float().sub_(mean).div_(std), torch.tensor([label for _, label in samples])

    builder = PipelineBuilder().add_source(source()).aggregate(job.batch_size, drop_last=True)
    pipeline = builder.pipe(make, concurrency=job.threads).add_sink(BUFFERED).build(num_threads=job.threads)
    with pipeline.auto_stop():
        yield from pipeline.get_iterator()
