"""Pillow-SIMD: the replaced loader itself, in an environment where Pillow is Pillow-SIMD."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.peers.children.protocol import Batches, Job, PeerError, Stream, endless_order

__all__ = ["stream"]


PREFETCH = 2


class Endless:
    """A sampler: the samples in random order, and again in another, without end."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __iter__(self) -> Iterator[int]:
        for place in endless_order(self._job):
            yield self._job.indices[place]


def stream(job: Job) -> Stream:
    """torchvision's ``ImageFolder`` in torch's ``DataLoader``, with a sampler that has no end."""
    import PIL

    if ".post" not in PIL.__version__:
        raise PeerError(f"Pillow {PIL.__version__} is installed there, which is not Pillow-SIMD")
    return Stream(_batches(job), PREFETCH * job.threads, ("pillow-simd", "numpy", "torch", "torchvision"))


def _batches(job: Job) -> Batches:
    from torch.utils.data import DataLoader
    from torchvision import datasets, transforms

    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(job.side),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(job.mean, job.std),
        ]
    )
    loader = DataLoader(
        datasets.ImageFolder(job.folder, transform),
        batch_size=job.batch_size,
        sampler=Endless(job),
        num_workers=job.threads,
        prefetch_factor=PREFETCH,
    )
    yield from loader
