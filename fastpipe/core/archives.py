"""Find the files in tar and zip archives, and the classes of a folder in an archive."""

from __future__ import annotations

import itertools
import os
import stat
import struct
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from fastpipe.core.archive_paths import place_of, version_of
from fastpipe.core.array_cache import Arrays, KeptFiles, default_folder
from fastpipe.core.class_folders import Classes, check_scan, choose_classes, empty_message
from fastpipe.core.file_identity import is_settled
from fastpipe.core.files import open_file, read_at, regular_status
from fastpipe.core.progress import SlowWork
from fastpipe.core.sample_tables import SampleTable, SampleTableBuilder, checked_offsets, pack_paths
from fastpipe.core.text import counted
from fastpipe.errors import OptionError

_SUFFIXES = (".tar", ".zip")
_COMPRESSED = {b"\x1f\x8b": "gunzip", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz", b"\x28\xb5\x2f\xfd": "unzstd"}
# The header before a file in a zip archive: a signature, the lengths of the name and of the extra data.
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_KEEP_FROM_S = 0.25
_FORMAT = 2
_NOT_KEPT = "The list of what is in the archives is not kept, so they are read each time"
_THREADS = 8  # reading lists mostly waits for the disk


class Place(NamedTuple):
    """Where a member's bytes are; the fields are those of ``archive_paths.Member``."""

    offset: int
    nbytes: int
    size: int | None = None


_OF_FOLDER = Place(0, 0)


# ---- the members of an archive ---------------------------------------------------------------------


def is_archive(path: str | os.PathLike[str]) -> bool:
    return os.fspath(path).lower().endswith(_SUFFIXES)


def members_of(path: str) -> dict[str, Place]:
    """Return the regular files and the folders in a tar or zip archive, in the archive's order.

    The name of a folder ends in ``/``.  A name has no ``./`` at its beginning.  If a name occurs several
    times, the last one counts, as after unpacking.

    Raises:
        OSError: as ``open`` raises it.
        OptionError: it is no such archive, or is damaged, compressed, encrypted or sparse, or has links that
            lead out of it.
    """
    with open(path, "rb", opener=open_file) as file:
        is_zip = file.read(2) == b"PK"
        file.seek(0)
        if not is_zip:
            return dict(tar_members(file, path))
        with _readable(path):
            return dict(_of_zip(file))


def tar_members(file: Any, path: str) -> Iterator[tuple[str, Place]]:
    """Yield what ``members_of`` returns for a tar file that is open for reading.

    Between two members, the caller may read other parts of the file.
    """
    begin = file.read(8)
    for magic, remedy in _COMPRESSED.items():
        if begin.startswith(magic):
            raise OptionError(
                f"{path!r} is compressed as a whole, so its files cannot be read one by one. Make a .tar "
                f"file of it with {remedy}: compressed images do not become smaller again"
            )
    file.seek(0)
    with _readable(path):
        yield from _of_tar(file)


@contextmanager
def _readable(path: str) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, zipfile.BadZipFile, struct.error, EOFError, OptionError) as error:
        raise OptionError(f"{path!r} cannot be read as an archive: {error}") from error


def _of_tar(file: Any) -> Iterator[tuple[str, Place]]:
    places: dict[str, Place] = {}
    with tarfile.open(fileobj=file, mode="r:") as tar:
        while (member := tar.next()) is not None:
            tar.members = []  # type: ignore[attr-defined]  # else it keeps all of them
            name = _bare(member.name)
            if member.islnk() or member.issym():
                place = places.get(_target_of(member, name))
                if place is None:
                    raise OptionError(
                        f"{member.name!r} is a link to {member.linkname!r}, which is not before it in the "
                        "archive. Make the archive with 'tar --dereference'"
                    )
            elif member.isdir():
                name, place = f"{name}/", _OF_FOLDER
            elif not member.isreg():
                continue
            elif member.issparse():
                raise OptionError(f"{member.name!r} is sparse. Make the archive without 'tar --sparse'")
            else:
                place = Place(member.offset_data, member.size)
            places[name] = place
            yield name, place


