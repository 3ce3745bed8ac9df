from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fastpipe.read.images import ImageReader
from fastpipe.testing import photo_tree


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

    return spoil
