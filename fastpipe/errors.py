"""Every error fastpipe raises on purpose, in one tree.

::

    FastpipeError
    ├── MissingDependencyError   (ImportError)   an optional package is not installed
    ├── OptionError              (ValueError)    an argument has a value that cannot work
    ├── AugmentError             (ValueError)    a batch, or an argument, of an augmentation cannot be used
    ├── BadSampleError           (OSError)       one sample could not be read or decoded
    │   └── TooManyBadSamplesError               the error budget of ``BadSamples`` is spent
    ├── CacheError               (OSError)       a cache's folder cannot be used, or must not be
    ├── HDF5Error                (OSError)       an HDF5 file is damaged, has changed, or is in use
    ├── VolumeError              (OSError)       a volume is damaged, has changed, or cannot be opened
    ├── StoreError               (OSError)       a store of objects does not answer, or not as it must
    │   ├── StoreAccessError     (PermissionError)   it does not let these credentials in
    │   ├── StoreBusyError                       it may answer when it is asked again
    │   └── ObjectChangedError                   an object is not the one that was listed any more
    ├── StageError               (OSError)       a stage's folder cannot be used, or must not be
    ├── GenerationError          (RuntimeError)  rows cannot be made, or are of another job
    ├── WorkerError              (RuntimeError)  a worker process died, or does not answer
    ├── SharedMemoryError        (RuntimeError)  a worker's batch does not fit into /dev/shm
    └── ClosedError              (RuntimeError)  a loader's threads are gone already

Each also derives from the built-in exception that the replaced code raises in the same
place, so that a script's ``except OSError`` keeps working.  A message says what failed,
what was found, where (path and index), and what to do about it.  As text it can be shown anywhere: control
characters in names from files are escaped (``args`` and ``path`` have them as they are).
"""

from __future__ import annotations

from fastpipe.core.text import printable, printable_lines

__all__ = [
    "AugmentError",
    "BadSampleError",
    "CacheError",
    "ClosedError",
    "FastpipeError",
    "GenerationError",
    "HDF5Error",
    "MissingDependencyError",
    "ObjectChangedError",
    "OptionError",
    "SharedMemoryError",
    "StageError",
    "StoreAccessError",
    "StoreBusyError",
    "StoreError",
    "TooManyBadSamplesError",
    "VolumeError",
    "WorkerError",
]


class FastpipeError(Exception):
    """Base of all errors that fastpipe raises on purpose."""

    def __str__(self) -> str:
        return printable(super().__str__())


class MissingDependencyError(FastpipeError, ImportError):
    """An optional package is needed and is not installed; the message has the pip command."""


class OptionError(FastpipeError, ValueError):
    """An option has a value, or a combination of values, that cannot work."""


class AugmentError(FastpipeError, ValueError):
    """A batch has a kind, shape or dtype that an augmentation does not take, or its arguments cannot work."""


class BadSampleError(FastpipeError, OSError):
    """One sample's file could not be read or decoded.

    Args:
        message: the whole message; it already names path and index.
        path: the file, where there is one.
        index: the sample's index in the dataset.

    The original exception is the ``__cause__`` in the process where it happened.
    """

    def __init__(self, message: str, *, path: str | None = None, index: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.index = index


class TooManyBadSamplesError(BadSampleError):
    """More samples were bad than ``BadSamples(max_errors=…)`` allows."""


class CacheError(FastpipeError, OSError):
    """A cache's folder cannot be used, or must not be because others could write there."""


class HDF5Error(FastpipeError, OSError):
    """An HDF5 file cannot be opened, is damaged, has changed since, or is being written to."""


class VolumeError(FastpipeError, OSError):
    """A volume cannot be opened, is damaged, has changed since, or is not what was said of it."""


class StoreError(FastpipeError, OSError):
    """A store of objects cannot be reached, refuses, or answers with something else than it must."""


class StoreAccessError(StoreError, PermissionError):
    """A store does not let these credentials in; asking again does not help."""


class StoreBusyError(StoreError):
    """A store had no answer just now: it is throttling, restarting, or the connection was cut."""


class ObjectChangedError(StoreError):
    """An object is not of the version asked for: it was replaced meanwhile."""


class StageError(FastpipeError, OSError):
    """A stage's folder cannot be used, or must not be because others could write there."""


class GenerationError(FastpipeError, RuntimeError):
    """Rows cannot be made: a function raised, or workers cannot run it; or what is there is of another job.

    Args:
        message: the whole message; it says what is kept, and how to go on.
        index: the row that failed, where it is one.
        trace: the traceback's text, where the function raised.
    """

    def __init__(self, message: str, *, index: int | None = None, trace: str = "") -> None:
        super().__init__(message)
        self.index = index
        self.trace = trace


class WorkerError(FastpipeError, RuntimeError):
    """A worker process died, or does not answer within ``timeout``.

    Args:
        message: the whole message; it names the worker, its last sample and its stack.
        worker: its number, from 0.
        pid: its process.
    """

    def __init__(self, message: str, *, worker: int | None = None, pid: int | None = None) -> None:
        super().__init__(message)
        self.worker = worker
        self.pid = pid

    def __str__(self) -> str:
        return printable_lines(self.args[0])


class SharedMemoryError(FastpipeError, RuntimeError):
    """A worker's batch does not fit into the shared memory through which torch sends it."""


class ClosedError(FastpipeError, RuntimeError):
    """Work was given to a thread pool that has been closed."""
