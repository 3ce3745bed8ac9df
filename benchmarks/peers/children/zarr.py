"""zarr-python in torch's DataLoader, in the process; with the codecs of the Rust library zarrs too."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.children.protocol import Batches, PeerError, Stream, VolumeJob
from fastpipe.bench.samples import ZarrPatches, start_of

__all__ = ["patches_of", "stream"]


def stream(job: VolumeJob) -> Stream:
    """Batches of random patches; ``options["pipeline"]`` is the class that decodes, if not zarr's own.

    Raises:
        PeerError: it cannot read these arrays.
    """
    import zarr
    from torch.utils.data import DataLoader

    packages = ["zarr"]
    if pipeline := job.options.get("pipeline"):
        zarr.config.set({"codec_pipeline.path": pipeline, "threading.max_workers": job.threads})
        packages.insert(0, pipeline.split(".")[0])
    dataset = patches_of(job)
    try:
        dataset[0]
    except Exception as error:  # whatever it stumbles over
        raise PeerError(f"cannot read the arrays: {type(error).__name__}: {error}") from None

    def batches() -> Batches:
        while True:
            loader: Any = DataLoader(dataset, job.batch_size)  # type: ignore[arg-type]
            for number, (values, labels) in enumerate(loader):
                first = number * job.batch_size
                yield (
                    values,
                    (labels, [start_of(job.shape, job.patch, first + row) for row in range(len(values))]),
                )

    return Stream(batches(), 0, packages)


def patches_of(job: VolumeJob) -> ZarrPatches:
    """An epoch's patches, of whole batches."""
    count = job.epoch // job.batch_size * job.batch_size
    return ZarrPatches((job.values, job.labels), job.shape, job.patch, count)