def _target_of(member: tarfile.TarInfo, name: str) -> str:
    if member.islnk():
        return _bare(member.linkname)
    return os.path.normpath(os.path.join(os.path.dirname(name), member.linkname))


def _of_zip(file: Any) -> Iterator[tuple[str, Place]]:
    with zipfile.ZipFile(file) as members:
        for member in members.infolist():
            if member.is_dir():
                yield _bare(member.filename), _OF_FOLDER
                continue
            if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise OptionError(
                    f"{member.filename!r} is encrypted, or compressed with another method than deflate. "
                    "Make the archive with 'zip -0'"
                )
            if stat.S_ISLNK(member.external_attr >> 16):
                raise OptionError(f"{member.filename!r} is a link. Make the archive without 'zip --symlinks'")
            header = bytearray(_LOCAL_HEADER.size)
            read_at(file.fileno(), header, member.header_offset)
            signature, name, extra = _LOCAL_HEADER.unpack(header)
            if signature != b"PK\x03\x04":
                raise OptionError(f"{member.filename!r} is not where the list of members says")
            offset = member.header_offset + _LOCAL_HEADER.size + name + extra
            is_stored = member.compress_type == zipfile.ZIP_STORED
            size = None if is_stored else member.file_size
            yield _bare(member.filename), Place(offset, member.compress_size, size)


def _bare(name: str) -> str:
    while name.startswith("./"):
        name = name[2:].lstrip("/")
    return name


# ---- a folder of classes in an archive -------------------------------------------------------------


class ArchiveFolder:
    """A folder in an archive, which contains one folder for each class.

    Args:
        archive: the path of the archive.
        inside: the folder in the archive, ``""`` or such as ``"data/train/"``.
        keeps: whether to keep the list of what is in the archive for the next time.
    """

    def __init__(self, archive: str, inside: str, keeps: bool) -> None:
        self._archive, self._inside, self._keeps = archive, inside, keeps
        self._found: list[list[str]] | None = None  # names and places, between ``find_classes`` and ``scan``

    @classmethod
    def at(cls, root: str | os.PathLike[str], keeps: bool) -> ArchiveFolder | None:
        """Return the folder that a root names, such as ``"data.zip"`` or ``"data.tar/train"``.

        Return None if the root is not in an archive.
        """
        archive = path = os.path.expanduser(os.fspath(root)).rstrip("/")
        while not is_archive(archive):
            archive, below = os.path.split(archive)
            if not below:
                return None
        if not os.path.isfile(archive):
            return None
        inside = path[len(archive) :].strip("/")
        return cls(archive, inside and f"{inside}/", keeps)

    def find_classes(self, classes: Classes | None) -> tuple[list[str], dict[str, int]]:
        """Return the names of the class folders and their indices, as ``class_folders.find_classes``."""
        below = {path.split("/", 1)[0] for path, _ in self._files() if "/" in path}
        return choose_classes(f"{self._archive}/{self._inside}", below, classes)

    def scan(
        self,
        class_to_idx: Mapping[str, int],
        *,
        extensions: str | Sequence[str] | None = None,
        is_valid_file: Callable[[str], bool] | None = None,
        allow_empty: bool = False,
    ) -> SampleTable:
        """Return the samples in the order that ``class_folders.scan_folder`` has after unpacking."""
        check_scan(class_to_idx, extensions, is_valid_file)
        endings = (extensions,) if isinstance(extensions, str) else tuple(extensions or ())
        prefix = f"{self._archive}/@"
        files: dict[str, list[tuple[str, str, str]]] = {name: [] for name in class_to_idx}
        for path, place in self._files():
            name = path.split("/", 1)[0]
            if name != path and name in files and not path.endswith("/"):
                files[name].append((*os.path.split(self._inside + path), place))
        builder, empty = SampleTableBuilder(prefix), []
        for name, found in sorted(files.items()):
            paths = [f"{place}/{folder}/{file}" for folder, file, place in sorted(found)]
            if is_valid_file is not None:
                paths = [path for path in paths if is_valid_file(prefix + path)]
            else:
                paths = [path for path in paths if path.lower().endswith(endings)]
            builder.add("", paths, class_to_idx[name])
            if not paths:
                empty.append(name)
        self._found = None
        if empty and not allow_empty:
            raise FileNotFoundError(empty_message(empty, extensions))
        return builder.build()

    def _files(self) -> Iterator[tuple[str, str]]:
        """Yield what is below the folder: paths from there, and places."""
        if self._found is None:
            (self._found,) = listed([Archive.of(self._archive)], ["members"], self._keeps, _names_and_places)
        for name, place in zip(*self._found, strict=True):
            if name.startswith(self._inside):
                yield name[len(self._inside) :], place


