"""Arrays that tensorstore reads: Zarr with any codecs, N5, and whatever lies in an object store."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np

from fastpipe.core.extras import require
from fastpipe.core.files import is_url
from fastpipe.core.text import in_bytes
from fastpipe.errors import VolumeError
from fastpipe.volumes.volume import (
    LARGEST_UNIT,
    DamagedUnitError,
    Int64Array,
    UInt8Array,
    UnitGrid,
    UnitReader,
    Volume,
    box_text,
    chunk_text,
    folder_state,
    grown_unit,
)

_PATIENCE_S = 5.0  # after which it is looked whether there is what no read comes back from
# What tensorstore raises for the states that its messages begin with.
FAILED = (ValueError, LookupError, NotImplementedError, OSError, RuntimeError, TypeError)
_LEAST_NBYTES = 1 << 18  # of a unit: smaller chunks are read some at a time
# tensorstore's names for what is wrong with stored bytes, with which its messages begin.
_DAMAGED = ("DATA_LOSS", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "OUT_OF_RANGE")
_UNKNOWN = ("not supported", "Unexpected N5 chunk mode")  # in messages of bytes that may well be whole
SPEC = " [tensorstore_spec="  # with which a message begins to repeat what was asked for
# Formats that are read as their own libraries have them; of a URL tensorstore itself finds out which it is.
_DRIVERS = ("zarr", "zarr3", "n5", "neuroglancer_precomputed")


class TensorStoreVolume(Volume):
    """An array that tensorstore opens; ``why`` it is not read here, in words, empty if it never is."""

    def __init__(self, name: str, spec: dict[str, Any], why: str = "") -> None:
        # An address may hold a password or a signature: these are in the spec only.
        parts = urlsplit(name if is_url(name) else "")
        user = parts.netloc.rpartition("@")[0]
        self._secrets = [part for part in (user and f"{user}@", parts.query and f"?{parts.query}") if part]
        self.name, self._spec, self._why = self.without_secrets(name), spec, why
        store = self.store()
        try:
            driver = store.spec().to_json()["driver"]
        except NotImplementedError:  # of a format around the array's, such as ZIP
            driver = "in a container that is read from this machine only"
        if driver not in _DRIVERS:
            raise VolumeError(
                f"{self.name} is {driver}: a URL must be that of an array in Zarr, N5 or precomputed"
            )
        self.shape = tuple(store.shape)
        self.dtype = np.dtype(store.dtype.numpy_dtype)
        # None of formats that have none, and where they need not say.
        fill = store.fill_value if self.dtype.kind in "biufc" else None
        self._fill = b"" if fill is None else np.array(fill, self.dtype).tobytes()
        sides = store.chunk_layout.read_chunk.shape or [0] * len(self.shape)
        chunk = [side or min(max(1, size), 64) for side, size in zip(sides, self.shape, strict=True)]
        self._chunk = tuple(chunk)
        nbytes = math.prod(chunk) * self.dtype.itemsize
        if nbytes > LARGEST_UNIT:  # tensorstore ends the process where it has no memory for one
            raise VolumeError(f"{self.name} has chunks of {in_bytes(nbytes)}, more than tensorstore decodes")
        self.grid = UnitGrid(self.shape, grown_unit(chunk, self.shape, self.dtype.itemsize, _LEAST_NBYTES))
        self.how = f"{driver} by tensorstore, chunks of {chunk_text(chunk, self.dtype)}"
        self.how += f", as {why}" if why else ""

    @property
    def finer(self) -> TensorStoreVolume | None:
        if self.grid.unit == self._chunk:
            return None
        made = copy.copy(self)
        made.grid = UnitGrid(self.shape, self._chunk)
        return made

    def store(self) -> Any:
        try:
            return _opened(self.name, self._spec)
        except _StoreError as error:
            said = self.without_secrets(str(error))
        if self._why:
            said += (
                "; fastpipe itself reads numbers that have no filters and are compressed by blosc, zstd, "
                f"gzip or nothing, and {self._why}"
            )
        if not isinstance(self._spec["kvstore"], dict):
            said += "; what only zarr-python reads is read from this machine: copy the array here"
        raise VolumeError(f"{self.name} cannot be opened by tensorstore: {said}")

    def without_secrets(self, text: str) -> str:
        text = text.partition(SPEC)[0]
        for secret in self._secrets:
            text = text.replace(secret, "")
        return text

    def open(self) -> UnitReader:
        return _Reader(self)

    def stored_in(self, numbers: Int64Array) -> Int64Array:
        """All in the same: they are read at the same time, as each may take long to come."""
        return np.zeros_like(numbers)

    def state(self) -> tuple[str, str]:
        store = self._spec["kvstore"]
        if not isinstance(store, dict):  # of what is elsewhere nobody says it
            return "", ""
        return store["path"], f"tensorstore {self._spec} {folder_state(store['path'])}"


class _Reader(UnitReader):
    def __init__(self, volume: TensorStoreVolume) -> None:
        self._volume, self._grid = volume, volume.grid
        self._store = volume.store()

    def read(self, numbers: Int64Array, outs: Sequence[UInt8Array]) -> None:
        boxes = [self._grid.box(number) for number in numbers.tolist()]
        reads = [self._store[box].read(order="C") for box in boxes]
        for box, read, out in zip(boxes, reads, outs, strict=True):
            try:
                part = _result(read, _folder_of(self._volume._spec))
            except FAILED as error:
                said = self._volume.without_secrets(str(error))
                # What cannot be reached, or not be read by this user, is no reason to do without a sample.
                is_damaged = said.startswith(_DAMAGED) and not any(what in said for what in _UNKNOWN)
                kind = DamagedUnitError if is_damaged else VolumeError
                raise kind(f"{self._volume.name}, the part at {box_text(box)}: {said}") from None
            self._volume.put(part, out)


_used_in: list[int] = []  # the process in which tensorstore has threads


def _opened(name: str, spec: dict[str, Any]) -> Any:
    if _used_in and _used_in[0] != os.getpid():
        raise VolumeError(
            f"{name} is read by tensorstore, whose threads do not survive a fork: give the loader "
            "multiprocessing_context='spawn', or num_workers=0, whose threads share what they decode"
        )
    _used_in[:] = [os.getpid()]
    try:
        return opened_by_tensorstore(spec, read=True, open=True)
    except VolumeError:
        raise
    except FAILED as error:
        raise _StoreError(str(error)) from None


def opened_by_tensorstore(spec: dict[str, Any], **how: Any) -> Any:
    """Open or make an array in a folder, or of a URL, by tensorstore; ``how`` is as of ``tensorstore.open``.

    The ``kvstore`` may be a URL as it is written elsewhere, where a "%" or "#" of a key is itself, and may
    have the path of any folder.
    """
    tensorstore = require("tensorstore", extra="volume")
    # What is decoded is remembered by fastpipe.
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})
    kvstore, folder = spec["kvstore"], None
    if isinstance(kvstore, str):
        scheme, _, rest = kvstore.partition("://")
        if scheme.lower() not in ("http", "https"):
            kvstore = f"{scheme}://{quote(rest, safe='/:@')}"
    elif "\\" in kvstore["path"] or any("\udc80" <= one <= "\udcff" for one in kvstore["path"]):
        # tensorstore takes a backslash for a slash, and no bytes that are no UTF-8.
        folder = os.open(kvstore["path"], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        kvstore = {**kvstore, "path": f"/proc/self/fd/{folder}/"}
    try:
        store = _result(
            tensorstore.open({**spec, "kvstore": kvstore}, context=context, **how), _folder_of(spec)
        )
        # Some formats have arrays that begin elsewhere; a volume begins at 0.
        store = store[tensorstore.d[:].translate_to[0]]
    except BaseException:
        if folder is not None:
            os.close(folder)
        raise
    if folder is not None:
        weakref.finalize(store, os.close, folder).atexit = False
    return store


def _folder_of(spec: dict[str, Any]) -> str:
    """The folder on this machine in which an array is; empty for what is elsewhere."""
    store = spec["kvstore"]
    return str(store["path"]) if isinstance(store, dict) else ""


def _result(future: Any, folder: str) -> Any:
    """What tensorstore has found.  It waits for ever for who writes to a fifo, if one has a chunk's name."""
    if folder:
        with contextlib.suppress(TimeoutError):
            return future.result(timeout=_PATIENCE_S)
        files = (os.path.join(place, name) for place, _, names in os.walk(folder) for name in names)
        fifos = [path for path in files if Path(path).is_fifo()]
        for path in fifos:  # whoever opens it lets tensorstore's thread go
            with contextlib.suppress(OSError):
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        if fifos:
            raise VolumeError(f"{fifos[0]} is a fifo, and no file: remove it")
    return future.result()


class _StoreError(Exception):
    """What tensorstore says of an array that it cannot open; its address may be in it."""
