"""Stages with small objects; no credentials but those of a test."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastpipe.core.locks import open_file_locks_are_possible
from fastpipe.options import Stage
from fastpipe.stores.stage import StageFolder
from fastpipe.stores.table import StageTable


class Uses:
    """When rows are needed next."""

    def __init__(self, at: Any, tag: bytes = b"t" * 16) -> None:
        self.at, self.tag = at, tag

    def next_uses(self, rows: Any) -> Any:
        return self.at[rows]


class Users:
    """Users of a stage in a folder: their tables have rows of 100 bytes, and room for ten."""

    SIZE, ROWS = 100, 60

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "fastpipe-stage"
        self.tables: list[StageTable] = []

    @staticmethod
    def name_of(row: int) -> bytes:
        return hashlib.md5(b"%d" % row).digest()

    @staticmethod
    def name_elsewhere(row: int) -> bytes:
        return hashlib.md5(b"elsewhere %d" % row).digest()

    def content(self, row: int) -> bytes:
        return (b"%d," % row * self.SIZE)[: self.SIZE]

    def open(
        self, limit: int = 1000, digest: bytes = b"d" * 16, name_of: Callable[[int], bytes] = name_of, rows: int = ROWS
    ) -> StageTable:  # fmt: skip
        sizes = np.full(rows, self.SIZE, np.int64)
        folder = StageFolder(Stage(self.folder, max_bytes=limit))
        self.tables.append(folder.open_table(digest, sizes, name_of))
        return self.tables[-1]

    def open_other(self) -> StageTable:
        """A table of another listing of the same objects."""
        return self.open(digest=b"e" * 16)

    def leave_old(self, name_of: Callable[[int], bytes] = name_elsewhere) -> None:
        """Fill the stage with ten objects of a listing that is used no more."""
        table = self.open(digest=b"o" * 16, name_of=name_of)
        self.keep(table, *range(10))
        table.close()

    def open_full(self) -> StageTable:
        table = self.open()
        self.keep(table, *range(10))
        return table

    def keep(self, table: StageTable, *rows: int) -> list[int]:
        """Store rows; those that there is room for."""
        return [row for row in rows if table.keep(row, self.content(row))]

    def kept(self, table: StageTable) -> list[int]:
        """The rows that are there, and what they should be."""
        found = {row: table.read(row) for row in range(self.ROWS)}
        assert all(data in (None, self.content(row)) for row, data in found.items())
        return [row for row, data in found.items() if data is not None]

    def follow(self, table: StageTable, at: Sequence[int], tag: bytes = b"t" * 16) -> None:
        """Say when the first rows are needed; the others are needed at once."""
        table.follow(Uses(np.r_[np.array(at, np.int64), np.zeros(self.ROWS - len(at), np.int64)], tag))

    def files(self) -> list[Path]:
        return [path for path in (self.path / "objects").glob("*/*") if path.is_file()]

    def unfinished(self) -> list[Path]:
        return list((self.path / "writing").iterdir())

    def nbytes(self) -> int:
        return StageFolder(Stage(self.folder)).usage().nbytes

    def close(self) -> None:
        while self.tables:  # their memory, and its descriptors, go with the last reference
            self.tables.pop().close()


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No credentials for Amazon but those that a test gives or writes to ``config`` or ``credentials``."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def users(tmp_path: Path) -> Iterator[Any]:
    if not open_file_locks_are_possible():
        pytest.skip("run it on 64-bit Linux, which has OFD locks")
    found = Users(tmp_path)
    yield found
    found.close()
