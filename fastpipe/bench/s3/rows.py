"""The rows of the case that are loaders in this process."""

from __future__ import annotations

import gc
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fastpipe
from fastpipe.bench.loaders import Draws, touch, train_transform
from fastpipe.bench.s3.bucket import Bucket
from fastpipe.core.extras import require

__all__ = [
    "WORKERS",
    "EmptyStages",
    "FirstEpochs",
    "LaterEpochs",
    "MountRow",
    "first_loader",
    "remote_dataset",
    "timed_epoch",
]

# Of the loaders that fastpipe replaces: as scripts for mounted buckets have them.
WORKERS = 8


def remote_dataset(bucket: Bucket, stage: Path | None, seed: int, transform: Any = None) -> Any:
    """The bucket as a `FastImageFolder`.

    Args:
        bucket: what it reads.
        stage: the stage's folder, or None.
        seed: of the order and of the augmentation.
        transform: the case's, if no other is given.
    """
    return fastpipe.FastImageFolder(
        bucket.url, transform or train_transform("float32"), cache="off", seed=seed,
        storage_options=bucket.options, stage=None if stage is None else fastpipe.Stage(stage),
    )  # fmt: skip


class EmptyStages:
    """Folders for stages that are empty, from ``__enter__`` to ``__exit__``.

    Those that were used are not removed before: for some minutes ext4 passes over what belonged to files that
    were just removed, which would cost the next stage as much as all the rest of writing its files.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fastpipe-bench-")
        self._numbers = itertools.count()

    def __enter__(self) -> EmptyStages:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def next(self) -> Path:
        """One that nobody has had."""
        return Path(self._folder.name, str(next(self._numbers)))


@contextmanager
def first_loader(bucket: Bucket, batch_size: int, seed: int, stage: Path | None) -> Iterator[Any]:
    """A `FastLoader` over the bucket.

    Args:
        bucket: what it reads.
        batch_size: images in a batch.
        seed: of the order and of the augmentation.
        stage: the stage's folder, or None.
    """
    dataset = remote_dataset(bucket, stage, seed)
    try:
        yield fastpipe.FastLoader(dataset, batch_size, shuffle=True)
    finally:
        dataset.close()


class FirstEpochs:
    """A `Contender` of fastpipe's that goes through first epochs; nothing is there when one begins.

    Making the dataset, which lists the bucket, is not in the time.

    Args:
        key: its name.
        bucket: what it reads.
        batch_size: images in a batch.
        stages: where their stages are; None for none.
    """

    workers = 0

    def __init__(self, key: str, bucket: Bucket, batch_size: int, stages: EmptyStages | None) -> None:
        self.key, self.chunk = key, len(bucket.keys)
        self._bucket, self._batch_size, self.stages = bucket, batch_size, stages
        self._epochs = 0
        self._seconds: Counter[str] = Counter()

    def measure(self, count: int) -> float:
        """Consume so many images; return the seconds it took."""
        return sum(self._epoch() for _ in range(count // self.chunk))

    def stage_seconds(self) -> dict[str, float]:
        """Seconds by stage that the loaders' clocks have counted so far."""
        return dict(self._seconds)

    def close(self) -> None:
        """Nothing is left open between epochs."""

    def _epoch(self) -> float:
        self._epochs += 1
        stage = None if self.stages is None else self.stages.next()
        with first_loader(self._bucket, self._batch_size, self._epochs, stage) as loader:
            seconds = timed_epoch(loader, self.chunk)
            self._seconds.update(loader.clock.totals())
            del loader
        gc.collect()
        return seconds


class LaterEpochs:
    """A `Contender` of fastpipe's that goes through later epochs, of a folder or a stage that has everything.

    Args:
        key: its name.
        bucket: what it reads.
        batch_size: images in a batch.
        stage: the stage's folder; None reads the local folder.
    """

    workers = 0

    def __init__(self, key: str, bucket: Bucket, batch_size: int, stage: Path | None) -> None:
        self.key, self.chunk = key, len(bucket.keys)
        if stage is None:
            self._dataset = fastpipe.FastImageFolder(
                str(bucket.folder), train_transform("float32"), cache="off", seed=0
            )
        else:
            self._dataset = remote_dataset(bucket, stage, 0)
            self._dataset.stage_all()
        self._loader: Any = fastpipe.FastLoader(self._dataset, batch_size, shuffle=True)

    def measure(self, count: int) -> float:
        """Consume so many images; return the seconds it took."""
        return sum(timed_epoch(self._loader, self.chunk) for _ in range(count // self.chunk))

    def close(self) -> None:
        """Let go of the loader and the stage."""
        self._loader = None
        self._dataset.close()
        gc.collect()


class MountRow:
    """A `Contender` that is the replaced script's: torchvision's folder over a mount, in torch's loader.

    Args:
        key: its name.
        folder: the image folder on the mount.
        batch_size: images in a batch.
        workers: processes.
    """

    def __init__(self, key: str, folder: Path, batch_size: int, workers: int = WORKERS) -> None:
        self.key, self.workers, self.chunk = key, workers, batch_size * workers
        folder_type = require("torchvision", extra="torch").datasets.ImageFolder
        dataset = folder_type(str(folder), train_transform("float32"))
        self._draws = Draws(range(len(dataset)), self.chunk)
        self.loader: Any = require("torch.utils.data", extra="torch").DataLoader(
            dataset, batch_size, sampler=self._draws, num_workers=workers, persistent_workers=True
        )

    def measure(self, count: int) -> float:
        """Consume so many images; return the seconds it took."""
        return timed_epoch(self.batches(count), count)

    def batches(self, count: int) -> Any:
        """An epoch of so many images."""
        self._draws.length = count
        return self.loader

    def close(self) -> None:
        """Let go of the loader, which ends its workers."""
        self.loader = None
        gc.collect()


def timed_epoch(loader: Any, count: int) -> float:
    """Go through an epoch, from asking for its iterator to its end; return the seconds it took."""
    seen = 0
    start = time.perf_counter()
    for batch in loader:
        seen += touch(batch)
    seconds = time.perf_counter() - start
    if seen != count:
        raise RuntimeError(f"an epoch has {seen} images in the place of {count}")
    return seconds
