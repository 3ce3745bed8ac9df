"""Which volumes, labels and masks belong together: by their order, by patterns and by tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastpipe.errors import OptionError
from fastpipe.volumes.sources import ROLES, matched_volumes


def touched(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def test_several_volumes_are_matched_by_their_order() -> None:
    for path in ("a.zarr", Path("a.zarr"), np.zeros(3), "https://host/x.zarr?part=[1]*"):
        found = matched_volumes(path)
        assert list(found) == ["volume"] and len(found["volume"]) == 1
        assert found["volume"][0] is path
    masks = [np.zeros(1), np.ones(1)]
    found = matched_volumes(["a", "b"], mask=masks)
    assert list(found) == ["volume", "mask"]
    assert found["volume"] == ["a", "b"]
    assert found["mask"][1] is masks[1]
    table = matched_volumes([("a", "la", "ma"), ("b", "lb", "mb")])
    assert table == {"volume": ["a", "b"], "labels": ["la", "lb"], "mask": ["ma", "mb"]}
    assert list(table) == list(ROLES)
    assert matched_volumes([("a", "la")]) == {"volume": ["a"], "labels": ["la"]}
    assert matched_volumes([("a",), ("b",)]) == {"volume": ["a", "b"]}


@pytest.mark.parametrize(
    ("volume", "options", "said"),
    [
        ((), {}, "names no volumes"), ([()], {}, r"must be tuples \(volume, labels\[, mask\]\)"),
        ([("a", "b", "c", "d")], {}, "must be tuples"), ([("a", "b")], {"mask": "c"}, "columns of the table"),
    ],
)  # fmt: skip
def test_volumes_that_cannot_be_matched_are_refused(volume: Any, options: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        matched_volumes(volume, **options)


def test_paths_in_a_file_are_from_its_folder_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'mask,volume\nm/1,a b.zarr\n/abs/2,"x,y.zarr"\ns3://k/3,https://h/z.zarr\n'
    (tmp_path / "x.csv").write_text(text, encoding="utf-8-sig")  # with the mark that some spreadsheets write
    for path in (tmp_path / "x.csv", str(tmp_path / "x.csv")):
        assert matched_volumes(path) == {
            "volume": [f"{tmp_path}/a b.zarr", f"{tmp_path}/x,y.zarr", "https://h/z.zarr"],
            "mask": [f"{tmp_path}/m/1", "/abs/2", "s3://k/3"],
        }
    with pytest.raises(OptionError, match="columns of the table"):
        matched_volumes(tmp_path / "x.csv", labels="c")
    (tmp_path / "x.csv").write_text("volume\na.npy\n")
    monkeypatch.chdir(tmp_path)
    assert matched_volumes("x.csv") == {"volume": ["a.npy"]}
    with pytest.raises(FileNotFoundError):
        matched_volumes("none.csv")


def test_a_file_that_is_not_filled_in_is_refused(tmp_path: Path) -> None:
    for text, said in (
        ("labels\na\n", "must have a column volume"), ("volume,notes\na,b\n", "it has .*notes"),
        ("volume\n", "must have a column volume"), ("volume,labels\na,b\nc,\n", "row 3 is not filled in"),
        ("volume,labels\na\n", "row 2 is not filled in"), ("volume,labels\na,b,c\n", r"x\.csv"),
    ):  # fmt: skip
        (tmp_path / "x.csv").write_text(text)
        with pytest.raises(OptionError, match=said):
            matched_volumes(tmp_path / "x.csv")


def test_a_pattern_is_all_that_it_matches_in_natural_order(tmp_path: Path) -> None:
    cases = touched(tmp_path, *(f"{name}/{kind}.npy" for name in "bac" for kind in ("image", "labels")))
    found = matched_volumes(f"{cases}/*/image.npy", labels=cases / "*" / "labels.npy")
    images, labels = ([f"{cases}/{name}/{kind}.npy" for name in "abc"] for kind in ("image", "labels"))
    assert found == {"volume": images, "labels": labels}
    assert matched_volumes(f"{cases}/**/image.npy") == {"volume": images}
    found = matched_volumes([f"{cases}/b/*e.npy", f"{cases}/a/image.npy"])
    assert found == {"volume": [images[1], images[0]]}
    with pytest.raises(OptionError, match=r"labels='.*/\*\.zarr' matches nothing"):
        matched_volumes(f"{cases}/a/image.npy", labels=f"{cases}/*.zarr")
    # A path that exists is no pattern, nor is that of an array in a file, which may have any name.
    touched(tmp_path, "scan[1].npy", "x.h5")
    for name in ("scan[1].npy", "x.h5/x[1]", "x.h5/q?", "x.h5/a/*"):
        assert matched_volumes(f"{tmp_path}/{name}") == {"volume": [f"{tmp_path}/{name}"]}


def test_patterns_are_matched_by_what_their_wildcards_match(tmp_path: Path) -> None:
    """Numbers of several digits, with a suffix: by characters, the images come in another order than the labels."""
    images = touched(tmp_path, *(f"imagesTr/BRATS_{number}_0000.npy" for number in (1, 2, 10)))
    touched(tmp_path, *(f"labelsTr/BRATS_{number}.npy" for number in (1, 2, 10)))
    found = matched_volumes(
        f"{images}/imagesTr/*_0000.npy", f"{tmp_path}/labelsTr/*.npy", f"{tmp_path}//labelsTr/*.npy"
    )
    pairs = zip(found["volume"], found["labels"], strict=True)
    assert all(Path(image).name == f"{Path(labels).stem}_0000.npy" for image, labels in pairs)
    assert [Path(image).name[6:-9] for image in found["volume"]] == ["1", "2", "10"]
    assert list(map(Path, found["mask"])) == list(map(Path, found["labels"]))


@pytest.mark.parametrize(
    ("names", "volume", "labels"),
    [
        (("a/x[1]/1.npy", "a/x[1]/2.npy"), "a/*/?.npy", "b/*/?.npy"),
        (("a/1.npy", "a/p/q/1.npy", "a/p/2.npy"), "a/**/*.npy", "b/**/*.npy"),
        (("a/1.npy", "a/p/q/1.npy"), "a/**", "b/**"),
        (("a/x1.npy", "a/y2.npy", "a/z3.npy"), "a/[x-y][!3].npy", "b/??.npy"),
        (("a/1_a.npy", "a/2_a.npy"), "a/*_*.npy", "b/*_*.npy"),
    ],
)
def test_wildcards_of_every_kind_are_matched(tmp_path: Path, names: Any, volume: str, labels: str) -> None:
    touched(tmp_path, *names, *(name.replace("a/", "b/", 1) for name in names if "z" not in name))
    found = matched_volumes(f"{tmp_path}/{volume}", labels=f"{tmp_path}/{labels}")
    expected = [f"{tmp_path}/{name}" for name in sorted(names) if "z" not in name]
    assert [path for path in found["volume"] if path.endswith(".npy")] == expected
    pairs = zip(found["volume"], found["labels"], strict=True)
    assert all(second == first.replace(f"{tmp_path}/a", f"{tmp_path}/b") for first, second in pairs)


def test_an_ending_that_is_a_wildcard_does_not_count(tmp_path: Path) -> None:
    touched(tmp_path, "a/labels.npy", "b/labels.npy", "a/image.npy", "b/image.tif")
    images, labels = f"{tmp_path}/*/image.*", f"{tmp_path}/*/labels.npy"
    assert matched_volumes(images, labels) == {
        "volume": [f"{tmp_path}/a/image.npy", f"{tmp_path}/b/image.tif"],
        "labels": [f"{tmp_path}/a/labels.npy", f"{tmp_path}/b/labels.npy"],
    }
    (tmp_path / "a" / "image.tif").touch()
    with pytest.raises(OptionError, match=r"has both .*image\.npy' and .*image\.tif'"):
        matched_volumes(images, labels)


@pytest.mark.parametrize(
    ("volume", "labels", "said"),
    [
        ("l/*.npy", "l/1*.npy", r"labels='.*l/1\*.npy' has nothing for '1', of .*give a table"),
        ("i/*_0.npy", "l/*.npy", r"volume='.*' has nothing for '2', of '.*l/2.npy', and 0 more of la"),
        ("i/*.npy", "l/*.npy", r"labels='.*' has nothing for '1_0', .* give a table"),
        ("i/*_*.npy", "l/*.npy", r"equally many wildcards, got 2 in volume='.*', 1 in labels="),
    ],
)
def test_a_file_without_a_partner_is_named(tmp_path: Path, volume: str, labels: str, said: str) -> None:
    touched(tmp_path, "i/1_0.npy", "i/10_0.npy", "l/1.npy", "l/2.npy", "l/10.npy")
    with pytest.raises(OptionError, match=said):
        matched_volumes(f"{tmp_path}/{volume}", labels=f"{tmp_path}/{labels}")


def test_patterns_in_lists_and_tables_are_matched(tmp_path: Path) -> None:
    touched(tmp_path, "i/1_0.npy", "i/10_0.npy", "l/1.npy", "l/10.npy", "k/3.npy")
    images = [f"{tmp_path}/i/1_0.npy", f"{tmp_path}/i/10_0.npy", f"{tmp_path}/k/3.npy"]
    labels = [f"{tmp_path}/l/1.npy", f"{tmp_path}/l/10.npy", f"{tmp_path}/k/3.npy"]
    patterns = [f"{tmp_path}/i/*_0.npy", images[-1]], [f"{tmp_path}/l/*.npy", labels[-1]]
    (tmp_path / "x.csv").write_text("volume,labels\ni/*_0.npy,l/*.npy\nk/3.npy,k/*.npy\n")
    expected = {"volume": images, "labels": labels}
    assert matched_volumes(patterns[0], labels=patterns[1]) == expected
    assert matched_volumes(list(zip(*patterns, strict=True))) == expected
    assert matched_volumes(tmp_path / "x.csv") == expected
    assert matched_volumes(f"{tmp_path}/l/1*", labels=images[1::-1])["labels"] == images[1::-1]
    with pytest.raises(OptionError, match=r"volume= is a pattern, whose matches are in natural order"):
        matched_volumes(f"{tmp_path}/i/*", labels=labels[:2])
    with pytest.raises(OptionError, match=r"volume= and labels= cannot be matched, .*give a table"):
        matched_volumes(patterns[0], labels=f"{tmp_path}/l/*.npy")
    said = "equally many of volume, labels and mask, got 2 for volume=, 1 for"
    with pytest.raises(OptionError, match=said):
        matched_volumes([(patterns[0][0], "one"), ("one", patterns[1][0])])
