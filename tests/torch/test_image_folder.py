"""``FastImageFolder`` where ``torchvision.datasets.ImageFolder`` was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dataset_kinds import STEADY
from same import same
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import pil_loader

from fastpipe import BadSamples, FastImageFolder
from fastpipe.errors import OptionError

pytestmark = pytest.mark.usefixtures("same_generators")


@pytest.mark.parametrize("as_text", [True, False])
def test_attributes_are_those_of_image_folder(tree: Path, as_text: bool) -> None:
    root = str(tree) if as_text else tree
    double = lambda target: target * 2  # noqa: E731
    ours, theirs = FastImageFolder(root, STEADY, double), ImageFolder(root, STEADY, double)
    for name in ("root", "transform", "target_transform", "loader", "extensions", "classes", "class_to_idx"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in ("samples", "targets", "imgs"):
        assert list(getattr(ours, name)) == getattr(theirs, name), name
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.imgs is ours.samples and repr(ours.transforms) == repr(theirs.transforms)
    assert len(ours) == len(theirs) and set(vars(theirs)) <= set(dir(ours))
    for one in (ours, theirs):
        one.target_transform = v1.Lambda(str)
    assert repr(ours).rstrip() == repr(theirs).replace("ImageFolder", "FastImageFolder", 1).rstrip()


def test_edits_of_samples_are_seen(tree: Path) -> None:
    ours, theirs = FastImageFolder(tree, STEADY), ImageFolder(tree, STEADY)
    for edit in (
        lambda d: d.samples.__setitem__(0, (d.samples[9][0], 77)),
        lambda d: d.imgs.append((d.samples[2][0], 5)),
        lambda d: d.samples.reverse(),
        lambda d: d.samples.__delitem__(slice(0, 4)),
        lambda d: d.samples.sort(key=lambda sample: sample[0][-5:]),
        lambda d: setattr(d, "samples", [(Path(path), target) for path, target in d.samples][:6]),
        lambda d: d.samples.insert(0, d.samples[-1]),
    ):
        edit(ours), edit(theirs)
        assert len(ours) == len(theirs) and list(ours.samples) == list(theirs.samples)
        for index in (0, 3, -1):
            single, (several,) = ours[index], ours.__getitems__([index])
            assert same(single, theirs[index]) and same(tuple(several), theirs[index])


def test_options_changed_on_the_object_are_followed(tree: Path, tmp_path: Path) -> None:
    dataset = FastImageFolder(tree, STEADY)
    dataset[0]
    dataset.samples[0] = (str(tmp_path / "missing.jpg"), 0)
    dataset.bad_samples = BadSamples("replace")
    assert dataset[0][1] == dataset.__getitems__([0])[0][1] == 0
    dataset.threads = 3
    assert dataset._running().pool.threads == 3
    with pytest.raises(OptionError, match=r"must be .*channels_last, got torch\.preserve_format"):
        dataset.memory_format = torch.preserve_format


def of_both(**methods: Any) -> tuple[Any, Any]:
    """Subclasses of both that have these methods."""
    return type("Ours", (FastImageFolder,), methods), type("Theirs", (ImageFolder,), methods)


def test_methods_of_a_subclass_are_used(tree: Path) -> None:
    def getitem(self: Any, index: int) -> Any:
        return (*super(type(self), self).__getitem__(index), index)

    def find(self: Any, directory: Any) -> Any:
        return ["class_002", "class_000"], {"class_002": 0, "class_000": 1}

    def make(directory: Any, class_to_idx: Any, extensions: Any = None, *_: Any, **__: Any) -> Any:
        assert extensions
        return [(str(path), 5) for path in sorted(Path(directory).rglob("*0001.jpg"))]

    for methods in (
        {"__getitem__": getitem}, {"__len__": lambda self: 4}, {"find_classes": find}, {"make_dataset": staticmethod(make)}
    ):  # fmt: skip
        ours, theirs = (kind(tree, STEADY) for kind in of_both(**methods))
        assert (ours.classes, ours.class_to_idx) == (theirs.classes, theirs.class_to_idx)
        assert len(ours) == len(theirs) and ours.imgs is ours.samples
        assert ours.samples == theirs.samples and ours.targets == theirs.targets
        assert same([tuple(one) for one in ours.__getitems__([2, 0])], [theirs[2], theirs[0]])
        assert len(list(torch.utils.data.DataLoader(ours, 3))) == -(-len(theirs) // 3)


@pytest.mark.parametrize("value", [0.5, "x", True, np.int32(3), 2**70, None, (1, 2)], ids=repr)
def test_classes_may_be_any_values(tree: Path, value: Any) -> None:
    finds = of_both(find_classes=lambda self, directory: (["class_000"], {"class_000": value}))
    ours, theirs = (kind(tree) for kind in finds)
    assert ours.samples == theirs.samples
    assert list(map(repr, ours.targets)) == list(map(repr, theirs.targets))
    assert repr(ours[1][1]) == repr(theirs[1][1])


@pytest.mark.parametrize("value", [0.5, 2**70, None], ids=repr)
def test_an_edited_sample_is_replaced_like_the_others(tree: Path, tmp_path: Path, value: Any) -> None:
    ours = FastImageFolder(tree, bad_samples="replace")
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    ours.samples[1] = (ours.samples[1][0], value)
    ours.samples[2] = (str(tmp_path / "bad.jpg"), value)
    assert ours[2][1] in [*ours.targets, value]


def test_another_image_backend_is_honoured(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, opened = ImageFolder(tree, STEADY)[0], []
    monkeypatch.setattr("torchvision.get_image_backend", lambda: "accimage")
    load = lambda path: opened.append(path) or pil_loader(path)  # noqa: E731
    monkeypatch.setattr("torchvision.datasets.folder.accimage_loader", load)
    assert same(FastImageFolder(tree, STEADY)[0], stock) and len(opened) == 1


def _error(make: Callable[[], Any]) -> tuple[type[BaseException], str]:
    with pytest.raises(Exception) as caught:
        make()
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize("kind", ["missing", "no classes", "a file", "empty class"])
def test_errors_and_options_are_image_folders(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "root"
    if kind == "a file":
        root.write_text("x")
    elif kind != "missing":
        root.mkdir()
        (root / "stray.jpg").write_bytes(b"x")
    if kind == "empty class":
        for name in ("full", "void", "wrong"):
            (root / name).mkdir()
        (root / "full/a.JPG").write_bytes(b"x")
        (root / "wrong/a.txt").write_bytes(b"x")
        ours, theirs = (each(root, allow_empty=True) for each in (FastImageFolder, ImageFolder))
        assert (ours.samples, ours.classes) == (theirs.samples, theirs.classes)
    for arguments in ({}, {"is_valid_file": lambda path: path.endswith(".none")}):
        ours, theirs = (_error(lambda: each(root, **arguments)) for each in (FastImageFolder, ImageFolder))
        assert ours == theirs


def test_is_valid_file_is_that_of_image_folder(tree: Path) -> None:
    valid = lambda path: path.endswith("2.jpg")  # noqa: E731
    ours, theirs = FastImageFolder(tree, is_valid_file=valid), ImageFolder(tree, is_valid_file=valid)
    assert (ours.samples, ours.extensions) == (theirs.samples, theirs.extensions)
