"""Find the classes and the samples of a folder of class folders.

The result equals that of ``torchvision.datasets.folder``, order and errors included; only
the way there is shorter.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from fastpipe.errors import OptionError
from fastpipe.index.tables import SampleTable, SampleTableBuilder

__all__ = ["IMG_EXTENSIONS", "find_classes", "scan_folder"]

IMG_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")

_NAMED_AT_MOST = 20


def find_classes(
    directory: str | os.PathLike[str], classes: Sequence[str] | None = None
) -> tuple[list[str], dict[str, int]]:
    """Find the class folders of a dataset.

    Args:
        directory: the folder that holds one folder for each class.
        classes: names of the class folders to take, in this order.  ``None`` takes all of
            them, sorted.

    Returns:
        The class names, and the class index of each name.

    Raises:
        FileNotFoundError: the directory does not exist, or has no folder in it.
        OptionError: ``classes`` is empty, names a folder twice, or one that is not there.
        TypeError: ``classes`` is not a sequence of strings.
    """
    found = sorted(entry.name for entry in os.scandir(directory) if entry.is_dir())
    if not found:
        raise FileNotFoundError(f"Couldn't find any class folder in {directory}.")
    names = found if classes is None else _selected(directory, found, classes)
    return names, {name: index for index, name in enumerate(names)}


def _selected(directory: str | os.PathLike[str], found: list[str], classes: Sequence[str]) -> list[str]:
    """The classes the user asks for, checked."""
    if isinstance(classes, str):
        raise TypeError(f"classes=… must be a sequence of folder names, got the string {classes!r}")
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

    Returns:
        The table of ``(path, class index)``.

    Raises:
        ValueError: ``class_to_idx`` is empty, or both or neither of ``extensions`` and
            ``is_valid_file`` are given.
        FileNotFoundError: a class has no file, and ``allow_empty`` is false.
    """
    directory = os.path.expanduser(directory)
    if not class_to_idx:
        raise ValueError("'class_to_index' must have at least one entry to collect any samples.")
    if extensions is not None and is_valid_file is None:
        select = _by_extension(extensions)
    elif is_valid_file is not None and extensions is None:
        select = _by_function(is_valid_file)
    else:
        raise ValueError("Both extensions and is_valid_file cannot be None or not None at the same time")

    builder = SampleTableBuilder()
    empty: list[str] = []
    for name in sorted(class_to_idx):
        before = len(builder)
        for folder, files in _walk(os.path.join(directory, name)):
            prefix = os.path.join(folder, "")
            files.sort()
            builder.add(prefix, select(prefix, files), class_to_idx[name])
        if len(builder) == before:
            empty.append(name)
    if empty and not allow_empty:
        raise FileNotFoundError(_empty_message(empty, extensions))
    return builder.build()


def _empty_message(empty: Sequence[str], extensions: str | Sequence[str] | None) -> str:
    message = f"Found no valid file for the classes {', '.join(empty)}. "
    if extensions is None:
        return message
    supported = extensions if isinstance(extensions, str) else ", ".join(extensions)
    return message + f"Supported extensions are: {supported}"


_Select = Callable[[str, list[str]], list[str]]


def _by_extension(extensions: str | Sequence[str]) -> _Select:
    """Select file names by how their path ends."""
    endings = extensions if isinstance(extensions, str) else tuple(extensions)
    separators = tuple(filter(None, (os.sep, os.altsep)))

    def by_name(prefix: str, names: list[str]) -> list[str]:
        return [name for name in names if name.lower().endswith(endings)]

    def by_path(prefix: str, names: list[str]) -> list[str]:
        return [name for name in names if (prefix + name).lower().endswith(endings)]

    # An ending with a separator in it asks for more of the path than the name.
    whole = endings if isinstance(endings, str) else "".join(endings)
    return by_path if any(separator in whole for separator in separators) else by_name


def _by_function(is_valid_file: Callable[[str], bool]) -> _Select:
    """Select files with the user's function, which gets the whole path."""

    def by_function(prefix: str, names: list[str]) -> list[str]:
        return [name for name in names if is_valid_file(prefix + name)]

    return by_function


def _walk(top: str) -> list[tuple[str, list[str]]]:
    """All folders from ``top`` down with their files, as ``sorted(os.walk(top, followlinks=True))``.

    Whatever is not a folder is a file: broken links, fifos, and links in a loop once the
    operating system gives up following them.  A folder that cannot be read is left out,
    with all below it.
    """
    found: list[tuple[str, list[str]]] = []
    # False also for a name that no file can have, for which scandir raises ValueError.
    pending = [top] if os.path.isdir(top) else []
    while pending:
        folder = pending.pop()
        try:
            with os.scandir(folder) as entries:
                folders, files = _split(entries)
        except OSError:
            continue
        found.append((folder, files))
        pending += [os.path.join(folder, name) for name in folders]
    found.sort()
    return found


def _split(entries: Iterable[os.DirEntry[str]]) -> tuple[list[str], list[str]]:
    """The names of the folders, and of everything else."""
    folders: list[str] = []
    files: list[str] = []
    for entry in entries:
        try:
            is_folder = entry.is_dir()
        except OSError:
            is_folder = False
        if is_folder:
            folders.append(entry.name)
        else:
            files.append(entry.name)
    return folders, files
