"""Observe a loader's dataset in any process: the time that each stage takes, and the files that are read."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import pickle
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from pathlib import Path
from time import perf_counter_ns
from types import CodeType
from typing import Any, NamedTuple

from fastpipe.tools.recorder import Recorder, Tally
from fastpipe.tools.stacks import COLLATE, Boundary

_log = logging.getLogger("fastpipe.profile")
_LAST = 100  # priority among the finalizers of a process: high priorities run first
_SPANS = 400  # most batches whose times are kept, for a trace
_OBSERVERS = "_fastpipe_observers"
_MOST_ARRAY_READS, _MOST_IMAGE_READS = 256, 512  # most observed reads: samples are read alike
_FORMATS = ("zarr", "zarr3", "n5")
_LOADERS = {"nibabel": "load", "tifffile": "imread", "zarr": "open", "numpy": "load"}  # load volumes
_LEAST_DIMENSIONS = 3
_MOST_LOADS, _MOST_VOLUMES = 512, 64


@dataclass
class Account:
    worker: int
    batches: int = 0
    samples: int = 0
    collate_ns: int = 0
    cpu_ns: int = 0
    opened: int = 0
    tally: Tally = field(default_factory=Tally)
    arrays: list[ArrayRead] = field(default_factory=list)
    volumes: list[OpenVolume] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    spans: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=_SPANS))

    def __getstate__(self) -> dict[str, Any]:
        # Copies, because other threads may change the originals while they are pickled.
        return {**vars(self), "spans": self.spans.copy(), "tally": Tally(self.tally)}


class Witness:
    """Observes a loader's dataset.  Each process writes its measurements (an ``Account``) to ``folder``."""

    # The witness of the loader that now makes a batch in this process.  A thread may iterate several loaders.
    _active: Witness | None = None

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._pid = self._began = 0
        self._dataset: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_folder": self._folder, "_pid": 0, "_began": 0, "_dataset": None}

    def begin(self) -> None:
        if self._pid == os.getpid():
            return
        from torch.utils.data import get_worker_info  # the caller has imported torch

        worker = get_worker_info()
        self._account = Account(-1 if worker is None else worker.id)
        self._pid, self._cpu = os.getpid(), time.process_time_ns()
        self._reads = Reads()
        self._account.arrays = self._reads.arrays
        # Without workers, several threads may make batches in turn, as TensorFlow's threads do for Keras.
        threads = None if worker is None else [threading.get_ident()]
        self._recorder = Recorder(
            BOUNDARIES, threads, self.tell, counts=lambda: Witness._active in (None, self)
        )
        self._recorder.tally = self._account.tally
        self._recorder.start()
        if worker is not None:  # the recorder's thread may not run again before the worker ends
            Finalize(None, self.close, exitpriority=_LAST)

    def close(self) -> None:
        if self._pid == os.getpid():
            self._reads.close()
            self._recorder.stop()
            self._pid = 0
            if Witness._active is self:
                Witness._active = None

    def fetching(self, dataset: Any) -> None:
        Witness._active = self
        if not self._began:
            self.begin()
            self._reads.begin()
            self._dataset = dataset
            self._began = perf_counter_ns()

    def collated(self, count: int, begin: int) -> None:
        self.begin()
        account, end = self._account, perf_counter_ns()
        account.batches += 1
        account.samples += count
        account.opened = self._reads.opened
        account.collate_ns += end - begin
        account.spans.append((self._began or begin, begin, end))
        self._began = 0

    def accounts(self) -> list[Account]:
        found = []
        if self._pid == os.getpid():
            self._update()
            found.append(copy.deepcopy(self._account))
        for path in sorted(Path(self._folder).glob("*.account")):
            if not found or path.stem != str(self._pid):
                with contextlib.suppress(FileNotFoundError):
                    found.append(pickle.loads(path.read_bytes()))
        return found

    def tell(self) -> None:
        self._update()
        path = Path(self._folder, f"{os.getpid()}.unfinished")
        with contextlib.suppress(OSError):  # the reading process has ended and removed the folder
            path.write_bytes(pickle.dumps(self._account))
            path.replace(path.with_suffix(".account"))

    def _update(self) -> None:
        if self._dataset is not None and all(one.is_loaded for one in self._account.volumes):
            self._account.volumes = volumes_of(self._dataset) or list(self._reads.volumes)
        self._account.images = list(dict.fromkeys(read.file for read in list(self._reads.images)))
        self._account.cpu_ns = time.process_time_ns() - self._cpu - self._recorder.own_cpu_ns


class TimedDataset:
    def __init__(self, dataset: Any, witness: Witness) -> None:
        self.dataset, self._witness = dataset, witness

    def __getitem__(self, index: Any) -> Any:
        self._witness.fetching(self.dataset)
        return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "_witness"):  # this object is being unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


