"""Read arrays with tensorstore: Zarr with any codecs, N5, and arrays in object stores."""

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

_PATIENCE_S = 5.0  # seconds after which a waiting read checks for FIFOs, whose reads never return
# The classes of tensorstore's errors.
FAILED = (ValueError, LookupError, NotImplementedError, OSError, RuntimeError, TypeError)
_LEAST_NBYTES = 1 << 18  # the least bytes of a unit; a unit of small chunks has several chunks
# The first words of tensorstore's messages about damaged bytes.
_DAMAGED = ("DATA_LOSS", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "OUT_OF_RANGE")
_UNKNOWN = ("not supported", "Unexpected N5 chunk mode")  # in messages about bytes that may be intact
SPEC = " [tensorstore_spec="  # where tensorstore's messages begin to repeat the request
# The formats that tensorstore reads like the format's own library.  tensorstore detects the format of a URL.
_DRIVERS = ("zarr", "zarr3", "n5", "neuroglancer_precomputed")


class TensorStoreVolume(Volume):
    """An array that tensorstore opens.

    ``why`` says why fastpipe cannot read the array itself.  ``why`` is empty for formats that only
    tensorstore reads.
    """

    def __init__(self, name: str, spec: dict[str, Any], why: str = "") -> None:
        # A URL may contain a password or a signature, which must not get into messages.
        parts = urlsplit(name if is_url(name) else "")
        user = parts.netloc.rpartition("@")[0]
        self._secrets = [part for part in (user and f"{user}@", parts.query and f"?{parts.query}") if part]
        self.name, self._spec, self._why = self.without_secrets(name), spec, why
        store = self.store()
        try:
            driver = store.spec().to_json()["driver"]
        except NotImplementedError:  # a format that wraps the array, such as ZIP
            driver = "in a container that is read from this machine only"
        if driver not in _DRIVERS:
            raise VolumeError(
                f"{self.name} is {driver}: a URL must be that of an array in Zarr, N5 or precomputed"
            )
        self.shape = tuple(store.shape)
        self.dtype = np.dtype(store.dtype.numpy_dtype)
        # The fill value is None if the format has no fill value, or if the array does not set it.
        fill = store.fill_value if self.dtype.kind in "biufc" else None
        self._fill = b"" if fill is None else np.array(fill, self.dtype).tobytes()
        sides = store.chunk_layout.read_chunk.shape or [0] * len(self.shape)
        chunk = [side or min(max(1, size), 64) for side, size in zip(sides, self.shape, strict=True)]
        self._chunk = tuple(chunk)
        nbytes = math.prod(chunk) * self.dtype.itemsize
        if nbytes > LARGEST_UNIT:  # tensorstore aborts the process if it cannot allocate a chunk
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
        """Return 0 for all units, so that one call reads many units in parallel, as a read may take long."""
        return np.zeros_like(numbers)

    def state(self) -> tuple[str, str]:
        store = self._spec["kvstore"]
        if not isinstance(store, dict):  # a URL, whose state is unknown
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
                # A network failure or a missing permission does not mean that the sample is damaged.
                is_damaged = said.startswith(_DAMAGED) and not any(what in said for what in _UNKNOWN)
                kind = DamagedUnitError if is_damaged else VolumeError
                raise kind(f"{self._volume.name}, the part at {box_text(box)}: {said}") from None
            self._volume.put(part, out)


_used_in: list[int] = []  # the ID of the process in which tensorstore has threads


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
    """Open or create an array in a folder or at a URL with tensorstore.

    ``how`` has further arguments for ``tensorstore.open``.  The ``kvstore`` in ``spec`` may be a URL as users
    write it: "%" and "#" in a key are literal.  The ``kvstore`` may also have the path of any folder.
    """
    tensorstore = require("tensorstore", extra="volume")
    # fastpipe keeps decoded units in its own memory.
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})
    kvstore, folder = spec["kvstore"], None
    if isinstance(kvstore, str):
        scheme, _, rest = kvstore.partition("://")
        if scheme.lower() not in ("http", "https"):
            kvstore = f"{scheme}://{quote(rest, safe='/:@')}"
    elif "\\" in kvstore["path"] or any("\udc80" <= one <= "\udcff" for one in kvstore["path"]):
        # tensorstore replaces a backslash by a slash, and rejects bytes that are not UTF-8.
        folder = os.open(kvstore["path"], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        kvstore = {**kvstore, "path": f"/proc/self/fd/{folder}/"}
    try:
        store = _result(
            tensorstore.open({**spec, "kvstore": kvstore}, context=context, **how), _folder_of(spec)
        )
        # Some formats have arrays whose origin is not 0, but the origin of a volume is 0.
        store = store[tensorstore.d[:].translate_to[0]]
    except BaseException:
        if folder is not None:
            os.close(folder)
        raise
    if folder is not None:
        weakref.finalize(store, os.close, folder).atexit = False
    return store


def _folder_of(spec: dict[str, Any]) -> str:
    """Return the local folder of an array; the result is empty if the array is remote."""
    store = spec["kvstore"]
    return str(store["path"]) if isinstance(store, dict) else ""


def _result(future: Any, folder: str) -> Any:
    """Wait for tensorstore's result; raise an error if a file in ``folder`` is a FIFO.

    tensorstore would wait forever for a process that writes to the FIFO.
    """
    if folder:
        with contextlib.suppress(TimeoutError):
            return future.result(timeout=_PATIENCE_S)
        files = (os.path.join(place, name) for place, _, names in os.walk(folder) for name in names)
        fifos = [path for path in files if Path(path).is_fifo()]
        for path in fifos:  # opening the fifo releases tensorstore's thread
            with contextlib.suppress(OSError):
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        if fifos:
            raise VolumeError(f"{fifos[0]} is a fifo, not a file: remove it")
    return future.result()


class _StoreError(Exception):
    """An error with tensorstore's message about an array that cannot be opened; the URL may be in it."""
