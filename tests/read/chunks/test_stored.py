"""Bytes of files, in calls that give as much as they like."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from fastpipe.read.chunks.errors import ChunkError
from fastpipe.read.chunks.stored import read_fully


@pytest.mark.parametrize("most", [1, 7, 1 << 20])
def test_short_reads_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    (tmp_path / "x").write_bytes(data.tobytes())
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, views, at: real(file, [view[:most] for view in views], at))
    descriptor = os.open(tmp_path / "x", os.O_RDONLY)
    try:
        out = np.zeros(600, np.uint8)
        read_fully(descriptor, out[:500], 100)
        assert (out[:500] == data[100:600]).all() and not out[500:].any()
        read_fully(descriptor, out[:0], 5000)
        with pytest.raises(ChunkError, match="the file ends within it"):
            read_fully(descriptor, out, 401)
    finally:
        os.close(descriptor)