class TimedBatches(TimedDataset):
    def __getitems__(self, indices: Any) -> Any:
        self._witness.fetching(self.dataset)
        return self.dataset.__getitems__(indices)


class TimedIterable:
    def __init__(self, dataset: Any, witness: Witness) -> None:
        self.dataset, self._witness = dataset, witness

    def __iter__(self) -> Iterator[Any]:
        return _TimedIterator(iter(self.dataset), self.dataset, self._witness)

    def __len__(self) -> int:
        return len(self.dataset)


class _TimedIterator:
    def __init__(self, inner: Iterator[Any], dataset: Any, witness: Witness) -> None:
        self._inner, self.dataset, self._witness = inner, dataset, witness

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._witness.fetching(self.dataset)
        return next(self._inner)


class TimedCollate:
    def __init__(self, function: Callable[[Any], Any], witness: Witness) -> None:
        self._function, self._witness = function, witness

    def __call__(self, samples: Any) -> Any:
        begin = perf_counter_ns()
        batch = self._function(samples)
        self._witness.collated(len(samples) if isinstance(samples, Sequence) else 1, begin)
        return batch


class TimedInit:
    def __init__(self, function: Callable[[int], None] | None, witness: Witness) -> None:
        self._function, self._witness = function, witness

    def __call__(self, worker_id: int) -> None:
        from torch.utils.data import get_worker_info

        worker = get_worker_info()
        if worker is not None and isinstance(worker.dataset, (TimedDataset, TimedIterable)):
            object.__setattr__(worker, "dataset", worker.dataset.dataset)
        self._witness.begin()
        if self._function is not None:
            self._function(worker_id)


def timed_parts(loader: Any, witness: Witness, is_map_style: bool) -> dict[str, Any]:
    kind: Any = TimedBatches if getattr(loader.dataset, "__getitems__", None) else TimedDataset
    return {
        "dataset": (kind if is_map_style else TimedIterable)(loader.dataset, witness),
        "collate_fn": TimedCollate(loader.collate_fn, witness),
        "worker_init_fn": TimedInit(loader.worker_init_fn, witness) if loader.num_workers else None,
    }


BOUNDARIES: dict[CodeType, Boundary] = {
    TimedDataset.__getitem__.__code__: Boundary("dataset"),
    TimedBatches.__getitems__.__code__: Boundary("dataset"),
    _TimedIterator.__next__.__code__: Boundary("dataset"),
    TimedCollate.__call__.__code__: Boundary("collate", COLLATE),
}


def observe(owner: Any, name: str, see: Callable[..., object]) -> Callable[[], None]:
    """Call ``see`` after each call of the function ``name`` of ``owner``.

    Return a function that ends this observation.  Several observations of a function may end in any order.
    """
    function = getattr(owner, name)
    observers = getattr(function, _OBSERVERS, None)
    if observers is None:
        function, observers = _observed(function), []
        setattr(function, _OBSERVERS, observers)
        setattr(owner, name, function)
    observers.append(see)

    def end() -> None:
        if see in observers:
            observers.remove(see)
        # If other code has replaced the function, the wrapper stays and only calls the original.
        if not observers and getattr(owner, name) is function:
            setattr(owner, name, function.__wrapped__)

    return end


def _observed(function: Any) -> Any:
    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        observers = getattr(watched, _OBSERVERS)
        for see in tuple(observers):
            try:
                see(value, *args, **kwargs)
            except Exception:  # the caller's work continues after any error
                _log.warning("%s is no longer observed", function, exc_info=True)
                observers.remove(see)
        return value

    return watched


class ArrayRead(NamedTuple):
    file: str
    name: str
    shape: tuple[int, ...]
    part: tuple[int, ...]

    @property
    def sample_dims(self) -> int | None:
        count = len(self.shape) - len(self.part)
        return count if count > 0 and self.shape[count:] == self.part else None


@dataclass
class ImageRead:
    file: str
    box: tuple[float, ...] | None = None
    size: tuple[int, int] | None = None


class OpenVolume(NamedTuple):
    path: str
    shape: tuple[int, ...]
    is_loaded: bool = False


