"""Made-up photographs and log-mel spectrograms, and which photos are read."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from fastpipe.bench.data import folder_to_use, made_once, scan
from fastpipe.bench.synthetic import mel_rows, photo_tree, photograph, write_table
from fastpipe.errors import OptionError


def test_photographs_are_as_hard_to_compress_as_real_ones() -> None:
    bits = []
    for number in range(16):
        file, image = io.BytesIO(), photograph(np.random.default_rng([7, number]), (375, 500))
        Image.fromarray(image).save(file, "JPEG", quality=90, subsampling="4:2:0")
        bits.append(file.tell() * 8 / (375 * 500))
    assert 1.6 <= np.mean(bits) <= 2.4 and min(bits) > 0.8 and max(bits) < 4.5
    assert np.std(bits) > 0.1, "all images are equally hard: not like photographs"
    grey = image.mean(axis=2)
    steps = np.abs(np.diff(grey, axis=1))
    assert np.quantile(steps, 0.5) < 6 < np.quantile(steps, 0.999), "smooth regions, and edges"
    spectrum = np.abs(np.fft.rfft(grey - grey.mean(), axis=1)).mean(axis=0)
    assert spectrum[1:6].mean() > 10 * spectrum[100:200].mean(), "noise, not a photograph"


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (9, 1), (240, 320)])
def test_a_photograph_is_a_function_of_its_seed(size: tuple[int, int]) -> None:
    first, again, other = (photograph(np.random.default_rng(seed), size) for seed in (3, 3, 4))
    assert first.shape == (*size, 3) and first.dtype == np.uint8 and first.flags.c_contiguous
    np.testing.assert_array_equal(first, again)
    assert min(size) < 9 or np.abs(first.astype(int) - other).mean() > 10


def test_a_tree_is_deterministic_and_grows_without_changing(tmp_path: Path) -> None:
    def contents(name: str, count: int, seed: int, **options: Any) -> dict[str, bytes]:
        root = photo_tree(tmp_path / name, classes=count, per_class=count, seed=seed, **options)
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*.jpg"))}

    small = contents("a", 2, 5, sizes=(40, 60))
    assert list(small) == [f"class_00{c}/000{i}.jpg" for c in (0, 1) for i in (0, 1)]
    assert len(set(small.values())) == 4
    large = contents("b", 3, 5, sizes=(40, 60))
    assert len(large) == 9 and all(large[name] == content for name, content in small.items())
    assert not set(contents("c", 2, 6, sizes=(40, 60)).values()) & set(small.values())
    sizes = {Image.open(io.BytesIO(content)).size for content in contents("d", 2, 5).values()}
    assert len(sizes) > 1  # without a size they vary as ImageNet's


def test_spectrograms_are_smooth_and_compress_as_real_ones(tmp_path: Path) -> None:
    rows, again, others = (mel_rows(np.random.default_rng(seed), 64) for seed in (0, 0, 8))
    assert rows.dtype == np.float32 and np.array_equal(rows, again) and not np.array_equal(rows, others)
    assert np.diff(rows, axis=1).std() < 0.6 * rows.std() and np.diff(rows, axis=2).std() < 0.6 * rows.std()
    # 260 s of speech at 8 kHz, 64 bands, in the same chunks: 1.27 and 1.17.
    for compression, least, most in (("gzip", 1.2, 1.4), ("lzf", 1.1, 1.3), (None, 1, 1)):
        path = tmp_path / f"{compression}.h5"
        write_table(path, "x", [rows], rows.shape, chunk=(16, 64, 128), compression=compression)
        with h5py.File(path) as file:
            assert np.array_equal(file["x"][:], rows)
            assert least <= rows.nbytes / file["x"].id.get_storage_size() <= most


def test_a_small_folder_takes_part_as_a_whole_and_of_a_large_one_all_classes(tmp_path: Path) -> None:
    tree = photo_tree(tmp_path / "tree", classes=3, per_class=4, sizes=(20, 30))
    photos = scan(tree, "tree")
    assert photos.indices == tuple(range(12)) and photos.labels == (0,) * 4 + (1,) * 4 + (2,) * 4
    assert photos.bytes == sum(Path(file).stat().st_size for file in photos.files)
    part = scan(tree, "tree", most_photos=3)
    assert part.total == 12 and set(part.labels) == {0, 1, 2}
    assert len(scan(tree, "tree", most_bytes=1).files) == 1
    (tree / "class_000" / "broken.jpg").write_bytes(b"")
    assert scan(tree, "tree").pixels == 600


def make(root: Path) -> Path:
    return photo_tree(root, classes=1, per_class=1, sizes=(8, 8))


def test_data_is_made_once_by_whoever_is_first_and_whole(tmp_path: Path) -> None:
    said: list[str] = []

    def interrupted(root: Path) -> None:
        make(root)
        raise KeyboardInterrupt

    def beside_another(root: Path) -> Path:
        made_once("photos", make, "photos", tmp_path, said.append)
        return make(root)

    with pytest.raises(KeyboardInterrupt):
        made_once("photos", interrupted, "photos", tmp_path)
    assert list(tmp_path.iterdir()) == []
    folder = made_once("photos", beside_another, "photos", tmp_path)
    assert made_once("photos", interrupted, "photos", tmp_path, said.append) == folder
    assert list(tmp_path.iterdir()) == [folder] and len(said) == 1


def test_the_option_wins_over_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPIPE_PHOTOS", str(tmp_path))
    tree = make(tmp_path / "tree")
    assert folder_to_use(None)[0] == tmp_path
    assert folder_to_use(tree) == (tree, "tree", False)
    monkeypatch.setenv("FASTPIPE_PHOTOS", str(tmp_path / "none"))
    with pytest.raises(OptionError, match=r"\$FASTPIPE_PHOTOS"):
        folder_to_use(None)
