"""``FastImageFolder`` where ``torchvision.datasets.ImageFolder`` was."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from same import same
from torchvision import get_image_backend
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import pil_loader

from fastpipe import BadSamples, FastImageFolder
from fastpipe.errors import OptionError

pytestmark = pytest.mark.usefixtures("same_generators")

STEADY = v1.Compose([v1.Resize(40), v1.CenterCrop(32), v1.ToTensor()])


def test_the_signature_begins_as_image_folders() -> None:
    theirs = list(inspect.signature(ImageFolder).parameters.values())
    ours = list(inspect.signature(FastImageFolder).parameters.values())
    for mine, its in zip(ours, theirs, strict=False):
        assert (mine.name, mine.default, mine.kind) == (its.name, its.default, its.kind)
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in ours[len(theirs) :])


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
    assert ours.imgs is ours.samples
    assert repr(ours.transforms) == repr(theirs.transforms)
    assert len(ours) == len(theirs)
    assert set(vars(theirs)) <= set(dir(ours))
    for one in (ours, theirs):
        one.target_transform = v1.Lambda(str)
    assert repr(ours).rstrip() == repr(theirs).replace("ImageFolder", "FastImageFolder", 1).rstrip()


def _both(dataset: Any, index: int) -> Any:
    single = dataset[index]
    assert same(tuple(dataset.__getitems__([index])[0]), single)
    return single


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
        edit(ours)
        edit(theirs)
        assert len(ours) == len(theirs)
        assert list(ours.samples) == list(theirs.samples)
        for index in (0, 3, -1):
            assert same(_both(ours, index), theirs[index])


def test_options_changed_on_the_object_are_followed(tree: Path, tmp_path: Path) -> None:
    dataset = FastImageFolder(tree, STEADY)
    dataset[0]
    dataset.samples[0] = (str(tmp_path / "missing.jpg"), 0)
    dataset.bad_samples = BadSamples("replace")
    assert dataset[0][1] == 0
    assert dataset.__getitems__([0])[0][1] == 0
    dataset.threads = 3
    assert dataset._running().pool.threads == 3


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
        assert (ours.classes, ours.class_to_idx, len(ours)) == (
            theirs.classes,
            theirs.class_to_idx,
            len(theirs),
        )
        assert ours.samples == theirs.samples and ours.imgs is ours.samples
        assert ours.targets == theirs.targets
        assert same([tuple(one) for one in ours.__getitems__([2, 0])], [theirs[2], theirs[0]])
        assert len(list(torch.utils.data.DataLoader(ours, 3))) == -(-len(theirs) // 3)


@pytest.mark.parametrize("value", [0.5, "x", True, np.int32(3), 2**70, None, (1, 2)], ids=repr)
def test_classes_may_be_any_values(tree: Path, value: Any) -> None:
    def find(self: Any, directory: Any) -> Any:
        return ["class_000"], {"class_000": value}

    ours, theirs = (kind(tree) for kind in of_both(find_classes=find))
    assert ours.samples == theirs.samples
    assert list(map(repr, ours.targets)) == list(map(repr, theirs.targets))
    assert repr(ours[1][1]) == repr(theirs[1][1])


@pytest.mark.parametrize("value", [0.5, 2**70, None], ids=repr)
def test_an_edited_sample_is_replaced_like_the_others(tree: Path, tmp_path: Path, value: Any) -> None:
    ours = FastImageFolder(tree, bad_samples="replace")
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    ours.samples[1] = (ours.samples[1][0], value)
    ours.samples[2] = (str(tmp_path / "bad.jpg"), value)
    found = ours[2][1]
    assert found in list(ours.targets) or found == value


def test_a_loader_of_the_users_own_is_called(tree: Path) -> None:
    called: list[str] = []

    def load(path: str) -> Any:
        called.append(path)
        return Image.new("RGB", (50, 40), (1, 2, 3))

    dataset = FastImageFolder(tree, STEADY, loader=load)
    expected = ImageFolder(tree, STEADY, loader=load)[2]
    assert same(dataset[2], expected)
    assert same(dataset.__getitems__([2, 2]), [expected, expected])
    assert called == [dataset.samples[2][0]] * 4
    dataset.loader = ImageFolder(tree).loader
    assert not same(dataset[2], expected)


def test_another_image_backend_is_honoured(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_image_backend() == "PIL"
    stock = ImageFolder(tree, STEADY)[0]
    monkeypatch.setattr("torchvision.get_image_backend", lambda: "accimage")
    opened: list[str] = []
    monkeypatch.setattr(
        "torchvision.datasets.folder.accimage_loader", lambda path: opened.append(path) or pil_loader(path)
    )
    assert same(FastImageFolder(tree, STEADY)[0], stock)
    assert len(opened) == 1


def test_classes_may_be_chosen_in_any_order(tree: Path) -> None:
    dataset = FastImageFolder(tree, classes=["class_002", "class_000"])
    assert dataset.classes == ["class_002", "class_000"]
    assert dataset.class_to_idx == {"class_002": 0, "class_000": 1}
    assert sorted(set(dataset.targets)) == [0, 1]
    for path, target in dataset.samples:
        assert Path(path).parent.name == dataset.classes[target]
    for classes in ([], ["class_000", "nowhere"], ["class_000", "class_000"]):
        with pytest.raises(OptionError, match="classes"):
            FastImageFolder(tree, classes=classes)


def _error(make: Callable[[], Any]) -> tuple[type[BaseException], str]:
    with pytest.raises(Exception) as caught:
        make()
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize("kind", ["missing", "no classes", "a file", "empty class"])
def test_errors_are_image_folders(tmp_path: Path, kind: str) -> None:
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
    for arguments in ({}, {"is_valid_file": lambda path: path.endswith(".none")}):
        assert _error(lambda: FastImageFolder(root, **arguments)) == _error(
            lambda: ImageFolder(root, **arguments)
        )


def test_allow_empty_and_is_valid_file_are_those_of_image_folder(tree: Path, tmp_path: Path) -> None:
    for name in ("full", "void"):
        (tmp_path / name).mkdir()
    (tmp_path / "full/a.jpg").write_bytes(b"x")
    valid = lambda path: path.endswith("2.jpg")  # noqa: E731
    for root, options in ((tmp_path, {"allow_empty": True}), (tree, {"is_valid_file": valid})):
        ours, theirs = FastImageFolder(root, **options), ImageFolder(root, **options)
        assert (ours.samples, ours.classes, ours.extensions) == (
            theirs.samples,
            theirs.classes,
            theirs.extensions,
        )


def test_memory_format_sets_the_strides_of_batches(tree: Path) -> None:
    plain, last = (
        FastImageFolder(tree, STEADY),
        FastImageFolder(tree, STEADY, memory_format=torch.channels_last),
    )
    images, _ = torch.utils.data.default_collate(last.__getitems__([0, 1]))
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images, torch.utils.data.default_collate(plain.__getitems__([0, 1]))[0])
    with pytest.raises(OptionError, match=r"must be .*channels_last, got torch\.preserve_format"):
        plain.memory_format = torch.preserve_format
