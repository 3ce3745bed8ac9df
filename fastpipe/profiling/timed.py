"""A stock loader's dataset and collate function with a witness beside them, in whichever process."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from time import perf_counter_ns
from types import CodeType
from typing import Any

from fastpipe.profiling.arrays_read import ArrayRead, ArrayReads
from fastpipe.profiling.images_read import ImageReads
from fastpipe.profiling.recorder import Recorder, Tally
from fastpipe.profiling.stacks import Boundary
from fastpipe.profiling.stages import COLLATE
from fastpipe.profiling.volumes_open import OpenVolume, VolumeLoads, volumes_of

__all__ = [
    "BOUNDARIES",
    "Account",
    "TimedBatches",
    "TimedCollate",
    "TimedDataset",
    "TimedInit",
    "TimedIterable",
    "Witness",
]

_LAST = 100  # of a process's finalizers this is among the first
_SPANS = 400  # batches of which begin and end are kept, for a trace


class Account:
    """What one process has done for a loader.

    Attributes:
        pid: of the process.
        worker: its number; -1 in the process that trains.
        batches, samples: that it made.
        collate_ns: nanoseconds in the collate function.
        cpu_ns: in which the process has run, but for who looks at it.
        tally: by stage and line.
        arrays: of HDF5 files that the dataset reads.
        volumes: that it has open, or else loads.
        images, opened: files that Pillow opened, each once, and how often it did so for these samples.
        spans: begin, end of fetching and end of collating of the last batches, by the monotonic clock.
    """

    def __init__(self, worker: int) -> None:
        self.pid, self.worker = os.getpid(), worker
        self.batches = self.samples = self.collate_ns = self.cpu_ns = 0
        self.spans: deque[tuple[int, int, int]] = deque(maxlen=_SPANS)
        self.tally = Tally()
        self.arrays: list[ArrayRead] = []
        self.volumes: list[OpenVolume] = []
        self.images: list[str] = []
        self.opened = 0

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return {**self.__dict__, "spans": list(self.spans), "tally": self.tally.as_json()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Account:
        """As `as_json` gives it."""
        found = cls(content["worker"])
        for name, value in content.items():
            setattr(found, name, value)
        found.spans = deque((tuple(span) for span in content["spans"]), maxlen=_SPANS)
        found.tally = Tally.from_json(content["tally"])
        found.arrays = [ArrayRead.from_json(read) for read in content["arrays"]]
        found.volumes = [
            OpenVolume(path, tuple(shape), is_loaded) for path, shape, is_loaded in content["volumes"]
        ]
        return found


class Witness:
    """Sees what a loader's dataset does in whichever process; goes to workers, forked or spawned.

    Args:
        folder: where each process notes what it has seen.
    """

    # Whose loader makes a batch in this process: a thread may iterate several, and their datasets look alike.
    _asked: Witness | None = None

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._pid = 0
        self._began = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"_folder": self._folder, "_pid": 0, "_began": 0}

    @property
    def account(self) -> Account:
        """Of this process; looking begins with its first use."""
        if self._pid != os.getpid():
            self._begin()
        return self._account

    def close(self) -> None:
        """End looking, in this process."""
        if self._pid == os.getpid():
            self._reads.end()
            self._loads.end()
            self._opens.end()
            self._recorder.stop()
            self._pid = 0
            if Witness._asked is self:
                Witness._asked = None

    def fetching(self, dataset: Any) -> None:
        """A sample is asked for; perhaps the first of a batch."""
        Witness._asked = self
        if not self._began:
            self.account  # looking begins with the first  # noqa: B018
            self._reads.begin()
            self._loads.begin()
            self._opens.begin()
            self._dataset = dataset
            self._began = perf_counter_ns()

    def collated(self, count: int, begin: int) -> None:
        """A batch is whole whose collation began then."""
        account, end = self.account, perf_counter_ns()
        account.batches += 1
        account.samples += count
        account.opened = self._opens.count
        account.collate_ns += end - begin
        account.spans.append((self._began or begin, begin, end))
        self._began = 0

    def accounts(self) -> list[Account]:
        """Of all processes, as far as they have told; this one need not have."""
        found = []
        if self._pid == os.getpid():
            self._look()
            found.append(Account.from_json(json.loads(json.dumps(self._account.as_json()))))
        for path in sorted(Path(self._folder).glob("*.json")):
            if found and path.stem == str(self._pid):
                continue
            with contextlib.suppress(FileNotFoundError):
                found.append(Account.from_json(json.loads(path.read_text())))
        return found

    def tell(self) -> None:
        """Note what was seen so far; the note is whole whenever it is read."""
        self._look()
        path = os.path.join(self._folder, f"{os.getpid()}.json")
        with contextlib.suppress(OSError):  # the one who reads it has ended, and the folder is gone
            with open(f"{path}.unfinished", "w") as file:
                json.dump(self._account.as_json(), file)
            os.replace(f"{path}.unfinished", path)

    def _look(self) -> None:
        if self._dataset is not None and not any(not one.is_loaded for one in self._account.volumes):
            self._account.volumes = volumes_of(self._dataset) or list(self._loads.found)
        self._account.images = self._opens.files
        self._account.cpu_ns = time.process_time_ns() - self._cpu - self._recorder.own_cpu_ns

    def _begin(self) -> None:
        self._account = Account(_worker_number())
        self._pid, self._cpu = os.getpid(), time.process_time_ns()
        self._reads, self._loads, self._dataset = ArrayReads(), VolumeLoads(), None
        self._opens: ImageReads = ImageReads()
        self._account.arrays = self._reads.found
        # Where nobody else makes the batches, one thread may do so after another: TensorFlow's, for Keras.
        threads = None if self._account.worker < 0 else [threading.get_ident()]
        self._recorder = Recorder(
            BOUNDARIES, threads, self.tell, counts=lambda: Witness._asked in (None, self)
        )
        self._recorder.tally = self._account.tally
        self._recorder.start()
        if self._account.worker >= 0:  # whose main thread ends before threads beside it are heard again
            Finalize(None, self.close, exitpriority=_LAST)


def _worker_number() -> int:
    """Of this process among a loader's workers; -1 if it is none."""
    from torch.utils.data import get_worker_info  # who calls this has loaded it

    worker = get_worker_info()
    return -1 if worker is None else worker.id


