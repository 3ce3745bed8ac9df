"""Folders as stores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fastpipe.errors import OptionError, StoreAccessError, StoreError
from fastpipe.stores.filesystems import FolderStore
from fastpipe.stores.opening import open_store


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A folder with one file, beside another file."""
    (tmp_path / "top" / "cat").mkdir(parents=True)
    (tmp_path / "top" / "cat" / "x.jpg").write_bytes(b"x")
    (tmp_path / "outside").write_bytes(b"secret")
    return tmp_path / "top"


def _keys(store: object) -> list[str]:
    return sorted(one.key for page in store.objects("") for one in page)  # type: ignore[attr-defined]


def test_no_key_leads_out_of_the_folder(top: Path) -> None:
    store, _ = open_store(top)
    for key in ("../outside", "cat/../../outside", f"{top.parent}/outside", "cat/..", "a\0b"):
        with pytest.raises(FileNotFoundError):
            store.get(key)
        with pytest.raises(FileNotFoundError):
            store.get_range(key, 0, 1)
    assert _keys(store) == ["cat/x.jpg"]


def test_links_to_folders_are_followed_once(top: Path) -> None:
    (top / "dog").symlink_to(top / "cat")
    (top / "cat" / "back").symlink_to(top)
    (top / "gone").symlink_to(top / "nothing")
    store, _ = open_store(top)
    assert _keys(store) == ["cat/x.jpg", "dog/x.jpg"]
    assert store.folders("") == ["cat", "dog"]


def test_only_files_are_objects(top: Path) -> None:
    os.mkfifo(top / "pipe")
    assert _keys(open_store(top)[0]) == ["cat/x.jpg"]


def test_names_that_are_no_text_are_read(top: Path) -> None:
    with open(os.path.join(os.fsencode(top), b"\xff.jpg"), "wb") as file:
        file.write(b"y")
    store, _ = open_store(top)
    assert store.get(_keys(store)[1]).data == b"y"


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path / "nothing")
    for ask in (lambda: list(store.objects("")), lambda: store.folders("cat/")):
        with pytest.raises(FileNotFoundError, match=f"{tmp_path}/nothing/"):
            ask()


def test_a_folder_that_is_not_mounted_any_more_is_no_missing_object(top: Path) -> None:
    store, _ = open_store(top)
    with pytest.raises(FileNotFoundError, match="it was removed since it was listed"):
        store.get("cat/none.jpg")
    for path in sorted(top.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    for _ in range(2):
        with pytest.raises(StoreError, match=r"is empty, or not there\. Is it still mounted\?"):
            store.get("cat/none.jpg")
        if top.exists():
            top.rmdir()


def test_other_errors_name_the_file(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = open_store(top)
    for error, kind in ((PermissionError(13, "no"), StoreAccessError), (OSError(5, "I/O error"), StoreError)):

        def fail(*_: object, error: OSError = error, **__: object) -> None:
            raise error

        monkeypatch.setattr("builtins.open", fail)
        with pytest.raises(kind, match=r"top/cat/x\.jpg"):
            store.get("cat/x.jpg")


def test_a_folder_takes_no_options(top: Path) -> None:
    with pytest.raises(OptionError, match="is a folder") as caught:
        open_store(f"file://{top}", {"secret": "hunter2"})
    assert "hunter2" not in str(caught.value)
    assert isinstance(open_store(f"file://{top}", {})[0], FolderStore)
