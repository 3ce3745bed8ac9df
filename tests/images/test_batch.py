"""Batches that the native core makes: torchvision's samples, bit for bit, and the errors of the way through Python."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from odd_images import write_fifo
from PIL import Image
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from transform_chains import chains

from fastpipe import Decode, FastImageFolder
from fastpipe.bench.synthetic import photograph
from fastpipe.core.types import Key
from fastpipe.errors import BadSampleError
from fastpipe.images import batch as images_batch
from fastpipe.torch.randomness import keyed

# torchvision says so when antialias=False has no effect on PIL images.
pytestmark = pytest.mark.filterwarnings("ignore:Anti-alias option is always applied")

KINDS: list[dict[str, Any]] = [
    {"subsampling": sampling, "progressive": progressive}
    for sampling in ("4:4:4", "4:2:2", "4:2:0")
    for progressive in (False, True)
] + [
    {"grey": True}, {"grey": True, "progressive": True}, {"restart_marker_blocks": 3}, {"quality": 100},
    {"optimize": True}, {"cmyk": True}, {"format": "PNG"},
]  # fmt: skip
SIZES = [(1, 1), (1, 9), (9, 1), (2, 3), (8, 8), (15, 17), (16, 16), (17, 33), (33, 31), (70, 93), (130, 40)]


def encoded(size: tuple[int, int], kind: dict[str, Any]) -> bytes:
    options = {"format": "JPEG", **kind}
    image = Image.fromarray(photograph(np.random.default_rng(size), size))
    if options.pop("grey", False):
        image = image.convert("L")
    if options.pop("cmyk", False):
        image = image.convert("CMYK")
    file = io.BytesIO()
    image.save(file, **options)
    return file.getvalue()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Files of every kind and size."""
    root, paths = tmp_path_factory.mktemp("files"), []
    for number, kind in enumerate(KINDS):
        for size in SIZES:
            path = root / f"{number}_{size[0]}_{size[1]}.jpg"
            path.write_bytes(encoded(size, kind))
            paths.append(str(path))
    return paths


@pytest.fixture(scope="module")
def datasets(files: list[str]) -> Iterator[tuple[FastImageFolder, FastImageFolder]]:
    """One whose batches are made natively, as far as may be, and one whose are made by Python and Pillow."""
    samples = [(path, number) for number, path in enumerate(files)]
    made = [
        FastImageFolder.from_samples(samples, cache="off", threads=2, decode=Decode(backend=backend))
        for backend in ("auto", "pillow")
    ]
    for dataset in made:
        dataset.__getitems__(range(len(files)))  # so that no test is said to leave their threads behind
    yield made[0], made[1]
    for dataset in made:
        dataset.close()


class Counted:
    """How many samples the core made, and how many were left to Python."""

    def __init__(self) -> None:
        self.made = self.left = 0


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    found, look = Counted(), images_batch.ImageBatch._look

    def look_and_count(self: Any) -> None:
        made = int((self._statuses[:, 0] == 1).sum())
        found.made += made
        found.left += len(self._statuses) - made
        look(self)

    monkeypatch.setattr(images_batch.ImageBatch, "_look", look_and_count)
    return found


CHAINS = st.sampled_from([v1, v2]).flatmap(chains)


def outcome(call: Callable[[], Any]) -> Any:
    """What a call gives: a value or an error."""
    try:
        return call()
    except Exception as error:
        return error


def assert_same(made: Any, expected: Any, *, strides: bool = True) -> None:
    assert type(made) is type(expected)
    if isinstance(expected, Image.Image):
        assert (made.mode, made.size) == (expected.mode, expected.size)
        assert made.tobytes() == expected.tobytes()
    elif isinstance(expected, torch.Tensor):
        assert (made.dtype, made.shape) == (expected.dtype, expected.shape)
        assert not strides or made.stride() == expected.stride()
        ours, theirs = (value.as_subclass(torch.Tensor).double().numpy() for value in (made, expected))
        np.testing.assert_array_equal(ours, theirs)  # NaN equals NaN
    elif isinstance(expected, BadSampleError):
        assert (str(made), made.index, made.path) == (str(expected), expected.index, expected.path)
        assert_same(made.__cause__, expected.__cause__)
    elif isinstance(expected, BaseException):
        assert str(made) == str(expected)
    else:
        assert made == expected


CLASSIC = [v1.RandomResizedCrop(24), v1.RandomHorizontalFlip(), v1.ToTensor(),
           v1.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]  # fmt: skip
MODERN = [v2.ToImage(), v2.RandomResizedCrop(24, antialias=True), v2.RandomHorizontalFlip(),
          v2.ToDtype(torch.float32, scale=True),
          v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]  # fmt: skip
NUMBERS = st.lists(st.integers(0, len(KINDS) * len(SIZES) - 1), min_size=1, max_size=5)
SEED = st.integers(0, 2**32)
EVERY = list(range(len(KINDS) * len(SIZES)))


