"""``FastImageFolder.from_samples`` where a script's own ``Dataset`` of images was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import torch
from dataset_kinds import KINDS, STEADY, OwnImages
from same import same
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from fastpipe import FastImageFolder, FastLoader
from fastpipe.core.sample_tables import SampleTable
from fastpipe.errors import OptionError

TARGETS: dict[str, Any] = {
    "class": lambda n: n % 3, "int64 of NumPy": lambda n: np.int64(n % 3), "int16 of NumPy": np.int16,
    "number": lambda n: n / 7, "number of NumPy": lambda n: np.float32(n / 7), "text": str,
    "flag": lambda n: n % 2 == 0, "pair": lambda n: (n, n / 3), "tensor": lambda n: torch.arange(3) + n,
    "array": lambda n: np.arange(4, dtype=np.float32) + n,
    "dict": lambda n: {"id": n, "box": np.full(4, n), "name": f"photo {n}"},
}  # fmt: skip


def _table(folder: Path, kind: str = "class") -> list[tuple[Any, Any]]:
    made = TARGETS.get(kind, lambda number: 2**70 + number)  # "beyond int64", which torch cannot collate
    return [(path, made(number)) for number, path in enumerate(sorted(folder.rglob("*.jpg")))]


@pytest.mark.few(6)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", TARGETS)
def test_batches_are_those_of_the_replaced_dataset(photo_tree: Path, kind: str, workers: int) -> None:
    table = _table(photo_tree, kind)
    ours = FastImageFolder.from_samples(table, STEADY)
    assert isinstance(ours, ImageFolder) and len(ours) == len(table)
    theirs = list(DataLoader(OwnImages(table, STEADY), batch_size=5))
    fast = FastLoader(ours, 5, num_workers=workers, workers="processes")
    for loader in (fast, DataLoader(ours, 5), fast.reference()):
        assert same(list(loader), theirs)


def test_targets_are_those_given(photo_tree: Path) -> None:
    assert isinstance(FastImageFolder.from_samples(_table(photo_tree)).samples, SampleTable)
    for kind in ("class", "int64 of NumPy", "int16 of NumPy", "beyond int64", "number", "flag", "text"):
        table = _table(photo_tree, kind)
        ours = FastImageFolder.from_samples(iter(table))
        assert list(ours.targets) == [target for _, target in table]
        assert list(ours.samples) == list(ours.imgs) == [(str(path), target) for path, target in table]
        assert all(type(mine) is type(target) for mine, (_, target) in zip(ours.targets, table, strict=True))
        assert type(ours[1][1]) is type(table[1][1])


def test_target_transform_gets_the_given_target(photo_tree: Path) -> None:
    for kind in ("int64 of NumPy", "beyond int64", "flag", "array"):
        table = _table(photo_tree, kind)
        assert FastImageFolder.from_samples(table, STEADY, type)[2][1] is type(table[2][1])
    table = _table(photo_tree, "beyond int64")
    big = FastImageFolder.from_samples(table, STEADY, lambda target: target % 5)
    found = torch.cat([targets for _, targets in FastLoader(big, 4)])
    assert found.tolist() == [target % 5 for _, target in table]


@pytest.mark.parametrize("kind", ["mixed", "beyond int64"])
def test_only_equal_targets_replace_each_other(photo_tree: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    good = sorted(photo_tree.rglob("*.jpg"))[:4]
    targets: list[Any] = [1, "1", "1", 1, 1] if kind == "mixed" else [2**63, 2**63 + 1, -1, 2**63, 2**63 + 1]
    table = zip([tmp_path / "bad.jpg", *good], targets, strict=True)
    ours = FastImageFolder.from_samples(table, bad_samples="replace", seed=0)
    assert ours[0][1] == targets[0] and type(ours[0][1]) is int


@pytest.mark.parametrize("kind", ["number", "dict", "tuple of a table"])
@pytest.mark.parametrize("transform", [None, STEADY])
def test_a_replacement_brings_its_own_target(
    photo_tree: Path, tmp_path: Path, kind: str, transform: Any
) -> None:
    files, made = [tmp_path / "bad.jpg", *sorted(photo_tree.rglob("*.jpg"))[:3]], TARGETS.get(kind, float)
    files[0].write_bytes(b"no image")
    given: Any = [(file, made(number)) for number, file in enumerate(files)]
    how: dict[str, Any] = {"bad_samples": "replace", "seed": 0}
    if kind == "tuple of a table":
        given = [{"file": file, "x": x} for file, x in given]
        how |= {"image": "file", "target": ["x"]}
    ours = FastImageFolder.from_samples(given, transform, **how)
    expected = [ours[n] for n in (1, 2, 3)]
    made_here = ours[0], ours.__getitems__([0, 2])[0], next(iter(FastLoader(ours, 2, collate_fn=list)))[0]
    for sample in made_here:
        assert any(same(tuple(sample), other) for other in expected)
    image, described = FastImageFolder.from_samples(given, transform, str, **how)[0]
    assert any(same((image, described), (other, str(target))) for other, target in expected)


def test_relative_paths_begin_in_root(photo_tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = [(path.relative_to(photo_tree), target) for path, target in _table(photo_tree)]
    there = FastImageFolder.from_samples(table, STEADY, root=photo_tree)
    assert there.root == str(photo_tree)
    monkeypatch.chdir(photo_tree)
    assert same(there[4], FastImageFolder.from_samples(table, STEADY)[4])


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ([], {}, "has no samples"), ([("a.jpg", 0), ("b.jpg",)], {}, r"\[1\] must be \(path, target\)"),
        ([("a.jpg", 0), 5], {}, r"\[1\] must be \(path, target\)"), ([(0, "a.jpg")], {}, r"got \(0, 'a.jpg'\)"),
        ([("s3://bucket/a.jpg", 0)], {}, "file of this machine"),
        ([("a.jpg", 0)], {"root": "s3://bucket"}, "file of this machine"),
        ([("a.jpg", 0)], {"stage": "x"}, "stage= applies to images found in a folder"),
        ([("a.jpg", 0)], {"allow_empty": True}, "allow_empty="),
        ([("a.jpg", 0)], {"classes": "ab"}, "names of classes"), ([("a.jpg", 0)], {"threads": 0}, "threads must be"),
    ],
)  # fmt: skip
def test_samples_that_cannot_be_are_named(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        FastImageFolder.from_samples(arguments, **options)


def test_shards_are_named_by_a_list_or_a_pattern_and_have_no_root(tmp_path: Path) -> None:
    KINDS["images in shards"].write(tmp_path)
    paths = [str(tmp_path / f"shard-{number}.tar") for number in range(3)]
    given = {"image": "jpg", "target": "__key__"}
    for shards in (
        paths,
        tuple(map(Path, paths)),
        f"{tmp_path}/shard-*.tar",
        f"{tmp_path}/shard-{{0..2}}.tar",
    ):
        dataset = FastImageFolder.from_samples(shards, **given)  # type: ignore[arg-type]
        assert dataset.targets == [f"{number:03}" for number in range(15)]
    assert len(FastImageFolder.from_samples(paths[1], **given)) == 5
    with pytest.raises(OptionError, match="archives contain their images, so leave root= out"):
        FastImageFolder.from_samples(paths, root=tmp_path, **given)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="a table needs the names of two columns"):
        FastImageFolder.from_samples(paths[0])
    with pytest.raises(OptionError, match="must be a file of this machine"):
        FastImageFolder.from_samples(["s3://bucket/x.tar", paths[0]], **given)  # type: ignore[arg-type]


def _grow(folder: Path) -> None:
    with (folder / "shard-1.tar").open("ab") as file:
        file.write(bytes(10240))


def _put(folder: Path) -> None:
    with lmdb.open(str(folder / "x.lmdb"), map_size=1 << 24) as env, env.begin(write=True) as txn:
        txn.put(b"more", b"x")


@pytest.mark.parametrize("policy", ["raise", "skip", "replace"])
@pytest.mark.parametrize(("name", "change"), [("images in shards", _grow), ("images in an LMDB", _put)])
def test_an_archive_that_changes_is_an_error_with_every_policy(
    tmp_path: Path, name: str, change: Any, policy: Any
) -> None:
    kind = KINDS[name]
    kind.write(tmp_path)
    dataset = kind.fast(tmp_path, bad_samples=policy)
    loader = FastLoader(dataset, 5)
    assert len(list(loader)) == 3
    change(tmp_path)
    with pytest.raises(OSError, match="the archive has changed since it was listed: make the dataset anew"):
        list(loader)
    assert len(list(FastLoader(kind.fast(tmp_path), 5))) == 3


def test_a_zip_file_needs_torchvisions_loader(tmp_path: Path) -> None:
    KINDS["images in a zip file"].write(tmp_path)
    with pytest.raises(OptionError, match=r"a custom loader.*opens files, and .* has none"):
        FastImageFolder(tmp_path / "tree.zip" / "tree", loader=lambda path: None)
    with pytest.raises(FileNotFoundError, match="Couldn't find any class folder"):
        FastImageFolder(tmp_path / "tree.zip" / "other")
    with pytest.raises(OptionError, match="stage= copies single files"):
        FastImageFolder(tmp_path / "tree.zip", stage=tmp_path / "stage")
    chosen = FastImageFolder(tmp_path / "tree.zip" / "tree", classes=["class_002", "class_000"])
    assert chosen.classes == ["class_002", "class_000"] and chosen.targets[0] == 1 and len(chosen) == 10
