"""LMDB files of images: their keys, and the places of their values.

The file is read here and not by the package lmdb, which refuses to open a file that the script itself has
open in this process, and which ends the process if the file is cut off.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fastpipe.core.archive_paths import place_of
from fastpipe.core.archives import Archive, Place
from fastpipe.core.files import open_file, read_at
from fastpipe.core.shards import KEY, MOST_BYTES, Samples, collect_samples
from fastpipe.errors import OptionError

_DATA = "data.mdb"  # the file in an LMDB's folder

# Values that are no files of images, by their bytes.
_OTHERS = {
    "a number": re.compile(rb"\d{1,20}"),
    "an array of NumPy": re.compile(rb"(\x93NUMPY|PK\x03\x04).*", re.DOTALL),
    "pickled": re.compile(rb"\x80[\x02-\x05].*\.", re.DOTALL),
    "packed by msgpack": re.compile(rb"([\x81-\x87\x91-\x9f]|\xdc\0|\xde\0).*", re.DOTALL),
    "a Datum of Caffe": re.compile(rb"\x08[\x01-\x04]\x10.*", re.DOTALL),
}
_NAME_KEYS = 'If not all keys are of images, name those that are, such as image="image-*"'
_SPLIT = (
    "Write the bytes of each image's file as a value, and its label as another one, such as b'image-7' and "
    "b'label-7'. Or keep your own Dataset, with FastLoader in place of DataLoader"
)

# ---- the samples of a file -----------------------------------------------------------------------


def is_lmdb(path: str) -> bool:
    """Return whether a path ends in ``lmdb`` or ``.mdb``, or is a folder with a ``data.mdb``.

    >>> is_lmdb("train.lmdb"), is_lmdb("bedroom_train_lmdb/"), is_lmdb("train.csv")
    (True, True, False)
    """
    return path.rstrip("/").lower().endswith(("lmdb", ".mdb")) or os.path.isfile(os.path.join(path, _DATA))


def read_lmdb(paths: Sequence[str], image: str, names: Sequence[str], keeps: bool) -> Samples:
    """Return the samples of LMDBs, in the order of their keys: the places of images, and other values.

    Args:
        paths: files, or folders with a ``data.mdb``.
        image: the keys of the images, with one ``*`` for the name of a sample: ``"image-*"`` or ``"*"``.
        names: the keys of other values, such as ``"label-*"``.  These are texts in UTF-8.  If a key has an
            extension of shards, such as ``"*.cls"``, they are values of this kind.  ``__key__`` is the name
            of the sample.
        keeps: whether to keep what was read for the next time.

    Raises:
        OptionError: it is no LMDB, or is damaged or encrypted; it has named databases, or several values for
            a key; a sample lacks a value; a value is no image or no text.  The message names the key.
    """
    files = [os.path.join(path, _DATA) if os.path.isdir(path) else path for path in paths]
    wanted = [name for name in names if name != KEY]
    for name in (image, *wanted):
        if name.count("*") != 1:
            raise OptionError(
                f"{name!r} must have one *, for the name of a sample in the keys of an LMDB, such as "
                'image="image-*", target="label-*". If all values are images: image="*"'
            )

    def samples_of(path: str, version: int) -> Iterator[tuple[str, ...]]:
        return _samples_of(path, version, image, wanted)

    return collect_samples(list(map(Archive.of, files)), ["lmdb", image, wanted], names, keeps, samples_of)


def _samples_of(path: str, version: int, image: str, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield for each sample of a file: the place and key of its image, its name, the texts of its values."""
    found: dict[str, dict[bytes, Place]] = {pattern: {} for pattern in (image, *names)}
    # A key that several patterns fit belongs to the longest one.
    ends = {one: tuple(map(str.encode, one.split("*"))) for one in sorted(found, key=len, reverse=True)}
    keys: list[bytes] = []  # the first and the last one
    for key, place in values_of(path):
        keys[1:] = [key]
        for pattern, (before, after) in ends.items():
            if len(key) >= len(before) + len(after) and key.startswith(before) and key.endswith(after):
                found[pattern][key[len(before) : len(key) - len(after)]] = place
                break
    images = found[image]
    if not images:
        others = " and ".join(repr(_text(key)) for key in keys) or "none"
        raise OptionError(f"{path!r} has no key {image!r}. Its first and last keys are {others}")
    with open(path, "rb", opener=open_file) as file:
        for name in [*images][:1] + [*images][-1:]:
            _check_image(_value_at(file.fileno(), images[name]), _key(image, name), path)
        for name, place in images.items():
            texts = []
            for pattern in names:
                other = _key(pattern, name)
                if name not in found[pattern]:
                    raise OptionError(f"sample {_text(name)!r} of {path!r} has no key {other!r}")
                texts.append(_text_at(file.fileno(), found[pattern][name], other, path))
            yield f"{place_of(*place, version)}/{_key(image, name)}", _text(name), *texts


