"""What a job is, whether what is there already is of the same, and the folder in which its files grow."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastpipe.core.extras import require
from fastpipe.core.files import require_regular
from fastpipe.core.growing_folder import LOCK, GrowingFolder, has_empty_lock
from fastpipe.errors import GenerationError, OptionError
from fastpipe.generation.code import changed
from fastpipe.generation.columns import Schema
from fastpipe.generation.rows import Policy
from fastpipe.generation.storage import JOURNAL, Stored
from fastpipe.generation.workers import FUNCTION

_FORMAT = 1
_ATTRIBUTE = "fastpipe_generation"
_OWN_SUFFIXES = (".data", ".spool", ".h5", ".unfinished", ".part")  # the last of earlier versions


@dataclass(frozen=True)
class Job:
    """What is made."""

    function: str
    code: str  # digest and parts as of `code_version`
    parts: Mapping[str, str]
    seed: int
    rows: int
    schema: Schema
    columns: str  # as given
    chunk_rows: int | None
    max_bytes: int | None
    policy: Policy
    seeds_globals: bool
    shard_rows: int | None  # of a file, at most; None for all in one
    batch_rows: int  # of a call of ``batch``; 0 without
    versions: Mapping[str, str]  # of what had a hand in it
    extends: int = 0  # rows that come from files which are there already

    def as_json(self) -> dict[str, Any]:
        """For the journal."""
        values = {name: value for name, value in self.__dict__.items() if name != "schema"}
        return {"format": _FORMAT, **values, "parts": dict(self.parts), "form": self.schema.as_json(),
                "versions": dict(self.versions)}  # fmt: skip

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Job:
        """As `as_json` gives it, if this version of fastpipe did."""
        if content.get("format") != _FORMAT:
            raise GenerationError("it was made by another version of fastpipe")
        values = {name: value for name, value in content.items() if name not in ("format", "form")}
        return cls(**{"parts": {}, "extends": 0, **values, "schema": Schema.from_json(content["form"])})

    def attributes(self, rows: range, skipped: Sequence[int], nan_rows: int) -> dict[str, Any]:
        """Return the attributes of a finished file, for people and for extending it."""
        # Neither what the function is made of, which may be long, nor how it came about.
        content = {name: value for name, value in self.as_json().items() if name not in ("parts", "extends")}
        found: dict[str, Any] = {
            "function": self.function,
            "code_version": self.code,
            "seed": str(self.seed),
            "rows": self.rows,
            "first_row": rows.start,
            "last_row": rows.stop,
            "nan_rows": nan_rows,
            "versions": json.dumps(dict(self.versions), sort_keys=True),
            _ATTRIBUTE: json.dumps(content, sort_keys=True),
        }
        if skipped:
            found["skipped"] = np.array(skipped, np.int64)
        return found


def versions() -> dict[str, str]:
    """Return the versions of what has a hand in the rows, and in the file."""
    h5py = require("h5py", extra="generation")
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "h5py": h5py.__version__,
        "hdf5": h5py.version.hdf5_version,
    }


def differences(one: Job, wanted: Job) -> list[str]:
    """Say in what a job that is there differs from the wanted one, but for the number of rows."""
    found = []
    if one.code != wanted.code:
        what = "; ".join(changed(one.parts, wanted.parts)[:4]) if one.parts else ""
        other = "the function is another, or the version of Python or of a package is"
        found.append(f"the function has changed ({what})" if what else other)
    for name, words in (
        ("seed", "seed"), ("seeds_globals", "seed_globals"), ("columns", "columns"),
        ("chunk_rows", "chunk_rows"), ("max_bytes", "max_bytes"), ("policy", "bad_samples"),
    ):  # fmt: skip
        old, new = getattr(one, name), getattr(wanted, name)
        if old != new:
            found.append(f"{words} was {old!r} and is {new!r}")
    return found


def shard_path(out: Path, number: int, count: int) -> Path:
    """Return a file's name: ``out`` of a single one, else with a number."""
    return out if count == 1 else out.with_name(f"{out.stem}-{number:05d}{out.suffix}")


