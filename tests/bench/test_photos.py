from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastpipe.bench.synthetic import imagenet_size, photo_tree, photograph


def _bits(rng: np.random.Generator, size: tuple[int, int]) -> float:
    file = io.BytesIO()
    Image.fromarray(photograph(rng, size)).save(file, "JPEG", quality=90, subsampling="4:2:0")
    return file.tell() * 8 / (size[0] * size[1])


def test_jpegs_take_about_two_bits_a_pixel() -> None:
    bits = [_bits(np.random.default_rng([7, i]), (375, 500)) for i in range(16)]
    assert 1.6 <= np.mean(bits) <= 2.4
    assert min(bits) > 0.8 and max(bits) < 4.5
    assert np.std(bits) > 0.1, "all images are equally hard: not like photographs"


def test_sizes_are_like_those_of_imagenet() -> None:
    rng = np.random.default_rng(0)
    sizes = np.array([imagenet_size(rng) for _ in range(3000)])
    height, width = sizes.mean(axis=0)
    assert 370 <= height <= 420 and 450 <= width <= 490
    assert len({tuple(size) for size in sizes.tolist()}) > 300
    assert (sizes[:, 0] > sizes[:, 1]).mean() > 0.15, "no portraits"
    assert sizes.min() >= 50


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (9, 1), (33, 17), (240, 320)])
def test_shape_dtype_and_determinism(size: tuple[int, int]) -> None:
    first = photograph(np.random.default_rng(3), size)
    assert first.shape == (*size, 3) and first.dtype == np.uint8 and first.flags.c_contiguous
    np.testing.assert_array_equal(first, photograph(np.random.default_rng(3), size))
    if min(size) > 9:
        other = photograph(np.random.default_rng(4), size)
        assert np.abs(first.astype(int) - other).mean() > 10


def test_an_image_has_smooth_regions_edges_and_texture() -> None:
    grey = photograph(np.random.default_rng(1), (375, 500)).mean(axis=2)
    steps = np.abs(np.diff(grey, axis=1))
    assert np.quantile(steps, 0.5) < 6 < np.quantile(steps, 0.999)
    spectrum = np.abs(np.fft.rfft(grey - grey.mean(), axis=1)).mean(axis=0)
    assert spectrum[1:6].mean() > 10 * spectrum[100:200].mean(), "noise, not a photograph"


def _contents(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*.jpg"))}


def test_a_tree_is_deterministic_and_grows_without_changing(tmp_path: Path) -> None:
    small = _contents(photo_tree(tmp_path / "a", classes=2, per_class=2, seed=5, sizes=(40, 60)))
    assert list(small) == [f"class_00{c}/000{i}.jpg" for c in (0, 1) for i in (0, 1)]
    assert len(set(small.values())) == 4
    large = _contents(photo_tree(tmp_path / "b", classes=3, per_class=3, seed=5, sizes=(40, 60)))
    assert len(large) == 9 and all(large[name] == data for name, data in small.items())
    other = _contents(photo_tree(tmp_path / "c", classes=2, per_class=2, seed=6, sizes=(40, 60)))
    assert not set(other.values()) & set(small.values())


def test_a_tree_of_imagenet_sizes_varies(tmp_path: Path) -> None:
    root = photo_tree(tmp_path, classes=2, per_class=3)
    sizes = set()
    for path in sorted(root.rglob("*.jpg")):
        with Image.open(path) as image:
            sizes.add(image.size)
            assert image.format == "JPEG" and image.mode == "RGB"
    assert len(sizes) > 1
