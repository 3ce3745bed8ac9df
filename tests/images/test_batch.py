"""Batches that the native core makes: torchvision's samples, bit for bit, and the errors of the way through Python."""

from __future__ import annotations

import io
from collections import Counter
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
EVERY = list(range(len(KINDS) * len(SIZES)))


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
    root, contents = (
        tmp_path_factory.mktemp("files"),
        [encoded(size, kind) for kind in KINDS for size in SIZES],
    )
    for number, content in enumerate(contents):
        (root / f"{number}.jpg").write_bytes(content)
    return [str(root / f"{number}.jpg") for number in EVERY]


@pytest.fixture(scope="module")
def datasets(files: list[str]) -> Iterator[list[FastImageFolder]]:
    """One whose batches are made natively, as far as may be, and one whose are made by Python and Pillow."""
    made = pair([(path, number) for number, path in enumerate(files)], None)
    for dataset in made:
        dataset.__getitems__(EVERY)  # so that no test is said to leave their threads behind
    yield made
    for dataset in made:
        dataset.close()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many samples the core made, and how many were left to Python."""
    found, look = Counter[str](), images_batch.ImageBatch._look

    def look_and_count(self: Any) -> None:
        found.update("made" if status == 1 else "left" for status in self._statuses[:, 0])
        look(self)

    monkeypatch.setattr(images_batch.ImageBatch, "_look", look_and_count)
    return found


def outcome(call: Callable[[], Any]) -> Any:
    """A value or an error."""
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


WAYS = st.tuples(st.sampled_from([v1, v2]).flatmap(chains), NUMBERS, st.integers(0, 2**32), st.booleans())


@settings(max_examples=60)
@given(way=WAYS)
@example(way=(CLASSIC, EVERY, 2, True))
@example(way=(MODERN, EVERY, 3, False))
@example(way=([v1.Resize(32), v1.CenterCrop(28), v1.ToTensor()], EVERY, 0, False))
@example(way=([v1.RandomCrop(32, 4, pad_if_needed=True), *CLASSIC[1:]], EVERY, 0, False))
@example(way=([v1.RandomResizedCrop(20), v1.Grayscale(1), v1.ToTensor()], EVERY, 0, True))
@example(way=([v1.RandomHorizontalFlip(1.0)], EVERY, 0, False))
def test_native_batches_are_torchvisions(datasets: Any, way: Any) -> None:
    check(datasets, *way)


@pytest.mark.slow
@settings(max_examples=10_000)
@given(way=WAYS)
def test_native_batches_are_torchvisions_at_length(datasets: Any, way: Any) -> None:
    check(datasets, *way)


def test_python_makes_only_what_the_core_is_not_trusted_with(datasets: Any, counted: Counter[str]) -> None:
    dataset, others = datasets[0], len(SIZES)  # CMYK
    for chain in (CLASSIC, MODERN, [v1.Resize((9, 9))]):
        dataset.transform, dataset.memory_format = v1.Compose(chain), torch.contiguous_format
        counted.clear()
        dataset.__getitems__(EVERY)
        assert counted == {"made": len(EVERY) - others, "left": others}


@pytest.fixture
def mixed(tmp_path: Path) -> list[tuple[str, int]]:
    """Good samples, and others among them; tests/native/test_decisions.py has more damage."""
    good = encoded((70, 93), {"subsampling": "4:2:0"})
    at = good.index(b"\xff\xc0") + 5  # the pixels that it says it has
    contents = {
        "cut": good[: len(good) // 2], "empty": b"", "more behind": good + b"more", "cmyk": encoded((40, 30), {"cmyk": True}),
        "png": encoded((20, 30), {"format": "PNG"}), "huge": good[:at] + b"\xff\xdc\xff\xdc" + good[at + 4 :],
        "no pixels": good[:at] + bytes(4) + good[at + 4 :],
    }  # fmt: skip
    paths = []
    for number, (name, content) in enumerate(contents.items()):
        (tmp_path / f"{number} good.jpg").write_bytes(encoded((40 + number, 50), KINDS[number % 6]))
        (tmp_path / f"{name}.jpg").write_bytes(content)
        paths += [tmp_path / f"{number} good.jpg", tmp_path / f"{name}.jpg"]
    (tmp_path / "folder.jpg").mkdir()
    odd = ["folder.jpg", "missing.jpg", "x" * 300 + ".jpg", "0 good.jpg/x.jpg", write_fifo(tmp_path).name]
    links = {
        "link": "nothing",
        "circle": "circle.jpg",
        "unreadable": "/proc/self/mem",
        "linked": "0 good.jpg",
    }
    for name, target in links.items():
        (tmp_path / f"{name}.jpg").symlink_to(target)
        odd.append(f"{name}.jpg")
    return [
        (str(path), number % 3) for number, path in enumerate([*paths, *(tmp_path / name for name in odd)])
    ]


TRANSFORMS = {
    "tensors": v1.Compose([v1.RandomResizedCrop(24), v1.RandomHorizontalFlip(), v1.ToTensor()]),
    "pictures": v1.RandomResizedCrop(24),
    "own": v1.Compose([v1.RandomResizedCrop(24), lambda image: torch.from_numpy(np.array(image))]),
}


def pair(samples: Any, transform: Any) -> list[FastImageFolder]:
    options: dict[str, Any] = {"cache": "off", "threads": 2}
    return [
        FastImageFolder.from_samples(samples, transform, decode=Decode(backend=backend), **options)
        for backend in ("auto", "pillow")
    ]


@pytest.mark.parametrize("name", TRANSFORMS)
def test_each_sample_is_the_same_or_the_same_error(mixed: Any, name: str, counted: Counter[str]) -> None:
    ours, by_python = pair(mixed, TRANSFORMS[name])
    bad = set()
    for number in range(len(mixed)):
        found = []
        for dataset in (ours, by_python):
            for ask in (lambda d=dataset, n=number: d[n], lambda d=dataset, n=number: d.__getitems__([n])[0]):
                with keyed(Key(7, 0, np.array([number]))):
                    found.append(outcome(ask))
        if isinstance(found[2], Exception):
            bad.add(number)
        else:
            found = [image for image, _ in found]
        assert_same(found[0], found[2])
        assert_same(found[1], found[3])
    for numbers in (range(len(mixed)), range(len(mixed) - 1, -1, -1), [0, 7, 2, 3, 1]):
        found = []
        for dataset in (ours, by_python):
            with keyed(Key(7, 0, np.arange(len(numbers)))):
                found.append(outcome(lambda dataset=dataset, some=numbers: dataset.__getitems__(some)))
        assert isinstance(found[1], BadSampleError)
        assert found[1].index == next(number for number in numbers if number in bad), "the first error counts"
        assert_same(*found)
    assert len(bad) >= 10
    assert counted["made"] >= 14


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
def test_files_of_any_name(tmp_path: Path, prefix: str, counted: Counter[str]) -> None:
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
    assert counted == {"made": 2 * len(NAMES)}


def test_a_name_with_a_zero_is_not_that_before_it(tmp_path: Path) -> None:
    (tmp_path / "x.jpg").write_bytes(encoded((40, 30), {}))
    found = []
    for dataset in pair([(str(tmp_path / "x.jpg"), 0)], TRANSFORMS["tensors"]):
        dataset.samples = [(str(tmp_path / "x.jpg\0.jpg"), 0)]
        found.append(outcome(lambda dataset=dataset: dataset.__getitems__([0])))
    assert isinstance(found[0], BadSampleError)
    assert_same(*found)
