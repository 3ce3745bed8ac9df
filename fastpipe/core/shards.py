"""Shards: tar files of samples, as WebDataset writes and reads them.  The values of samples in archives."""

from __future__ import annotations

import glob
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from fastpipe.core.archive_paths import place_of
from fastpipe.core.archives import Archive, Place, listed, tar_members
from fastpipe.core.files import is_url, open_file
from fastpipe.errors import OptionError

# The files of a sample lie one after the other, and have one name up to the first dot.
_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
_OF_SHARD = re.compile(r"__[^/]*__($|/)")  # files that are about the shard, not of a sample
_BRACES = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}")
KEY = "__key__"
_READ: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("txt", "text", "transcript"), str),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int),
    **dict.fromkeys(("json", "jsn"), json.loads),
}
MOST_BYTES = 1 << 20  # of a value


class Samples(NamedTuple):
    """The samples of archives.

    Attributes:
        images: the path of each sample's image.
        columns: the values of each column that was asked for.
        where: a function that names a sample, for errors.
    """

    images: list[str]
    columns: dict[str, list[Any]]
    where: Callable[[int], str]


def shard_paths(pattern: str) -> list[str]:
    """Return the files that a pattern names: with ``*`` and ``?``, and with braces as WebDataset has them.

    >>> shard_paths("train-{008..011}.tar")
    ['train-008.tar', 'train-009.tar', 'train-010.tar', 'train-011.tar']
    """
    if is_url(pattern):
        raise OptionError(f"{pattern!r} must be a file of this machine: copy it to a local disk first")
    if os.path.exists(pattern):
        return [pattern]
    return [path for name in braced(pattern) for path in _matching(name)]


def braced(pattern: str) -> list[str]:
    """Return the names for which the braces of a pattern stand.

    >>> braced("s3://{a,b}/{8..10}.tar")[1:4]
    ['s3://a/9.tar', 's3://a/10.tar', 's3://b/8.tar']
    """
    found = _BRACES.search(pattern)
    if found is None:
        return [pattern]
    first, last, names = found.groups()
    if names is None:
        numbers = range(int(first), int(last) + 1)
        names = ",".join(str(number).zfill(len(first)) for number in numbers)
    before, after = pattern[: found.start()], pattern[found.end() :]
    return [one for name in names.split(",") for one in braced(before + name + after)]


def _matching(name: str) -> list[str]:
    if os.path.exists(name) or not glob.has_magic(name):
        return [name]
    paths = sorted(glob.glob(name))
    if not paths:
        raise FileNotFoundError(f"no file matches {name!r}")
    return paths


def read_shards(paths: Sequence[str], image: str, names: Sequence[str], keeps: bool) -> Samples:
    """Return the samples of tar files: the places of their images, and the values of their other files.

    Args:
        paths: the tar files.
        image: the extension of the images, such as ``"jpg"``, or several, ``"jpg;jpeg;png"``.
        names: the extensions of other files.  ``txt`` and ``text`` are texts, ``cls``, ``index`` and ``id``
            are integers, and ``json`` is any value; with ``left.cls``, what follows the last dot counts.
            ``__key__`` is the name of the sample.
        keeps: whether to keep what was read for the next time.

    Raises:
        OptionError: a sample lacks a file, or a file is not as its extension says.  The message names it.
    """
    return samples_of_shards(
        [Archive.of(path) for path in paths],
        image,
        names,
        keeps,
        lambda path: open(path, "rb", opener=open_file),
    )


def samples_of_shards(
    shards: Sequence[Archive], image: str, names: Sequence[str], keeps: bool, open_shard: Callable[[str], Any]
) -> Samples:
    """Return the samples of tar files as ``read_shards``.  ``open_shard`` opens one for reading."""
    for name in names:
        if name != KEY and _kind(name) not in _READ:
            raise OptionError(
                f"values of {name!r} are not known. The extensions of values are {', '.join(sorted(_READ))}"
            )
    kinds = image.lower().split(";")
    wanted = [name for name in names if name != KEY]

    def samples_of(path: str, version: int) -> Iterator[tuple[str, ...]]:
        with open_shard(path) as shard:
            yield from _samples_of(shard, path, version, kinds, wanted)

    return collect_samples(shards, ["shards", kinds, wanted], names, keeps, samples_of)