def check(datasets: Any, chain: list[Any], numbers: list[int], seed: int, last: bool) -> None:
    key = Key(seed, 0, np.arange(len(numbers)))
    made = []
    for dataset in datasets:
        dataset.transform = v1.Compose(chain)
        dataset.memory_format = torch.channels_last if last else torch.contiguous_format
        with keyed(key):
            made.append(outcome(lambda dataset=dataset: dataset.__getitems__(numbers)))
    ours, by_python = made
    if "INTERNAL ASSERT" in str(by_python) or "INTERNAL ASSERT" in str(ours):
        event("torch fails")  # its uint8 resize of one row or column does, with some strides
        return
    if isinstance(by_python, Exception):
        event("refused")
        assert_same(ours, by_python)
        return
    plan = datasets[0].plan
    assert not plan.stock
    parameters = plan.draw(key)
    for (image, target), (other, _), number, row in zip(ours, by_python, numbers, parameters, strict=True):
        assert target == number
        assert_same(image, other)
        opened = Image.open(datasets[0].samples[number][0])
        expected = plan.reference(opened.convert("RGB"), row.tolist())
        if isinstance(expected, Image.Image):
            assert expected.info in (image.info, {})  # padding and grey make torchvision forget it
            assert image.info == other.info
        assert_same(image, expected, strides=False)


@settings(max_examples=60)
@given(chain=CHAINS, numbers=NUMBERS, seed=SEED, last=st.booleans())
@example(chain=CLASSIC, numbers=EVERY, seed=2, last=True)
@example(chain=MODERN, numbers=EVERY, seed=3, last=False)
@example(chain=[v1.Resize(32), v1.CenterCrop(28), v1.ToTensor()], numbers=EVERY, seed=0, last=False)
@example(chain=[v1.RandomCrop(32, 4, pad_if_needed=True), *CLASSIC[1:]], numbers=EVERY, seed=0, last=False)
@example(chain=[v1.RandomResizedCrop(20), v1.Grayscale(1), v1.ToTensor()], numbers=EVERY, seed=0, last=True)
@example(chain=[v1.RandomHorizontalFlip(1.0)], numbers=EVERY, seed=0, last=False)
def test_native_batches_are_torchvisions(
    datasets: Any, chain: list[Any], numbers: list[int], seed: int, last: bool
) -> None:
    check(datasets, chain, numbers, seed, last)


@pytest.mark.slow
@settings(max_examples=10_000)
@given(chain=CHAINS, numbers=NUMBERS, seed=SEED, last=st.booleans())
def test_native_batches_are_torchvisions_at_length(
    datasets: Any, chain: list[Any], numbers: list[int], seed: int, last: bool
) -> None:
    check(datasets, chain, numbers, seed, last)


