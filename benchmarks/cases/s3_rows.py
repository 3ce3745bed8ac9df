"""The data of the case ``s3``: photos as objects behind a proxy; and its rows in this process."""

from __future__ import annotations

import gc
import itertools
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from delay_proxy import Faults
from s3_server import S3, S3Missing, S3Proxy

import fastpipe
from fastpipe.bench.check import RowCheck, digests_of_samples
from fastpipe.bench.data import Photos
from fastpipe.bench.images import check_transform, train_transform
from fastpipe.bench.runner import Contender, DrawnRow, Draws, consume
from fastpipe.core.extras import require
from fastpipe.errors import OptionError

# ----------------------------------------------------------------------------------------------------
# What the case reads: photos as objects behind a proxy, and the same ones in a local folder.

CLASSES = 8
FOLDER = "train"
_PUTTING = 8  # threads


class Bucket:
    """Photos in a bucket, from ``__enter__`` to ``__exit__``; each comes so often that there are enough.

    Args:
        photos: the photos.
        count: how many objects are made of them.
        delay_ms, jitter_ms: until the first byte of an answer.
        say: told what takes long.

    Attributes:
        s3: the server.
        proxy: before it.
        name: the bucket's.
        keys: of the objects; labels are those of their folders.
        local: the folder with the same files.
        nbytes: of all objects.

    Raises:
        OptionError: there is no server, and none can be started.
    """

    proxy: S3Proxy
    name: str
    local: Path

    def __init__(
        self, photos: Photos, count: int, delay_ms: float, jitter_ms: float,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        self.s3, self._say = S3(), say
        self._files = [Path(photos.files[number % len(photos.files)]) for number in range(count)]
        self._faults = Faults(delay_ms=delay_ms, jitter_ms=jitter_ms)
        per_class = -(-count // CLASSES)
        self.keys = [
            f"{FOLDER}/class{number // per_class}/{number:06}{file.suffix.lower()}"
            for number, file in enumerate(self._files)
        ]
        self.nbytes = sum(file.stat().st_size for file in self._files)
        self._stack = ExitStack()

    def __enter__(self) -> Bucket:
        with ExitStack() as stack:
            self._say("starting the S3 server")
            try:
                stack.enter_context(self.s3)
            except S3Missing as error:
                raise OptionError(f"the case s3 needs an S3 server: {error}") from None
            self.name = self.s3.bucket()
            self.local = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastpipe-bench-")))
            self._say(f"putting {len(self.keys):,} objects")
            with ThreadPoolExecutor(_PUTTING) as pool:
                list(pool.map(self._put, self.keys, self._files))
            self.proxy = stack.enter_context(self.s3.proxy(self._faults))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        """The URL of the folder with the class folders."""
        return f"s3://{self.name}/{FOLDER}"

    @property
    def folder(self) -> Path:
        """The same folder on the local disk."""
        return self.local / FOLDER

    @property
    def labels(self) -> list[int]:
        """The class index of each object, in the order of the keys."""
        classes = [key.split("/")[1] for key in self.keys]
        numbers = {name: number for number, name in enumerate(sorted(set(classes)))}
        return [numbers[name] for name in classes]

    @property
    def options(self) -> dict[str, Any]:
        """``storage_options`` through the proxy."""
        return self.proxy.options

    def _put(self, key: str, file: Path) -> None:
        self.s3.put(self.name, key, file.read_bytes())
        path = self.local / key
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, path)


# ---- The rows of the case that are loaders in this process ------------------------------------------

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


class FirstEpochs(Contender):
    """A `Contender` of fastpipe's that goes through first epochs; nothing is there when one begins.

    Making the dataset, which lists the bucket, is not in the time.

    Args:
        key: its name.
        bucket: what it reads.
        batch_size: images in a batch.
        stages: where their stages are; None for none.
    """

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

    def _epoch(self) -> float:
        self._epochs += 1
        stage = None if self.stages is None else self.stages.next()
        with first_loader(self._bucket, self._batch_size, self._epochs, stage) as loader:
            seconds = consume(loader, self.chunk)
            self._seconds.update(loader.clock.totals())
            del loader
        gc.collect()
        return seconds


class LaterEpochs(Contender):
    """A `Contender` of fastpipe's that goes through later epochs, of a folder or a stage that has everything.

    Args:
        key: its name.
        bucket: what it reads.
        batch_size: images in a batch.
        stage: the stage's folder; None reads the local folder.
    """

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
        return sum(consume(self._loader, self.chunk) for _ in range(count // self.chunk))

    def close(self) -> None:
        """Let go of the loader and the stage."""
        self._loader = None
        self._dataset.close()
        gc.collect()


class MountRow(DrawnRow):
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
        self.draws = Draws(range(len(dataset)), self.chunk)
        self.loader: Any = require("torch.utils.data", extra="torch").DataLoader(
            dataset, batch_size, sampler=self.draws, num_workers=workers, persistent_workers=True
        )


# ---- The rows of the case that fetch objects and do nothing with them -------------------------------

CONNECTIONS = (16, 32, 64, 96, 128)


class ObstoreThreads(Contender):
    """A `Contender`: obstore's synchronous calls in a pool of threads, over all objects in random order.

    Args:
        key: its name.
        bucket: what it reads.
        threads: how many requests at a time.
    """

    def __init__(self, key: str, bucket: Bucket, threads: int) -> None:
        self.key, self.chunk = key, len(bucket.keys)
        self._keys = bucket.keys
        self._random = np.random.default_rng(0)
        obstore = require("obstore", extra="s3")
        options = bucket.options
        self._store = require("obstore.store", extra="s3").S3Store(
            bucket.name, endpoint=options["endpoint_url"], access_key_id=options["key"],
            secret_access_key=options["secret"], region="us-east-1", virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )  # fmt: skip
        self._get: Callable[..., Any] = obstore.get
        self._pool = ThreadPoolExecutor(threads)

    def measure(self, count: int) -> float:
        """Fetch so many objects; return the seconds it took."""
        return sum(self._once() for _ in range(count // self.chunk))

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _once(self) -> float:
        keys = [self._keys[place] for place in self._random.permutation(self.chunk)]
        start = time.perf_counter()
        sizes = list(self._pool.map(lambda key: len(self._get(self._store, key).bytes()), keys))
        seconds = time.perf_counter() - start
        if min(sizes) <= 0:
            raise RuntimeError("an object is empty")
        return seconds


class InOrder(Contender):
    """A `Contender` of fastpipe's: all objects, fetched ahead of a random order, taken in it.

    Args:
        key: its name.
        bucket: what it reads.
        batch_size: objects that are asked for at a time.
    """

    def __init__(self, key: str, bucket: Bucket, batch_size: int) -> None:
        self.key, self.chunk = key, len(bucket.keys)
        self._batch_size = batch_size
        self._random = np.random.default_rng(0)
        self._dataset = remote_dataset(bucket, None, 0)
        self._paths = [path for path, _ in self._dataset.samples]

    def measure(self, count: int) -> float:
        """Fetch so many objects; return the seconds it took."""
        return sum(self._once() for _ in range(count // self.chunk))

    def close(self) -> None:
        """End the threads."""
        self._dataset.close()

    def _once(self) -> float:
        order = self._random.permutation(self.chunk)
        batches = [order[at : at + self._batch_size] for at in range(0, self.chunk, self._batch_size)]
        before = self._dataset.downloaded[0]
        start = time.perf_counter()
        reader = self._dataset._remote.reader()
        reader.follow(iter(batches), None, is_here=True)
        for batch in batches:
            reader.need(batch)
            for row in batch.tolist():
                reader.read(self._paths[row], row)
        seconds = time.perf_counter() - start
        count = self._dataset.downloaded[0] - before
        if count != self.chunk:
            raise RuntimeError(f"{count} objects were fetched in the place of {self.chunk}")
        return seconds


class StageAll(Contender):
    """A `Contender` of fastpipe's: all objects, copied to an empty stage by ``stage_all``.

    Args:
        key: its name.
        bucket: what it reads.
        stages: where its stages are.
    """

    def __init__(self, key: str, bucket: Bucket, stages: EmptyStages) -> None:
        self.key, self.chunk = key, len(bucket.keys)
        self._bucket, self._stages = bucket, stages

    def measure(self, count: int) -> float:
        """Stage so many objects; return the seconds it took."""
        return sum(self._once() for _ in range(count // self.chunk))

    def _once(self) -> float:
        dataset = remote_dataset(self._bucket, self._stages.next(), 0)
        start = time.perf_counter()
        failed = dataset.stage_all()
        seconds = time.perf_counter() - start
        count = dataset.downloaded[0]
        dataset.close()
        if failed or count != self.chunk:
            raise RuntimeError(f"{count} objects were staged in the place of {self.chunk}")
        gc.collect()
        return seconds


def best_connections(
    bucket: Bucket, counts: tuple[int, ...] = CONNECTIONS, say: Callable[[str], None] = lambda text: None
) -> int:
    """The number of threads with which obstore alone fetches the most, in the best of two runs each.

    Args:
        bucket: what is read.
        counts: the numbers to try.
        say: told what was found.
    """
    rates = {}
    for threads in counts:
        row = ObstoreThreads("", bucket, threads)
        try:
            rates[threads] = max(row.chunk / row.measure(row.chunk) for _ in range(2))
        finally:
            row.close()
    best = max(rates, key=lambda threads: rates[threads])
    found = ", ".join(f"{threads}: {rate:,.0f}" for threads, rate in rates.items())
    say(f"obstore, objects/s by threads: {found}; taken: {best}")
    return best


# ----------------------------------------------------------------------------------------------------
# Before anything is timed: are the batches of the bucket those of the local folder, each sample once?


def check_bucket(bucket: Bucket, batch_size: int, say: Callable[[str], None] = lambda text: None) -> RowCheck:
    """Compare epochs of the bucket, with a stage and without, with the local folder.

    Args:
        bucket: what is read.
        batch_size: images in a batch.
        say: told what is compared.
    """
    check = RowCheck(whose="the local folder's")
    transform = check_transform()
    local = fastpipe.FastImageFolder(str(bucket.folder), transform, cache="off")
    expected: Counter[bytes] = Counter()
    for images, labels in fastpipe.FastLoader(local, batch_size):
        expected.update(digests_of_samples(images.numpy(), labels.numpy()))
    stock = require("torchvision", extra="torch").datasets.ImageFolder(str(bucket.folder))
    for stages in (False, True):
        say(f"comparing: the bucket {'with' if stages else 'without'} a stage")
        with tempfile.TemporaryDirectory(prefix="fastpipe-bench-") as folder:
            dataset = remote_dataset(bucket, Path(folder, "stage") if stages else None, 0, transform)
            names = [path.removeprefix(f"{bucket.url}/") for path, _ in dataset.samples]
            if names != [str(Path(path).relative_to(bucket.folder)) for path, _ in stock.samples]:
                check.problems += ("the bucket's samples are not those that torchvision finds",)
            loader: Any = fastpipe.FastLoader(dataset, batch_size, shuffle=True)
            for epoch in range(1 + stages):
                check.add(f"{'with' if stages else 'without'} a stage, epoch {epoch}", expected, loader)
            dataset.close()
    return check
