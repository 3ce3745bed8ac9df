"""Find the classes and the samples of a dataset in a store of objects.

The results, their order and the errors are those of torchvision's ``ImageFolder`` for a local copy of the
objects.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from fastpipe.core.class_folders import Classes, IndexCache, check_scan, choose_classes, empty_message
from fastpipe.core.sample_tables import FrozenSamples, SampleTable, SampleTableBuilder
from fastpipe.core.types import Store
from fastpipe.errors import OptionError
from fastpipe.stores.listing import (
    KeptFolders,
    KeptRows,
    Lister,
    Listing,
    ListingCache,
    ListingKey,
    Rows,
    age_in_words,
    joined_texts,
)

_log = logging.getLogger("fastpipe.index")

_NO_FOLDERS = ("", ".", "..")  # may occur between the slashes of a key, but are not names of folders


def find_remote_classes(
    store: Store,
    root: str,
    prefix: str,
    classes: Classes | None = None,
    *,
    cache: IndexCache | None = None,
    refresh: bool = False,
) -> tuple[list[str], dict[str, int]]:
    """Find the class folders of a dataset in a store, as ``find_classes`` does for a folder.

    All paths in messages begin with ``root`` (such as ``"s3://bucket/train/"``).  All keys begin with
    ``prefix``, which is empty or ends in a slash.  The names of the folders are cached in the folder of
    ``cache``.  ``refresh`` lists the folders again.
    """
    listings = None if cache is None else ListingCache(cache.path, now=cache.now)
    kept = None if listings is None or refresh else listings.load_folders(store.name, prefix)
    if kept is not None and listings is not None:
        _log.info(
            "The class folders of %s are those that were listed %s ago (%d); refresh=True lists them anew",
            root, age_in_words(listings.now() - kept.listed), len(kept.names),
        )  # fmt: skip
        with contextlib.suppress(OptionError):  # a missing class may have been added: list again
            return choose_classes(root, kept.names, classes)
    began = time.time_ns() if listings is None else listings.now()
    names = [name for name in store.folders(prefix) if name not in _NO_FOLDERS]
    # With ``refresh``, an empty list also replaces the names in the cache.
    if listings is not None and (names or refresh):
        listings.save_folders(store.name, prefix, KeptFolders(began, names))
    return choose_classes(root, names, classes)


def scan_store(
    store: Store,
    root: str,
    prefix: str,
    class_to_idx: Mapping[str, int],
    *,
    extensions: str | Sequence[str] | None = None,
    is_valid_file: Callable[[str], bool] | None = None,
    allow_empty: bool = False,
    cache: IndexCache | None = None,
    refresh: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[SampleTable, Listing]:
    """Find all samples in the class folders.  Return a table of ``(path, class index)``, and the listing.

    ``root`` and ``prefix`` are those of ``find_remote_classes``.  ``refresh`` lists cached folders again.
    All other arguments, the order and the errors are those of ``core.class_folders.scan_folder``.
    """
    check_scan(class_to_idx, extensions, is_valid_file)
    names = sorted(class_to_idx)
    tops = [name if not name or name.endswith("/") else f"{name}/" for name in names]
    if is_valid_file is not None:
        listed = Lister(store, root, prefix, ("",), on_progress).listed(tops)
        found = [_valid(root, rows, is_valid_file) for rows in listed]
    else:
        assert extensions is not None
        endings = (extensions,) if isinstance(extensions, str) else tuple(extensions)
        lister = Lister(store, root, prefix, endings, on_progress)
        found = _by_extension(lister, tops, ListingKey(store.name, prefix, endings), cache, refresh)
    empty = [name for name, rows in zip(names, found, strict=True) if not len(rows)]
    if empty and not allow_empty:
        raise FileNotFoundError(empty_message(empty, extensions))
    return _table(root, prefix, found, [class_to_idx[name] for name in names])


def _by_extension(
    lister: Lister, tops: Sequence[str], key: ListingKey, kept: IndexCache | None, refresh: bool
) -> list[Rows]:
    """Return the content of each class folder, from the cache if possible, otherwise from the store."""
    # An extension with a slash is compared with the path, which the cache's key does not contain.
    if kept is None or any("/" in ending for ending in key.endings):
        return lister.listed(tops)
    cache = ListingCache(kept.path, now=kept.now)
    known = cache.load(key)
    usable = {} if refresh else {top: known[top] for top in tops if top in known}
    if usable:
        _log.info(
            "The objects of %s are those that were listed %s ago (%d in %d of %d classes); refresh=True "
            "lists them anew", lister.root,
            age_in_words(cache.now() - min(kept.listed for kept in usable.values())),
            sum(len(kept.rows) for kept in usable.values()), len(usable), len(set(tops)),
        )  # fmt: skip
    missing = [top for top in dict.fromkeys(tops) if top not in usable]
    if not missing:
        return [usable[top].rows for top in tops]
    began = cache.now()
    listed = dict(zip(missing, (KeptRows(began, rows) for rows in lister.listed(missing)), strict=True))
    lasting = {top: kept for top, kept in known.items() if top not in listed}
    lasting |= {top: kept for top, kept in listed.items() if len(kept.rows)}
    if lasting.keys() != known.keys() or any(len(kept.rows) for kept in listed.values()):
        cache.save(key, lasting)
    return [(usable.get(top) or listed[top]).rows for top in tops]


def _valid(root: str, rows: Rows, is_valid_file: Callable[[str], bool]) -> Rows:
    return rows.taken([number for number, path in enumerate(rows.each_path()) if is_valid_file(root + path)])


def _table(
    root: str, prefix: str, found: Sequence[Rows], targets: Sequence[int]
) -> tuple[SampleTable, Listing]:
    """Return the content of the classes, in order, as a table and a listing.  They share the paths."""
    table = _table_of(root, found, targets)
    paths = table._data
    if not isinstance(paths, FrozenSamples):  # class indices that are not plain integers
        paths = _table_of(root, found, [0] * len(found))._data
        assert isinstance(paths, FrozenSamples)
    sizes = np.concatenate([rows.sizes for rows in found])
    return table, Listing(paths, prefix, sizes, joined_texts([rows.versions for rows in found]))


def _table_of(root: str, found: Iterable[Rows], targets: Iterable[int]) -> SampleTable:
    builder = SampleTableBuilder(root)
    for rows, target in zip(found, targets, strict=True):
        builder.add_packed(rows.paths, target)
    return builder.build()
