"""Folders as stores, and what fsspec's file systems say when something is wrong."""

from __future__ import annotations

import asyncio
import importlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
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
from fastpipe.stores.filesystems import FilesystemStore, FolderStore
from fastpipe.stores.opening import open_store

fsspec = pytest.importorskip("fsspec", reason="pip install '.[s3]'")
memory = importlib.import_module("fsspec.implementations.memory")


class FarSystem(memory.MemoryFileSystem):  # type: ignore[misc, name-defined]
    """A file system that has ETags, and fails as a test says."""

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
def far(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A store of that, with one object."""
    fsspec.register_implementation("far", FarSystem, clobber=True)
    for name, value in {"store": {}, "tags": {}, "pseudo_dirs": [""], "error": None, "infos": 0}.items():
        monkeypatch.setattr(FarSystem, name, value)
    FarSystem(skip_instance_cache=True).pipe_file("/box/cat/x.jpg", b"content")
    store, _ = open_store("far://box", {"password": "hunter2-word"})
    assert isinstance(store, FilesystemStore)
    yield store
    store.close()
    importlib.import_module("fsspec.registry")._registry.pop("far")


class StatusError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__("hunter2-word in an answer")
        self.status = status


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (StatusError(401), StoreAccessError), (StatusError(403), StoreAccessError),
        (StatusError(404), FileNotFoundError), (StatusError(412), ObjectChangedError),
        (StatusError(429), StoreBusyError), (StatusError(500), StoreBusyError), (StatusError(503), StoreBusyError),
        (StatusError(301), StoreError), (StatusError(418), StoreError),
        (ConnectionResetError("reset hunter2-word"), StoreBusyError), (TimeoutError("hunter2-word"), StoreBusyError),
        (asyncio.TimeoutError(), StoreBusyError), (PermissionError("hunter2-word"), StoreAccessError),
        (FileNotFoundError("hunter2-word"), FileNotFoundError), (OSError("hunter2-word"), StoreError),
        (KeyError("far://box/cat/: a bug of the client's is its own error"), KeyError),
    ],
)  # fmt: skip
def test_errors_are_fastpipes_without_secrets(far: Any, error: Exception, expected: type[Exception]) -> None:
    FarSystem.error = error
    for ask in (
        lambda: far.get("cat/x.jpg"), lambda: far.get_range("cat/x.jpg", 0, 1), lambda: list(far.objects("cat/")),
    ):  # fmt: skip
        with pytest.raises(expected, match="far://box/cat/") as caught:
            ask()
        if expected in (StoreError, StoreAccessError):
            assert type(caught.value) is expected
        assert "hunter2" not in str(caught.value)


def test_a_far_object_takes_one_request_which_notices_changes(far: Any, monkeypatch: Any) -> None:
    ((listed,),) = far.objects("")
    assert listed.version == "one-7"
    before = FarSystem.infos
    assert far.get(listed.key, listed.version) == (b"content", "one-7")
    assert far.get_range(listed.key, 1, 3, listed.version) == b"on"
    assert FarSystem.infos == before
    with monkeypatch.context() as patch:
        patch.setattr(FarSystem, "cat_file", lambda *_, **__: b"cont")  # a part of it
        with pytest.raises(StoreBusyError, match="4 bytes of 7"):
            far.get(listed.key, listed.version)
    FarSystem(skip_instance_cache=True).pipe_file("/box/cat/x.jpg", b"longer content")
    FarSystem.tags = {"/box/cat/x.jpg": "two"}
    with pytest.raises(ObjectChangedError):
        far.get(listed.key, listed.version)


def test_secrets_are_not_shown_and_what_cannot_be_is_refused(far: Any, monkeypatch: Any) -> None:
    content = pickle.dumps(far)
    assert b"hunter2" not in content
    with pytest.raises(StoreAccessError, match="password"):
        pickle.loads(content).get("cat/x.jpg")
    store, _ = open_store("far://box", {"password": "bad-hunter2"})
    with pytest.raises(OptionError, match=r"cannot parse …") as caught:
        store.get("x")
    assert "hunter2" not in f"{caught.value}{store!r}"
    with pytest.raises(OptionError, match="nosuchscheme"):
        open_store("nosuchscheme://box/x")[0].folders("")

    def missing(*_: object, **__: object) -> None:
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(MissingDependencyError, match=r"gs://box/.*install gcsfs"):
        open_store("gs://box/x")[0].folders("")


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A local folder, or one that is mounted, with one file, beside another file."""
    (tmp_path / "top" / "cat").mkdir(parents=True)
    (tmp_path / "top" / "cat" / "x.jpg").write_bytes(b"x")
    (tmp_path / "outside").write_bytes(b"secret")
    return tmp_path / "top"


def test_no_key_leads_out_of_a_folder(top: Path) -> None:
    store, _ = open_store(top)
    for key in ("../outside", "cat/../../outside", f"{top.parent}/outside", "cat/..", "a\0b"):
        for ask in (lambda: store.get(key), lambda: store.get_range(key, 0, 1)):
            with pytest.raises(FileNotFoundError):
                ask()


def test_files_are_objects_and_links_to_folders_are_followed_once(top: Path) -> None:
    os.mkfifo(top / "pipe")
    (top / "dog").symlink_to(top / "cat")
    (top / "cat" / "back").symlink_to(top)
    (top / "gone").symlink_to(top / "nothing")
    with open(os.path.join(os.fsencode(top), b"\xff.jpg"), "wb") as file:  # a name that is no text
        file.write(b"y")
    store, _ = open_store(top)
    names = sorted(one.key for page in store.objects("") for one in page)
    assert names[:2] == ["cat/x.jpg", "dog/x.jpg"] and len(names) == 3
    assert store.get(names[2]).data == b"y"
    assert store.folders("") == ["cat", "dog"]


def test_a_folder_that_is_missing_is_named_and_no_missing_object(top: Path) -> None:
    store, _ = open_store(top / "nothing")
    for ask in (lambda: list(store.objects("")), lambda: store.folders("cat/")):
        with pytest.raises(FileNotFoundError, match=f"{top}/nothing/"):
            ask()
    store, _ = open_store(top)
    with pytest.raises(FileNotFoundError, match="it was removed since it was listed"):
        store.get("cat/none.jpg")
    (top / "cat" / "x.jpg").unlink()
    (top / "cat").rmdir()
    for is_there in (True, False):
        if not is_there:
            top.rmdir()
        with pytest.raises(StoreError, match=r"is empty, or not there\. Is it still mounted\?"):
            store.get("cat/none.jpg")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PermissionError(13, "no"), StoreAccessError), (OSError(5, "I/O error"), StoreError),
        (TimeoutError(110, "timed out"), StoreBusyError),
    ],
)  # fmt: skip
def test_other_errors_name_the_file(top: Path, monkeypatch: Any, error: OSError, kind: Any) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    store, _ = open_store(top)
    monkeypatch.setattr("builtins.open", fail)
    for ask in (lambda: store.get("cat/x.jpg"), lambda: store.get_range("cat/x.jpg", 0, 1)):
        with pytest.raises(kind, match=r"top/cat/x\.jpg"):
            ask()


def test_a_folder_takes_no_options(top: Path) -> None:
    with pytest.raises(OptionError, match="is a folder") as caught:
        open_store(f"file://{top}", {"secret": "hunter2"})
    assert "hunter2" not in str(caught.value)
    assert isinstance(open_store(f"file://{top}", {})[0], FolderStore)
