"""Requests to a peer's process, and its responses."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "AnyJob",
    "AugmentJob",
    "Batches",
    "Job",
    "PeerError",
    "Stream",
    "TableJob",
    "VolumeJob",
    "augment_problem",
    "batch_problem",
    "endless_order",
    "folder_bytes",
    "is_jpeg",
    "job_of",
    "repeats",
    "table_problem",
    "volume_problem",
    "without_non_jpegs",
]


# An epoch of a loader that cannot go on for ever has at least so many batches, so that what its end
# and its start cost is as little a part as in training.
EPOCH_BATCHES = 512

Batches = Generator[tuple[Any, Any], None, None]


class PeerError(Exception):
    """The peer cannot do this job; the message says why."""


@dataclass(frozen=True)
class Job:
    """The data to load.

    Attributes:
        folder: the image folder.
        indices: which samples of it, as torchvision's ``ImageFolder`` counts them.
        files, labels: these samples.
        batch_size: images in a batch.
        threads: how many threads or processes the peer may use.
        side: height and width of the output.
        mean, std: for values of 0 to 1, one for each channel.
        output: ``"float32"``, normalised, or ``"uint8"``.
        scratch: an empty folder for what the peer makes of the photos; the parent removes it.
        options: what tells rows of the same peer apart.
    """

    folder: str
    indices: Sequence[int]
    files: Sequence[str]
    labels: Sequence[int]
    batch_size: int
    threads: int
    side: int
    mean: Sequence[float]
    std: Sequence[float]
    output: str
    scratch: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Job:
        """The job of a line of JSON."""
        return cls(**{one.name: content[one.name] for one in fields(cls)})


@dataclass(frozen=True)
class TableJob:
    """Which rows of an HDF5 dataset to load.

    Attributes:
        path: the file.
        dataset: the dataset's path in it.
        shape, dtype: the dataset's.
        group: rows of a chunk.
        window: groups whose rows are mixed.
        batch_size: rows in a batch.
        threads: how many threads the peer may use.
        scratch: an empty folder; the parent removes it.
    """

    path: str
    dataset: str
    shape: Sequence[int]
    dtype: str
    group: int
    window: int
    batch_size: int
    threads: int
    scratch: str


@dataclass(frozen=True)
class VolumeJob:
    """Which patches of a volume to load.

    Attributes:
        values, labels: folders of Zarr arrays of the same voxels.
        shape: of the arrays.
        patch: voxels of a patch along each dimension.
        batch_size: patches in a batch.
        threads: how many threads the peer may use.
        epoch: patches after which one that remembers less than everything begins with nothing again.
        memory_bytes: so much of what is decoded may be remembered.
        keeps_all: whether everything is in memory before the first batch.
        scratch: an empty folder; the parent removes it.
        options: what tells rows of the same peer apart.
    """

    values: str
    labels: str
    shape: Sequence[int]
    patch: Sequence[int]
    batch_size: int
    threads: int
    epoch: int
    memory_bytes: int
    keeps_all: bool
    scratch: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AugmentJob:
    """The data to augment.

    Attributes:
        photos: a NumPy file, uint8 (N, 3, H, W).
        spectrograms: a NumPy file, float32 (N, F, T).
        volumes, labels_of_volumes: NumPy files, float32 (M, 1, D, H, W), and uint8 (M, D, H, W).
        tasks: what will be asked for: a recipe's name and the dtype before it, ``"simclr-uint8"``.
        batch_size: N.
        side: height and width of images afterwards.
        mean, std: for values of 0 to 1, one for each channel.
        classes: labels are below this number.
        threads: how many threads the peer may use.
        device: ``"cpu"`` or ``"cuda"``.
        scratch: an empty folder; the parent removes it.
        options: what tells rows of the same peer apart.
    """

    photos: str
    spectrograms: str
    volumes: str
    labels_of_volumes: str
    tasks: Sequence[str]
    batch_size: int
    side: int
    mean: Sequence[float]
    std: Sequence[float]
    classes: int
    threads: int
    device: str
    scratch: str
    options: Mapping[str, Any] = field(default_factory=dict)


AnyJob = Job | TableJob | VolumeJob | AugmentJob


def job_of(content: Mapping[str, Any]) -> AnyJob:
    """The job of a line of JSON."""
    if "tasks" in content:
        return AugmentJob(**{one.name: content[one.name] for one in fields(AugmentJob)})
    if "patch" in content:
        return VolumeJob(**{one.name: content[one.name] for one in fields(VolumeJob)})
    if "dataset" in content:
        return TableJob(**{one.name: content[one.name] for one in fields(TableJob)})
    return Job.from_json(content)


@dataclass(frozen=True)
class Stream:
    """A peer at work.

    Attributes:
        batches: without end: images (N, 3, H, W), or (N, H, W, 3) where ``layout`` says so, and
            labels, or rows of a table and their numbers, or patches of a volume and a pair of those
            of its labels and where they begin, (N, D); as numpy arrays or torch tensors in the host's memory.
        ahead: at most so many batches wait ready made.
        packages: those whose versions say what was measured.
        layout: ``"NCHW"`` or ``"NHWC"``.
        note: what a reader should know and is known only now.
        prepared_s: seconds that a conversion of the photos took, which is not part of the rate.
        prepared_bytes: what it made.
        choose: makes another task what is done from the next batch on, of a peer that has several; raises
            `PeerError` where it cannot do that one, and stays with the one before.
        wait: waits until a device has done what it was asked, of batches that are there; the clock is read
            after that, and no batch looked at.
        renewed: makes ``batches`` anew, of one that has remembered nothing, before each measurement; None
            where nothing is remembered, or all.  Nothing of the ones before is at work once they are closed.
    """

    batches: Batches
    ahead: int
    packages: Sequence[str]
    layout: str = "NCHW"
    note: str = ""
    prepared_s: float | None = None
    prepared_bytes: int | None = None
    renewed: Callable[[], Batches] | None = None
    choose: Callable[[str], None] | None = None
    wait: Callable[[], None] | None = None


def is_jpeg(file: str) -> bool:
    """Return True if a file's content is a JPEG, whatever its name."""
    with open(file, "rb") as opened:
        return opened.read(3) == b"\xff\xd8\xff"


