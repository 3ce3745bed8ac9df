"""A folder of images on a file system that answers from elsewhere, measured as if it were near."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np

from fastpipe.core.extras import require
from fastpipe.core.text import in_bytes
from fastpipe.profiling.candidate import Candidate, place_of
from fastpipe.profiling.costs import LoaderCosts
from fastpipe.profiling.mounts import file_system
from fastpipe.profiling.scratch import Scratch
from fastpipe.profiling.swaps import accelerated
from fastpipe.profiling.watching import Watched

__all__ = ["of_staged"]

_WAITS = 0.1  # from this part of a batch's time on a copy nearby is worth it
_BATCHES, _MOST_BYTES = 8, 256 << 20  # that are copied to be measured


def of_staged(watched: Watched, costs: LoaderCosts, mounts: str | None = None) -> Iterator[Candidate]:
    """fastpipe's dataset with ``stage=``, measured on copies of some files, as later epochs find them.

    Args:
        watched: a loader of torch's.
        costs: of its batches.
        mounts: as of `file_system`.
    """
    loader, dataset, size = watched.loader, watched.loader.dataset, watched.batch_size
    samples, root = getattr(dataset, "samples", None), getattr(dataset, "root", None)
    idle = costs.read_idle_s / max(costs.wall_s, 1e-9)
    if idle < _WAITS or not samples or size is None or not isinstance(root, (str, os.PathLike)):
        return
    try:
        remote = file_system(os.fspath(root), mounts)
    except OSError:
        return
    if not remote.is_remote:
        return
    copies = _Copies(loader, samples, size)
    yield Candidate(
        "let fastpipe copy files to a local disk before they are needed: FastImageFolder(…, "
        f'stage="/a/local/disk") and FastLoader{place_of(watched)}',
        f"a batch waits {idle:.0%} of its time for {remote.name}; measured on copies of "
        f"{copies.count} of your files, as epochs after the first find them",
        copies.begin, close=copies.close,
    )  # fmt: skip


class _Copies:
    """Batches of files that are copied here when they are first iterated.

    Args:
        loader: of a dataset with ``samples``, pairs of a path and a label.
        samples: these.
        batch_size: samples of a batch.
    """

    def __init__(self, loader: Any, samples: Any, batch_size: int) -> None:
        self._loader, self._samples, self._batch_size = loader, samples, batch_size
        self.count = min(len(samples), _BATCHES * batch_size)
        self._folder: Scratch | None = None
        self._near: Any = None

    def close(self) -> None:
        """Remove the copies."""
        self._near = None
        if self._folder is not None:
            self._folder.close()

    def begin(self) -> Iterator[Any]:
        """An iterator of one epoch.

        Raises:
            OSError: there is no room, or a file cannot be read.
        """
        if self._folder is None:
            self._folder = Scratch()
        if self._near is None:
            self._near = self._loader_of(self._folder.path)
        return iter(self._near)

    def _loader_of(self, folder: str) -> Any:
        """fastpipe's loader over copies."""
        drawn = np.random.default_rng(0).choice(len(self._samples), self.count, replace=False)
        copied, room = [], min(_MOST_BYTES, shutil.disk_usage(folder).free // 2)
        for number, at in enumerate(map(int, drawn)):
            path, label = self._samples[at]
            room -= os.path.getsize(path)
            if room < 0:
                break
            name = os.path.join(folder, f"{number:06d}{os.path.splitext(path)[1]}")
            copied.append((shutil.copyfile(path, name), label))
        if len(copied) < self._batch_size:
            raise OSError(f"there is no room for {self._batch_size} files in {folder}: "
                          f"{in_bytes(shutil.disk_usage(folder).free)} are free")  # fmt: skip
        dataset = copy.copy(self._loader.dataset)
        vars(dataset).update(samples=copied, imgs=copied, targets=[label for _, label in copied])
        stock = require("torch.utils.data", extra="torch").DataLoader(
            dataset, self._batch_size, shuffle=True, drop_last=True,
            collate_fn=self._loader.collate_fn, num_workers=self._loader.num_workers,
            worker_init_fn=self._loader.worker_init_fn,
        )  # fmt: skip
        # Where it makes the images itself it would keep them, of which there are few.
        return accelerated(stock, {"cache": "off"}) or accelerated(stock, {})
