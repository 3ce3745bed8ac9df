"""MONAI: its loader of threads over slices of Zarr arrays, or its CacheDataset with random crops."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.peers.children.protocol import Batches, Stream, VolumeJob
from benchmarks.peers.children.zarr import patches_of
from fastpipe.bench.samples import start_of

__all__ = ["stream"]


_KEYS = ("values", "labels")


def stream(job: VolumeJob) -> Stream:
    """Batches of random patches, of arrays in memory if the job keeps all."""
    packages = ("monai", "zarr", "torch")
    if job.keeps_all:
        return Stream(_cropped(job), 2, packages, note="hash_as_key=True, copy_cache=False")
    # Its loader's buffer, and what workers have ready: two batches each.
    return Stream(_sliced(job), 2 * job.threads + 2, packages)


def _sliced(job: VolumeJob) -> Batches:
    """Slices, read in threads that stand for workers."""
    from monai.data import ThreadDataLoader

    dataset = patches_of(job)
    while True:
        loader = ThreadDataLoader(
            dataset, batch_size=job.batch_size, num_workers=job.threads, use_thread_workers=True
        )
        for number, (values, labels) in enumerate(loader):
            first = number * job.batch_size
            starts = [start_of(job.shape, job.patch, first + row) for row in range(len(values))]
            yield values, (labels, starts)


def _cropped(job: VolumeJob) -> Batches:
    """Random crops of whole arrays that its cache keeps."""
    import torch
    import zarr
    from monai.data import CacheDataset, MetaTensor, ThreadDataLoader
    from monai.transforms import Compose, RandSpatialCropd, Transform

    class Loaded(Transform):  # type: ignore[misc]
        """The arrays, with a channel."""

        def __call__(self, item: dict[str, str]) -> dict[str, Any]:
            read = {key: zarr.open_array(item[key], mode="r")[:] for key in _KEYS}
            return {key: MetaTensor(torch.from_numpy(read[key][None])) for key in _KEYS}

    crop = RandSpatialCropd(_KEYS, roi_size=job.patch, random_size=False)
    # The same item again and again, which is kept once; a copy for each crop would be of everything.
    items = [{"values": job.values, "labels": job.labels}] * job.epoch
    dataset = CacheDataset(
        items, Compose([Loaded(), crop]), hash_as_key=True, copy_cache=False, num_workers=1, progress=False
    )
    while True:
        for batch in ThreadDataLoader(dataset, batch_size=job.batch_size, num_workers=0, drop_last=True):
            starts = np.asarray(batch["values"].affine)[:, :3, 3].astype(np.int64)
            yield batch["values"].as_tensor()[:, 0], (batch["labels"].as_tensor()[:, 0], starts)
