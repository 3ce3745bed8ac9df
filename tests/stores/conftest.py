"""Stores of every kind, with objects in them."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fastpipe.core.types import Store
from fastpipe.stores.clients import StorageOptions
from fastpipe.stores.filesystems import FilesystemStore
from fastpipe.stores.locations import Location
from fastpipe.stores.opening import open_store
from fastpipe.stores.s3 import S3fsStore


@dataclass
class Place:
    """A store, and how objects get into it."""

    kind: str
    store: Store
    location: Location
    put: Callable[[str, bytes], object]
    delete: Callable[[str], object]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_bucket(self) -> bool:
        return self.kind.startswith("s3")

    def fill(self, keys: list[str]) -> None:
        """Objects whose content is their key."""
        for key in keys:
            self.put(key, key.encode())


KINDS = ("s3-obstore", "s3-s3fs", "memory", "file", "file-fsspec", "folder")


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A new, empty store."""
    yield from make_place(request.param, request, tmp_path)


@pytest.fixture(params=[kind for kind in KINDS if kind.startswith("s3")])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A new, empty bucket."""
    yield from make_place(request.param, request, tmp_path)


@pytest.fixture
def by_obstore(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A new, empty bucket that obstore reads."""
    yield from make_place("s3-obstore", request, tmp_path)


def make_place(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    make = {"s3": _s3, "memory": _memory}.get(kind.partition("-")[0])
    made = _folder(kind, tmp_path) if make is None else make(kind, request)
    yield made
    made.store.close()
    if kind == "memory":
        import fsspec

        fsspec.filesystem("memory").rm(f"/{made.location.bucket}", recursive=True)


def _s3(kind: str, request: pytest.FixtureRequest) -> Place:
    s3 = request.getfixturevalue("s3")
    name = s3.bucket()
    store, location = open_store(f"s3://{name}", s3.options)
    if kind == "s3-s3fs":
        store = S3fsStore(location, StorageOptions(s3.options))
    return Place(
        kind,
        store,
        location,
        lambda key, data: s3.put(name, key, data),
        lambda key: s3.delete(name, key),
        s3.options,
    )


def _memory(kind: str, request: pytest.FixtureRequest) -> Place:
    fsspec = pytest.importorskip("fsspec", reason="pip install 'fastpipe[s3]'")
    fs, name = fsspec.filesystem("memory"), f"test-{uuid.uuid4().hex}"
    store, location = open_store(f"memory://{name}")
    fs.mkdir(f"/{name}")
    return Place(
        kind,
        store,
        location,
        lambda key, data: fs.pipe_file(f"/{name}/{key}", data),
        lambda key: fs.rm(f"/{name}/{key}"),
    )


def _folder(kind: str, tmp_path: Path) -> Place:
    """A folder; keys of a URL's store begin at the root of the file system."""
    store, location = open_store(str(tmp_path / "top") if kind == "folder" else f"file://{tmp_path}/top")
    if kind == "file-fsspec":
        store = FilesystemStore(location, StorageOptions())
    top = tmp_path / "top"
    top.mkdir()

    def at(key: str) -> Path:
        return Path(location.path(key).removeprefix("file://"))

    def put(key: str, data: bytes) -> None:
        at(key).parent.mkdir(parents=True, exist_ok=True)
        at(key).unlink(missing_ok=True)
        at(key).write_bytes(data)

    def delete(key: str) -> None:
        shutil.rmtree(at(key)) if at(key).is_dir() else at(key).unlink()

    return Place(kind, store, location, put, delete)
