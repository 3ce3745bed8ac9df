"""``FastImageFolder`` where ``torchvision.datasets.ImageFolder`` was."""

from __future__ import annotations

import copy
import inspect
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import get_image_backend
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import pil_loader
from torchvision.transforms import v2

from fastpipe import BadSamples, Decode, FastImageFolder
from fastpipe.errors import OptionError

pytestmark = pytest.mark.usefixtures("same_generators")

STEADY = v1.Compose([v1.Resize(40), v1.CenterCrop(32), v1.ToTensor()])
RANDOM = v1.Compose([v1.RandomResizedCrop(24), v1.RandomHorizontalFlip(), v1.ToTensor()])


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return type(a) is type(b) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Image.Image):
        return type(a) is type(b) and a.mode == b.mode and a.tobytes() == b.tobytes()
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


# ---- the same object -----------------------------------------------------------------------------


def test_it_is_an_image_folder() -> None:
    assert issubclass(FastImageFolder, ImageFolder)


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


def test_repr_differs_in_the_name_alone(tree: Path) -> None:
    for arguments in ({}, {"transform": STEADY}, {"transform": RANDOM, "target_transform": v1.Lambda(str)}):
        expected = repr(ImageFolder(tree, **arguments)).replace("ImageFolder", "FastImageFolder", 1)
        ours = repr(FastImageFolder(tree, **arguments))
        assert ours.rstrip() == expected.rstrip()


def test_repr_shows_options_that_change_something(tree: Path) -> None:
    text = repr(FastImageFolder(tree, seed=5, decode=Decode(exif=True), bad_samples="skip"))
    for part in ("Seed: 5", "Decode(exif=True)", "BadSamples(policy='skip')"):
        assert part in text


# ---- samples -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "transform", [None, STEADY, v1.ToTensor(), v1.Resize(20), v2.Compose([v2.ToImage()])], ids=str
)
def test_samples_are_image_folders(tree: Path, transform: Any) -> None:
    ours, theirs = FastImageFolder(tree, transform), ImageFolder(tree, transform)
    indices = [0, 7, 7, -1, 14, 3]
    expected = [theirs[i] for i in indices]
    assert _equal([ours[i] for i in indices], expected)
    assert _equal([tuple(one) for one in ours.__getitems__(indices)], expected)


def test_without_a_transform_samples_are_pil_images(tree: Path) -> None:
    image, target = FastImageFolder(tree)[3]
    assert type(image) is Image.Image
    assert (image.mode, type(target)) == ("RGB", int)


def test_single_samples_are_plain_tuples(tree: Path) -> None:
    assert type(FastImageFolder(tree, STEADY)[0]) is tuple


def test_random_transforms_follow_manual_seed(tree: Path) -> None:
    dataset = FastImageFolder(tree, RANDOM)
    torch.manual_seed(3)
    first, other = dataset[2], dataset[2]
    torch.manual_seed(3)
    assert _equal(dataset[2], first)
    assert not _equal(first, other)
    torch.manual_seed(3)
    assert _equal(tuple(dataset.__getitems__([2])[0]), first)


@pytest.mark.parametrize(
    "index",
    [np.int64(4), np.uint8(4), np.array(4), torch.tensor(4), torch.tensor(4, dtype=torch.int32), True, -3],
)
def test_any_integer_is_an_index(tree: Path, index: Any) -> None:
    ours, theirs = FastImageFolder(tree, STEADY), ImageFolder(tree, STEADY)
    assert _equal(ours[index], theirs[int(index)])
    assert _equal(tuple(ours.__getitems__([index])[0]), theirs[int(index)])


@pytest.mark.parametrize("index", [15, -16, 10**12, np.int64(15)])
def test_an_index_out_of_range(tree: Path, index: Any) -> None:
    dataset = FastImageFolder(tree, STEADY)
    with pytest.raises(IndexError, match="15"):
        dataset[index]
    with pytest.raises(IndexError, match="15"):
        dataset.__getitems__([0, index])


@pytest.mark.parametrize("index", [1.0, "1", None, [1]])
def test_what_is_no_index(tree: Path, index: Any) -> None:
    dataset = FastImageFolder(tree, STEADY)
    with pytest.raises(TypeError):
        dataset[index]
    with pytest.raises(TypeError):
        dataset.__getitems__([index])


def test_a_loop_over_the_dataset_ends(tree: Path) -> None:
    assert _equal(list(FastImageFolder(tree, STEADY)), list(ImageFolder(tree, STEADY)))


def test_no_indices(tree: Path) -> None:
    assert FastImageFolder(tree, STEADY).__getitems__([]) == []
    assert FastImageFolder(tree, bad_samples="skip").__getitems__([]) == []