def _key(pattern: str, name: bytes) -> str:
    return pattern.replace("*", _text(name))


def _text(key: bytes) -> str:
    """Return a key, in hexadecimal digits if it is no text."""
    text = key.decode("utf-8", "replace")
    return text if text.isprintable() and "\ufffd" not in text else key.hex()


def _value_at(descriptor: int, place: Place) -> bytes:
    value = bytearray(place.nbytes)
    read_at(descriptor, value, place.offset)
    return bytes(value)


def _check_image(value: bytes, key: str, path: str) -> None:
    """Raise an error if a value is known to be something else than an image."""
    for kind, form in _OTHERS.items():
        if form.fullmatch(value):
            remedy = _NAME_KEYS if kind == "a number" else _SPLIT
            raise OptionError(f"{key!r} in {path!r} is {kind}, not the bytes of an image's file. {remedy}")


def _text_at(descriptor: int, place: Place, key: str, path: str) -> str:
    if place.nbytes > MOST_BYTES:
        raise OptionError(f"{key!r} in {path!r} has {place.nbytes} bytes, too many for a value")
    value = _value_at(descriptor, place)
    text = value.decode("utf-8", "replace")
    if "\ufffd" in text or "\0" in text:  # packed numbers have zeros
        raise OptionError(
            f"{key!r} in {path!r} is not a text in UTF-8 but {value[:20]!r}. Name the samples, "
            'target="__key__", and let a target_transform look their targets up'
        )
    return text


# ---- the format ----------------------------------------------------------------------------------
#
# A file consists of pages of one size.  The first two describe the file; that of the later transaction is
# valid.  The values are in a tree.  Its branches are pages with the numbers of other pages, its leaves are
# pages with keys.  A key is followed by its value, or, if that is large, by the number of its first page.

_MAGIC = 0xBEEFC0DE
# A description: the magic number and the version; the tree of unused pages, with the size of a page, flags
# and the root; the tree of values, with the same fields; the number of the transaction.
_DESCRIPTION = struct.Struct("<II16x IH34xQ IH34xQ 8xQ")
_PAGE = struct.Struct("<HH2x")  # the end of a page's header: flags, and where the places of its nodes end
_NODE = struct.Struct("<HHHH")  # halves of the value's size, flags, and the size of the key that follows
_NUMBER = struct.Struct("<Q")  # of a page
_NO_PAGE = (1 << 64) - 1
# Bits of flags.
_BRANCH, _LEAF, _LARGE, _DUPLICATES, _ENCRYPTED = 1, 2, 1, 4, 0x2000
_COPY = "Copy its values into a new LMDB, whose keys have one value each"


class _Format(NamedTuple):
    """A version of the format.

    Attributes:
        header: the bytes of a page's header.
        base: where the places of nodes count from in a page.
        odd: the bytes that follow a key of an odd number of bytes.
    """

    header: int
    base: int
    odd: int


