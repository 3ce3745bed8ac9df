"""Fixtures of the tests of ``fastpipe.torch``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fastpipe.cache import places
from fastpipe.testing import photo_tree


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifteen small photographs in three classes; a module that needs others has a ``tree`` of its own."""
    return photo_tree(tmp_path_factory.mktemp("tree"), classes=3, per_class=5, sizes=(52, 64))


_common: dict[str, str] = {}


@pytest.fixture
def own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, which is this test's own."""
    folder = tmp_path / "user-cache"
    _common.setdefault("XDG_CACHE_HOME", os.environ["XDG_CACHE_HOME"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setattr(places, "_failed", set())
    return folder


@pytest.fixture
def common_cache_folder(own_cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one of all tests, and so of the fork server, which has the environment that it began with."""
    monkeypatch.setenv("XDG_CACHE_HOME", _common["XDG_CACHE_HOME"])
