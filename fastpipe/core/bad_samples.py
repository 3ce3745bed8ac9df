"""Count bad samples (samples that cannot be read), and log them with their names."""

from __future__ import annotations

import errno
import json
import logging
import os
import struct
import threading
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any

from fastpipe.core.archive_paths import ChangedArchiveError
from fastpipe.core.files import open_output
from fastpipe.errors import (
    BadSampleError,
    CacheError,
    ClosedError,
    FastpipeError,
    StageError,
    StoreError,
    TooManyBadSamplesError,
)
from fastpipe.options import BadSamples

_log = logging.getLogger("fastpipe.bad_samples")

_OF_MACHINE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS}

# Errors of reading and decoding that can mean that an image's file is damaged.  Pillow's plugins do not catch
# the Python errors that a damaged file causes in them.
_OF_FILES = (
    OSError, SyntaxError, ValueError, ArithmeticError, LookupError, EOFError, RuntimeError,
    struct.error, zlib.error,
)  # fmt: skip
_OF_FILES_BY_NAME = {
    "PIL.Image.DecompressionBombError",
    "tensorflow.python.framework.errors_impl.InvalidArgumentError",
}
# These errors mean a mistake in a program, unless the decoder raises them because of a damaged file.
_OF_PROGRAMS = (TypeError, AttributeError, AssertionError)
_DECODERS = ("PIL.", "tensorflow.")


@dataclass(frozen=True)
class Item:
    """Describes a sample.  ``index`` is its index in the dataset, and ``path`` is its file.  ``target`` is
    its class or None.  ``column`` is the column of a table that contains the sample's image, or empty."""

    index: int
    path: str
    target: Any = None
    column: str = ""


def is_of_machine(error: BaseException) -> bool:
    """Return whether an error is about the machine or the setup, and not about a file.

    An error is about the machine or the setup if other files could not be read either, or if the file could
    be read at another time or by another user.  A FileNotFoundError, also from a store, is about the file.
    """
    kinds = (MemoryError, ImportError, NameError, RecursionError, PermissionError, ChangedArchiveError)
    ours = (StoreError, StageError, CacheError, ClosedError)
    return isinstance(error, kinds + ours) or (isinstance(error, OSError) and error.errno in _OF_MACHINE)


def means_damage(error: BaseException) -> bool:
    """Return whether an error of reading or decoding an image means that the image's file is bad.

    All other errors are raised with every policy for bad samples: for example errors of the machine, missing
    packages, and warnings that were turned into errors.
    """
    if is_of_machine(error):
        return False
    if isinstance(error, _OF_PROGRAMS):
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        return bool(frames) and str(frames[-1].f_globals.get("__name__")).startswith(_DECODERS)
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
    return isinstance(error, _OF_FILES) or not _OF_FILES_BY_NAME.isdisjoint(names)


def is_of_samples(error: BaseException, damaged: type[FastpipeError]) -> bool:
    """Return whether an error is about some samples of a file, and not about the whole file.  ``damaged`` is
    the only class of fastpipe's errors for which the result is True."""
    if isinstance(error, FastpipeError):
        return isinstance(error, damaged)
    is_of_file = isinstance(error, OSError) and not isinstance(error, (FileNotFoundError, PermissionError))
    return is_of_file and not is_of_machine(error)


def bad_sample_error(item: Item, cause: BaseException) -> BadSampleError:
    column = f" ({item.column})" if item.column else ""
    remedy = getattr(cause, "remedy", "Repair or remove the file")
    if isinstance(cause, FileNotFoundError) and not os.path.isabs(item.path) and "://" not in item.path:
        with suppress(OSError):  # the current folder may be gone, too
            remedy = f"Relative paths begin in {os.getcwd()!r}: correct the path"
    error = BadSampleError(
        f"sample {item.index}{column} could not be read: {item.path!r}{_size_note(item.path)}: "
        f"{type(cause).__name__}: {cause}. "
        f"{remedy}, or pass bad_samples='replace' or 'skip' to go on without it.",
        path=item.path,
        index=item.index,
    )
    error.__cause__ = cause
    return error


def no_replacement(item: Item, tried: int) -> BadSampleError:
    """Return the error for a bad sample whose ``tried`` replacements could not be read either."""
    of = "" if item.target is None else f" of class {item.target}"
    return BadSampleError(
        f"sample {item.index} ({item.path!r}) could not be read, nor could any of {tried} tried in its place"
        f"{of}. The warnings logged for each say why; repair the files, or restore them from a copy",
        path=item.path, index=item.index,
    )  # fmt: skip


def why_nothing_is_left(left_out: Mapping[int, BadSampleError], count: int) -> BadSampleError | None:
    """Return the error for a batch whose ``count`` samples were all left out; None if the batch was empty."""
    if not left_out:
        return None
    first = left_out[min(left_out)]
    if count == 1:
        return first
    return BadSampleError(
        f"all {count} samples of a batch are bad, so bad_samples='skip' leaves no sample; the first: {first}",
        path=first.path,
        index=first.index,
    )


def _size_note(path: str) -> str:
    try:
        return f" ({os.stat(path).st_size:,} bytes)"
    except (OSError, ValueError):
        return ""


class BadSampleLog:
    """Counts and logs the bad samples of this process.  Each bad sample is counted only once."""

    def __init__(self, options: BadSamples) -> None:
        self._options = options
        self._lock = threading.Lock()
        # The path is also compared, because with random patches an index is another patch in each epoch.
        self._seen: set[tuple[int, str]] = set()

    @property
    def count(self) -> int:
        return len(self._seen)

    def record(self, item: Item, error: BadSampleError) -> None:
        """Count and log a bad sample, unless it was recorded before.  Raise an error if there are more bad
        samples than the option ``max_errors`` allows."""
        with self._lock:
            name = item.index, item.path
            new = name not in self._seen
            self._seen.add(name)
            count = len(self._seen)
        if new:
            done = "replaced" if self._options.policy == "replace" else "left out"
            # Pass the error as text: log handlers may store the record, and the exception's traceback would
            # keep the batch alive.
            _log.warning("bad sample %s: %s", done, str(error))
            self._write(item, error)
        limit = self._options.max_errors
        if limit is not None and count > limit:
            raise TooManyBadSamplesError(
                f"{count} samples were bad, more than BadSamples(max_errors={limit}) allows; "
                f"the last: {error}",
                path=item.path,
                index=item.index,
            ) from error.__cause__

    def _write(self, item: Item, error: BadSampleError) -> None:
        if self._options.log is None:
            return
        content = {
            "index": item.index, "path": item.path, "target": item.target,
            "action": self._options.policy, "error": repr(error.__cause__),
        }  # fmt: skip
        line = json.dumps(content, default=repr)  # a target may have any type
        # Write the line with one call to a file opened for appending, so that lines of several processes are
        # never mixed.
        descriptor = open_output(self._options.log, appends=True)
        try:
            os.write(descriptor, line.encode() + b"\n")
        finally:
            os.close(descriptor)

    def __reduce__(self) -> tuple[object, ...]:
        return (BadSampleLog, (self._options,))
