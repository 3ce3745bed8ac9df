"""Repack an HDF5 file: write a copy with other chunks and filters, and verify the copy."""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import io
import math
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from fastpipe.console import Pace, Progress, print_line
from fastpipe.core.files import (
    UNFINISHED,
    open_file,
    open_regular,
    parents_made,
    read_at,
    rename_anew,
    sync_folder,
    who_else_may_write,
)
from fastpipe.core.locks import locks_are_possible, try_to_lock
from fastpipe.core.machine import available_cpus
from fastpipe.core.text import counted, in_bytes
from fastpipe.errors import FastpipeError, HDF5Error, OptionError
from fastpipe.hdf5.chunks import FileState
from fastpipe.hdf5.copying import (
    RowSource,
    address_of,
    check_rows,
    check_structure,
    copy_references,
    copy_structure,
    has_references,
    is_plain,
    read_rows,
    write_rows,
)
from fastpipe.hdf5.filters import (
    BLOSC,
    BLOSC_CODECS,
    DEFLATE,
    FLETCHER32,
    LZ4,
    LZF,
    SHUFFLE,
    ZSTD,
    in_words,
    may_lose,
)
from fastpipe.hdf5.inspect import SMALL_NBYTES
from fastpipe.hdf5.library import filters_of, h5py, load_plugins, missing, missing_filters
from fastpipe.hdf5.opening import (
    dataset_named,
    datasets_of,
    library_errors,
    lies_in,
    name_of,
    opened,
    raw_name,
    storage_of,
)

_LEVELS = {"gzip": (4, 0, 9), "zstd": (3, 1, 22), "blosc": (5, 0, 9)}  # default, lowest and highest level
_CODECS = "keep, none, gzip[:LEVEL], lzf, lz4, zstd[:LEVEL], blosc[:CODEC[:LEVEL]]"
_BY_PLUGIN = {"lz4": LZ4, "zstd": ZSTD, "blosc": BLOSC}


@dataclass(frozen=True)
class Codec:
    name: str  # the codec's name, ``"none"``, or ``"keep"`` for the filters of the source
    level: int = 0
    inner: str = ""  # blosc's own codec


def parse_codec(text: str) -> Codec:
    """Parse the value of the option ``--codec``.

    >>> parse_codec("gzip:9").level, parse_codec("blosc:zstd:7").inner
    (9, 'zstd')
    """
    name, *rest = text.split(":")
    inner = ""
    if name == "blosc":
        inner = rest.pop(0) if rest else "lz4"
        if inner not in BLOSC_CODECS:
            raise OptionError(f"--codec blosc has {', '.join(BLOSC_CODECS)}; got {inner!r}")
    if name not in _LEVELS:
        if name in ("keep", "none", "lzf", "lz4") and not rest:
            return Codec(name)
        raise OptionError(f"--codec must be one of {_CODECS}; got {text!r}")
    default, least, most = _LEVELS[name]
    level = rest[0] if rest else str(default)
    if len(rest) > 1 or not level.isdecimal() or not least <= int(level) <= most:
        raise OptionError(f"--codec {name} has levels from {least} to {most}; got {text!r}")
    return Codec(name, int(level), inner)


def set_filters(properties: Any, codec: Codec, shuffle: bool | None, dataset: Any) -> None:
    """Replace the filters in ``properties``, the creation properties for a chunked copy of ``dataset``.

    ``properties`` still has the filters of ``dataset``.  If ``shuffle`` is None, the shuffle filter is used
    for elements of more than one byte.
    """
    steps, kind = filters_of(properties), dataset.id.get_type()
    if codec.name == "keep":
        lossy = may_lose(steps, kind.get_class())
        if lossy:
            raise OptionError(
                f"{dataset.name}: its filter {in_words(lossy)} may round values that were rounded already; "
                "choose another --codec, which keeps them as they are"
            )
        if missing(steps):
            load_plugins()
        for step in steps:  # the library here may lack a filter, or may be unable to apply it
            info = h5py.h5z.get_filter_info(step.code) if h5py.h5z.filter_avail(step.code) else 0
            if not info & h5py.h5z.FILTER_CONFIG_ENCODE_ENABLED:
                raise OptionError(
                    f"{dataset.name}: the HDF5 library here cannot write its filter {in_words(step)}; choose "
                    "another --codec"
                )
        return
    has_sum = any(step.code == FLETCHER32 for step in steps)
    for step in steps:
        properties.remove_filter(step.code)
    # If elements have no fixed size, chunks contain only references to the elements.  Filters would compress
    # only the references, and filters from plugins may abort the process.
    if codec.name == "none" or not is_plain(kind):
        return
    _add(properties, codec, kind.get_size() > 1 if shuffle is None else shuffle)
    if has_sum:
        properties.set_fletcher32()


