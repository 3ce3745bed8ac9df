"""What a job is, and whether what is there already is of the same."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastpipe.core.extras import require
from fastpipe.core.files import require_regular
from fastpipe.errors import GenerationError, OptionError
from fastpipe.generation.code_version import changed, code_name, code_version
from fastpipe.generation.form import Form
from fastpipe.generation.journal import JOURNAL
from fastpipe.generation.making import Policy
from fastpipe.generation.storing import Stored
from fastpipe.generation.work import FUNCTION
from fastpipe.hdf5.growing import LOCK, GrowingFolder, has_empty_lock

__all__ = [
    "Finished",
    "Folder",
    "Job",
    "differences",
    "job_named",
    "paths_of",
    "shard_path",
]

_FORMAT = 1
_ATTRIBUTE = "fastpipe_generation"
_SHARD_DIGITS = 5
_OWN_SUFFIXES = (".data", ".spool", ".part", ".h5", ".unfinished")


@dataclass(frozen=True)
class Job:
    """What is made.

    Attributes:
        function, code, parts: the function's name, and its version as of `code_version`.
        seed, rows, form: as given, and learned.
        columns, chunk_rows, max_bytes, policy, seeds_globals: as given.
        shard_rows: rows of a file, at most; None of all in one.
        batch_rows: rows of a call of ``batch``; 0 without.
        versions: of what had a hand in it.
        extends: rows that come from files which are there already.
    """

    function: str
    code: str
    parts: Mapping[str, str]
    seed: int
    rows: int
    form: Form
    columns: str
    chunk_rows: int | None
    max_bytes: int | None
    policy: Policy
    seeds_globals: bool
    shard_rows: int | None
    batch_rows: int
    versions: Mapping[str, str]
    extends: int = 0

    def as_json(self) -> dict[str, Any]:
        """For the journal."""
        return {"format": _FORMAT, **self.__dict__, "parts": dict(self.parts), "form": self.form.as_json(),
                "versions": dict(self.versions)}  # fmt: skip

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Job:
        """As `as_json` gives it.

        Raises:
            GenerationError: it is of another version of fastpipe.
        """
        if content.get("format") != _FORMAT:
            raise GenerationError("it was made by another version of fastpipe")
        values = {name: value for name, value in content.items() if name != "format"}
        return cls(**{"parts": {}, "extends": 0, **values, "form": Form.from_json(values["form"])})

    def attributes(self, rows: range, skipped: Sequence[int], nan_rows: int) -> dict[str, Any]:
        """Of a finished file: what it is of, for people and for whoever extends it.

        Args:
            rows: the first, and the one behind the last.
            skipped: those of them that it has not.
            nan_rows: how many of the job's rows have a NaN.
        """
        content = self.as_json()
        # Neither what the function is made of, which may be long, nor how it came about.
        for name in ("parts", "extends"):
            del content[name]
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


def job_named(function: Callable[..., Any]) -> tuple[str, str, dict[str, str]]:
    """A function's name, its version, and what that is made of."""
    version = code_version(function)
    return code_name(function), version.digest, dict(version.parts)


def versions() -> dict[str, str]:
    """Of what had a hand in the rows, and in the file."""
    h5py = require("h5py", extra="generation")
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "h5py": h5py.__version__,
        "hdf5": h5py.version.hdf5_version,
    }


def differences(one: Job, wanted: Job) -> list[str]:
    """In what a job that is there differs from one that is asked for, but for the number of rows."""
    found = []
    if one.code != wanted.code:
        what = changed(one.parts, wanted.parts) if one.parts else []
        found.append(
            f"the function has changed ({'; '.join(what[:4])})" if what else "the function is another"
        )
    for name, words in (
        ("seed", "seed"), ("seeds_globals", "seed_globals"), ("columns", "columns"),
        ("chunk_rows", "chunk_rows"), ("max_bytes", "max_bytes"), ("policy", "bad_samples"),
    ):  # fmt: skip
        old, new = getattr(one, name), getattr(wanted, name)
        if old != new:
            found.append(f"{words} was {old!r} and is {new!r}")
    return found


def shard_path(out: Path, number: int, count: int) -> Path:
    """A file's name: ``out`` of a single one, else with a number."""
    return out if count == 1 else out.with_name(f"{out.stem}-{number:0{_SHARD_DIGITS}d}{out.suffix}")


def paths_of(out: Path) -> tuple[Path, ...]:
    """The files that are there under a name, or under that with numbers."""
    if os.path.lexists(out):
        return (out,)
    found: list[Path] = []
    while os.path.lexists(path := shard_path(out, len(found), 2)):
        found.append(path)
    return tuple(found)


@dataclass(frozen=True)
class Finished:
    """Finished files.

    Attributes:
        paths: they, in the order of their rows.
        job: what they are of.
        skipped: rows that are in none of them.
        nan_rows: how many rows have a NaN.
    """

    paths: tuple[Path, ...]
    job: Job
    skipped: tuple[int, ...]
    nan_rows: int

    @classmethod
    def at(cls, out: Path) -> Finished | None:
        """The files of a name; None if there are none.

        Raises:
            OptionError: there is something else.
            GenerationError: they are of another version of fastpipe.
            OSError: they cannot be read.
        """
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
        require_regular(path, os.stat(path))  # the library would wait for who writes to a fifo
        with h5py.File(path, "r") as file:
            found = {name: file.attrs[name] for name in (_ATTRIBUTE, "first_row", "last_row", "nan_rows")}
            skipped = file.attrs.get("skipped", np.zeros(0, np.int64)).tolist()
    except (OSError, KeyError) as error:
        # HDF5's own have no number, and what is no file has this one.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise OptionError(
            f"{path} exists, and fastpipe.generate has not made it; name another file, or remove it"
        ) from None
    rows = {name: int(found[name]) for name in ("first_row", "last_row", "nan_rows")}
    return {_ATTRIBUTE: str(found[_ATTRIBUTE]), **rows, "skipped": skipped}


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
        """Remove what was written and not noted: where the disk was full, it is still.

        Args:
            blocks: noted ones.
        """
        ends: dict[str, int] = {}
        for spooled in (spooled for one in blocks for spooled in one.spooled):
            ends[spooled.file] = max(ends.get(spooled.file, 0), spooled.begin + spooled.nbytes)
        for name in os.listdir(self.folder):
            if name.endswith((".part", ".unfinished")) or (name.endswith(".spool") and name not in ends):
                # A task of an earlier call may still write on another machine, and rename or remove its file.
                with contextlib.suppress(FileNotFoundError):
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
        return [
            name
            for name in os.listdir(self.folder)
            if name in (JOURNAL, LOCK, FUNCTION) or name.endswith(_OWN_SUFFIXES)
        ]
