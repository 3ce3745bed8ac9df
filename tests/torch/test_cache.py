"""``cache=``: the same samples, decoded once."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from odd_images import OddImage, odd_images
from PIL import Image, ImageOps
from same import same
from streams import BY_PROCESSES
from torch.utils.data import DataLoader, Subset
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from fastpipe import Cache, Decode, FastHDF5Dataset, FastImageFolder, FastLoader, FastPatchDataset
from fastpipe.bench.synthetic import photo_tree
from fastpipe.core import caches as places
from fastpipe.core.caches import open_cache_store
from fastpipe.errors import BadSampleError, CacheError, OptionError
from fastpipe.images.batch import MADE, ImageBatch
from fastpipe.images.reader import ImageReader

# Pillow warns of palettes with transparency and of truncated metadata, as it does in ImageFolder.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:PIL", "ignore:Palette images with Transparency"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="run it where files have locks: not on Windows"),
]

Settled = Callable[[Path], Path]
MIB = 1 << 20
COUNT = 12


def info(image: Any) -> Any:
    """User code that looks at the image's ``info``."""
    return len(image.info), sorted(map(repr, image.info.items())), torch.from_numpy(np.array(image))


def half(image: Any) -> Any:
    """User code that Pillow's image passes through."""
    return image.resize((image.width // 2, image.height // 2))


CROP = v1.Compose(
    [v1.RandomResizedCrop(24), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize([0.5] * 3, [0.2] * 3)]
)
_KEPT = 11  # of fastpipe/native/status.h: made from a kept image
TRANSFORMS: dict[str, Any] = {
    "floats": CROP,
    "bytes": v1.Compose([v1.RandomResizedCrop(24, scale=(0.1, 0.4)), v1.PILToTensor()]),
    "bytes first": v2.Compose([v2.ToImage(), v2.RandomResizedCrop(24, antialias=True), v2.RandomHorizontalFlip()]),
    "usual": v1.Compose([v1.Resize(40), v1.CenterCrop(32), v1.ToTensor()]),
    "grey": v1.Compose([v1.RandomCrop(30), v1.Grayscale(3), v1.ToTensor()]),
    "stock": v1.Compose([v1.RandomResizedCrop(24), v1.ColorJitter(0.4, 0.4, 0.4, 0.1), v1.ToTensor()]),
    "user code": v1.Compose([half, v1.RandomCrop(16), v1.ToTensor()]), "info": info, "none": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory, settled: Settled) -> Path:
    return settled(photo_tree(tmp_path_factory.mktemp("tree"), classes=3, per_class=4, sizes=(52, 64)))


@pytest.fixture(autouse=True)
def _no_stores_of_other_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(places, "_failed", set())


@pytest.fixture
def decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Returns the files that were decoded since the last call, by Python or natively, here and in workers."""
    log, opened, looked = tmp_path / "decoded", ImageReader.open, ImageBatch._look

    def note(*names: str) -> None:
        with open(log, "a") as file:
            file.writelines(f"{name}\n" for name in names)

    def open_and_note(self: ImageReader, blob: bytes, path: str, *more: Any) -> Any:
        note(path)
        return opened(self, blob, path, *more)

    def look_and_note(self: Any) -> None:
        statuses = zip(self.items, self._statuses[:, :2].tolist(), strict=True)
        note(*(item.path for item, (outcome, reason) in statuses if outcome == MADE and reason != _KEPT))
        looked(self)

    def new() -> list[str]:
        names = sorted(log.read_text().splitlines()) if log.exists() else []
        log.write_text("")
        return names

    monkeypatch.setattr(ImageReader, "open", open_and_note)
    monkeypatch.setattr(ImageBatch, "_look", look_and_note)
    return new


def _epochs(dataset: Any, kind: Any = DataLoader, epochs: int = 3, **options: Any) -> Iterator[list[Any]]:
    """Epochs of batches that are a function of the epoch's number."""
    loader = kind(dataset, **{"batch_size": 5, **options})
    for epoch in range(epochs):
        torch.manual_seed(epoch)
        yield list(loader)


def _caches(tmp_path: Path) -> dict[str, Any]:
    return {
        "auto": Cache("auto", 16 * MIB), "ram": Cache("ram", 17 * MIB),
        "disk": Cache("disk", 18 * MIB, dir=tmp_path), "small": Cache("ram", 40_000, form="pixels"),
        "coefficients": Cache("ram", 19 * MIB, form="coefficients"),
        "coefficients, auto": Cache("auto", 20 * MIB, form="coefficients"),
        "index": Cache("ram", 23 * MIB, form="index"),
        "coefficients on disk": Cache("disk", 21 * MIB, dir=tmp_path / "coefficients", form="coefficients"),
    }  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", [DataLoader, FastLoader])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_batches_are_those_without_a_cache(tree: Path, tmp_path: Path, name: str, kind: Any) -> None:
    transform = TRANSFORMS[name]
    options = {"collate_fn": list} if name in ("none", "info") else {}
    stock = list(_epochs(FastImageFolder(tree, transform, cache="off"), kind, **options))
    for cache in _caches(tmp_path).values():
        dataset = FastImageFolder(tree, transform, cache=cache)
        for expected, epoch in zip(stock, _epochs(dataset, kind, **options), strict=True):
            assert same(epoch, expected), cache
        if name in ("usual", "none", "info"):
            assert same(dataset[3], ImageFolder(tree, transform)[3])


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory, settled: Settled) -> tuple[Path, dict[str, OddImage]]:
    root = tmp_path_factory.mktemp("odd")
    cases = {str(case.path): case for case in odd_images(root / "all")}
    return settled(root), cases


@pytest.mark.parametrize("form", ["pixels", "coefficients", "index"])
@pytest.mark.parametrize(("exif", "transform"), [(True, None), (False, TRANSFORMS["usual"])])
def test_every_kind_of_file_is_as_without_a_cache(odd: Any, exif: bool, transform: Any, form: Any) -> None:
    (root, cases), decode = odd, Decode(exif=exif)
    plain = FastImageFolder(root, transform, decode=decode, cache="off")
    dataset = FastImageFolder(root, transform, decode=decode, cache=Cache("ram", 256 * MIB, form=form))
    good = 0
    assert "there now" not in _lines_of(dataset)
    for index, (path, _) in enumerate(plain.samples):
        if cases[path].expect == "bad":
            errors = []
            for one in (plain, dataset, dataset):
                with pytest.raises(BadSampleError) as raised:
                    one[index]
                errors.append((str(raised.value), type(raised.value.__cause__), raised.value.path))
            assert errors[1:] == errors[:1] * 2, path
            continue
        good += 1
        expected = plain[index]
        for _ in range(3):
            assert same(dataset[index], expected), path
    store: Any = open_cache_store(dataset.cache)
    assert f"; the cache has {len(store)} entries now" in _lines_of(dataset)
    if form == "pixels":
        assert good - 10 < len(store) <= good, "all but links to others"
    else:
        assert 30 < len(store) < good, "the usual JPEGs"


@pytest.mark.parametrize("count", [3_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_random_regions_of_kept_coefficients_have_the_files_pixels(odd: Any, count: int) -> None:
    """All kinds of JPEGs.  tests/parity compares regions that are decoded from files with Pillow's."""
    (root, cases), size = odd, (23, 31)
    crop = v2.Compose([v2.RandomResizedCrop(size, scale=(1e-4, 1), ratio=(0.2, 5)), v2.PILToTensor()])
    forms = [
        Cache("off"),
        Cache("ram", 90 * MIB, form="coefficients"),
        Cache("ram", 92 * MIB, form="index"),
    ]
    datasets = [FastImageFolder(root, crop, cache=cache) for cache in forms]
    good = [
        index
        for index, (path, _) in enumerate(datasets[0].samples)
        if path.endswith((".jpg", ".jpeg")) and cases[path].expect != "bad"
    ]
    order = torch.randint(len(good), (count,), generator=torch.Generator().manual_seed(count)).tolist()
    loaders = [FastLoader(Subset(one, [good[i] for i in order]), 256, seed=5) for one in datasets]
    for expected, *others in zip(*loaders, strict=True):
        assert all(torch.equal(other[0], expected[0]) for other in others)


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", [DataLoader, BY_PROCESSES])
@pytest.mark.parametrize(
    ("workers", "persistent", "cache"),
    [
        (1, True, "ram"),
        (2, False, "ram"),
        (2, True, "disk"),
        (2, False, "auto"),
        (2, False, "small"),
        (2, False, "coefficients"),
        (2, False, "coefficients, auto"),
        (1, False, "index"),
        (2, True, "coefficients on disk"),
    ],
)
def test_forked_workers_share_a_cache(
    tree: Path, tmp_path: Path, decoded: Any, kind: Any, workers: int, persistent: bool, cache: str
) -> None:
    options = {"num_workers": workers, "multiprocessing_context": "fork", "persistent_workers": persistent}
    stock = list(_epochs(FastImageFolder(tree, CROP, cache="off"), kind, 3, **options))
    dataset = FastImageFolder(tree, CROP, cache=_caches(tmp_path)[cache])
    decoded()
    counts = []
    for expected, epoch in zip(stock, _epochs(dataset, kind, 3, **options), strict=True):
        assert same(epoch, expected)
        counts.append(len(decoded()))
    if cache == "small":
        assert counts[0] == COUNT > counts[1] == counts[2] > 0
    else:
        assert counts == [COUNT, COUNT if "auto" in cache else 0, 0]


def _counts(dataset: Any, decoded: Any, epochs: int = 4) -> list[int]:
    decoded()
    return [len(decoded()) for _ in _epochs(dataset, FastLoader, epochs)]


def test_a_kept_image_is_neither_read_nor_decoded(tree: Path, decoded: Any, monkeypatch: Any) -> None:
    dataset = FastImageFolder(tree, CROP, cache="ram")
    assert _counts(dataset, decoded) == [COUNT, 0, 0, 0]
    monkeypatch.setattr(dataset._running().maker.read.__self__, "_read", None)
    assert len(list(FastLoader(dataset, 5))) == 3


def test_auto_keeps_nothing_if_not_everything_fits(tree: Path, decoded: Any) -> None:
    """Each image fits, and so do all that are used; but not all that the dataset has."""
    dataset = FastImageFolder(tree, CROP, cache=Cache("auto", 60_000, form="pixels"))
    store: Any = open_cache_store(dataset.cache)
    for _ in range(3):
        assert len(list(FastLoader(Subset(dataset, [0, 1]), 2))) == 1
    assert _counts(dataset, decoded) == [COUNT] * 4 and len(store) == 0
    few = FastImageFolder(tree, CROP, cache=dataset.cache, classes=["class_001"])
    assert _counts(few, decoded, 3) == [4, 4, 0]


def test_a_small_cache_has_the_same_images_in_every_epoch(tree: Path, decoded: Any) -> None:
    dataset = FastImageFolder(tree, CROP, cache=Cache("ram", 45_000, form="pixels"))
    found = [decoded() for _ in _epochs(dataset, FastLoader, 4, shuffle=True)]
    assert len(found[0]) == COUNT and 0 < len(found[1]) < COUNT
    assert found[1] == found[2] == found[3]


def test_datasets_over_the_same_files_share_what_is_kept(tree: Path, decoded: Any) -> None:
    option = Cache("ram", 16 * MIB)
    assert _counts(FastImageFolder(tree, CROP, cache=option), decoded, 2) == [COUNT, 0]
    others = [
        FastImageFolder(tree, TRANSFORMS["usual"], cache=option),
        FastImageFolder(tree, CROP, cache=Cache("ram", 16 * MIB), classes=["class_002", "class_000"]),
        FastImageFolder(str(tree) + "/../" + tree.name, CROP, cache=option),
        FastImageFolder(tree, TRANSFORMS["bytes first"], cache=option, bad_samples="skip", seed=3, threads=2),
    ]
    assert [_counts(other, decoded, 1) for other in others] == [[0]] * 4
    for decode in (Decode(short_side=30), Decode(exif=True), Decode("pillow"), Decode(max_pixels=10_000_000)):
        other = FastImageFolder(tree, CROP, cache=option, decode=decode)
        assert _counts(other, decoded, 2) == [COUNT, 0], decode
    assert _counts(FastImageFolder(tree, CROP, cache=option), decoded, 1) == [0]
    assert _counts(FastImageFolder(tree, CROP, cache=Cache("ram", 15 * MIB)), decoded, 1) == [COUNT]


def _lines_of(dataset: Any) -> str:
    return str(FastLoader(dataset, 5).plan)


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_the_form_is_chosen_by_the_room_there_is(
    tree: Path, tmp_path: Path, decoded: Any, where: Any
) -> None:
    files = sum(path.stat().st_size for path in tree.rglob("*.jpg"))
    names = {
        16 * MIB: "  decoded images", 4 * files // 3: "  coefficients of JPEGs", files: "  indices of JPEGs"
    }  # fmt: skip
    for number, (max_bytes, name) in enumerate(names.items()):
        folder = tmp_path / str(number) if where == "disk" else None
        dataset = FastImageFolder(tree, CROP, cache=Cache(where, max_bytes, dir=folder))
        assert name in _lines_of(dataset)
        counts = _counts(dataset, decoded, 3)
        assert counts[0] == COUNT > counts[1] == counts[2], "some of these tiny images may not fit"
        if folder is not None:
            # A later run keeps to the form that is there, although another suits its limit.
            for limit in names:
                again = FastImageFolder(tree, CROP, cache=Cache(where, limit, dir=folder))
                assert name in _lines_of(again)


def test_auto_keeps_coefficients_if_pixels_do_not_fit(tree: Path, decoded: Any) -> None:
    dataset = FastImageFolder(tree, CROP, cache=Cache("auto", 60_000))
    assert "or coefficients of JPEGs if those do not fit" in _lines_of(dataset)
    counts = _counts(dataset, decoded, 8)
    assert counts[0] == COUNT and counts[-1] == 0, "after some epochs of so few images"
    nothing = FastImageFolder(tree, CROP, cache=Cache("auto", 9_000))
    assert _counts(nothing, decoded, 8) == [COUNT] * 8


def test_images_of_other_formats_are_not_kept_as_coefficients(shapes: Path, decoded: Any) -> None:
    dataset = FastImageFolder(shapes, TRANSFORMS["usual"], cache=Cache("ram", form="coefficients"))
    counts = _counts(dataset, decoded, 3)
    assert counts[1:] == [sum(path.endswith("png") for path, _ in dataset.samples)] * 2


def test_coefficients_are_not_kept_where_pillow_decodes(tree: Path) -> None:
    decode = Decode("pillow")
    with pytest.raises(OptionError, match="form='coefficients'"):
        FastImageFolder(tree, CROP, cache=Cache("ram", form="coefficients"), decode=decode)
    dataset = FastImageFolder(tree, CROP, cache=Cache("ram", 60_000), decode=decode)
    assert "decoded images  →  kept in" in _lines_of(dataset)


@pytest.mark.parametrize("form", ["coefficients", "index"])
def test_images_of_a_part_of_the_size_are_made_from_every_form(
    tmp_path: Path, form: Any, settled: Any
) -> None:
    tree, decode = (
        settled(photo_tree(tmp_path / "tree", classes=1, per_class=3, sizes=(400, 700))),
        Decode(scaled=True),
    )
    crop = v1.Compose([v1.RandomResizedCrop(40, scale=(0.3, 1)), v1.PILToTensor()])
    plain, kept = (
        FastLoader(Subset(FastImageFolder(tree, crop, cache=cache, decode=decode), [0, 1, 2] * 20), 4, seed=1)
        for cache in (Cache("off"), Cache("ram", form=form))
    )
    for _ in range(2):
        assert same(list(kept), list(plain))


def test_only_image_folders_have_a_form(tmp_path: Path) -> None:
    cache = Cache("ram", form="coefficients")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.zeros((4, 3))
    with pytest.raises(OptionError, match="keeps chunks"):
        FastHDF5Dataset(tmp_path / "x.h5", "x", cache=cache)
    with pytest.raises(OptionError, match="keeps parts of volumes"):
        FastPatchDataset(np.zeros((8, 8, 8)), patch_size=(4, 4, 4), cache=cache)


def _single(folder: Path, color: tuple[int, int, int], format: str = "png") -> Path:
    path = folder / "tree" / "a" / f"x.{format}"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (40, 30), color).save(path)
    return path


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_a_replaced_file_is_kept_anew(tmp_path: Path, where: str, decoded: Any, settled: Settled) -> None:
    _single(tmp_path, (9, 20, 30), "bmp")
    dataset = FastImageFolder(tmp_path / "tree", v1.PILToTensor(), cache=_caches(tmp_path)[where])
    for red in (10, 11, 12):
        _single(tmp_path, (red, 20, 30), "bmp")
        assert dataset[0][0][:, 3, 3].tolist() == [red, 20, 30]
        settled(tmp_path / "tree")
        for _ in range(4):
            decoded()
            assert dataset[0][0][:, 3, 3].tolist() == [red, 20, 30]
        assert decoded() == []


def test_what_takes_a_files_place_while_it_is_read_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settled: Settled
) -> None:
    for name, colour in (("one", (1, 2, 3)), ("other", (200, 0, 0))):
        settled(_single(tmp_path / name, colour, "bmp"))
    link = tmp_path / "link"
    link.symlink_to("one/tree")
    dataset = FastImageFolder(link, v1.PILToTensor(), cache="ram")
    source = dataset._running().maker.read.__self__
    real = source._read

    def read(path: str) -> Any:
        link.unlink()
        link.symlink_to("other/tree")
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(source, "_read", read)
        assert torch.equal(dataset[0][0], ImageFolder(link, v1.PILToTensor())[0][0])
    link.unlink()
    link.symlink_to("one/tree")
    assert torch.equal(dataset[0][0], ImageFolder(link, v1.PILToTensor())[0][0])


def test_a_lost_cache_file_is_decoded_again(tree: Path, tmp_path: Path, caplog: Any) -> None:
    dataset = FastImageFolder(tree, TRANSFORMS["usual"], cache=Cache("disk", dir=tmp_path))
    expected = [dataset[index] for index in range(COUNT)]
    list(dataset)
    os.truncate(tmp_path / "fastpipe-decoded" / "000000.data", 100)
    assert same(list(dataset), expected) and "cannot be read any more" in caplog.text


def test_a_file_replaced_just_when_its_kept_image_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settled: Settled
) -> None:
    """Its rows must not be taken for those of another size: that would be memory out of bounds."""
    path = settled(_single(tmp_path, (1, 2, 3)))
    dataset = FastImageFolder(tmp_path / "tree", TRANSFORMS["usual"], cache=Cache("disk", dir=tmp_path))
    assert len([*dataset, *dataset]) == 2  # kept, and found to be right
    os.truncate(tmp_path / "fastpipe-decoded" / "000000.data", 100)
    source = dataset._running().maker.read.__self__
    real = source._kept

    def kept(entry: Any, name: str) -> Any:
        Image.new("RGB", (9, 9)).save(path)
        return real(entry, name)

    monkeypatch.setattr(source, "_kept", kept)
    with pytest.raises(BadSampleError, match="replaced while it was read"):
        dataset[0]
    assert dataset[0][0].shape == (3, 32, 32)