class TimedDataset:
    """A dataset whose samples are witnessed; otherwise it is the user's."""

    def __init__(self, dataset: Any, witness: Witness) -> None:
        self.dataset, self._witness = dataset, witness

    def __getitem__(self, index: Any) -> Any:
        self._witness.fetching(self.dataset)
        return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "_witness"):  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


class TimedBatches(TimedDataset):
    """The same of a dataset that answers for a whole batch."""

    def __getitems__(self, indices: Any) -> Any:
        self._witness.fetching(self.dataset)
        return self.dataset.__getitems__(indices)


class TimedIterable:
    """The same of a dataset that is iterated."""

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
    """A collate function that is witnessed."""

    def __init__(self, function: Callable[[Any], Any], witness: Witness) -> None:
        self._function, self._witness = function, witness

    def __call__(self, samples: Any) -> Any:
        begin = perf_counter_ns()
        batch = self._function(samples)
        self._witness.collated(len(samples) if isinstance(samples, Sequence) else 1, begin)
        return batch


class TimedInit:
    """Runs in each worker before the user's own function, to which the dataset is the user's."""

    def __init__(self, function: Callable[[int], None] | None, witness: Witness) -> None:
        self._function, self._witness = function, witness

    def __call__(self, worker_id: int) -> None:
        from torch.utils.data import get_worker_info

        worker = get_worker_info()
        if worker is not None and isinstance(worker.dataset, (TimedDataset, TimedIterable)):
            object.__setattr__(worker, "dataset", worker.dataset.dataset)
        self._witness.account  # looking begins  # noqa: B018
        if self._function is not None:
            self._function(worker_id)


BOUNDARIES: dict[CodeType, Boundary] = {
    TimedDataset.__getitem__.__code__: Boundary("dataset"),
    TimedBatches.__getitems__.__code__: Boundary("dataset"),
    _TimedIterator.__next__.__code__: Boundary("dataset"),
    TimedCollate.__call__.__code__: Boundary("collate", COLLATE),
}