def test_indices_of_any_kind(tree: Path) -> None:
    dataset = FastImageFolder(tree, STEADY)
    expected = [tuple(one) for one in dataset.__getitems__([1, 5, 2])]
    for indices in ((1, 5, 2), np.array([1, 5, 2]), torch.tensor([1, 5, 2])):
        assert _equal([tuple(one) for one in dataset.__getitems__(indices)], expected)


# ---- live edits ----------------------------------------------------------------------------------


def _both(dataset: Any, index: int) -> Any:
    single = dataset[index]
    assert _equal(tuple(dataset.__getitems__([index])[0]), single)
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
            assert _equal(_both(ours, index), theirs[index])


def test_edits_of_targets_change_what_they_change_in_image_folder(tree: Path) -> None:
    ours, theirs = FastImageFolder(tree, STEADY), ImageFolder(tree, STEADY)
    for dataset in (ours, theirs):
        dataset.targets[0] = 99
        dataset.targets = [target + 1 for target in dataset.targets]
    assert ours.targets == theirs.targets
    assert _equal(_both(ours, 0), theirs[0])


def test_a_new_transform_is_used_at_once(tree: Path) -> None:
    ours, theirs = FastImageFolder(tree, STEADY), ImageFolder(tree, STEADY)
    assert _equal(_both(ours, 1), theirs[1])
    for transform in (None, v1.Resize((20, 10)), lambda image: image.size, v1.ToTensor()):
        ours.transform = theirs.transform = transform
        assert _equal(_both(ours, 1), theirs[1])
    ours.target_transform = theirs.target_transform = str
    assert _equal(_both(ours, 1), theirs[1])


def test_a_transform_changed_in_place_is_followed(tree: Path) -> None:
    transform = v1.Compose(
        [v1.Resize(40), v1.CenterCrop(32), v1.ToTensor(), v1.Normalize([0.5] * 3, [0.5] * 3)]
    )
    ours, theirs = FastImageFolder(tree, transform), ImageFolder(tree, transform)
    assert _equal(_both(ours, 1), theirs[1])
    for edit in (
        lambda: setattr(transform.transforms[1], "size", (20, 16)),
        lambda: setattr(transform.transforms[3], "mean", [0.1, 0.2, 0.3]),
        lambda: transform.transforms.pop(),
        lambda: transform.transforms.insert(0, v1.Grayscale(3)),
        lambda: setattr(transform.transforms[1], "interpolation", v1.InterpolationMode.NEAREST),
    ):
        edit()
        image, target = theirs[1]
        ours_image, ours_target = _both(ours, 1)
        assert target == ours_target
        assert ours_image.shape == image.shape
        assert torch.allclose(ours_image, image, atol=1.5 / 255)


def test_options_changed_on_the_object_are_followed(tree: Path, tmp_path: Path) -> None:
    dataset = FastImageFolder(tree, STEADY)
    dataset[0]
    dataset.samples[0] = (str(tmp_path / "missing.jpg"), 0)
    dataset.bad_samples = BadSamples("replace")
    assert dataset[0][1] == 0
    assert dataset.__getitems__([0])[0][1] == 0
    dataset.threads = 3
    assert dataset._running().pool.threads == 3


# ---- subclasses and options that make samples in their own way -------------------------------------


def test_getitem_of_a_subclass_wins(tree: Path) -> None:
    class Indexed(FastImageFolder):
        def __getitem__(self, index: int) -> Any:
            return (*super().__getitem__(index), index)

    class Other(ImageFolder):
        def __getitem__(self, index: int) -> Any:
            return (*super().__getitem__(index), index)

    ours, theirs = Indexed(tree, STEADY), Other(tree, STEADY)
    assert _equal(ours[4], theirs[4])
    assert _equal(ours.__getitems__([4, 1]), [theirs[4], theirs[1]])


def test_len_of_a_subclass_wins(tree: Path) -> None:
    class Short(FastImageFolder):
        def __len__(self) -> int:
            return 4

    dataset = Short(tree, STEADY)
    assert len(dataset) == 4
    assert len(list(torch.utils.data.DataLoader(dataset, batch_size=3))) == 2
    assert _equal(dataset[10], ImageFolder(tree, STEADY)[10])


def test_find_classes_of_a_subclass_wins(tree: Path) -> None:
    def find(self: Any, directory: Any) -> Any:
        return ["class_002", "class_000"], {"class_002": 0, "class_000": 1}

    ours = type("Ours", (FastImageFolder,), {"find_classes": find})(tree)
    theirs = type("Theirs", (ImageFolder,), {"find_classes": find})(tree)
    assert (ours.classes, ours.class_to_idx) == (theirs.classes, theirs.class_to_idx)
    assert ours.samples == theirs.samples
    assert ours.targets == theirs.targets