def test_python_makes_only_what_the_core_is_not_trusted_with(
    datasets: Any, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, opened = datasets[0], list[str]()
    others = 2 * len(SIZES)  # CMYK and PNG
    for chain in (CLASSIC, MODERN, [v1.Resize((9, 9))]):
        dataset.transform, dataset.memory_format = v1.Compose(chain), torch.contiguous_format
        counted.made = counted.left = 0
        dataset.__getitems__(EVERY)
        assert (counted.made, counted.left) == (len(EVERY) - others, others)
        with monkeypatch.context() as patch:
            patch.setattr(dataset._running().maker, "read", opened.append)
            dataset.__getitems__(EVERY[:-others])
    assert not opened


@pytest.fixture
def mixed(tmp_path: Path) -> list[tuple[str, int]]:
    """Good samples, and others among them."""
    good, rng = encoded((70, 93), {"subsampling": "4:2:0"}), np.random.default_rng(0)
    contents = {
        "cut": good[: len(good) // 2], "cut by one": good[:-1], "no end": good[:-2], "empty": b"", "no jpeg": b"not an image",
        "zeros": bytes(1 << 20), "a marker": b"\xff\xd8\xff", "more behind": good + b"more",
        "spoilt": good[:400] + rng.bytes(200) + good[600:], "png": encoded((20, 30), {"format": "PNG"}),
        "cmyk": encoded((40, 30), {"cmyk": True}), "progressive cut": encoded((70, 93), {"progressive": True})[:1500],
    }  # fmt: skip
    at = good.index(b"\xff\xc0")
    contents["huge"] = good[: at + 5] + b"\xff\xdc\xff\xdc" + good[at + 9 :]  # pixels that it says it has
    contents["no pixels"] = good[: at + 5] + b"\0\0\0\0" + good[at + 9 :]
    paths = []
    for number, (name, content) in enumerate(contents.items()):
        (tmp_path / f"{number} good.jpg").write_bytes(encoded((40 + number, 50), KINDS[number % 6]))
        (tmp_path / f"{name}.jpg").write_bytes(content)
        paths += [tmp_path / f"{number} good.jpg", tmp_path / f"{name}.jpg"]
    (tmp_path / "folder.jpg").mkdir()
    (tmp_path / "link.jpg").symlink_to("nothing")
    (tmp_path / "circle.jpg").symlink_to("circle.jpg")
    (tmp_path / "unreadable.jpg").symlink_to("/proc/self/mem")
    (tmp_path / "linked.jpg").symlink_to("0 good.jpg")
    odd = ["folder", "link", "circle", "missing", "linked", "x" * 300, "0 good.jpg/x"]
    odd = [f"{name}.jpg" for name in odd]
    if os.path.exists("/proc/self/mem"):
        odd.append("unreadable.jpg")
    if hasattr(os, "mkfifo"):
        odd.append(write_fifo(tmp_path).name)
    paths += [tmp_path / name for name in odd]
    return [(str(path), number % 3) for number, path in enumerate(paths)]


TRANSFORMS = {
    "tensors": v1.Compose([v1.RandomResizedCrop(24), v1.RandomHorizontalFlip(), v1.ToTensor()]),
    "pictures": v1.RandomResizedCrop(24),
    "own": v1.Compose([v1.RandomResizedCrop(24), lambda image: torch.from_numpy(np.array(image))]),
}


def pair(samples: Any, transform: Any, **options: Any) -> list[FastImageFolder]:
    return [
        FastImageFolder.from_samples(
            samples,
            transform,
            **{"cache": "off", "threads": 2, "seed": 4, **options},
            decode=Decode(backend=backend),
        )
        for backend in ("auto", "pillow")
    ]


@pytest.mark.parametrize("name", TRANSFORMS)
def test_each_sample_is_the_same_or_the_same_error(mixed: Any, name: str, counted: Counted) -> None:
    ours, by_python = pair(mixed, TRANSFORMS[name])
    bad = 0
    for number in range(len(mixed)):
        found = []
        for dataset in (ours, by_python):
            key = Key(7, 0, np.array([number]))
            with keyed(key):
                found.append(outcome(lambda dataset=dataset, n=number: dataset[n]))
            with keyed(key):
                found.append(outcome(lambda dataset=dataset, n=number: dataset.__getitems__([n])))
        one, many, expected, expected_many = found
        if isinstance(expected, Exception):
            bad += 1
            assert_same(one, expected)
            assert_same(many, expected_many)
        else:
            assert_same(one[0], expected[0])
            assert_same(many[0][0], expected_many[0][0])
    for numbers in (
        range(len(mixed)),
        range(len(mixed) - 1, -1, -1),
        [0, 7, 2, 3, 1],
    ):  # the first error counts
        found = []
        for dataset in (ours, by_python):
            with keyed(Key(7, 0, np.arange(len(numbers)))):
                found.append(outcome(lambda dataset=dataset, some=numbers: dataset.__getitems__(some)))
        assert isinstance(found[1], BadSampleError)
        assert_same(*found)
    assert bad >= 14
    assert counted.made >= 28


NAMES = [
    "plain",
    "ü",
    "日本",
    "a b",
    "ends with dot.",
    "new\nline",
    "\udcff\udc80",
    "x" * 251,
    "é" * 125 + "x",
]
NAMES += ["-", "~", "%s"]


@pytest.mark.parametrize("prefix", ["a", "ü\udcfe"])
def test_files_of_any_name(tmp_path: Path, prefix: str, counted: Counted) -> None:
    root = tmp_path / prefix / "class"
    try:
        root.mkdir(parents=True)
        for number, name in enumerate(NAMES):
            (root / f"{name}.jpg").write_bytes(encoded((40, 30 + number), {}))
    except (OSError, UnicodeError):
        pytest.skip("this file system does not take such names: run it on one that does")
    transform = v1.Compose([v1.CenterCrop((20, 24)), v1.PILToTensor()])
    fast = FastImageFolder(tmp_path / prefix, transform, cache="off")
    stock = ImageFolder(tmp_path / prefix, transform)
    assert list(fast.samples) == stock.samples
    for dataset in (fast, FastImageFolder.from_samples(stock.samples, transform, cache="off")):
        made = dataset.__getitems__(range(len(NAMES)))
        assert all(torch.equal(made[number][0], stock[number][0]) for number in range(len(NAMES)))
    assert (counted.made, counted.left) == (2 * len(NAMES), 0)


def test_a_name_with_a_zero_is_not_that_before_it(tmp_path: Path) -> None:
    (tmp_path / "x.jpg").write_bytes(encoded((40, 30), {}))
    found = []
    for dataset in pair([(str(tmp_path / "x.jpg"), 0)], TRANSFORMS["tensors"]):
        dataset.samples = [(str(tmp_path / "x.jpg\0.jpg"), 0)]
        found.append(outcome(lambda dataset=dataset: dataset.__getitems__([0])))
    assert isinstance(found[0], BadSampleError)
    assert_same(*found)