_FORMATS = {1: _Format(16, 0, 0), 3: _Format(24, 24, 1)}  # of LMDB 0.9 and 1.0


class _Tree(NamedTuple):
    """The tree of values of a file: the format, the bytes of a page, and the number of the first page."""

    form: _Format
    page_size: int
    root: int


def values_of(path: str) -> Iterator[tuple[bytes, Place]]:
    """Yield the keys of an LMDB file, in its order, and the places of their values.

    Raises:
        OSError: as ``open`` raises it.
        OptionError: it is no LMDB, or is damaged or encrypted; it has named databases, or several values for
            a key.
    """
    with open(path, "rb", opener=open_file) as file:
        try:
            tree = _tree_of(file.fileno(), path)
            yield from _values_of(file.fileno(), tree, path)
        except struct.error as error:
            raise _damaged(path) from error


def _tree_of(descriptor: int, path: str) -> _Tree:
    begin = bytearray(_FORMATS[3].header + _DESCRIPTION.size)
    read_at(descriptor, begin, 0)
    for form in _FORMATS.values():
        magic, version, size, *_ = first = _DESCRIPTION.unpack_from(begin, form.header)
        if magic == _MAGIC:
            break
    else:
        raise OptionError(f"{path!r} is no LMDB file, or was written on a machine without 64 bits")
    if _FORMATS.get(version) is not form:
        known = " and ".join(map(str, _FORMATS))
        raise OptionError(f"{path!r} has version {version} of LMDB's format, not {known}. {_COPY}")
    if not 256 <= size <= 1 << 16 or read_at(descriptor, begin, size) < len(begin):
        raise _damaged(path)
    second = _DESCRIPTION.unpack_from(begin, form.header)
    *_, flags, _, _, flags_of_values, root, _ = max(first, second, key=lambda found: found[-1])
    if flags & _ENCRYPTED:
        raise OptionError(f"{path!r} is encrypted. {_COPY}")
    if flags_of_values & _DUPLICATES:
        raise OptionError(f"{path!r} may have several values for a key (dupsort). {_COPY}")
    return _Tree(form, size, root)


def _values_of(descriptor: int, tree: _Tree, path: str) -> Iterator[tuple[bytes, Place]]:
    (header, base, odd), size, root = tree
    nbytes = os.fstat(descriptor).st_size
    page, pages = bytearray(size), [] if root == _NO_PAGE else [root]
    for _ in range(nbytes // size + 1):  # a damaged tree may lead in a circle
        if not pages:
            return
        number = pages.pop()
        if number > nbytes // size or read_at(descriptor, page, number * size) < size:
            raise _damaged(path)
        kind, end = _PAGE.unpack_from(page, header - _PAGE.size)
        nodes = struct.unpack_from(f"<{max(0, end + base - header) // 2}H", page, header)
        if kind & _BRANCH:
            for node in reversed(nodes):
                low, high, top, _ = _NODE.unpack_from(page, base + node)
                pages.append(low | high << 16 | top << 32)
            continue
        for node in nodes:
            low, high, flags, length = _NODE.unpack_from(page, base + node)
            begin = base + node + _NODE.size
            key = bytes(page[begin : begin + length])
            at, nbytes_of_value = begin + length + (length & odd), low | high << 16
            if flags & ~_LARGE:
                raise OptionError(f"{path!r} has a database named {_text(key)!r} in it. {_COPY}")
            if flags:
                (first,) = _NUMBER.unpack_from(page, at)
                at, room = header, nbytes - first * size
            else:
                first, room = number, size
            if not kind & _LEAF or at + nbytes_of_value > room:
                raise _damaged(path)
            yield key, Place(first * size + at, nbytes_of_value)
    raise _damaged(path)


def _damaged(path: str) -> OptionError:
    return OptionError(f"{path!r} is cut off or damaged, or was written to while it was read: copy it again")
