"""Change bytes of small HDF5 files at random and compare fastpipe with h5py, each file in a process of its own.

Usage: ``python mutation_script.py FOLDER SEED COUNT``.  Prints a JSON list of what is wrong; the files stay in FOLDER.

Right is: a row that h5py reads is equal, or is what the file held before (the library's search misses chunks that
its list has, if inner nodes of a B-tree are damaged); any other row, and a file that cannot be
read, is an error of fastpipe's that is an OSError (or a KeyError, for a name that is not there any more) and names
the file; and nothing ends the process or hangs where h5py does not.  fastpipe refuses chunks of which filters make
more or fewer bytes than they should, which h5py does not see.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import pickle
import random
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np

from fastpipe import FastHDF5Dataset, FastPatchDataset
from fastpipe.cli import main
from fastpipe.errors import FastpipeError
from fastpipe.hdf5 import inspect as inspect_report  # noqa: F401 - before the processes are forked
from fastpipe.sampling import Grid

_STRICT = ("expected", "end too early", "more than the", "header is cut off", "impossible size")
_LIMIT_S = 60
_NUMBERS = (3, 1 << 20, 1 << 31, (1 << 31) - 1, 1 << 40, 1 << 62, (1 << 63) - 1, (1 << 64) - 2)

DATA = np.random.default_rng(0).integers(0, 50, (7, 9)).astype("<i4")


def _plain(file: Any) -> None:
    file["x"] = DATA
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.COMPACT)
    space = h5py.h5s.create_simple(DATA.shape)
    h5py.Dataset(h5py.h5d.create(file.id, b"y", h5py.h5t.STD_I32BE, space, properties))[...] = DATA


def _chunked(file: Any) -> None:
    file.create_dataset(
        "x", data=DATA, chunks=(3, 4), compression="gzip", shuffle=True, fletcher32=True, maxshape=(None, 9)
    )
    file.create_dataset("y", data=DATA, chunks=(2, 9), compression="lzf")
    file.create_dataset("z", data=DATA, chunks=(3, 9), **hdf5plugin.Blosc())


def _others(file: Any) -> None:
    file.create_dataset("x", data=DATA, chunks=(3, 9), scaleoffset=0)
    file["y"] = [f"text {number}" for number in range(7)]
    file["z"] = np.array([(number, number / 2) for number in range(7)], [("a", "<i4"), ("b", ">f8")])
    lists = file.create_dataset("lists", (7,), h5py.vlen_dtype("i4"))
    for number in range(7):
        lists[number] = np.arange(number)


def _groups(file: Any) -> None:
    for number in range(12):
        group = file.create_group(f"group {number}", track_order=bool(number % 2))
        group.attrs["text"] = "attribute " * 3
        group["x"] = DATA + number
    file["x"], file["y"] = h5py.SoftLink("/group 3/x"), file["group 4/x"]


def _many(file: Any) -> None:
    file.create_dataset(
        "x", data=np.arange(300, dtype="i4").reshape(30, 10), chunks=(1, 2), compression="gzip"
    )
    file.create_dataset("y", data=np.arange(60, dtype="i2").reshape(30, 2), chunks=(1, 1), maxshape=(None, 2))


def _virtual(file: Any) -> None:
    file.create_dataset("y", data=DATA, chunks=(3, 9), compression="gzip")
    layout = h5py.VirtualLayout((7, 9), "i4")
    layout[:4] = h5py.VirtualSource(".", "y", (7, 9))[:4]
    file.create_virtual_dataset("x", layout, fillvalue=3)


KINDS: dict[str, Callable[[Any], None]] = {
    "plain": _plain, "chunked": _chunked, "others": _others, "groups": _groups, "many": _many, "virtual": _virtual,
}  # fmt: skip
NAMES = ["x", "y", "z", "lists", "group 5/x"]


def changed(content: bytes, draw: random.Random) -> bytes:
    """A file with some other bytes, more, or fewer."""
    made, at = bytearray(content), draw.randrange(len(content))
    how = draw.choice(["bit", "byte", "zeros", "ones", "number", "more", "fewer", "cut"])
    if how == "bit":
        made[at] ^= 1 << draw.randrange(8)
    elif how == "byte":
        made[at] = draw.randrange(256)
    elif how in ("zeros", "ones"):
        made[at : at + draw.randrange(1, 9)] = (b"\0" if how == "zeros" else b"\xff") * draw.randrange(1, 9)
        made = made[: len(content)].ljust(len(content), b"\0")
    elif how == "number":
        made[at : at + 8] = draw.choice(_NUMBERS).to_bytes(8, "little")[: len(made[at : at + 8])]
    elif how == "more":
        made[at:at] = draw.randbytes(draw.randrange(1, 5))
    else:
        del made[at : at + draw.randrange(1, 5) if how == "fewer" else None]
    return bytes(made)


def plain(value: Any) -> Any:
    """A value of which equal ones are equal, bit by bit."""
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return tuple(plain(each) for each in value.ravel().tolist())
    if isinstance(value, np.void) and value.dtype.names:
        return tuple(plain(value[name]) for name in value.dtype.names)
    if isinstance(value, (np.ndarray, np.generic)):
        return str(value.dtype), value.shape, value.tobytes()
    return repr(value)


def rows_of_h5py(path: str, name: str) -> list[Any] | str:
    """The rows, None in the place of those that are errors; or why there are none."""
    try:
        with h5py.File(path) as file:
            dataset, found = file[name], list[Any]()
            if not isinstance(dataset, h5py.Dataset) or not dataset.shape:
                return "no rows"
            for number in range(min(dataset.shape[0], 40)):
                try:
                    found.append(plain(dataset[number]))
                except Exception:
                    found.append(None)
            return found
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class Comparison:
    """What is wrong with one file."""

    def __init__(self, path: str, good: dict[str, list[Any] | str]) -> None:
        self._path, self._good = path, good
        self.wrong: list[str] = []

    def check_error(self, what: str, error: Exception) -> None:
        is_named = Path(self._path).name in str(error)
        is_fit = isinstance(error, FastpipeError) or type(error) is KeyError
        if not is_fit or not is_named:
            self.wrong.append(f"{what}: {type(error).__name__}: {error}")

    def rows(self, name: str) -> None:
        theirs, good = rows_of_h5py(self._path, name), self._good[name]
        are_read = isinstance(theirs, list) and any(row is not None for row in theirs)
        try:
            dataset = FastHDF5Dataset(self._path, name, cache="off", threads=1)
        except Exception as error:
            self.check_error(name, error)
            if are_read:
                self.wrong.append(f"{name}: refused, though h5py reads rows: {error}")
            return
        for number, row in enumerate(theirs if isinstance(theirs, list) else []):
            before = good[number] if isinstance(good, list) and number < len(good) else None
            try:
                ours = plain(dataset[number])
            except Exception as error:
                self.check_error(f"{name}[{number}]", error)
                is_missed = row != before and "many earliest" in self._path  # by the library's search
                if row is not None and not is_missed and not any(why in str(error) for why in _STRICT):
                    self.wrong.append(f"{name}[{number}]: h5py reads it: {error}")
                continue
            if ours not in (row, before):
                self.wrong.append(f"{name}[{number}]: {ours} instead of {row}")

    def patches(self, name: str) -> None:
        try:
            patches = FastPatchDataset(
                f"{self._path}/{name}", DATA.shape, sampling=Grid(), cache="off", threads=1
            )
            patches[0]
        except Exception as error:
            self.check_error(f"patch of {name}", error)

    def command(self, *arguments: str) -> None:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                code = main([*arguments])
            except Exception as error:
                self.wrong.append(f"{arguments[0]}: {type(error).__name__}: {error}")
                return
        if code == 2 and Path(self._path).name not in out.getvalue():
            self.wrong.append(f"{arguments[0]}: {out.getvalue()}")


def compared(path: str, good: dict[str, list[Any] | str], *, with_repack: bool) -> list[str]:
    """Compare in a process of its own, whose end is nothing wrong if h5py alone ends it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(writing, "wb") as pipe, contextlib.suppress(BaseException):
            os.close(reading)
            signal.alarm(_LIMIT_S)
            comparison = Comparison(path, good)
            for name in good:
                rows_of_h5py(path, name)
            for look in (list, lambda file: file.visititems(lambda *_: None)):
                with contextlib.suppress(Exception), h5py.File(path) as file:
                    look(file)
            for step in ("rows", "patches"):
                for name in good:
                    pickle.dump(f"{step} of {name}", pipe)
                    pipe.flush()
                    getattr(comparison, step)(name)
            commands = [["inspect", path], ["scan", path]]
            commands += [["repack", path, f"{path}.copy", "--codec", "lzf"]] if with_repack else []
            for arguments in commands:
                pickle.dump(arguments[0], pipe)
                pipe.flush()
                comparison.command(*arguments)
            pickle.dump(comparison.wrong, pipe)
        os._exit(0)
    os.close(writing)
    last: Any = []
    with os.fdopen(reading, "rb") as pipe, contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            last = pickle.load(pipe)
    _, status = os.waitpid(child, 0)
    return last if isinstance(last, list) else [f"{last}: the process ended with {status}"]


