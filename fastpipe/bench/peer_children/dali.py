"""DALI on the CPU: read, decode the crop, resize, mirror and normalise."""

from __future__ import annotations

from typing import Any

from fastpipe.bench.peer_children.protocol import Batches, Job, Stream

__all__ = ["stream"]

PREFETCH = 2


def stream(job: Job) -> Stream:
    """DALI's endless pipeline."""
    return Stream(_batches(job), PREFETCH, ("nvidia-dali-cuda130", "nvidia-dali-cuda120", "numpy"))


def _batches(job: Job) -> Batches:
    import nvidia.dali.fn as fn
    import nvidia.dali.types as types
    from nvidia.dali import pipeline_def

    @pipeline_def(  # type: ignore[untyped-decorator, unused-ignore]
        batch_size=job.batch_size,
        num_threads=job.threads,
        device_id=None,
        prefetch_queue_depth=PREFETCH,
    )
    def pipeline() -> Any:
        encoded, labels = fn.readers.file(
            files=list(job.files), labels=list(job.labels), random_shuffle=True, initial_fill=1024
        )
        images = fn.decoders.image_random_crop(
            encoded,
            device="cpu",
            random_area=[0.08, 1.0],
            random_aspect_ratio=[3 / 4, 4 / 3],
            adjust_orientation=False,
        )
        images = fn.resize(images, resize_x=job.side, resize_y=job.side)
        images = fn.crop_mirror_normalize(
            images,
            dtype=types.FLOAT,
            output_layout="CHW",
            mirror=fn.random.coin_flip(probability=0.5),
            mean=[255 * value for value in job.mean],
            std=[255 * value for value in job.std],
        )
        return images, labels

    built = pipeline()
    built.build()
    while True:
        images, labels = built.run()
        yield images.as_array(), labels.as_array()
