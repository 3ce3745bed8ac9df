"""Fixtures of the tests of ``fastpipe.torch``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from fastpipe import FastLoader
from fastpipe.bench.synthetic import photo_tree
from fastpipe.core import caches as places
from fastpipe.core.transfer import Transfer
from fastpipe.torch.delivery import Delivery
from fastpipe.torch.folder_source import FolderSource


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifteen small photographs in three classes; a module that needs others has a ``tree`` of its own."""
    return photo_tree(tmp_path_factory.mktemp("tree"), classes=3, per_class=5, sizes=(52, 64))


@pytest.fixture(scope="module")
def eleven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny photograph in each of eleven classes."""
    return photo_tree(tmp_path_factory.mktemp("eleven"), classes=11, per_class=1, sizes=(16, 20))


@pytest.fixture(scope="module")
def bucket(s3: Any, photo_tree: Path) -> str:
    """The files of ``photo_tree`` as objects of a real server, with keys that begin with "train/"."""
    name: str = s3.bucket()
    files = {f"train/{path.relative_to(photo_tree)}": path for path in photo_tree.rglob("*.jpg")}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: s3.put(name, key, files[key].read_bytes()), files))
    return name


@pytest.fixture
def accelerator() -> Iterator[Any]:
    from accelerate import Accelerator  # here: it takes seconds

    made = Accelerator(cpu=True, gradient_accumulation_steps=3)
    yield made
    made.free_memory()


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


class _Ahead(Transfer):
    """Behaves on the CPU as a device whose copies run beside the work."""

    is_asynchronous = True  # type: ignore[assignment]

    def start(self, batch: Any, finish: Callable[[Any], Any]) -> Callable[[], Any]:
        moved = finish(batch)
        return lambda: moved


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look-ahead and normalisation on the device, as with CUDA, on the CPU."""
    make, ask = FastLoader._delivery, FolderSource.ask

    def asked(self: FolderSource, **changes: Any) -> None:
        ask(self, **{name: value for name, value in changes.items() if name != "is_pinned"})  # needs a GPU

    monkeypatch.setattr(FolderSource, "ask", asked)

    def delivery(self: Any, source: FolderSource | None, seed: int | None) -> Delivery | None:
        made = make(self, source, seed)
        if self.device is None or made is None:
            return made
        made.transfer = _Ahead(torch.device("cpu"))
        if source is not None and self.collate_fn is default_collate:
            made.finishes = True
            source.ask(sends_bytes=True)
        return made

    monkeypatch.setattr(FastLoader, "_delivery", delivery)