class Reads:
    def __init__(self) -> None:
        self.arrays: list[ArrayRead] = []
        self.volumes: list[OpenVolume] = []
        self.images: list[ImageRead] = []
        self.opened = 0
        self._left = {"h5py": _MOST_ARRAY_READS, **dict.fromkeys((*_LOADERS, "zarr.Array"), _MOST_LOADS)}
        self._local = threading.local()
        self._ends: dict[str, Callable[[], None]] = {}

    def begin(self) -> Reads:
        for package, name in _LOADERS.items():
            if self._left[package]:
                see = functools.partial(self._loaded, package)
                self._observe(sys.modules.get(package), name, see, f"{package}.{name}")
        if self._left["h5py"] and "h5py" in sys.modules:
            self._observe(sys.modules["h5py"].Dataset, "__getitem__", self._read, "h5py")
        if self._left["zarr.Array"] and "zarr" in sys.modules:
            self._observe(sys.modules["zarr"].Array, "__getitem__", self._sliced, "zarr.Array")
        module = sys.modules.get("PIL.Image")
        if module is not None:
            # Other threads may read images now.  A thread opens, crops and then resizes an image.  The last
            # operation is observed first and removed first, so that a box is never observed without a size.
            self._observe(module.Image, "resize", self._resized, "resize")
            self._observe(module.Image, "crop", self._cropped, "crop")
            self._observe(module, "open", self._opened, "open")
        return self

    def close(self) -> None:
        while self._ends:  # an interruption must not lose a function that has not run
            key = next(iter(self._ends))
            self._ends[key]()
            self._ends.pop(key, None)

    def _observe(self, owner: Any, name: str, see: Callable[..., object], key: str) -> None:
        if owner is not None and key not in self._ends:
            self._ends[key] = observe(owner, name, see)

    def _count(self, package: str, key: str) -> None:
        self._left[package] = max(0, self._left[package] - 1)
        if not self._left[package] and key in self._ends:
            self._ends[key]()
            self._ends.pop(key, None)

    def _read(self, value: Any, dataset: Any, *_: Any, **__: Any) -> None:
        self._count("h5py", "h5py")
        part = getattr(value, "shape", ())
        file = os.path.realpath(os.fsdecode(dataset.file.filename))
        read = ArrayRead(file, dataset.name, tuple(dataset.shape or ()), tuple(part))
        if read not in self.arrays:
            self.arrays.append(read)

    def _loaded(self, package: str, value: Any, file: Any = None, *_: Any, **__: Any) -> None:
        self._count(package, f"{package}.{_LOADERS[package]}")
        shape = tuple(getattr(value, "shape", ()))
        if not isinstance(file, (str, os.PathLike)) or len(shape) < _LEAST_DIMENSIONS:
            return
        volume = OpenVolume(os.path.abspath(os.fspath(file)), shape, True)
        if volume not in self.volumes and len(self.volumes) < _MOST_VOLUMES:
            self.volumes.append(volume)

    def _sliced(self, _part: Any, array: Any, *_: Any, **__: Any) -> None:
        self._count("zarr.Array", "zarr.Array")
        shape, known = tuple(array.shape), {one.path for one in self.volumes}
        if len(shape) >= _LEAST_DIMENSIONS and len(known) < _MOST_VOLUMES:
            self.volumes += [OpenVolume(path, shape) for path in _paths(array) if path not in known]

    def _opened(self, _image: Any, fp: Any, *_: Any, **__: Any) -> None:
        self.opened += 1
        self._local.read = None
        if not isinstance(fp, (str, bytes, os.PathLike)):
            fp = getattr(fp, "name", None)  # ``fp`` is an open file
        if len(self.images) < _MOST_IMAGE_READS and isinstance(fp, (str, bytes, os.PathLike)):
            self._local.read = ImageRead(os.path.abspath(os.fsdecode(fp)))
            self.images.append(self._local.read)

    def _cropped(self, _part: Any, _image: Any, box: Any = None, *_: Any, **__: Any) -> None:
        read: ImageRead | None = getattr(self._local, "read", None)
        if read is not None and read.box is None and read.size is None and box is not None:
            read.box = tuple(box)

    def _resized(self, _small: Any, _image: Any, size: Any, *_: Any, **__: Any) -> None:
        read: ImageRead | None = getattr(self._local, "read", None)
        if read is not None and read.size is None:
            read.size = (size[0], size[1])


def volumes_of(dataset: Any) -> list[OpenVolume]:
    values = list(getattr(dataset, "__dict__", {}).values())
    found = (OpenVolume(path, tuple(value.shape)) for value in values for path in _paths(value))
    return list(dict.fromkeys(found))


def _paths(value: Any) -> Iterator[str]:
    package, kind = type(value).__module__.partition(".")[0], type(value).__name__
    try:
        if package == "tensorstore" and kind == "TensorStore":
            content = value.spec().to_json()
            store = content.get("kvstore") if content.get("driver") in _FORMATS else None
            if isinstance(store, str):
                yield store.removeprefix("file://").rstrip("/")
            elif isinstance(store, dict) and store.get("driver") == "file":
                yield str(store["path"]).rstrip("/")
            elif isinstance(store, dict) and store.get("driver") == "http":
                yield f"{store['base_url']}{store.get('path', '')}".rstrip("/")
        elif package == "zarr" and kind == "Array":
            text = str(value.store_path)
            if text.startswith("file://"):
                yield text.removeprefix("file://").rstrip("/")
    except Exception:  # the array cannot be described: ignore it
        return