def _add(properties: Any, codec: Codec, shuffle: bool) -> None:
    if codec.name in _BY_PLUGIN:
        load_plugins()
    if shuffle and codec.name != "blosc":
        properties.set_filter(SHUFFLE, h5py.h5z.FLAG_OPTIONAL)
    # With FLAG_OPTIONAL, the library stores a chunk uncompressed if compression does not make it smaller.
    code, values = {
        "gzip": (DEFLATE, (codec.level,)),
        "lzf": (LZF, ()),
        "lz4": (LZ4, ()),
        "zstd": (ZSTD, (codec.level,)),
        "blosc": (BLOSC, (0, 0, 0, 0, codec.level, int(shuffle), BLOSC_CODECS.get(codec.inner, 0))),
    }[codec.name]
    properties.set_filter(code, h5py.h5z.FLAG_OPTIONAL, values)


MEMORY_NBYTES = 64 << 20
_STEP_NBYTES = 16 << 20  # bytes of rows that are read and written at a time
_TRIES = 50
_AUTO_NBYTES = 64 << 10
_MOST_NBYTES = 1 << 50  # a dataset of this size or more cannot be copied
_LARGEST_CHUNK = 1 << 30  # the format's limit is 4 GiB


@dataclass(frozen=True)
class Options:
    """The options of ``fastpipe repack`` for an HDF5 file."""

    chunk_rows: int | None  # number of samples in a chunk; None for automatic
    codec: Codec
    shuffle: bool | None  # None for automatic
    datasets: tuple[str, ...]  # names of the datasets to repack; empty for all datasets from ``SMALL_NBYTES``
    sample_dims: int  # number of first dimensions that count samples


@dataclass(frozen=True)
class Target:
    name: str
    chunk: tuple[int, ...] | None  # the chunk shape of the copy; None if the copy is contiguous
    rows: int
    step: int  # number of rows that are read and written at a time
    row_nbytes: int  # bytes of a decoded row, if elements have a fixed size


def make_plan(file: Any, options: Options) -> list[Target]:
    """Find the targets: the datasets to write row by row.  All other datasets are copied unchanged."""
    found = datasets_of(file, file.filename)
    for dataset in found:
        nbytes = math.prod(dataset.shape or ()) * dataset.id.get_type().get_size()
        if nbytes >= _MOST_NBYTES:
            raise HDF5Error(
                f"{file.filename}, dataset {name_of(dataset)} declares a shape of {dataset.shape}, "
                f"{in_bytes(nbytes)}, which is more than can be copied"
            )
    named = {_named(file, name, found) for name in options.datasets}
    return [_target(dataset, options) for dataset in found if _is_chosen(dataset, named)]


def _named(file: Any, name: str, found: Sequence[Any]) -> str:
    item = dataset_named(file, name, file.filename)
    if item is None:
        raise OptionError(f"{file.filename} has no dataset {name!r}; `fastpipe inspect` lists those it has")
    if not item.shape:
        raise OptionError(f"{name!r} is a single value: it has no rows that could be chunked")
    if has_references(item.id.get_type()):
        raise OptionError(f"{name!r} has references, which are copied as they are; name other datasets")
    if not lies_in(item, file):
        raise OptionError(f"{name!r} is a link to another file, which stays a link; name other datasets")
    # A dataset with several names is written under the name that is found first.
    return next(name_of(one) for one in found if address_of(one) == address_of(item))


def _is_chosen(dataset: Any, named: set[str]) -> bool:
    if not dataset.shape or has_references(dataset.id.get_type()):
        return False
    # A copy in another folder would not find the dataset's source files, so the copy contains their data.
    if storage_of(dataset) in ("virtual", "external"):
        return True
    if named:
        return name_of(dataset) in named
    nbytes = math.prod(dataset.shape) * dataset.id.get_type().get_size()
    return bool(max(nbytes, dataset.id.get_storage_size()) >= SMALL_NBYTES)


def _target(dataset: Any, options: Options) -> Target:
    shape, size = tuple(map(int, dataset.shape)), dataset.id.get_type().get_size()
    chunk = _chunk(dataset, shape, size, options)
    row_nbytes = size * math.prod(shape[1:])
    old = tuple(map(int, dataset.chunks)) if dataset.chunks else ()
    step = _step(row_nbytes, (chunk or (1,))[0], old, size, math.prod(chunk or ()) * size)
    return Target(name_of(dataset), chunk, shape[0], step, row_nbytes)


