"""A copy of an HDF5 file with other chunks: made in steps that a kill does not undo, then read back."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from fastpipe.console import Pace, Progress, print_line
from fastpipe.core.extras import require
from fastpipe.core.files import open_file
from fastpipe.core.machine import available_cpus
from fastpipe.core.text import in_bytes
from fastpipe.errors import FastpipeError, HDF5Error, OptionError
from fastpipe.hdf5.checking import check_rows, check_structure
from fastpipe.hdf5.codecs import parse_codec, set_filters
from fastpipe.hdf5.copying import copy_references, copy_structure
from fastpipe.hdf5.library import filters_of, missing, missing_filters
from fastpipe.hdf5.objects import datasets_of, raw_name
from fastpipe.hdf5.opening import library_errors, opened
from fastpipe.hdf5.partial import Partial, clear, exists_already, identity, left_behind
from fastpipe.hdf5.planning import MEMORY_NBYTES, Options, Target, make_plan
from fastpipe.hdf5.rows import RowSource, read_rows, write_rows

__all__ = ["repack"]

_FORMAT = 1
_CHECKPOINT_NBYTES = 32 << 20
_WRITTEN, _VERIFIED, _LINKED = "written", "verified", "linked"


def repack(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    """Make the copy; ``args`` as of ``repack_cli``.

    Returns:
        0.

    Raises:
        OptionError: the options cannot work.
        HDF5Error: the source is damaged, or changes; or the copy is not equal to it.
        OSError: the disk is full, for instance.
    """
    begun = time.monotonic()
    options = _options(args)
    source, out = str(args.input), Path(args.output)
    _check_paths(source, out, args.force)
    state = identity(source)  # before anything is read
    with opened(source) as file, library_errors(source):
        _load_filters(file)
        targets = make_plan(file, options)
        job = _job(state, targets, options)
        if (left_behind(out) or {}).get("job") == job:
            clear(out)
        else:
            if os.path.lexists(out) and not args.force:
                raise exists_already(out)
            with Partial(out) as partial:
                _Repacking(source, file, partial, targets, options, job, args.threads, progress).run()
                partial.finish(force=args.force)
    progress.stop()
    rows = sum(target.rows for target in targets)
    print_line(console, _summary(out, source, rows, len(targets), time.monotonic() - begun))
    return 0


def _options(args: argparse.Namespace) -> Options:
    try:
        codec = parse_codec(args.codec)
    except argparse.ArgumentTypeError as error:
        raise OptionError(f"--codec {error}") from None
    if args.shuffle is not None and codec.name in ("keep", "none"):
        raise OptionError(f"--shuffle and --no-shuffle go with a new codec, not with --codec {codec.name}")
    return Options(args.chunk_rows, codec, args.shuffle, tuple(args.dataset), args.sample_dims)


def _check_paths(source: str, out: Path, force: bool) -> None:
    os.close(open_file(source))  # its errors are the clearest
    if out.is_dir():
        raise OptionError(f"{out} is a folder; name a file")
    if not out.parent.is_dir():
        raise OptionError(f"there is no folder {out.parent}; make it first")
    if out.exists() and os.path.samefile(source, out):
        raise OptionError(f"{out} is the input itself; name another file")
    if os.path.lexists(out) and not force and left_behind(out) is None:
        raise exists_already(out)


def _job(state: list[int], targets: Sequence[Target], options: Options) -> dict[str, Any]:
    """What tells one job from another, in a note."""
    return {
        "format": _FORMAT,
        "input": state,
        "options": options.content(),
        "targets": [{**asdict(one), "chunk": one.chunk and list(one.chunk)} for one in targets],
    }


def _load_filters(file: Any) -> None:
    """Give the library what it needs for the file's filters, as far as it is installed."""
    for dataset in datasets_of(file, file.filename):
        missing_filters(dataset)


def _summary(out: Path, source: str, rows: int, datasets: int, seconds: float) -> str:
    before, after = os.stat(source).st_size, out.stat().st_size
    what = f"{datasets} dataset{'s' if datasets != 1 else ''}, {rows:,} rows"
    return (
        f"{out}: {in_bytes(before)} → {in_bytes(after)} ({after / max(before, 1):.2f}×); {what} in "
        f"{seconds:.1f} s ({rows / max(seconds, 1e-9):,.0f} rows/s), every value read back and equal"
    )


