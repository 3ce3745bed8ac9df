"""What came of a call: what was made, or an error that says what is kept, and how to go on."""

from __future__ import annotations

import errno
import inspect
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastpipe.console import in_time
from fastpipe.core.text import in_bytes
from fastpipe.errors import FastpipeError, GenerationError
from fastpipe.generation.job import Job
from fastpipe.generation.storing import Stored
from fastpipe.hdf5.growing import folder_of

__all__ = ["Generated", "rows_of", "told"]

_BY_VALUE = "<dynamic-code>"  # what cloudpickle says that a function's file is


@dataclass(frozen=True)
class Generated:
    """What ``generate`` has made.

    Attributes:
        paths: the files, in the order of their rows.
        rows: that they have.
        failed: rows that are left out, with what was wrong.
        nan_rows: how many rows have a NaN.
        made: rows that were made by this call; the others were there.
        seconds: this call took.
    """

    paths: tuple[Path, ...]
    rows: int
    failed: tuple[tuple[int, str], ...] = ()
    nan_rows: int = 0
    made: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        nbytes = sum(path.stat().st_size for path in self.paths)
        files = (
            str(self.paths[0]) if len(self.paths) == 1 else f"{len(self.paths)} files from {self.paths[0]}"
        )
        if not self.made:
            return f"{files}: {self.rows:,} rows, {in_bytes(nbytes)}, all there already"
        rate = f"{self.made / max(self.seconds, 1e-9):,.3g} rows/s"
        took = f"{self.seconds:.1f} s" if self.seconds < 60 else in_time(self.seconds)
        return f"{files}: {self.rows:,} rows, {in_bytes(nbytes)}; {self.made:,} made in {took}, {rate}"


def told(
    error: BaseException, blocks: Sequence[Stored], job: Job, out: Path, function: Callable[..., Any]
) -> BaseException:
    """An error that says what is kept, and how to go on.

    Args:
        error: what ended a call.
        blocks: that are noted.
        job, out, function: of the call.
    """
    kept = f"{rows_of(blocks):,} of {job.rows:,} rows are kept in {folder_of(out)}"
    again = f"{kept}; the same call goes on from there"
    if sum(len(one.failed) for one in blocks) == job.rows:
        again = "No row is kept"
    if isinstance(error, KeyboardInterrupt):
        return KeyboardInterrupt(f"interrupted: {again}")
    if isinstance(error, GenerationError):
        return _of_row(error, again, job, function)
    if isinstance(error, OSError) and not isinstance(error, FastpipeError):
        text = error.strerror or str(error)
        if error.filename is not None:
            text += f": {os.fsdecode(error.filename)!r}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # of HDF5 the text has many lines
            free = in_bytes(shutil.disk_usage(out.parent).free)
            text = f"{os.strerror(error.errno or 0)} ({free} are free)"
        text = f"{text}; {again}"
        return type(error)(text) if error.errno is None else type(error)(error.errno, text)
    return error


def _of_row(error: GenerationError, again: str, job: Job, function: Callable[..., Any]) -> GenerationError:
    alone, policy = "", ""
    if error.trace:
        name, index = job.function.split(":")[-1], error.index
        alone = f" Alone it is {name}({index}, np.random.default_rng([{job.seed}, {index}]))."
        policy = ". bad_samples='skip' leaves such rows out, and 'retry' draws again"
    trace = error.trace.replace(_BY_VALUE, inspect.getsourcefile(_plain(function)) or _BY_VALUE)
    found = GenerationError(
        f"{str(error).rstrip('.')}.{alone} {again}{policy}", index=error.index, trace=trace
    )
    found.__cause__ = error.__cause__ or (_WorkerTraceError(trace) if trace else None)
    return found


class _WorkerTraceError(Exception):
    """The traceback of an error in a worker, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _plain(function: Callable[..., Any]) -> Any:
    """The function itself, of one that is an object, or part of another."""
    function = getattr(function, "func", function)
    return function if inspect.isfunction(inspect.unwrap(function)) else type(function)


def rows_of(blocks: Sequence[Stored]) -> int:
    """How many rows blocks have, those that failed included."""
    return sum(one.last - one.first for one in blocks)
