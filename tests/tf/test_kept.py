"""What a script changes of Pillow while it runs shows in kept samples as in those that are decoded each time."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageFile

from fastpipe import Cache, Decode
from fastpipe.tf import image_dataset


@pytest.fixture
def files(tmp_path: Path, settled: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Three images, one of them cut off, which is allowed."""
    rng = np.random.default_rng(0)
    for number, end in enumerate(["png", "jpg", "png"]):
        image = Image.fromarray(rng.integers(0, 255, (40, 44, 3), dtype=np.uint8))
        image.save(tmp_path / f"{number}.{end}")
    whole = (tmp_path / "2.png").read_bytes()
    (tmp_path / "2.png").write_bytes(whole[: len(whole) // 2])
    settled(tmp_path)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
    return [str(path) for path in sorted(tmp_path.iterdir())]  # type: ignore[return-value]


def _epoch(dataset: Any) -> Any:
    """An epoch's images and whether Pillow warned of one, or the words of an error."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            found = np.concatenate([images.numpy() for images in dataset]).tolist()
        except tf.errors.OpError:
            return "an error"
    return found, any(issubclass(one.category, Image.DecompressionBombWarning) for one in seen)


@pytest.mark.parametrize("code", [None, lambda image: image.rotate(90)], ids=["made", "cut"])
def test_limits_of_pillow_hold_for_kept_samples(files: list[str], code: Any) -> None:
    both: dict[str, Any] = {"image_size": 8, "shuffle": False, "parity": "pil"}
    if code is not None:
        both["preprocess"] = code
    off = image_dataset(files, None, cache="off", **both)
    kept = image_dataset(files, None, cache=Cache("ram", max_bytes=1 << 26), **both)
    usual, seen = Image.MAX_IMAGE_PIXELS, []
    for allowed, limit in [
        (True, usual),
        (False, usual),
        (True, 1700),
        (True, 500),
        (True, None),
        (True, usual),
    ]:
        ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS = allowed, limit
        for _ in range(2):
            seen.append(_epoch(off))
            assert _epoch(kept) == seen[-1], (allowed, limit)
    pixels = seen[0][0]
    assert [one if isinstance(one, str) else one[1] for one in seen[::2]] == [
        False, "an error", True, "an error", False, False
    ]  # fmt: skip
    assert all(one[0] == pixels for one in seen if not isinstance(one, str))


def test_a_dataset_with_a_limit_of_its_own_is_not_given_what_another_keeps(files: list[str]) -> None:
    both: dict[str, Any] = {"image_size": 8, "shuffle": False, "parity": "tf"}
    cache = Cache("ram", max_bytes=1 << 26)
    for _ in range(2):
        assert not isinstance(_epoch(image_dataset(files[:2], None, cache=cache, **both)), str)
    limited = image_dataset(files[:2], None, cache=cache, decode=Decode(max_pixels=500), **both)
    assert _epoch(limited) == "an error"