def without_non_jpegs(job: Job, reader: str) -> None:
    """Check that all photos are JPEGs.

    Raises:
        PeerError: some are not, and ``reader`` reads nothing else.
    """
    if not all(is_jpeg(file) for file in job.files):
        raise PeerError(f"{reader} reads JPEG only and some photos are not")


def repeats(job: Job) -> int:
    """Return how many times an epoch repeats the photos to be long enough.

    >>> job = Job("", range(200), ["a"] * 200, [0] * 200, 64, 2, 224, (), (), "uint8", "")
    >>> repeats(job)
    164
    """
    return math.ceil(EPOCH_BATCHES * job.batch_size / len(job.files))


def endless_order(job: Job) -> Iterator[int]:
    """Places in ``job.files``: all in random order, and again in another, without end."""
    rng = np.random.default_rng()
    while True:
        yield from rng.permutation(len(job.files)).tolist()


def folder_bytes(folder: Path) -> int:
    """Size of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def table_problem(job: TableJob, values: npt.NDArray[Any]) -> str | None:
    """Return what is wrong with a batch of rows, or ``None``."""
    shape = (job.batch_size, *job.shape[1:])
    if values.shape != shape or values.dtype != np.dtype(job.dtype):
        return f"the first batch is {values.dtype} {values.shape}, expected {job.dtype} {shape}"
    return None


def volume_problem(job: VolumeJob, values: npt.NDArray[Any], labels: npt.NDArray[Any]) -> str | None:
    """Return what is wrong with the form of a batch of patches, or ``None``."""
    shape = (job.batch_size, *job.patch)
    for name, found in (("values", values), ("labels", labels)):
        if found.shape != shape:
            return f"the first batch has {name} of {found.shape}, expected {shape}"
    return None


def augment_problem(job: AugmentJob, task: str, values: npt.NDArray[Any]) -> str | None:
    """Return what is wrong with the form of an augmented batch, or ``None``."""
    if values.ndim == 5 and values.dtype == np.float32:  # volumes, which are fewer
        return None if np.isfinite(values).all() else f"{task}: a batch holds values that are not finite"
    if len(values) != job.batch_size or values.dtype != np.float32 or values.ndim not in (3, 4):
        seen = f"{values.dtype} {values.shape}"
        return f"{task}: a batch is {seen}, expected float32 of {job.batch_size} samples"
    size = (job.side, job.side)
    if values.ndim == 4 and size not in (values.shape[2:], values.shape[1:3]):
        return f"{task}: images are {values.shape}, expected {size[0]}×{size[1]} pixels"
    return None if np.isfinite(values).all() else f"{task}: a batch holds values that are not finite"


def batch_problem(job: Job, layout: str, images: npt.NDArray[Any], labels: Any) -> str | None:
    """Return what is wrong with a batch, or ``None``.

    Args:
        job: what was asked for.
        layout: ``"NCHW"`` or ``"NHWC"``.
        images: the images.
        labels: their labels.
    """
    size, side = job.batch_size, job.side
    shape = (size, side, side, 3) if layout == "NHWC" else (size, 3, side, side)
    if images.shape != shape or images.dtype != np.dtype(job.output):
        return f"the first batch is {images.dtype} {images.shape}, expected {job.output} {shape}"
    strangers = set(np.asarray(labels).reshape(-1).tolist()) - set(job.labels)
    if np.asarray(labels).size != size or strangers:
        return f"the first batch has {np.asarray(labels).size} labels, not of the folder: {sorted(strangers)}"
    low, high = 0.0, 255.0
    if job.output == "float32":
        low, high = (0 - max(job.mean)) / min(job.std), (1 - min(job.mean)) / min(job.std)
    if not (low - 0.01 <= images.min() < images.max() <= high + 0.01):
        return f"values lie in {images.min():.3f}..{images.max():.3f}, expected within {low:.3f}..{high:.3f}"
    return None