def _names_and_places(path: str, version: int) -> list[list[str]]:
    members = members_of(path)
    return [list(members), [place_of(*place, version) for place in members.values()]]


# ---- lists are kept -------------------------------------------------------------------------------


class Archive(NamedTuple):
    """An archive in one state.

    Attributes:
        path: the path or URL.
        identity: what identifies the archive, whatever its state.
        state: what changes when the archive changes.
        version: a number, 32 bits, made of the state.
        changed_ns: when it was changed, in nanoseconds since 1970.
    """

    path: str
    identity: list[Any]
    state: list[Any]
    version: int
    changed_ns: int

    @classmethod
    def of(cls, path: str) -> Archive:
        """Return the file at a path.  Errors are those of ``os.stat``."""
        found = regular_status(path)
        state = [found.st_size, found.st_mtime_ns, found.st_ctime_ns]
        changed = max(found.st_mtime_ns, found.st_ctime_ns)
        return cls(path, [found.st_dev, found.st_ino], state, version_of(found), changed)


def listed(
    archives: Sequence[Archive], about: list[Any], keeps: bool, make: Callable[[str, int], list[list[str]]]
) -> list[list[list[str]]]:  # fmt: skip
    """Return the columns of texts that ``make`` returns for each archive and its version.

    They are kept until an archive changes; ``about`` says what they are.
    """
    states = [one.state for one in archives]
    key = [about, _FORMAT, [one.identity for one in archives]]
    folder = default_folder() if keeps else None
    files = None if folder is None else KeptFiles(folder, _NOT_KEPT)

    def read(kept: dict[str, Any], array: Arrays) -> list[list[list[str]]] | None:
        return _unpacked(kept["counts"], array) if kept["states"] == states else None

    found = None if files is None else files.load(key, read)
    if found is not None:
        return found
    start, now = time.perf_counter(), time.time_ns()
    with SlowWork(f"Listing {counted(len(archives), 'archive')}") as progress:
        found = []
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="fastpipe-list") as pool:
            for columns in pool.map(lambda one: make(one.path, one.version), archives):
                found.append(columns)
                progress(f"{len(found):,} so far")
    is_old = all(is_settled(one.changed_ns, now) for one in archives)
    if files is not None and is_old and time.perf_counter() - start > _KEEP_FROM_S:
        packed = [pack_paths("", column) for columns in found for column in columns]
        arrays = {
            "arena": np.frombuffer(b"".join(one.block for one in packed), np.uint8),
            "lengths": np.concatenate([np.zeros(0, np.int64), *(one.lengths for one in packed)]),
        }
        counts = [[len(column) for column in columns] for columns in found]
        files.save(key, {"states": states, "counts": counts}, arrays)
    return found


def _unpacked(counts: list[list[int]], array: Arrays) -> list[list[list[str]]]:
    """Return the columns that were kept.  Raise an error if they do not fit together."""
    arena, lengths = array("arena", np.uint8).tobytes(), array("lengths", np.int64)
    offsets = checked_offsets(arena, lengths).tolist()
    texts = [arena[begin:end].decode("utf-8", "surrogatepass") for begin, end in itertools.pairwise(offsets)]
    if sum(map(sum, counts)) != len(texts):
        raise ValueError(f"{len(texts)} texts are in columns of {counts}")
    left = iter(texts)
    return [[list(itertools.islice(left, count)) for count in columns] for columns in counts]
