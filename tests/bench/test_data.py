"""Which photos are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastpipe.bench import data
from fastpipe.bench.data import folder_to_use, generated_folder, made_once, scan
from fastpipe.bench.synthetic import photo_tree
from fastpipe.errors import OptionError


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_tree(tmp_path_factory.mktemp("photos"), classes=3, per_class=4, sizes=(40, 60))


def test_a_small_folder_takes_part_as_a_whole(tree: Path) -> None:
    photos = scan(tree, "tree")
    assert photos.indices == tuple(range(12))
    assert photos.labels == (0,) * 4 + (1,) * 4 + (2,) * 4
    assert photos.bytes == sum(Path(file).stat().st_size for file in photos.files)


def test_of_a_large_folder_a_part_spread_over_all_classes(tree: Path) -> None:
    photos = scan(tree, "tree", most_photos=3)
    assert photos.total == 12
    assert set(photos.labels) == {0, 1, 2}
    assert len(scan(tree, "tree", most_bytes=1).files) == 1


def make(root: Path) -> Path:
    return photo_tree(root, classes=1, per_class=1, sizes=(8, 8))


def test_made_once(tmp_path: Path) -> None:
    calls: list[Path] = []
    said: list[str] = []

    def counted(root: Path) -> Path:
        calls.append(root)
        return make(root)

    folder = made_once("photos", counted, "photos", tmp_path, said.append)
    assert made_once("photos", counted, "photos", tmp_path, said.append) == folder
    assert len(calls) == len(said) == 1
    assert list(tmp_path.iterdir()) == [folder]


def test_large_photos_are_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def noted(root: Path, **options: Any) -> Path:
        calls.append(options)
        return make(root)

    monkeypatch.setattr(data, "photo_tree", noted)
    folders = {generated_folder(tmp_path, large=large) for large in (False, True)}
    assert len(folders) == 2
    assert [options["sizes"] for options in calls] == [None, (3024, 4032)]


def test_the_pixels_of_a_photo_are_told(tmp_path: Path) -> None:
    tree = photo_tree(tmp_path / "tree", classes=2, per_class=3, sizes=(20, 30))
    (tree / "class_000" / "broken.jpg").write_bytes(b"")
    assert scan(tree, "tree").pixels == 600


def test_an_interrupted_making_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(root: Path) -> None:
        make(root)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made_once("photos", interrupted, "photos", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_two_at_once_agree(tmp_path: Path) -> None:
    def outer(root: Path) -> Path:
        made_once("photos", make, "photos", tmp_path)
        return make(root)

    folder = made_once("photos", outer, "photos", tmp_path)
    assert list(tmp_path.iterdir()) == [folder]


def test_the_option_wins_over_the_variable(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTPIPE_PHOTOS", str(tmp_path))
    assert folder_to_use(None)[0] == tmp_path
    assert folder_to_use(tree) == (tree, tree.name, False)


def test_a_variable_that_names_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPIPE_PHOTOS", str(tmp_path / "none"))
    with pytest.raises(OptionError, match=r"\$FASTPIPE_PHOTOS"):
        folder_to_use(None)
