"""The tree of all errors that fastpipe raises on purpose.

::

    FastpipeError
    ├── MissingDependencyError   (ImportError)   an optional package is not installed
    ├── OptionError              (ValueError)    an argument has a value that cannot work
    ├── AugmentError             (ValueError)    an augmentation cannot use its batch or an argument
    ├── BadSampleError           (OSError)       one sample could not be read or decoded
    │   └── TooManyBadSamplesError               more samples are bad than ``BadSamples`` allows
    ├── CacheError               (OSError)       a cache's folder cannot be used, or is not safe
    ├── HDF5Error                (OSError)       an HDF5 file is damaged, has changed, or is in use
    ├── VolumeError              (OSError)       a volume is damaged, has changed, or cannot be opened
    ├── StoreError               (OSError)       an object store does not answer, or gives a wrong answer
    │   ├── StoreAccessError     (PermissionError)   the store refuses these credentials
    │   ├── StoreBusyError                       the store is busy; a retry may succeed
    │   └── ObjectChangedError                   an object has changed since it was listed
    ├── StageError               (OSError)       a stage's folder cannot be used, or is not safe
    ├── GenerationError          (RuntimeError)  samples cannot be generated, or are from another job
    ├── WorkerError              (RuntimeError)  a worker process died, or does not answer
    ├── SharedMemoryError        (RuntimeError)  a worker's batch does not fit into /dev/shm
    └── ClosedError              (RuntimeError)  the threads for this work have already ended

Each error also derives from the built-in exception in parentheses.  The code that fastpipe replaces raises
that exception for the same failure, so a script's ``except OSError`` keeps working.  A message says what
failed, what was found, at which path and index, and what to do about it.  Every message is safe to
print: control characters in file names are escaped.  ``args`` and ``path`` hold the unescaped text.
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
    """An optional package is needed but not installed.  The message contains the pip command."""


class OptionError(FastpipeError, ValueError):
    """An option has a value, or a combination of values, that cannot work."""


class AugmentError(FastpipeError, ValueError):
    """An augmentation's arguments cannot work, or a batch has a kind, shape or dtype that is not accepted."""


class BadSampleError(FastpipeError, OSError):
    """One sample's file could not be read or decoded.

    Args:
        message: the whole message, including the path and the index.
        path: the path of the file; None if the sample has no file.
        index: the sample's index in the dataset; None if unknown.

    In the process that read the sample, the attribute ``__cause__`` is the original exception.
    """

    def __init__(self, message: str, *, path: str | None = None, index: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.index = index


class TooManyBadSamplesError(BadSampleError):
    """More samples were bad than ``BadSamples(max_errors=…)`` allows."""


class CacheError(FastpipeError, OSError):
    """A cache's folder cannot be used, or is not safe because other users could write to the folder."""


class HDF5Error(FastpipeError, OSError):
    """An HDF5 file cannot be opened, is damaged, has changed since it was opened, or is being written."""


class VolumeError(FastpipeError, OSError):
    """A volume cannot be opened, is damaged, has changed since it was opened, or has wrong metadata."""


class StoreError(FastpipeError, OSError):
    """An object store cannot be reached, refuses a request, or gives a wrong answer."""


class StoreAccessError(StoreError, PermissionError):
    """An object store refuses the script's credentials.  A retry does not help."""


class StoreBusyError(StoreError):
    """An object store cannot answer at present: it throttles or restarts, or the connection was cut."""


class ObjectChangedError(StoreError):
    """An object of a store was replaced after it was listed, so the listed version no longer exists."""


class StageError(FastpipeError, OSError):
    """A stage's folder cannot be used, or is not safe because other users could write to the folder."""


class GenerationError(FastpipeError, RuntimeError):
    """Samples cannot be generated: the user's function raised an error, worker processes cannot run this
    function, or the samples that already exist were made by another job.

    Args:
        message: the whole message, including which samples are kept and how to continue.
        index: the index of the sample that failed; None if the error is not about one sample.
        trace: the text of the traceback if the function raised an error, else an empty string.
    """

    def __init__(self, message: str, *, index: int | None = None, trace: str = "") -> None:
        super().__init__(message)
        self.index = index
        self.trace = trace


class WorkerError(FastpipeError, RuntimeError):
    """A worker process died, or does not answer within ``timeout``.

    Args:
        message: the whole message, including the worker, the worker's last sample and its stack.
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
    """A worker's batch does not fit into the shared memory in which torch sends batches."""


class ClosedError(FastpipeError, RuntimeError):
    """The threads for some work have ended: their pool was closed, or the interpreter is about to exit."""
