"""Find the classes and the samples of a folder of class folders.

The result equals that of ``torchvision.datasets.folder``, order and errors included; only
the way there is shorter.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from fastpipe._files import retrying_open
from fastpipe._printable import printable
from fastpipe.errors import OptionError
from fastpipe.index.cache import CacheKey, IndexCache, left_out
from fastpipe.index.storage import Packed, pack_paths
from fastpipe.index.tables import SampleTable, SampleTableBuilder
from fastpipe.index.walk import Folder, Walker
from fastpipe.options import Subset

__all__ = [
    "IMG_EXTENSIONS",
    "Classes",
    "check_scan",
    "choose_classes",
    "empty_message",
    "find_classes",
    "scan_folder",
]

IMG_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")

# Names of class folders, or what takes some of the names that there are.
Classes = Sequence[str] | Callable[[list[str]], Sequence[str]] | Subset

_NAMED_AT_MOST = 20


def find_classes(
    directory: str | os.PathLike[str], classes: Classes | None = None
) -> tuple[list[str], dict[str, int]]:
    """Find the class folders of a dataset.

    Args:
        directory: the folder that holds one folder for each class.
        classes: names of the class folders to take, in this order; or a function that is given the
            sorted names of all of them, and returns those to take in the order wanted; or a
            ``Subset``, whose classes are sorted.  ``None`` takes all of them, sorted.

    Returns:
        The class names, and the class index of each name.

    Raises:
        FileNotFoundError: the directory does not exist, or has no folder in it.
        OptionError: ``classes`` is empty, names a folder twice or one that is not there, or draws
            more than there are.
        TypeError: ``classes`` is not a sequence of strings, nor gives one.
    """
    return choose_classes(
        directory, (entry.name for entry in retrying_open(os.scandir, directory) if entry.is_dir()), classes
    )


def choose_classes(
    directory: str | os.PathLike[str], names: Iterable[str], classes: Classes | None
) -> tuple[list[str], dict[str, int]]:
    """Take classes of those that were found: what ``find_classes`` does once the folder is listed.

    Args:
        directory: where they were found, for messages.
        names: the names of all class folders, in any order.
        classes: as for ``find_classes``.

    Returns, Raises:
        as ``find_classes``.
    """
    found = sorted(names)
    if not found:
        raise FileNotFoundError(printable(f"Couldn't find any class folder in {directory}."))
    if classes is None:
        chosen = found
    elif isinstance(classes, Subset):
        chosen = classes.select(found)
    else:
        chosen = _checked(directory, found, classes(list(found)) if callable(classes) else classes)
    return chosen, {name: index for index, name in enumerate(chosen)}


def _checked(directory: str | os.PathLike[str], found: list[str], classes: Sequence[str]) -> list[str]:
    """The classes the user asks for."""
    if isinstance(classes, str):
        raise TypeError(f"classes=… must be a sequence of folder names, got the string {classes!r}")
    if not isinstance(classes, Iterable):
        raise TypeError(f"classes=… must be, or return, a sequence of folder names, got {classes!r}")
    names = list(classes)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"classes=… must hold strings, got {name!r} of type {type(name).__name__}")
    if not names:
        raise OptionError("classes=… must name at least one folder, got none; leave it out to take all")
    existing, unique = set(found), set(names)
    missing = [name for name in names if name not in existing]
    if missing:
        raise OptionError(
            f"classes=… names folders that are not in {os.fspath(directory)!r}: {_listed(missing)}. "
            f"The folders there are: {_listed(found)}"
        )
    if len(unique) != len(names):
        twice = sorted(name for name in unique if names.count(name) > 1)
        raise OptionError(f"classes=… must name every folder once; named more than once: {_listed(twice)}")
    return names


def _listed(names: Sequence[str]) -> str:
    """The names in quotes; not all of them if they are many."""
    text = ", ".join(map(repr, names[:_NAMED_AT_MOST]))
    more = len(names) - _NAMED_AT_MOST
    return text if more <= 0 else f"{text} and {more} more"


def scan_folder(
    directory: str | os.PathLike[str],
    class_to_idx: Mapping[str, int],
    *,
    extensions: str | Sequence[str] | None = None,
    is_valid_file: Callable[[str], bool] | None = None,
    allow_empty: bool = False,
    cache: IndexCache | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> SampleTable:
    """Find all samples below the class folders.

    Classes come sorted by name, a class's folders sorted by their path as a string, and a
    folder's files sorted by name.  Links to folders are followed; folders that cannot be
    read are passed over.

    Args:
        directory: the folder that holds one folder for each class; ``~`` is expanded.
        class_to_idx: the class folders to scan, and their class indices.
        extensions: lower-case ending, or endings, of the files to take; compared without
            regard to case.
        is_valid_file: called with each path, says whether to take it.  Exactly one of
            ``extensions`` and ``is_valid_file`` must be given.
        allow_empty: whether a class may have no file.
        cache: where scans are kept, so that folders which have not changed since are not listed
            again.  Never used with ``is_valid_file``, which may look at anything.
        on_progress: called a few times a second with the number of folders and of files found.

    Returns:
        The table of ``(path, class index)``.

    Raises:
        ValueError: ``class_to_idx`` is empty, or both or neither of ``extensions`` and
            ``is_valid_file`` are given.
        FileNotFoundError: a class has no file, and ``allow_empty`` is false.
    """
    directory = os.path.expanduser(directory)
    check_scan(class_to_idx, extensions, is_valid_file)
    names = sorted(class_to_idx)
    prefix, tops = _below(directory, names)
    builder = SampleTableBuilder(prefix)
    empty: list[str] = []
    if is_valid_file is not None:
        listed = Walker(prefix, _listed_names, on_progress=on_progress).walk(tops)
        found: Iterable[list[Packed]] = (_packed(prefix, folders, is_valid_file) for folders in listed)
    else:
        assert extensions is not None
        found = _find_by_extension(directory, prefix, tops, extensions, cache, on_progress)
    for name, folders in zip(names, found, strict=True):
        before = len(builder)
        for paths in folders:
            builder.add_packed(paths, class_to_idx[name])
        if len(builder) == before:
            empty.append(name)
    if empty and not allow_empty:
        raise FileNotFoundError(empty_message(empty, extensions))
    return builder.build()


def check_scan(
    class_to_idx: Mapping[str, int],
    extensions: str | Sequence[str] | None,
    is_valid_file: Callable[[str], bool] | None,
) -> None:
    """Refuse the options that torchvision refuses, as it does.

    Raises:
        ValueError: ``class_to_idx`` is empty, or both or neither of the others are given.
    """
    if not class_to_idx:
        raise ValueError("'class_to_index' must have at least one entry to collect any samples.")
    if (extensions is None) == (is_valid_file is None):
        raise ValueError("Both extensions and is_valid_file cannot be None or not None at the same time")


def _below(directory: str, names: Sequence[str]) -> tuple[str, list[str]]:
    """What the paths of all class folders begin with, and the rest of each."""
    prefix = os.path.join(directory, "")
    tops = [os.path.join(directory, name) for name in names]
    if not all(top.startswith(prefix) for top in tops):  # a name that is a whole path
        prefix = ""
    return prefix, [top[len(prefix) :] for top in tops]


def _find_by_extension(
    directory: str,
    prefix: str,
    tops: Sequence[str],
    extensions: str | Sequence[str],
    cache: IndexCache | None,
    on_progress: Callable[[int, int], None] | None,
) -> list[list[Packed]]:
    """For each class folder the paths to take, with as little listing of folders as the cache allows."""
    endings = (extensions,) if isinstance(extensions, str) else tuple(extensions)
    # An ending with a separator in it asks for more of the path than the name.
    by_path = any(separator in "".join(endings) for separator in filter(None, (os.sep, os.altsep)))

    def take(folder: str, names: list[str]) -> tuple[int, Packed]:
        inside = os.path.join(folder, "")
        names.sort()
        if by_path:
            taken = [name for name in names if (prefix + inside + name).lower().endswith(endings)]
        else:
            taken = [name for name in names if name.lower().endswith(endings)]
        return len(taken), pack_paths(inside, taken)

    key = None if cache is None or by_path or not prefix else _key(directory, endings)
    if cache is None or key is None:
        found = Walker(prefix, take, on_progress=on_progress).walk(tops)
        return [[folder.content for folder in folders] for folders in found]
    start = time.perf_counter()
    known = cache.load(key)
    found = Walker(prefix, take, known=known, now=cache.now, on_progress=on_progress).walk(tops)
    lasting = {folder.path: folder for folders in found for folder in folders if folder.stamp is not None}
    is_new = any(known.get(path) is not folder for path, folder in lasting.items())
    if is_new and time.perf_counter() - start > cache.keep_from_s:
        cache.save(key, list({**left_out(known, tops, prefix), **lasting}.values()))
    return [[folder.content for folder in folders] for folders in found]


def _key(directory: str, endings: tuple[str, ...]) -> CacheKey | None:
    """Under which the scan of a folder is kept; None for one that will fail in its own way."""
    try:
        status = os.stat(directory)
    except (OSError, ValueError):
        return None
    return CacheKey(status.st_dev, status.st_ino, endings)


def _listed_names(folder: str, names: list[str]) -> tuple[int, list[str]]:
    names.sort()
    return len(names), names


def _packed(
    prefix: str, folders: Sequence[Folder[list[str]]], is_valid_file: Callable[[str], bool]
) -> list[Packed]:
    """The paths that the user's function takes.  It gets the whole path."""
    packed = []
    for folder in folders:
        inside = os.path.join(folder.path, "")
        before = prefix + inside
        packed.append(pack_paths(inside, [name for name in folder.content if is_valid_file(before + name)]))
    return packed


def empty_message(empty: Sequence[str], extensions: str | Sequence[str] | None) -> str:
    """What torchvision says of classes without a file."""
    message = printable(f"Found no valid file for the classes {', '.join(empty)}. ")
    if extensions is None:
        return message
    supported = extensions if isinstance(extensions, str) else ", ".join(extensions)
    return message + f"Supported extensions are: {supported}"
