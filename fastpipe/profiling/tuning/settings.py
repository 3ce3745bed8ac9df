"""What of a loader is tuned, and a loader with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import fastpipe
from fastpipe.core.extras import require
from fastpipe.options import Cache, Decode
from fastpipe.profiling.watching import is_map_style, processes_of

__all__ = ["Base", "Settings", "folders_behind"]


@dataclass(frozen=True)
class Settings:
    """Values of the settings that are tuned.

    Attributes:
        workers: worker processes; 0 for none.
        ahead: batches made ahead: by each worker, or else by this process's threads.
        threads: of a dataset of fastpipe's, in each process that makes batches.
        backend: decoder of images.
        cache: where what was decoded is kept.

    What a dataset does not have is None, and stays as it is.
    """

    workers: int
    ahead: int | Literal["auto"] = "auto"
    threads: int | Literal["auto"] | None = None
    backend: str | None = None
    cache: Cache | None = None

    def with_workers(self, workers: int) -> Settings:
        """The same with another number of worker processes, each of which makes as much ahead as is usual."""
        return self if workers == self.workers else replace(self, workers=workers, ahead="auto")

    @property
    def of_loader(self) -> dict[str, Any]:
        """Arguments of ``FastLoader`` and ``accelerate``."""
        name = "prefetch_factor" if self.workers else "prefetch_batches"
        more = {} if self.ahead == "auto" else {name: self.ahead}
        processes = {"workers": "processes"} if self.workers else {}
        return {"num_workers": self.workers, **processes, **more}

    def of_dataset(self, before: Settings) -> dict[str, Any]:
        """Arguments of fastpipe's datasets that differ from those before."""
        found: dict[str, Any] = {}
        if self.threads not in (None, before.threads):
            found["threads"] = self.threads
        if self.backend not in (None, before.backend):
            found["decode"] = Decode(backend=self.backend)  # type: ignore[arg-type]
        if self.cache not in (None, before.cache):
            found["cache"] = self.cache
        return found

    def told(self, before: Settings) -> str:
        """What is said of a loader, and what differs of its dataset.

        >>> Settings(workers=2, ahead=4, threads=3).told(Settings(workers=0, threads="auto"))
        'num_workers=2, prefetch_factor=4, threads=3'
        """
        values = self.of_loader | self.of_dataset(before)
        # Here num_workers are always processes.
        return ", ".join(f"{name}={value!r}" for name, value in values.items() if name != "workers")


class Base:
    """A loader whose settings are tuned.

    Args:
        loader: of torch's, or fastpipe's.

    Attributes:
        loader: itself.
        folders: fastpipe's datasets behind it.
        is_sequence: whether its dataset gives samples by index, so that any number of workers makes the same.
        is_threaded: whether threads of fastpipe's make its batches where there are no workers.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.folders = folders_behind(loader.dataset)
        self.is_sequence = is_map_style(loader.dataset)
        fast = fastpipe.accelerate(loader, num_workers=0)
        self.is_threaded = hasattr(fast, "clock")
        # What the cache of torchvision's folders is, of which fastpipe makes its own.
        self._cache: dict[str, Any] = {}
        if self.is_threaded and not self.folders and Cache.of(getattr(loader, "cache", "auto")) == Cache():
            self._cache = {"cache": "off"}

    @property
    def settings(self) -> Settings:
        """As they are."""
        loader = self.loader
        workers = processes_of(loader)
        ahead: Any = loader.prefetch_factor if workers else getattr(loader, "prefetch_batches", "auto")
        first = self.folders[0] if self.folders else None
        decode = getattr(first, "decode", None)
        return Settings(
            workers, "auto" if workers and ahead == 2 else ahead,
            getattr(first, "threads", None),
            None if decode is None else decode.backend,
            getattr(first, "cache", None),
        )  # fmt: skip

    @contextlib.contextmanager
    def dataset_with(self, settings: Settings) -> Iterator[None]:
        """fastpipe's datasets have these settings meanwhile, and keep nothing that ``cache="auto"`` would:
        what is tried later would else find what was decoded for others."""
        before = [(one, dict(vars(one))) for one in self.folders]
        try:
            self.set(settings)
            for one in self.folders:
                if getattr(one, "cache", None) == Cache():
                    one.cache = Cache("off")
            yield
        finally:
            for one, attributes in before:
                for name in ("threads", "decode", "cache"):
                    if name in attributes:
                        setattr(one, name, attributes[name])

    def set(self, settings: Settings) -> None:
        """Give fastpipe's datasets these settings."""
        for one in self.folders:
            if settings.threads is not None:
                one.threads = settings.threads
            if settings.backend is not None and settings.backend != one.decode.backend:
                # A share on the GPU is the other back end's.
                one.decode = replace(one.decode, backend=settings.backend, gpu_share=None)
            if settings.cache is not None and settings.cache != one.cache:
                one.cache = settings.cache

    def made(self, settings: Settings, *, for_trial: bool = False) -> Any:
        """A ``FastLoader`` with these settings; those of the dataset are set apart from this.

        Args:
            settings: of the loader.
            for_trial: keeps nothing that ``cache="auto"`` would.
        """
        return fastpipe.accelerate(self.loader, **settings.of_loader, **(self._cache if for_trial else {}))


def folders_behind(dataset: Any) -> list[Any]:
    """fastpipe's datasets behind one, also through torch's ``Subset`` and ``ConcatDataset``.

    >>> folders_behind(range(3))
    []
    """
    data = require("torch.utils.data", extra="torch")
    if type(dataset) is data.Subset:
        return folders_behind(dataset.dataset)
    if type(dataset) is data.ConcatDataset:
        found = [folder for part in dataset.datasets for folder in folders_behind(part)]
        return list({id(folder): folder for folder in found}.values())
    return [dataset] if type(dataset).__module__.partition(".")[0] == "fastpipe" else []
