"""DALI: read, decode the crop, resize, mirror and normalise; on the CPU, or from decoding on on a GPU."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.children.protocol import Batches, Job, Stream

__all__ = ["stream"]


PREFETCH = 2


def stream(job: Job) -> Stream:
    """DALI's endless pipeline; ``options["device"]`` is ``"cuda"`` where it is to decode on a GPU."""
    packages = ("nvidia-dali-cuda130", "nvidia-dali-cuda120", "numpy")
    if not _is_on_gpu(job):
        return Stream(_batches(job), PREFETCH, packages)
    import torch

    return Stream(_batches(job), PREFETCH, packages, wait=torch.cuda.synchronize)


def _is_on_gpu(job: Job) -> bool:
    return job.options.get("device") == "cuda"


def _batches(job: Job) -> Batches:
    import nvidia.dali.fn as fn
    import nvidia.dali.types as types
    from nvidia.dali import pipeline_def

    is_on_gpu, is_bytes = _is_on_gpu(job), job.output == "uint8"

    @pipeline_def(  # type: ignore[untyped-decorator, unused-ignore]
        batch_size=job.batch_size,
        num_threads=job.threads,
        device_id=0 if is_on_gpu else None,
        prefetch_queue_depth=PREFETCH,
    )
    def pipeline() -> Any:
        encoded, labels = fn.readers.file(
            files=list(job.files), labels=list(job.labels), random_shuffle=True, initial_fill=1024
        )
        images = fn.decoders.image_random_crop(
            encoded,
            device="mixed" if is_on_gpu else "cpu",
            random_area=[0.08, 1.0],
            random_aspect_ratio=[3 / 4, 4 / 3],
            adjust_orientation=False,
        )
        images = fn.resize(images, resize_x=job.side, resize_y=job.side)
        images = fn.crop_mirror_normalize(
            images,
            dtype=types.UINT8 if is_bytes else types.FLOAT,
            output_layout="CHW",
            mirror=fn.random.coin_flip(probability=0.5),
            mean=[0.0 if is_bytes else 255 * value for value in job.mean],
            std=[1.0 if is_bytes else 255 * value for value in job.std],
        )
        return images, labels

    built = pipeline()
    built.build()
    while True:
        images, labels = built.run()
        yield (_as_torch(images) if is_on_gpu else images.as_array()), labels.as_array()


def _as_torch(images: Any) -> Any:
    """A batch on a GPU, over DALI's memory."""
    from torch.utils.dlpack import from_dlpack

    return from_dlpack(images.as_tensor())