def test_a_lower_limit_of_pixels_holds_for_kept_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settled: Settled
) -> None:
    settled(_single(tmp_path, (1, 2, 3)))
    for decode in (Decode(), Decode(short_side=10)):
        dataset = FastImageFolder(tmp_path / "tree", TRANSFORMS["usual"], cache="ram", decode=decode)
        expected = dataset[0]
        with monkeypatch.context() as patch:
            patch.setattr(Image, "MAX_IMAGE_PIXELS", 40 * 30 // 2 - 1)
            with pytest.raises(BadSampleError, match="DecompressionBombError"):
                dataset[0]
            patch.setattr(Image, "MAX_IMAGE_PIXELS", 40 * 30 - 1)
            with pytest.warns(Image.DecompressionBombWarning):
                assert same(dataset[0], expected)
            patch.setattr(Image, "MAX_IMAGE_PIXELS", None)
            assert same(dataset[0], expected)
    option = Cache("ram")
    assert FastImageFolder(tmp_path / "tree", cache=option, decode=Decode(max_pixels=1200))[0]
    with pytest.raises(BadSampleError, match="max_pixels=1199"):
        FastImageFolder(tmp_path / "tree", cache=option, decode=Decode(max_pixels=1199))[0]


def first_resized(image: Any) -> Any:
    """What ``Decode(short_side=64)`` stands for, with torchvision's own means."""
    return v1.Resize(64)(image) if min(image.size) > 64 else image


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory, settled: Settled) -> Path:
    """Images of all shapes around a limit of 64, as JPEG and PNG."""
    root, random = tmp_path_factory.mktemp("shapes"), np.random.default_rng(5)
    (root / "a").mkdir()
    sizes = (64, 64), (63, 200), (65, 64), (65, 65), (200, 131), (301, 77), (40, 40), (3, 200), (128, 999)
    for number, size in enumerate(sizes):
        image = Image.fromarray(random.integers(0, 256, (*size[::-1], 3), np.uint8))
        image.save(root / "a" / f"{number:02}.{'png' if number % 2 else 'jpg'}", dpi=(72, 72))
    return settled(root)


