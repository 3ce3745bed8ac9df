"""Reading chunks from files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from fastpipe.core.reads import ChunkError, read_bytes, read_fully


def test_a_file_that_ends_before_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abcdef")
    descriptor = os.open(tmp_path / "x", os.O_RDONLY)
    try:
        out = np.empty(4, np.uint8)
        read_fully(descriptor, out, 1)
        assert out.tobytes() == b"bcde" == read_bytes(descriptor, 1, 4)
        with pytest.raises(ChunkError, match="ends within"):
            read_fully(descriptor, out, 3)
        with pytest.raises(ChunkError, match="ends within"):
            read_bytes(descriptor, 3, 1 << 60)
    finally:
        os.close(descriptor)
