from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastpipe.bench.synthetic import photo_tree
from fastpipe.images.batch import ImageBatch
from fastpipe.images.reader import ImageReader


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small folder that a test may spoil: 2 classes of 3."""
    return photo_tree(tmp_path / "tree", classes=2, per_class=3, sizes=(60, 90))


@pytest.fixture
def spoil_decoder(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int], None]:
    """Let the fast decoder give other pixels for one file: all of them ``levels`` darker."""

    def spoil(path: Path, levels: int) -> None:
        blob_of_it, real = path.read_bytes(), ImageReader.fast_region

        def region(self: ImageReader, blob: bytes, box: object) -> object:
            pixels = real(self, blob, box)  # type: ignore[arg-type]
            if blob != blob_of_it:
                return pixels
            assert pixels is not None, "the fast decoder takes this file"
            return np.where(pixels >= levels, pixels - levels, pixels).astype(np.uint8)

        monkeypatch.setattr(ImageReader, "fast_region", region)
        leave_to_python(path, monkeypatch)

    return spoil


def leave_to_python(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the native core leave a file to Python, where its pixels can be changed."""

    described = ImageBatch._described

    def left(self: ImageBatch, *arguments: Any) -> Any:
        self._files = {n: False for n, item in enumerate(self.items) if item.path == str(path)}
        return described(self, *arguments)

    monkeypatch.setattr(ImageBatch, "_described", left)


@pytest.fixture
def left_to_python(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Has the native core leave a file to Python."""
    return lambda path: leave_to_python(path, monkeypatch)
