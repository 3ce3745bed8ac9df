"""All errors that fastpipe raises on purpose, in one tree.

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
    ├── StoreError               (OSError)       an object store does not answer, or gives a wrong answer
    │   ├── StoreAccessError     (PermissionError)   it refuses these credentials
    │   ├── StoreBusyError                       a retry may succeed
    │   └── ObjectChangedError                   an object has changed since it was listed
    ├── StageError               (OSError)       a stage's folder cannot be used, or must not be
    ├── GenerationError          (RuntimeError)  rows cannot be made, or belong to another job
    ├── WorkerError              (RuntimeError)  a worker process died, or does not answer
    ├── SharedMemoryError        (RuntimeError)  a worker's batch does not fit into /dev/shm
    └── ClosedError              (RuntimeError)  a loader's threads have already ended

Each also derives from the built-in exception that the replaced code raises in the same
place, so that a script's ``except OSError`` keeps working.  A message states what failed,
what was found, where (path and index), and what to do about it.  Its text is safe to print anywhere: control
characters in file names are escaped (``args`` and ``path`` hold them unescaped).
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
    """An optional package is needed but not installed; the message contains the pip command."""


class OptionError(FastpipeError, ValueError):
    """An option has a value, or a combination of values, that cannot work."""


class AugmentError(FastpipeError, ValueError):
    """An augmentation's arguments cannot work, or it does not accept a batch's kind, shape or dtype."""


class BadSampleError(FastpipeError, OSError):
    """One sample's file could not be read or decoded.

    Args:
        message: the whole message; it already names path and index.
        path: the file, or None if there is none.
        index: the sample's index in the dataset, or None.

    In the process where it happened, the original exception is the ``__cause__``.
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
    """An HDF5 file cannot be opened, is damaged, has changed meanwhile, or is being written to."""


class VolumeError(FastpipeError, OSError):
    """A volume cannot be opened, is damaged, has changed meanwhile, or is not as described."""


class StoreError(FastpipeError, OSError):
    """An object store cannot be reached, refuses a request, or gives a wrong answer."""


class StoreAccessError(StoreError, PermissionError):
    """A store refuses these credentials; a retry does not help."""


class StoreBusyError(StoreError):
    """A store gave no answer for now: it throttles or restarts, or the connection was cut."""


class ObjectChangedError(StoreError):
    """An object no longer has the requested version: it was replaced meanwhile."""


class StageError(FastpipeError, OSError):
    """A stage's folder cannot be used, or must not be because others could write there."""


class GenerationError(FastpipeError, RuntimeError):
    """Rows cannot be made: the function raised, workers cannot run it, or existing rows are from another job.

    Args:
        message: the whole message; it says what is kept, and how to continue.
        index: the row that failed, or None if the error is not about one row.
        trace: the traceback's text if the function raised, else empty.
    """

    def __init__(self, message: str, *, index: int | None = None, trace: str = "") -> None:
        super().__init__(message)
        self.index = index
        self.trace = trace


class WorkerError(FastpipeError, RuntimeError):
    """A worker process died, or does not answer within ``timeout``.

    Args:
        message: the whole message; it names the worker, its last sample and its stack.
        worker: the worker's number, from 0.
        pid: the worker's process ID.
    """

    def __init__(self, message: str, *, worker: int | None = None, pid: int | None = None) -> None:
        super().__init__(message)
        self.worker = worker
        self.pid = pid

    def __str__(self) -> str:
        return printable_lines(self.args[0])


class SharedMemoryError(FastpipeError, RuntimeError):
    """A worker's batch does not fit into the shared memory that torch sends it through."""


class ClosedError(FastpipeError, RuntimeError):
    """Work was given to a thread pool that has been closed."""