@pytest.mark.parametrize("value", [0.5, "x", True, np.int32(3), 2**70, None, (1, 2)], ids=repr)
def test_classes_may_be_any_values(tree: Path, value: Any) -> None:
    def find(self: Any, directory: Any) -> Any:
        return ["class_000"], {"class_000": value}

    ours = type("Ours", (FastImageFolder,), {"find_classes": find})(tree)
    theirs = type("Theirs", (ImageFolder,), {"find_classes": find})(tree)
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


def test_make_dataset_of_a_subclass_wins(tree: Path) -> None:
    def make(
        directory: Any,
        class_to_idx: Any,
        extensions: Any = None,
        is_valid_file: Any = None,
        allow_empty: Any = 0,
    ) -> Any:
        assert extensions
        return [(str(path), 5) for path in sorted(Path(directory).rglob("*0001.jpg"))]

    ours = type("Ours", (FastImageFolder,), {"make_dataset": staticmethod(make)})(tree, STEADY)
    theirs = type("Theirs", (ImageFolder,), {"make_dataset": staticmethod(make)})(tree, STEADY)
    assert ours.samples == theirs.samples
    assert ours.imgs is ours.samples
    assert ours.targets == theirs.targets == [5] * 3
    assert _equal([tuple(one) for one in ours.__getitems__([2, 0])], [theirs[2], theirs[0]])


def test_a_loader_of_the_users_own_is_called(tree: Path) -> None:
    called: list[str] = []

    def load(path: str) -> Any:
        called.append(path)
        return Image.new("RGB", (50, 40), (1, 2, 3))

    dataset = FastImageFolder(tree, STEADY, loader=load)
    expected = ImageFolder(tree, STEADY, loader=load)[2]
    assert _equal(dataset[2], expected)
    assert _equal(dataset.__getitems__([2, 2]), [expected, expected])
    assert called == [dataset.samples[2][0]] * 4
    dataset.loader = ImageFolder(tree).loader
    assert not _equal(dataset[2], expected)


def test_target_transform_sees_each_target_in_order(tree: Path) -> None:
    seen: list[int] = []

    def remember(target: int) -> str:
        seen.append(target)
        return f"class {target}"

    dataset = FastImageFolder(tree, STEADY, remember)
    assert [target for _, target in dataset.__getitems__([14, 0, 6])] == ["class 2", "class 0", "class 1"]
    assert seen == [2, 0, 1]
    assert all(type(target) is int for target in seen)


def test_transforms_of_the_base_class_are_kept(tree: Path) -> None:
    dataset = FastImageFolder(tree, STEADY, str)
    image, target = dataset.transforms(dataset.loader(dataset.samples[0][0]), 0)
    assert _equal((image, target), dataset[0])


def test_another_image_backend_is_honoured(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_image_backend() == "PIL"
    stock = ImageFolder(tree, STEADY)[0]
    monkeypatch.setattr("torchvision.get_image_backend", lambda: "accimage")
    opened: list[str] = []
    monkeypatch.setattr(
        "torchvision.datasets.folder.accimage_loader", lambda path: opened.append(path) or pil_loader(path)
    )
    assert _equal(FastImageFolder(tree, STEADY)[0], stock)
    assert len(opened) == 1


# ---- classes -------------------------------------------------------------------------------------


def test_some_classes_in_the_users_order(tree: Path) -> None:
    dataset = FastImageFolder(tree, classes=["class_002", "class_000"])
    assert dataset.classes == ["class_002", "class_000"]
    assert dataset.class_to_idx == {"class_002": 0, "class_000": 1}
    assert sorted(set(dataset.targets)) == [0, 1]
    for path, target in dataset.samples:
        assert Path(path).parent.name == dataset.classes[target]


@pytest.mark.parametrize("classes", [[], ["class_000", "nowhere"], ["class_000", "class_000"]])
def test_classes_that_cannot_work(tree: Path, classes: list[str]) -> None:
    with pytest.raises(OptionError, match="classes"):
        FastImageFolder(tree, classes=classes)


# ---- errors -----------------------------------------------------------------------------------


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


def test_allow_empty(tmp_path: Path) -> None:
    for name in ("full", "void"):
        (tmp_path / name).mkdir()
    (tmp_path / "full/a.jpg").write_bytes(b"x")
    ours, theirs = FastImageFolder(tmp_path, allow_empty=True), ImageFolder(tmp_path, allow_empty=True)
    assert ours.samples == theirs.samples
    assert ours.classes == theirs.classes


def test_is_valid_file(tree: Path) -> None:
    valid = lambda path: path.endswith("2.jpg")  # noqa: E731
    ours, theirs = FastImageFolder(tree, is_valid_file=valid), ImageFolder(tree, is_valid_file=valid)
    assert ours.samples == theirs.samples
    assert ours.extensions == theirs.extensions is None


@pytest.mark.parametrize(
    "options",
    [{"threads": 0}, {"threads": "many"}, {"threads": 1.5}, {"memory_format": torch.preserve_format},
     {"bad_samples": "ignore"}],
    ids=str,
)  # fmt: skip
def test_options_that_cannot_work(tree: Path, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="must be"):
        FastImageFolder(tree, **options)


@pytest.mark.parametrize("seed", [1.5, "1"])
def test_a_seed_must_be_an_integer(tree: Path, seed: Any) -> None:
    with pytest.raises(TypeError):
        FastImageFolder(tree, seed=seed)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same(tree: Path, threads: int) -> None:
    dataset = FastImageFolder(tree, RANDOM, threads=threads)
    torch.manual_seed(0)
    several = [image.sum().item() for image, _ in dataset.__getitems__(list(range(15)))]
    torch.manual_seed(0)
    assert several == [
        image.sum().item() for image, _ in FastImageFolder(tree, RANDOM, threads=1).__getitems__(range(15))
    ]


def test_memory_format(tree: Path) -> None:
    plain, last = (
        FastImageFolder(tree, STEADY),
        FastImageFolder(tree, STEADY, memory_format=torch.channels_last),
    )
    images, _ = torch.utils.data.default_collate(last.__getitems__([0, 1]))
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images, torch.utils.data.default_collate(plain.__getitems__([0, 1]))[0])


