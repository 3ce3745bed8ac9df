"""The rows of the case that fetch objects and do nothing with them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from fastpipe.bench.s3.bucket import Bucket
from fastpipe.bench.s3.rows import EmptyStages, remote_dataset
from fastpipe.core.extras import require

__all__ = ["CONNECTIONS", "InOrder", "ObstoreThreads", "StageAll", "best_connections"]

CONNECTIONS = (16, 32, 64, 96, 128)


class ObstoreThreads:
    """A `Contender`: obstore's synchronous calls in a pool of threads, over all objects in random order.

    Args:
        key: its name.
        bucket: what it reads.
        threads: how many requests at a time.
    """

    workers = 0

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


class InOrder:
    """A `Contender` of fastpipe's: all objects, fetched ahead of a random order, taken in it.

    Args:
        key: its name.
        bucket: what it reads.
        batch_size: objects that are asked for at a time.
    """

    workers = 0

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


class StageAll:
    """A `Contender` of fastpipe's: all objects, copied to an empty stage by ``stage_all``.

    Args:
        key: its name.
        bucket: what it reads.
        stages: where its stages are.
    """

    workers = 0

    def __init__(self, key: str, bucket: Bucket, stages: EmptyStages) -> None:
        self.key, self.chunk = key, len(bucket.keys)
        self._bucket, self._stages = bucket, stages

    def measure(self, count: int) -> float:
        """Stage so many objects; return the seconds it took."""
        return sum(self._once() for _ in range(count // self.chunk))

    def close(self) -> None:
        """Nothing is left open between epochs."""

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
