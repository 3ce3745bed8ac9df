"""Files that are read together: what each would be if it were read alone."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from odd_images import damaged_at_random, write_fifo

from fastpipe.bench.synthetic import photo_tree
from fastpipe.core.files import read_file
from fastpipe.images.reader import read_jpeg_header, read_many


def test_photos_are_read_together_as_alone(tmp_path: Path) -> None:
    photos = sorted(photo_tree(tmp_path / "photos", classes=2, per_class=4).rglob("*.jpg"))
    rng = np.random.default_rng(3)
    paths = []
    for number in range(60):
        path = tmp_path / f"{number} ü.jpg"
        data = photos[number % len(photos)].read_bytes()
        path.write_bytes(damaged_at_random(data, rng) if number % 3 else data)
        paths.append(str(path))
    for name, found in zip(paths, read_many(paths), strict=True):
        alone = read_file(name)
        assert found == ((alone, read_jpeg_header(alone)) if alone else None)
        assert found is None or (type(found[0]) is bytes and hash(found[0]) == hash(alone))
    assert sum(found is not None and found[1] is not None for found in read_many(paths)) >= 20


def test_unreadable_files_are_left_and_the_others_are_there(tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.write_bytes(b"content")
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "nowhere").symlink_to("nothing")
    odd = ["empty", "folder", "nowhere", "missing", "x" * 300, "good\0more", Path(write_fifo(tmp_path)).name]
    paths = [str(tmp_path / name) for name in odd] + ["/dev/zero", "/proc/self/stat"]
    asked = [path for name in paths for path in (str(good), name)]
    before = set(os.listdir("/proc/self/fd"))
    found = read_many(asked)
    assert set(os.listdir("/proc/self/fd")) <= before  # others may have closed theirs
    assert found[::2] == [(b"content", None)] * len(paths)
    assert found[1::2] == [(b"", None)] + [None] * (len(paths) - 1)
    assert read_many([]) == []
