"""Which volumes, labels and masks belong together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastpipe.errors import OptionError
from fastpipe.index.patch_tables import ROLES, matched_volumes, roles_of


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    for name in ("b", "a", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "image.npy").touch()
        (tmp_path / name / "labels.npy").touch()
    return tmp_path


@pytest.mark.parametrize("path", ["a.zarr", Path("a.zarr"), np.zeros(3)])
def test_one_volume_is_a_list_of_one(path: Any) -> None:
    (found,) = matched_volumes(path)
    assert len(found) == 1
    assert found[0] is path
    assert roles_of(path, None, None) == ["volume"]


@pytest.mark.parametrize("kind", [list, lambda some: some])
def test_several_are_matched_by_their_order(kind: Any) -> None:
    images, masks = kind(["a", "b"]), kind([np.zeros(1), np.ones(1)])
    found = matched_volumes(images, mask=masks)
    assert found[0] == ["a", "b"]
    assert found[1][1] is masks[1]
    assert roles_of(images, None, masks) == ["volume", "mask"]


def test_a_pattern_is_all_that_it_matches_sorted(cases: Path) -> None:
    found = matched_volumes(f"{cases}/*/image.npy", labels=cases / "*" / "labels.npy")
    assert found == [[f"{cases}/{name}/{kind}.npy" for name in "abc"] for kind in ("image", "labels")]
    assert matched_volumes(f"{cases}/**/image.npy") == [found[0]]


def test_a_pattern_that_matches_nothing_is_refused(cases: Path) -> None:
    with pytest.raises(OptionError, match=r"labels='.*/\*\.zarr' matches nothing"):
        matched_volumes(f"{cases}/a/image.npy", labels=f"{cases}/*.zarr")


def test_a_path_that_looks_like_a_pattern_is_itself_where_it_exists(tmp_path: Path) -> None:
    (tmp_path / "scan[1].npy").touch()
    assert matched_volumes(tmp_path / "scan[1].npy") == [[tmp_path / "scan[1].npy"]]


def test_a_url_is_no_pattern() -> None:
    url = "https://host/x.zarr?part=[1]*"
    assert matched_volumes(url) == [[url]]


def test_equally_many_are_needed() -> None:
    with pytest.raises(
        OptionError, match="equally many of volume, labels and mask, got 2 for volume=, 1 for labels="
    ):
        matched_volumes(["a", "b"], labels="c")


@pytest.mark.parametrize("nothing", [[], ()])
def test_no_volumes_are_refused(nothing: Any) -> None:
    with pytest.raises(OptionError, match="names no volumes"):
        matched_volumes(nothing)


def test_a_table_has_a_row_for_each_volume() -> None:
    rows = [("a", "la", "ma"), ("b", "lb", "mb")]
    assert matched_volumes(rows) == [["a", "b"], ["la", "lb"], ["ma", "mb"]]
    assert roles_of(rows, None, None) == list(ROLES)
    assert matched_volumes([("a", "la")]) == [["a"], ["la"]]
    assert roles_of([("a",), ("b",)], None, None) == ["volume"]


@pytest.mark.parametrize("rows", [[("a", "b"), ("c",)], [("a", "b", "c", "d")], [()]])
def test_a_table_of_other_rows_is_refused(rows: Any) -> None:
    with pytest.raises(OptionError, match=r"must be tuples \(volume, labels\[, mask\]\)"):
        matched_volumes(rows)


def test_a_table_has_its_labels_and_masks(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("volume\na\n")
    for table in ([("a", "b")], tmp_path / "x.csv"):
        for given in ({"labels": "c"}, {"mask": "c"}):
            with pytest.raises(OptionError, match="columns of the table"):
                matched_volumes(table, **given)


def test_paths_in_a_file_are_from_its_folder_on(tmp_path: Path) -> None:
    text = 'mask,volume\nm/1,a b.zarr\n/abs/2,"x,y.zarr"\ns3://k/3,https://h/z.zarr\n'
    (tmp_path / "x.csv").write_text(text)
    for path in (tmp_path / "x.csv", str(tmp_path / "x.csv")):
        assert matched_volumes(path) == [
            [f"{tmp_path}/a b.zarr", f"{tmp_path}/x,y.zarr", "https://h/z.zarr"],
            [f"{tmp_path}/m/1", "/abs/2", "s3://k/3"],
        ]
        assert roles_of(path, None, None) == ["volume", "mask"]


def test_a_file_of_this_folder_needs_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.csv").write_text("volume\na.npy\n")
    monkeypatch.chdir(tmp_path)
    assert matched_volumes("x.csv") == [["a.npy"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("labels\na\n", "must have a column volume"),
        ("volume,notes\na,b\n", "it has .*notes"),
        ("", "must have a column volume"),
        ("volume\n", "must have a column volume"),
        ("volume,labels\na,b\nc,\n", "row 3 is not filled in"),
        ("volume,labels\na\n", "row 2 is not filled in"),
    ],
)
def test_a_file_that_is_not_filled_in_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(OptionError, match=message):
        matched_volumes(tmp_path / "x.csv")


def test_a_row_with_more_values_than_columns_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("volume,labels\na,b,c\n")
    with pytest.raises(OptionError, match=str(tmp_path)):
        matched_volumes(tmp_path / "x.csv")


def test_what_a_spreadsheet_puts_in_front_is_no_part_of_a_name(tmp_path: Path) -> None:
    """A mark of the order of bytes, as some write it."""
    (tmp_path / "x.csv").write_text("volume\na.npy\n", encoding="utf-8-sig")
    assert matched_volumes(tmp_path / "x.csv") == [[f"{tmp_path}/a.npy"]]


def test_a_file_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        matched_volumes(tmp_path / "x.csv")