def collect_samples(
    archives: Sequence[Archive], about: list[Any], names: Sequence[str], keeps: bool,
    samples_of: Callable[[str, int], Iterator[tuple[str, ...]]],
) -> Samples:  # fmt: skip
    """Return the samples of archives.

    Args:
        archives: the archives.
        about: what is read of them, for the list that is kept.
        names: the names of values.  What follows the last dot is their kind, as in ``read_shards``; values
            without a known kind are texts.
        keeps: whether to keep what was read for the next time.
        samples_of: a function that yields for each sample of an archive, given its path and version: the
            place and the name of the image, the name of the sample, and the texts of the values.
    """

    def columns(path: str, version: int) -> list[list[str]]:
        return list(map(list, zip(*samples_of(path, version), strict=True)))

    wanted = [name for name in names if name != KEY]
    paths: list[str] = []
    texts: list[list[str]] = [[] for _ in range(2 + len(wanted))]
    for archive, found in zip(archives, listed(archives, about, keeps, columns), strict=True):
        if found:  # else the archive has no samples
            paths += [archive.path] * len(found[0])
            for text, more in zip(texts, found, strict=True):
                text += more
    insides, keys, *texts = texts

    def where(number: int) -> str:
        return f"sample {keys[number]!r} of {paths[number]}"

    values: dict[str, list[Any]] = {KEY: keys} if KEY in names else {}
    for name, column in zip(wanted, texts, strict=True):
        values[name] = [_value(text, name, number, where) for number, text in enumerate(column)]
    images = [f"{path}/@{inside}" for path, inside in zip(paths, insides, strict=True)]
    return Samples(images, values, where)


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _value(text: str, name: str, number: int, where: Callable[[int], str]) -> Any:
    try:
        return _READ.get(_kind(name), str)(text)
    except ValueError as error:
        raise OptionError(f"{where(number)} has {text[:80]!r} for {name!r}: {error}") from error


def _samples_of(
    shard: Any, path: str, version: int, kinds: Sequence[str], names: Sequence[str]
) -> Iterator[tuple[str, ...]]:  # fmt: skip
    """Yield for each sample: the place and name of its image, its own name, and the texts of its values."""
    files: dict[str, tuple[str, str, Place, bytes]] = {}
    for name, place in tar_members(shard, path):
        found = _NAME.fullmatch(name)
        if found is None or _OF_SHARD.match(name) is not None:
            continue
        kind, content = found[2].lower(), b""
        if kind in names:
            if place.nbytes > MOST_BYTES:
                raise OptionError(f"{name!r} in {path!r} has {place.nbytes} bytes, too many for a value")
            shard.seek(place.offset)
            content = shard.read(place.nbytes)
        files[name] = found[1], kind, place, content
    for key, group in itertools.groupby(files.items(), lambda file: file[1][0]):
        of_sample = {kind: (name, place, content) for name, (_, kind, place, content) in group}
        image = next((of_sample[kind] for kind in kinds if kind in of_sample), None)
        missing = [name for name in names if name not in of_sample]
        if image is None or missing:
            lacks = ";".join(kinds) if image is None else missing[0]
            raise OptionError(
                f"sample {key!r} of {path!r} has no file {lacks!r}; it has {', '.join(of_sample)}"
            )
        texts = []
        for name, _, content in (of_sample[name] for name in names):
            try:
                texts.append(content.decode())
            except UnicodeDecodeError as error:
                raise OptionError(f"{name!r} in {path!r} is not a text in UTF-8: {error}") from error
        yield f"{place_of(*image[1], version)}/{image[0]}", key, *texts