def in_child(function: Callable[[], Any]) -> Any:
    """What a function returns in a child: the library of this process opens no file."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(function(), pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        found = pickle.load(pipe)
    os.wait()
    return found


def run(folder: Path, seed: int, count: int) -> list[str]:
    """What is wrong with so many files."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    draw, wrong = random.Random(seed), list[str]()
    made: list[tuple[str, bytes, dict[str, list[Any] | str]]] = []

    def make(path: Path, kind: str, libver: str) -> dict[str, list[Any] | str]:
        with h5py.File(path, "w", libver=libver) as file:
            KINDS[kind](file)
        return {name: rows for name in NAMES if isinstance(rows := rows_of_h5py(str(path), name), list)}

    for kind in KINDS:
        for libver in ("earliest", "latest"):
            path = folder / f"{kind} {libver}.h5"
            good = in_child(lambda path=path, kind=kind, libver=libver: make(path, kind, libver))
            made.append((path.stem, path.read_bytes(), good))
    for number in range(count):
        name, content, good = draw.choice(made)
        path = folder / f"{name}, changed {seed}-{number}.h5"
        path.write_bytes(changed(content, draw))
        found = compared(str(path), good, with_repack=number % 4 == 0)
        wrong += [f"{path.name}: {each}" for each in found]
        if not found:
            path.unlink()
    return wrong


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