@pytest.mark.few(6)
@pytest.mark.parametrize("where", ["off", "ram", "disk", "auto"])
@pytest.mark.parametrize("name", ["none", "usual", "info", "grey"])
def test_short_side_is_a_resize_before_all_else(shapes: Path, tmp_path: Path, name: str, where: str) -> None:
    grey = v1.Compose([v1.Resize(40), v1.Grayscale(3), v1.ToTensor()])
    transform = grey if name == "grey" else TRANSFORMS[name]
    stock = ImageFolder(shapes, v1.Compose([first_resized, *([transform] if transform else [])]))
    cache = _caches(tmp_path).get(where, "off")
    dataset = FastImageFolder(shapes, transform, decode=Decode(short_side=64), cache=cache)
    for _ in range(3):
        assert same(list(dataset), list(stock)), where


@pytest.mark.parametrize("where", ["off", "ram"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_short_side_is_the_turned_images(tmp_path: Path, orientation: int, where: Any, settled: Any) -> None:
    path, exif = tmp_path / "tree" / "a" / "x.jpg", Image.Exif()
    path.parent.mkdir(parents=True)
    exif[0x0112] = orientation
    noise = np.random.default_rng(orientation).integers(0, 256, (90, 200, 3), np.uint8)
    Image.fromarray(noise).save(path, exif=exif)
    settled(path.parent)
    expected = v1.Resize(64)(ImageOps.exif_transpose(Image.open(path).convert("RGB")))
    dataset = FastImageFolder(tmp_path / "tree", cache=where, decode=Decode(exif=True, short_side=64))
    for _ in range(2):
        assert same(dataset[0][0], expected)


def test_an_own_loader_has_no_cache(tree: Path) -> None:
    load = lambda path: Image.new("RGB", (9, 9))  # noqa: E731
    for cache in ("ram", "disk", Cache("ram", 10)):
        with pytest.raises(OptionError, match="cache="):
            FastImageFolder(tree, loader=load, cache=cache)
    for cache in ("off", "auto"):
        assert same(FastImageFolder(tree, loader=load, cache=cache)[0], ImageFolder(tree, loader=load)[0])
    assert not (places.user_cache_folder() / "shared-memory").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"where": "memory"}, "'auto', 'ram', 'disk', 'off'; got 'memory'"), ({"max_bytes": 0}, "positive"),
        ({"max_bytes": "lots"}, "number of bytes"), ({"max_bytes": 1.5}, "number of bytes"),
        ({"form": "jpeg"}, "'coefficients', 'index'; got 'jpeg'"), ({"dir": "x"}, "where='disk'"), ({"where": "ram", "dir": "x"}, "where='disk'"),
        *(({"short_side": side}, "short_side") for side in (0, -1, 64.5, "64")),
    ],
)  # fmt: skip
def test_options_that_cannot_work_are_named(arguments: Any, text: str, tree: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=text):
        (Decode if "short_side" in arguments else Cache)(**arguments)
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match="file"):
        FastImageFolder(tree, cache=Cache("disk", dir=tmp_path / "file"))