def paths_of(out: Path) -> tuple[Path, ...]:
    """Return the files that are there under a name, or under that with numbers."""
    if os.path.lexists(out):
        return (out,)
    found: list[Path] = []
    while os.path.lexists(path := shard_path(out, len(found), 2)):
        found.append(path)
    return tuple(found)


@dataclass(frozen=True)
class Finished:
    """Finished files, in the order of their rows."""

    paths: tuple[Path, ...]
    job: Job
    skipped: tuple[int, ...]  # rows that are in none of them
    nan_rows: int

    @classmethod
    def at(cls, out: Path) -> Finished | None:
        """Return the files of a name; None if there are none, an OptionError if there is something else."""
        paths = paths_of(out)
        if not paths:
            return None
        heads = [_head(path) for path in paths]
        skipped, at = [], 0
        for path, head in zip(paths, heads, strict=True):
            if head[_ATTRIBUTE] != heads[0][_ATTRIBUTE]:
                raise OptionError(f"{path} is of another job than {paths[0]}: move one of them away")
            skipped += [*range(at, head["first_row"]), *head["skipped"]]
            at = head["last_row"]
        job = Job.from_json(json.loads(heads[0][_ATTRIBUTE]))
        skipped += range(at, job.rows)
        return cls(paths, job, tuple(skipped), heads[0]["nan_rows"])


def _head(path: Path) -> dict[str, Any]:
    """The attributes of a finished file."""
    h5py = require("h5py", extra="generation")
    try:
        require_regular(path, os.stat(path))  # the library would wait for a writer of a fifo
        with h5py.File(path, "r") as file:
            numbers = "first_row", "last_row", "nan_rows"
            found: dict[str, Any] = {name: int(file.attrs[name]) for name in numbers}
            found[_ATTRIBUTE] = str(file.attrs[_ATTRIBUTE])
            found["skipped"] = file.attrs.get("skipped", np.zeros(0, np.int64)).tolist()
    except (OSError, KeyError) as error:
        # HDF5's own have no number, and what is no file has this one.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise OptionError(
            f"{path} exists, and fastpipe.generate has not made it; name another file, or remove it"
        ) from None
    return found


class Folder(GrowingFolder):
    """The folder ``OUT.partial``, locked, in which a job's files grow."""

    def __init__(self, out: Path) -> None:
        super().__init__(out, GenerationError)

    def _check_own(self) -> None:
        there, own = os.listdir(self.folder), self._own()
        is_own = has_empty_lock(self.folder) and (JOURNAL in own or len(own) == len(there))
        if there and not is_own:
            raise OptionError(
                f"{self.folder} is not that of an unfinished job; move it away, or remove it, and try again"
            )

    def clear(self) -> None:
        """Remove what jobs have left, but for the journal, which is begun anew."""
        for name in self._own():
            if name not in (JOURNAL, LOCK):
                os.unlink(self.folder / name)

    def tidy(self, blocks: Sequence[Stored]) -> None:
        """Remove what was written and is not in the journal: where the disk was full, it is still."""
        ends: dict[str, int] = {}
        for spooled in (spooled for one in blocks for spooled in one.spooled):
            ends[spooled.file] = max(ends.get(spooled.file, 0), spooled.begin + spooled.nbytes)
        for name in os.listdir(self.folder):
            if name.endswith((".unfinished", ".part")) or (name.endswith(".spool") and name not in ends):
                os.unlink(self.folder / name)
            elif name in ends:
                os.truncate(self.folder / name, ends[name])

    def remove(self) -> None:
        """Remove the folder, the journal last but for the lock; what others have put into it stays."""
        names = sorted(self._own(), key=lambda name: (name == LOCK, name == JOURNAL))
        for name in names:  # with the lock: nobody may take it in a folder that goes
            (self.folder / name).unlink(missing_ok=True)
        self.close()
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _own(self) -> list[str]:
        """The names of what jobs leave."""
        own = JOURNAL, LOCK, FUNCTION
        return [one for one in os.listdir(self.folder) if one in own or one.endswith(_OWN_SUFFIXES)]