# ---- copies and processes --------------------------------------------------------------------------


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda d: pickle.loads(pickle.dumps(d))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies_work_on_their_own(tree: Path, duplicate: Callable[[Any], Any], used: bool) -> None:
    dataset = FastImageFolder(tree, STEADY, seed=3, bad_samples="skip", threads=2)
    if used:
        dataset.__getitems__([0, 1])
    copied = duplicate(dataset)
    assert copied.imgs is copied.samples
    assert (copied.samples, copied.targets, copied.classes) == (
        dataset.samples,
        dataset.targets,
        dataset.classes,
    )
    assert (copied.seed, copied.bad_samples, copied.threads) == (3, BadSamples("skip"), 2)
    assert _equal([tuple(one) for one in copied.__getitems__([3, 4])], [dataset[3], dataset[4]])
    if duplicate is not copy.copy:
        copied.samples.pop()
        assert len(dataset) == 15


def _sum_of(dataset: Any, index: int, answers: Any) -> None:
    answers.put(float(dataset.__getitems__([index, 0])[0][0].sum()))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_another_process_has_threads_of_its_own(tree: Path, method: str) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"run it where processes can {method}")
    context = multiprocessing.get_context(method)
    dataset = FastImageFolder(tree, v1.Compose([v1.CenterCrop(16), v1.PILToTensor()]), threads=2)
    expected = float(dataset.__getitems__([4, 0])[0][0].sum())
    answers = context.SimpleQueue()
    process = context.Process(target=_sum_of, args=(dataset, 4, answers))
    process.start()
    assert answers.get() == expected
    process.join(60)
    assert process.exitcode == 0
    answers.close()


def test_threads_end_with_the_dataset(tree: Path) -> None:
    before = set(threading.enumerate())
    dataset = FastImageFolder(tree, STEADY, threads=3, decode=Decode(backend="pillow"))  # in Python's threads
    dataset.__getitems__([0, 1, 2, 3])
    started = [thread for thread in threading.enumerate() if thread not in before]
    assert len(started) == 3
    del dataset
    for thread in started:
        thread.join(60)
        assert not thread.is_alive()


def test_a_dataset_may_be_used_by_many_threads_from_the_first_moment(tree: Path) -> None:
    expected = ImageFolder(tree, STEADY)[3]
    for _ in range(5):
        dataset, start, wrong = FastImageFolder(tree, STEADY, threads=2), threading.Barrier(6), []

        def work(dataset: Any = dataset, start: Any = start, wrong: Any = wrong) -> None:
            start.wait()
            for _ in range(5):
                try:
                    if not _equal(tuple(dataset.__getitems__([1, 3])[1]), expected):
                        wrong.append("another sample")
                except Exception as error:
                    wrong.append(error)

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert wrong == []


def test_nothing_is_left_in_the_working_folder(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    FastImageFolder(tree, STEADY).__getitems__([0, 1])
    assert os.listdir(tmp_path) == []
