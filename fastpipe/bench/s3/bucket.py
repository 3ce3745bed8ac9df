"""What the case reads: photos as objects behind a proxy, and the same ones in a local folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fastpipe.bench.data import Photos
from fastpipe.errors import OptionError
from fastpipe.testing.delay_proxy import Faults
from fastpipe.testing.s3 import S3, S3Missing, S3Proxy

__all__ = ["CLASSES", "FOLDER", "Bucket"]

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
        """Of the folder with the class folders."""
        return f"s3://{self.name}/{FOLDER}"

    @property
    def folder(self) -> Path:
        """The same on the local disk."""
        return self.local / FOLDER

    @property
    def labels(self) -> list[int]:
        """Of the objects."""
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
