"""Stores by file systems of fsspec's: what their clients say when something is wrong."""

from __future__ import annotations

import asyncio
import importlib
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from fastpipe.errors import (
    MissingDependencyError,
    ObjectChangedError,
    OptionError,
    StoreAccessError,
    StoreBusyError,
    StoreError,
)
from fastpipe.stores.filesystems import FilesystemStore
from fastpipe.stores.opening import open_store

fsspec = pytest.importorskip("fsspec", reason="pip install 'fastpipe[s3]'")
memory = importlib.import_module("fsspec.implementations.memory")


class FarSystem(memory.MemoryFileSystem):  # type: ignore[misc, name-defined]
    """A file system that has ETags, and fails as it is told."""

    protocol = "far"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    error: BaseException | None = None
    infos = 0
    tags: dict[str, str] = {}

    def __init__(self, password: str = "", **options: Any) -> None:
        super().__init__(**options)
        if password == "bad-hunter2":
            raise ValueError(f"cannot parse {password}")

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("far://"))  # type: ignore[no-any-return]

    def _tagged(self, entry: dict[str, Any]) -> dict[str, Any]:
        return {**entry, "etag": self.tags.get(entry["name"], "one")}

    def cat_file(self, path: str, *args: Any, **options: Any) -> bytes:
        if FarSystem.error is not None:
            raise FarSystem.error
        return super().cat_file(path, *args, **options)  # type: ignore[no-any-return]

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        FarSystem.infos += 1
        return self._tagged(super().info(path, **options))

    def find(self, path: str, **options: Any) -> dict[str, Any]:
        if FarSystem.error is not None:
            raise FarSystem.error
        return {name: self._tagged(entry) for name, entry in super().find(path, **options).items()}


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Iterator[FilesystemStore]:
    """A store of that, with one object."""
    fsspec.register_implementation("far", FarSystem, clobber=True)
    for name, value in {"store": {}, "pseudo_dirs": [""], "error": None, "infos": 0, "tags": {}}.items():
        monkeypatch.setattr(FarSystem, name, value)
    FarSystem(skip_instance_cache=True).pipe_file("/box/cat/x.jpg", b"content")
    store, _ = open_store("far://box", {"password": "hunter2-word"})
    assert isinstance(store, FilesystemStore)
    yield store
    store.close()
    importlib.import_module("fsspec.registry")._registry.pop("far")


class _StatusError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__("hunter2-word in an answer")
        self.status = status


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (_StatusError(401), StoreAccessError),
        (_StatusError(403), StoreAccessError),
        (_StatusError(404), FileNotFoundError),
        (_StatusError(412), ObjectChangedError),
        (_StatusError(429), StoreBusyError),
        (_StatusError(500), StoreBusyError),
        (_StatusError(503), StoreBusyError),
        (_StatusError(301), StoreError),
        (_StatusError(418), StoreError),
        (ConnectionResetError("reset hunter2-word"), StoreBusyError),
        (TimeoutError("hunter2-word"), StoreBusyError),
        (asyncio.TimeoutError(), StoreBusyError),
        (PermissionError("hunter2-word"), StoreAccessError),
        (FileNotFoundError("hunter2-word"), FileNotFoundError),
        (OSError("hunter2-word"), StoreError),
    ],
)
def test_errors_are_ours_without_secrets(far: Any, error: Exception, expected: type[Exception]) -> None:
    FarSystem.error = error
    for ask in (
        lambda: far.get("cat/x.jpg"),
        lambda: far.get_range("cat/x.jpg", 0, 1),
        lambda: list(far.objects("cat/")),
    ):
        with pytest.raises(expected, match="far://box/cat/") as caught:
            ask()
        if expected in (StoreError, StoreAccessError):
            assert type(caught.value) is expected
        assert "hunter2" not in str(caught.value)


def test_what_a_client_has_broken_is_its_own_error(far: Any) -> None:
    FarSystem.error = KeyError("x")
    with pytest.raises(KeyError):
        far.get("cat/x.jpg")


def test_of_what_is_far_away_nothing_more_is_asked(far: Any) -> None:
    ((listed,),) = far.objects("")
    assert listed.version == "one-7"
    before = FarSystem.infos
    assert far.get(listed.key, listed.version) == (b"content", "one-7")
    assert far.get_range(listed.key, 1, 3, listed.version) == b"on"
    assert FarSystem.infos == before


def test_an_object_of_another_size_was_replaced(far: Any) -> None:
    ((listed,),) = far.objects("")
    FarSystem(skip_instance_cache=True).pipe_file("/box/cat/x.jpg", b"longer content")
    FarSystem.tags = {"/box/cat/x.jpg": "two"}
    with pytest.raises(ObjectChangedError):
        far.get(listed.key, listed.version)


def test_a_part_of_an_object_is_not_taken_for_all(far: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ((listed,),) = far.objects("")
    monkeypatch.setattr(FarSystem, "cat_file", lambda *_, **__: b"cont")
    with pytest.raises(StoreBusyError, match="4 bytes of 7"):
        far.get(listed.key, listed.version)


def test_a_bad_option_is_not_shown(far: Any) -> None:
    store, _ = open_store("far://box", {"password": "bad-hunter2"})
    with pytest.raises(OptionError, match=r"cannot parse …") as caught:
        store.get("x")
    assert "hunter2" not in f"{caught.value}{store!r}"


def test_an_unknown_scheme_is_refused() -> None:
    store, _ = open_store("nosuchscheme://box/x")
    with pytest.raises(OptionError, match="nosuchscheme"):
        store.folders("")


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    store, _ = open_store("gs://box/x")
    with pytest.raises(MissingDependencyError, match=r"gs://box/.*install gcsfs"):
        store.folders("")


def test_a_pickle_has_no_secrets(far: Any) -> None:
    content = pickle.dumps(far)
    assert b"hunter2" not in content
    with pytest.raises(StoreAccessError, match="password"):
        pickle.loads(content).get("cat/x.jpg")