def _chunk(dataset: Any, shape: tuple[int, ...], size: int, options: Options) -> tuple[int, ...] | None:
    has_filters = storage_of(dataset) == "chunked" and filters_of(dataset.id.get_create_plist())
    codec = options.codec.name
    will_have = codec != "none" and (has_filters if codec == "keep" else is_plain(dataset.id.get_type()))
    if options.chunk_rows is None and not will_have and dataset.maxshape == dataset.shape:
        return None
    dims = min(options.sample_dims, len(shape))
    own = tuple(max(side, 1) for side in shape[dims:])
    rows = options.chunk_rows or -(-_AUTO_NBYTES // (size * math.prod(own)))
    # A chunk may be longer than a dimension only if the dimension can grow.
    rows = max(1, min(rows, shape[dims - 1]))
    return _below_limit((*(1 for _ in shape[: dims - 1]), rows, *own), size)


def _below_limit(chunk: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Halve the chunk's dimensions, from the first to the last, until the chunk is below the size limit."""
    sides = list(chunk)
    for axis in range(len(sides)):
        while sides[axis] > 1 and math.prod(sides) * size > _LARGEST_CHUNK:
            sides[axis] = -(-sides[axis] // 2)
    return tuple(sides)


def _step(row_nbytes: int, rows: int, old: Sequence[int], size: int, new_nbytes: int) -> int:
    """Return how many rows are copied at a time.

    These rows fill whole chunks of the new dataset and, if memory allows, whole chunks of the old dataset.
    """
    row_nbytes = max(row_nbytes, 1)
    limit = max(MEMORY_NBYTES // 2, math.prod(old) * size if old else 0, new_nbytes)
    unit = math.lcm(rows, old[0]) if old else rows
    if unit * row_nbytes > limit:
        unit = rows
    wanted = max(_STEP_NBYTES, limit if old and old[0] * row_nbytes > limit else 0)
    return max(1, wanted // (unit * row_nbytes)) * unit


def repack(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    """Write and verify the copy; ``args`` has the arguments of ``tools.repack``."""
    begun = time.monotonic()
    codec = parse_codec(args.codec)
    if args.shuffle is not None and codec.name in ("keep", "none"):
        raise OptionError(f"--shuffle and --no-shuffle go with a new codec, not with --codec {codec.name}")
    options = Options(args.chunk_rows, codec, args.shuffle, tuple(args.dataset), args.sample_dims)
    source, out = str(args.input), Path(args.output)
    _check_paths(source, out, args.force)
    state = FileState.of(os.stat(source))  # taken before anything is read
    with opened(source) as file, library_errors(source):
        for dataset in datasets_of(file, source):
            missing_filters(dataset)  # loads the filters that are installed
        targets = make_plan(file, options)
        with parents_made(out), UnfinishedFile(out) as unfinished:
            threads = args.threads or available_cpus()
            _Repacking(source, state, file, unfinished, targets, options, threads, progress).run()
            unfinished.take_name(force=args.force)
    progress.stop()
    rows, seconds = sum(target.rows for target in targets), time.monotonic() - begun
    before, after = os.stat(source).st_size, out.stat().st_size
    print_line(
        console,
        f"{out}: {in_bytes(before)} → {in_bytes(after)} ({after / max(before, 1):.2f}×); "
        f"{counted(len(targets), 'dataset')}, {rows:,} rows in {seconds:.1f} s "
        f"({rows / max(seconds, 1e-9):,.0f} rows/s), every value read back and equal",
    )
    return 0


def _check_paths(source: str, out: Path, force: bool) -> None:
    os.close(open_file(source))  # the errors of ``open_file`` are clearer than the library's errors
    if out.is_dir():
        raise OptionError(f"{out} is a folder; name a file")
    if out.exists() and os.path.samefile(source, out):
        raise OptionError(f"{out} is the input itself; name another file")
    if os.path.lexists(out) and not force:
        raise _exists_already(out)


def _exists_already(out: Path) -> OptionError:
    return OptionError(f"{out} exists; name another file, or replace it with --force")


@dataclass(frozen=True)
class _Repacking:
    """One run of the command, which writes the copy and then reads the copy back."""

    path: str
    state: FileState
    source: Any
    unfinished: UnfinishedFile
    targets: Sequence[Target]
    options: Options
    threads: int
    progress: Progress

    def run(self) -> None:
        nbytes = sum(target.rows * target.row_nbytes for target in self.targets)
        self.progress.now("copying groups, attributes and small datasets")
        with self._open_copy("w") as copy:
            chunks = {target.name: target.chunk for target in self.targets}
            copy_structure(
                self.source, copy, chunks,
                lambda new, old: set_filters(new, self.options.codec, self.options.shuffle, old),
            )  # fmt: skip
            pace = Pace(self.progress, "writing", nbytes)
            for target in self.targets:
                self._write(target, copy, pace)
            lost = copy_references(self.source, copy)  # at the end, because references need their objects
        if lost:
            self.progress.done(f"references to objects without a name, which are empty in the copy: {lost:,}")
        if block := self.source.userblock_size:
            with open(self.path, "rb") as source:
                self.unfinished.seek(0)
                self.unfinished.write(source.read(block))
        self._check_unchanged()
        with self._open_copy("r") as copy:
            pace = Pace(self.progress, "reading back", nbytes)
            for target in self.targets:
                self._verify(target, copy, pace)
            check_structure(self.source, copy, {target.name for target in self.targets})
        self._check_unchanged()

    def _rows_of(self, target: Target) -> RowSource:
        dataset = self.source[raw_name(target.name)]
        return RowSource(dataset, self.path, self.threads, MEMORY_NBYTES // 2)

    def _write(self, target: Target, copy: Any, pace: Pace) -> None:
        dataset = copy[raw_name(target.name)]
        with self._rows_of(target) as source:
            for start, rows in source.steps(target.step):
                write_rows(dataset, start, rows)
                self.unfinished.check()
                self._check_unchanged()
                self._show(pace, target, start + len(rows), len(rows))

    def _verify(self, target: Target, copy: Any, pace: Pace) -> None:
        dataset = self.source[raw_name(target.name)]
        written = copy[raw_name(target.name)]
        with self._rows_of(target) as own:
            # The library reads the source for the comparison, independently of the code that wrote the copy.
            # If the library lacks a filter that fastpipe supports, fastpipe reads the source again.
            if missing(filters_of(dataset.id.get_create_plist())):
                steps = own.steps(target.step)
            else:
                steps = _through_library(dataset, target)
            for start, rows in steps:
                end = start + len(rows)
                check_rows(rows, read_rows(written, start, end), f"{self.path}, {target.name}")
                self._show(pace, target, end, len(rows))

    def _show(self, pace: Pace, target: Target, end: int, rows: int) -> None:
        pace.add(rows * target.row_nbytes, f"{target.name}, row {end:,} of {target.rows:,}")

    def _check_unchanged(self) -> None:
        if FileState.of(os.stat(self.path)) != self.state:
            raise HDF5Error(f"{self.path} has changed meanwhile; repack it when it is complete")

    @contextmanager
    def _open_copy(self, mode: str) -> Iterator[Any]:
        """Open the unfinished file with the library; for a disk failure, raise the system's own error."""
        options: Mapping[str, Any] = {}
        if mode == "w":
            # This reads the properties of the root group, because the file's properties lose the setting.
            tracked = self.source["/"].id.get_create_plist().get_link_creation_order()
            options = {
                "libver": _libver(self.source),
                "userblock_size": self.source.userblock_size,
                "track_order": bool(tracked),
            }
        try:
            with h5py.File(self.unfinished, mode, **options) as copy:
                yield copy
        except FastpipeError:
            raise
        except Exception:
            self.unfinished.check()
            raise
        self.unfinished.check()


def _libver(source: Any) -> tuple[str, str]:
    """Return the oldest and the newest format version for the copy, as h5py's ``libver``.

    The oldest version is that of the source.  Some attributes may need a newer version.
    """
    version = source.id.get_create_plist().get_version()[0]
    return {0: "earliest", 1: "earliest", 2: "v108"}.get(version, "v110"), "latest"


def _through_library(dataset: Any, target: Target) -> Iterator[tuple[int, Any]]:
    for start in range(0, target.rows, target.step):
        yield start, read_rows(dataset, start, min(start + target.step, target.rows))


class UnfinishedFile(io.FileIO):
    """The unfinished copy, until it gets the name OUT.  The file is new, locked and private to this user.

    h5py's driver for file-like objects ignores how many bytes a call has read or written.  Each call
    therefore reads or writes all bytes, and reads beyond the end return zeros.  The HDF5 library would not
    recover from a write error, such as a full disk.  After an error, later writes do nothing, and ``check``
    raises the error.  The constructor removes a file left by a killed run, and ``close`` removes the file if
    it was not renamed.
    """

    # Paths that this process is writing, because the file lock does not exclude threads of one process.  The
    # key contains the process's ID, because a forked child does not write its parent's files.
    _writing: ClassVar[dict[tuple[int, str], int]] = {}

    def __init__(self, out: Path) -> None:
        self._out, self._path = out, unfinished_path(out)
        self._error: OSError | None = None
        self._key = (os.getpid(), os.path.realpath(self._path))
        if self._writing.setdefault(self._key, id(self)) != id(self):
            raise HDF5Error(f"another thread is writing {out}; wait for it")
        try:
            super().__init__(_make_unfinished(self._path, out), "r+b")
        except BaseException:
            self._let_go()
            raise

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        done = read_at(self.fileno(), view, self.tell())
        view[done:] = bytes(len(view) - done)
        self.seek(done, os.SEEK_CUR)
        return done

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        nbytes = len(view)
        try:
            while view and self._error is None:
                view = view[os.write(self.fileno(), view) :]
        except OSError as error:
            self._error = error
        return nbytes

    def truncate(self, size: int | None = None) -> int:
        try:
            return super().truncate(size)
        except OSError as error:
            self._error = self._error or error
            return size or 0

    def check(self) -> None:
        """Raise the error of the first failed write."""
        if self._error is not None:
            raise self._error

    def take_name(self, *, force: bool) -> None:
        """Flush the file to the disk, then rename it to OUT."""
        os.fsync(self.fileno())
        if not _is_at(self._path, self.fileno()):
            raise OptionError(f"{self._path} was moved away while it was written; try again")
        if force:
            os.replace(self._path, self._out)
        else:
            try:
                if not rename_anew(self._path, self._out):
                    os.unlink(self._path)
            except FileExistsError:
                raise _exists_already(self._out) from None
        # The mode changes after the rename, because the private mode identifies a file left by a killed run.
        mask = os.umask(0o077)
        os.umask(mask)
        with contextlib.suppress(OSError):  # some file systems have no modes, and the copy is complete
            os.fchmod(self.fileno(), 0o666 & ~mask)
        sync_folder(self._out.parent)

    def close(self) -> None:
        if not self.closed and _is_at(self._path, self.fileno()):
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        super().close()
        self._let_go()

    def _let_go(self) -> None:
        if self._writing.get(self._key) == id(self):
            del self._writing[self._key]


def unfinished_path(out: Path) -> Path:
    """Return the path of the unfinished copy, with a file name that no other program uses."""
    digest = hashlib.sha256(os.fsencode(out.name)).hexdigest()[:16]
    return out.with_name(f"fastpipe-repack-{digest}{UNFINISHED}")


def _make_unfinished(path: Path, out: Path) -> int:
    """Return a descriptor of a new, locked file of mode 0600."""
    for _ in range(_TRIES):
        try:
            descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            _remove_left_behind(path, out)
            continue
        try:
            # Another process may have removed the file as left over before this process locked the file.
            if _lock(descriptor) and _is_at(path, descriptor):
                return descriptor
        except BaseException:  # a file system without locks
            if _is_at(path, descriptor):
                os.unlink(path)
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise _is_busy(out)


def _remove_left_behind(path: Path, out: Path) -> None:
    """Remove a killed run's file; raise an error if the file is not private to this user, or is locked."""
    try:
        descriptor = open_regular(path, os.O_RDWR)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.ENXIO, errno.EMLINK):
            raise OptionError(f"{path} is not an unfinished copy, but {_kind(path)}: move it away") from None
        raise
    try:
        folder = os.open(path.parent, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            why = who_else_may_write(folder, os.fstat(descriptor))
        finally:
            os.close(folder)
        if why:
            raise OptionError(f"{path} {why}: move it away, or name another file")
        if not _lock(descriptor):
            raise _is_busy(out)
        if _is_at(path, descriptor):  # the file at ``path`` is still the file that this process has locked
            os.unlink(path)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    return not locks_are_possible() or try_to_lock(descriptor)


def _is_busy(out: Path) -> HDF5Error:
    return HDF5Error(f"another process is writing {out}; wait for it, or end it")


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _kind(path: Path) -> str:
    mode = os.lstat(path).st_mode
    return "a link" if stat.S_ISLNK(mode) else "a folder" if stat.S_ISDIR(mode) else "no regular file"