class _Repacking:
    """One run, which begins where the one before was ended."""

    def __init__(
        self,
        path: str,
        source: Any,
        partial: Partial,
        targets: Sequence[Target],
        options: Options,
        job: dict[str, Any],
        threads: int | None,
        progress: Progress,
    ) -> None:
        self._path, self._source, self._partial = path, source, partial
        self._targets, self._options = targets, options
        self._threads, self._progress = threads or available_cpus(), progress
        self._job = job
        self._note: dict[str, Any] = {}

    def run(self) -> None:
        """Write what is not written, and check what is not checked."""
        try:
            self._run()
        except BaseException as error:
            # Nothing can go on from a source that has changed, from a wrong copy, or from nothing.
            if isinstance(error, HDF5Error) or self._partial.file.note is None:
                self._partial.remove()
            raise

    def _run(self) -> None:
        file = self._partial.file
        note = file.note
        if note is not None and note.get("job") == self._job and self._can_be_opened():
            self._note = note
            self._progress.done(self._going_on())
        else:
            file.begin_anew()
            self._note = {"job": self._job, _WRITTEN: {}, _VERIFIED: {}, _LINKED: False}
            self._make_structure()
        pace = Pace(self._progress, "writing", self._left(_WRITTEN))
        for target in self._targets:
            self._write(target, pace)
        self._link()
        self._verify()
        self._check_unchanged()

    def _can_be_opened(self) -> bool:
        """Whether the growing file is one that the library can open."""
        try:
            with self._open_copy("r") as copy:
                return all(copy.get(raw_name(target.name)) is not None for target in self._targets)
        except (OSError, RuntimeError, KeyError):
            return False

    def _going_on(self) -> str:
        written, verified = (
            sum(self._done(target, kind) for target in self._targets) for kind in (_WRITTEN, _VERIFIED)
        )
        rows = sum(target.rows for target in self._targets)
        return f"going on: {written:,} of {rows:,} rows are written, {verified:,} are verified"

    def _done(self, target: Target, kind: str) -> int:
        return int(self._note[kind].get(target.name, 0))

    def _left(self, kind: str) -> int:
        return sum((one.rows - self._done(one, kind)) * one.row_nbytes for one in self._targets)

    def _make_structure(self) -> None:
        self._progress.now("copying groups, attributes and small datasets")

        def filters(properties: Any, dataset: Any) -> None:
            set_filters(properties, self._options.codec, self._options.shuffle, dataset)

        with self._open_copy("w") as copy:
            copy_structure(self._source, copy, {one.name: one for one in self._targets}, filters)
        block = self._source.userblock_size
        if block:
            with open(self._path, "rb") as source:
                self._partial.file.seek(0)
                self._partial.file.write(source.read(block))
        self._checkpoint()

    def _write(self, target: Target, pace: Pace) -> None:
        """Write the rows of a dataset that are missing, with a checkpoint now and then."""
        first = self._done(target, _WRITTEN)
        if first >= target.rows:
            return
        with RowSource(
            self._source[raw_name(target.name)], self._path, self._threads, MEMORY_NBYTES // 2
        ) as source:
            steps = source.steps(first, target.step)
            while first < target.rows:
                fresh = 0
                with self._open_copy("r+") as copy:
                    dataset = copy[raw_name(target.name)]
                    for start, rows in steps:
                        write_rows(dataset, start, rows)
                        first = start + len(rows)
                        fresh += len(rows) * target.row_nbytes
                        pace.add(
                            len(rows) * target.row_nbytes, f"{target.name}, row {first:,} of {target.rows:,}"
                        )
                        if fresh >= _CHECKPOINT_NBYTES or self._partial.file.failed:
                            break
                self._note[_WRITTEN][target.name] = first
                self._checkpoint()

    def _link(self) -> None:
        """References, once: they need the objects that they lead to."""
        if self._note[_LINKED]:
            return
        with self._open_copy("r+") as copy:
            lost = copy_references(self._source, copy)
        self._note[_LINKED] = True
        self._checkpoint()
        if lost:
            self._progress.done(
                f"references to objects without a name, which are empty in the copy: {lost:,}"
            )

    def _verify(self) -> None:
        """Read everything back.  The file does not change any more, so what was checked stays checked."""
        pace = Pace(self._progress, "reading back", self._left(_VERIFIED))
        with opened(os.fspath(self._partial.file.path)) as copy:
            for target in self._targets:
                self._verify_rows(target, copy[raw_name(target.name)], pace)
            check_structure(self._source, copy, {target.name for target in self._targets})

    def _verify_rows(self, target: Target, copy: Any, pace: Pace) -> None:
        first, fresh = self._done(target, _VERIFIED), 0
        dataset = self._source[raw_name(target.name)]
        with RowSource(dataset, self._path, self._threads, MEMORY_NBYTES // 2) as own:
            # The library reads the source too, so that this does not rest on what wrote the copy; it
            # cannot where it lacks a filter that fastpipe knows.
            if missing(filters_of(dataset.id.get_create_plist())):
                steps = own.steps(first, target.step)
            else:
                steps = _through_library(dataset, first, target)
            for start, rows in steps:
                check_rows(rows, read_rows(copy, start, start + len(rows)), f"{self._path}, {target.name}")
                self._note[_VERIFIED][target.name] = start + len(rows)
                fresh += len(rows) * target.row_nbytes
                pace.add(
                    len(rows) * target.row_nbytes,
                    f"{target.name}, row {start + len(rows):,} of {target.rows:,}",
                )
                if fresh >= _CHECKPOINT_NBYTES:
                    self._check_unchanged()
                    self._partial.file.update_note(self._note)
                    fresh = 0

    def _checkpoint(self) -> None:
        self._check_unchanged()
        self._partial.file.checkpoint(self._note)

    def _check_unchanged(self) -> None:
        if identity(self._path) != self._job["input"]:
            raise HDF5Error(f"{self._path} has changed meanwhile; repack it when it is complete")

    @contextmanager
    def _open_copy(self, mode: str) -> Iterator[Any]:
        """The growing file, through the library; an error of the disk is raised as such."""
        h5py = require("h5py", extra="hdf5")
        file = self._partial.file
        options: Mapping[str, Any] = {}
        if mode == "w":
            # Not the file's properties, which forget it.
            tracked = self._source["/"].id.get_create_plist().get_link_creation_order()
            options = {"userblock_size": self._source.userblock_size, "track_order": bool(tracked)}
        try:
            with h5py.File(file, mode, libver=_libver(self._source), **options) as copy:
                yield copy
        except FastpipeError:
            raise
        except Exception:
            if file.failed is not None:
                file.checkpoint({})  # raises it
            raise


def _libver(source: Any) -> tuple[str, str]:
    """As old a form as the source's: some of its attributes may need the newer one."""
    version = source.id.get_create_plist().get_version()[0]
    return {0: "earliest", 1: "earliest", 2: "v108"}.get(version, "v110"), "latest"


def _through_library(dataset: Any, first: int, target: Target) -> Iterator[tuple[int, Any]]:
    for start in range(first, target.rows, target.step):
        yield start, read_rows(dataset, start, min(start + target.step, target.rows))
