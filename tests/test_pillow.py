"""``fastpipe.pillow``: JPEGs and PNGs that Pillow opens are decoded later, and nothing else changes."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from odd_images import OddImage, damaged_at_random, odd_images, pngs
from PIL import Image, ImageChops, ImageDraw, ImageFile, ImageOps, JpegImagePlugin, PngImagePlugin
from same import same
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

import fastpipe
import fastpipe.pillow
from fastpipe import FastLoader
from fastpipe.bench.synthetic import photograph
from fastpipe.errors import OptionError


@pytest.fixture
def lazily() -> Iterator[None]:
    fastpipe.pillow.register()
    yield
    fastpipe.pillow.unregister()


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> list[OddImage]:
    return odd_images(tmp_path_factory.mktemp("odd"))


@pytest.fixture(scope="module", params=["jpg", "png"])
def photo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A photograph of 200 x 150 pixels."""
    path = tmp_path_factory.mktemp("photo") / f"x.{request.param}"
    Image.fromarray(photograph(np.random.default_rng(0), (150, 200))).save(path, quality=90, dpi=(300, 300))
    return path


def class_of(path: Path) -> type:
    """Return Pillow's class for a file."""
    return JpegImagePlugin.JpegImageFile if path.suffix == ".jpg" else PngImagePlugin.PngImageFile


def both(make: Callable[[], Any]) -> tuple[Any, Any]:
    """Return what a function does with Pillow's own opener, and with fastpipe's."""
    fastpipe.pillow.unregister()
    expected = _done(make)
    fastpipe.pillow.register()
    try:
        return expected, _done(make)
    finally:
        fastpipe.pillow.unregister()


def _done(make: Callable[[], Any]) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = make()
        except Exception as error:
            result = type(error), str(error)
    return result, [(one.category, str(one.message)) for one in caught]


def facts(image: Any) -> tuple[Any, ...]:
    return image.mode, image.size, image.info, image.format, image.tobytes()


# ---- equality ----------------------------------------------------------------------------------------


def operation(rng: np.random.Generator) -> tuple[str, Callable[[Any], Any]]:
    """Return a method that scripts call on images, with random arguments, and its name."""
    size = tuple(map(int, rng.integers(1, 90, 2)))
    resample = int(rng.integers(0, 6))
    corner = rng.integers(-5, 60, 2)
    box = tuple(map(int, (*corner, *(corner + rng.integers(0, 60, 2)))))
    of_floats = tuple(edge + float(rng.choice([0, 0.25, 0.5, 0.75])) for edge in box)
    choices: list[tuple[str, Callable[[Any], Any]]] = [
        ("crop", lambda image: image.crop(box)),
        ("crop", lambda image: image.crop(of_floats)),
        ("crop", lambda image: image.crop(image.getbbox())),
        ("resize", lambda image: image.resize(size, resample)),
        ("resize", lambda image: image.resize(list(size))),
        ("resize in a box", lambda image: image.resize(size, box=(0, 0, *image.size))),
        ("resize by halves", lambda image: image.resize(size, resample, reducing_gap=2.0)),
        ("mirror", lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)),
        ("turn over", lambda image: image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)),
        ("rotate", lambda image: image.transpose(Image.Transpose.ROTATE_90)),
        ("RGB", lambda image: image.convert("RGB")),
        ("grey", lambda image: image.convert("L")),
        ("copy", lambda image: image.copy()),
        ("copy", copy.copy),
        ("deepcopy", copy.deepcopy),
        ("load", lambda image: (image.load(), image)[1]),
        ("thumbnail", lambda image: (image.thumbnail(size), image)[1]),
        ("draft", lambda image: (image.draft("L", size), image)[1]),
        ("pickle", lambda image: pickle.loads(pickle.dumps(image))),
        ("exif", ImageOps.exif_transpose),
        ("draw", lambda image: (ImageDraw.Draw(image).line((0, 0, 9, 9), fill=0), image)[1]),
        ("paste", lambda image: (image.paste(0, (1, 1, 3, 3)), image)[1]),
        ("point", lambda image: (image.load().__getitem__((0, 0)), image)[1]),
        ("array", lambda image: (np.asarray(image), image)[1]),
    ]
    return choices[rng.integers(len(choices))]


def chain(path: Path, seed: int) -> Callable[[], Any]:
    """Open an image and call some of those methods.  The facts are taken after each, so that an error has to
    be that of the same call; or only at the end."""

    def run() -> Any:
        rng = np.random.default_rng(seed)
        image, kept, log = Image.open(path), [], []
        for _ in range(rng.integers(0, 6)):
            name, change = operation(rng)
            log.append(name)
            try:
                image = change(image)
            except Exception as error:
                return log, type(error), str(error)
            log.append((image.mode, image.size, image.info, image.format))
            if rng.random() < 0.3:
                kept.append(image)
        return log, [np.asarray(image).tobytes() for image in (image, *kept)], facts(image)

    return run


@pytest.mark.parametrize("batch", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_every_file_and_every_chain_of_methods_is_as_with_pillow(odd: list[OddImage], batch: int) -> None:
    most = 20 if batch == 0 else 1000
    for image in odd:
        for seed in range(batch * 20, most):
            expected, found = both(chain(image.path, seed))
            assert found == expected, (image.name, seed)


def stages(data: bytes) -> Callable[[], Any]:
    """Open and transform an image, as torchvision does; an error has to come in the same stage."""

    def run() -> Any:
        log: list[Any] = []
        try:
            image = Image.open(io.BytesIO(data))
            log.append((image.size, image.mode, image.info))
            image = image.convert("RGB")
            log.append("converted")
            part = image.crop((5, 6, 60, 50)).resize((20, 30), Image.Resampling.BILINEAR)
            log += [np.asarray(part).tobytes(), np.asarray(image).tobytes()]
        except Exception as error:
            log.append((type(error), str(error).split(" at 0x")[0]))
        return log

    return run


@pytest.mark.parametrize("count", [400, pytest.param(30_000, marks=pytest.mark.slow)])
def test_an_error_of_a_damaged_file_comes_in_the_same_call(odd: list[OddImage], count: int) -> None:
    rng = np.random.default_rng(count)
    whole = [image.path.read_bytes() for image in odd if image.name.startswith("jpeg 4:")]
    for number in range(count):
        data = whole[number % len(whole)]
        if number % 2:
            damaged = damaged_at_random(data, rng)
        else:  # in the header, where tables are
            made = bytearray(data)
            for at in rng.integers(2, data.index(b"\xff\xda") + 14, rng.integers(1, 4)).tolist():
                made[at] = rng.integers(256)
            damaged = bytes(made)
        expected, found = both(stages(damaged))
        assert found == expected, (number, damaged)


@pytest.mark.parametrize("count", [400, pytest.param(30_000, marks=pytest.mark.slow)])
def test_an_error_of_a_damaged_png_comes_in_the_same_call(count: int) -> None:
    rng = np.random.default_rng(count)
    whole = [blob for _, _, blob, _ in pngs(photograph(rng, (17, 20)))]
    for number in range(count):
        made = bytearray(whole[number % len(whole)])
        for at in rng.integers(8, len(made), rng.integers(1, 4)).tolist():
            made[at] = rng.integers(256)
        if number % 8 == 0:
            del made[rng.integers(len(made)) :]
        damaged = bytes(made) if number % 4 == 0 else with_checksums(bytes(made))
        expected, found = both(stages(damaged))
        assert found == expected, (number, damaged)


def with_checksums(png: bytes) -> bytes:
    """Return a PNG whose chunks have right checksums, as far as it has chunks."""
    made, at = bytearray(png), 8
    while at + 12 <= len(made):
        end = at + 8 + int.from_bytes(made[at : at + 4], "big")
        if end + 4 > len(made):
            break
        made[end : end + 4] = zlib.crc32(made[at + 4 : end]).to_bytes(4, "big")
        at = end + 4
    return bytes(made)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16"])
def test_other_pngs_are_decoded_when_they_are_loaded(mode: str, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60), np.uint8)
    Image.fromarray(pixels.astype(np.uint16) if mode == "I;16" else pixels).convert(mode).save(
        tmp_path / "x.png"
    )

    def run() -> Any:
        image = Image.open(tmp_path / "x.png")
        part = image.crop((5, 6, 40, 30)).resize((20, 30), Image.Resampling.NEAREST)
        return type(image), part.mode, np.asarray(part).tobytes(), image.getpalette(), facts(image)

    expected, found = both(run)
    assert found == expected and found[0][0] is PngImagePlugin.PngImageFile


@pytest.mark.parametrize("first", [1, 2, 3, 10])
def test_an_image_may_be_cropped_any_number_of_times(photo: Path, first: int) -> None:
    def views() -> list[bytes]:
        made = []
        for number in range(3):
            with Image.open(photo) as image:
                rgb = image.convert("RGB")
            boxes = [(n, 2 * n, 60 + 9 * n, 70 + 5 * n) for n in range(first + number)]
            made += [rgb.crop(box).resize((32, 32), Image.Resampling.BILINEAR).tobytes() for box in boxes]
        return made

    expected, found = both(views)
    assert found == expected


_TRANSFORMS = {
    "train": v2.Compose([v2.RandomResizedCrop(64), v2.RandomHorizontalFlip(), v2.ToImage()]),
    "evaluation": v2.Compose([v2.Resize(96), v2.CenterCrop(64), v2.ToImage()]),
    "padded": v2.Compose([v2.RandomCrop(220, pad_if_needed=True), v2.Resize(64), v2.PILToTensor()]),
    "jitter": v2.Compose([v2.RandomResizedCrop(64), v2.ColorJitter(0.4, 0.4, 0.4), v2.PILToTensor()]),
    "policy": v2.Compose([v2.RandAugment(), v2.RandomResizedCrop(64), v2.PILToTensor()]),
    "turned": v2.Compose([v2.RandomRotation(20), v2.RandomVerticalFlip(), v2.PILToTensor()]),
}


@pytest.mark.parametrize("transform", _TRANSFORMS.values(), ids=list(_TRANSFORMS))
def test_torchvisions_transforms_give_the_same_samples(transform: Any, photo: Path) -> None:
    def samples() -> list[bytes]:
        torch.manual_seed(0)
        return [transform(Image.open(photo).convert("RGB")).numpy().tobytes() for _ in range(10)]

    expected, found = both(samples)
    assert found == expected


def test_images_are_made_without_pillow(photo: Path, lazily: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Image.core, "jpeg_decoder" if photo.suffix == ".jpg" else "zip_decoder")
    image = Image.open(photo).convert("RGB").crop((20, 30, 120, 110)).resize((40, 30))
    assert np.asarray(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)).shape == (30, 40, 3)
    assert image.getpixel((0, 0)) == tuple(np.asarray(image)[0, 0])


# ---- as Pillow's images --------------------------------------------------------------------------------


def test_images_are_instances_of_pillows_classes(photo: Path, lazily: None) -> None:
    image = Image.open(photo)
    assert isinstance(image, class_of(photo)) and type(image) is not class_of(photo)
    assert image.format == class_of(photo).format and image.info["dpi"] == pytest.approx((300, 300), abs=0.1)
    cropped = image.crop((0, 0, 50, 50))
    assert isinstance(cropped, Image.Image) and not isinstance(cropped, ImageFile.ImageFile)
    image.getpixel((0, 0))
    cropped.getpixel((0, 0))
    assert type(image) is class_of(photo) and type(cropped) is Image.Image


def test_a_grey_image_that_stays_grey_is_left_to_pillow(tmp_path: Path, lazily: None) -> None:
    Image.linear_gradient("L").save(tmp_path / "x.jpg")
    with Image.open(tmp_path / "x.jpg") as image:
        image.load()
        assert type(image) is JpegImagePlugin.JpegImageFile
    with Image.open(tmp_path / "x.jpg") as image:
        colours = image.convert("RGB")
        assert type(colours) is not Image.Image
        assert np.array_equal(np.asarray(colours), np.asarray(image)[:, :, None].repeat(3, 2))


def test_images_are_equal_to_pillows(photo: Path) -> None:
    stock, stock_crop = Image.open(photo), Image.open(photo).crop((1, 2, 50, 60))
    fastpipe.pillow.register()
    try:
        image = Image.open(photo)
        assert image.crop((1, 2, 50, 60)) == stock_crop and stock_crop == image.crop((1, 2, 50, 60))
        assert image.crop((1, 2, 50, 61)) != stock_crop
        assert image == stock and stock == Image.open(photo)
        assert ImageChops.difference(Image.open(photo), stock).getbbox() is None
    finally:
        fastpipe.pillow.unregister()


def test_an_image_that_is_changed_leaves_others_as_they_are(photo: Path, lazily: None) -> None:
    image = Image.open(photo).convert("RGB")
    part, array = image.crop((0, 0, 50, 50)), np.asarray(image)
    before = np.array(part)
    image.putpixel((0, 0), (1, 2, 3))
    image.load()[1, 0] = (4, 5, 6)
    assert np.array_equal(part, before) and array[0, 0].tolist() != [1, 2, 3]
    assert np.asarray(image)[0, :2].tolist() == [[1, 2, 3], [4, 5, 6]]
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(part)[0, 0] = 0


def test_pickles_need_no_fastpipe(photo: Path, lazily: None) -> None:
    pickled = pickle.dumps([Image.open(photo), Image.open(photo).resize((9, 9))])
    assert b"fastpipe" not in pickled
    assert pickle.loads(pickled)[1] == Image.open(photo).resize((9, 9))


@pytest.mark.parametrize("use", ["load", "crop", "convert"])
def test_files_are_closed_as_by_pillow(photo: Path, use: str) -> None:
    calls: dict[str, Callable[[Any], Any]] = {
        "load": lambda image: image.load(),
        "crop": lambda image: image.crop((0, 0, 9, 9)),
        "convert": lambda image: image.convert("RGB"),
    }

    def run() -> Any:
        image: Any = Image.open(photo)
        own = image.fp
        calls[use](image)
        with photo.open("rb") as file:
            other = Image.open(file)
            calls[use](other)
            place = file.tell()
        with Image.open(photo) as third:
            pass
        return own.closed, image.fp, place, other.fp, _done(third.load)[0]

    expected, found = both(run)
    assert found == expected


def test_a_file_may_change_or_go_after_it_has_been_read(photo: Path, tmp_path: Path, lazily: None) -> None:
    path = tmp_path / "x.jpg"
    path.write_bytes(photo.read_bytes())
    image = Image.open(path).convert("RGB")
    path.write_bytes(b"")
    path.unlink()
    assert image.resize((20, 20)) == Image.open(photo).resize((20, 20))


def test_closed_images_say_so(photo: Path) -> None:
    def run() -> Any:
        image = Image.open(photo)
        image.load()
        image.close()
        return image.resize((9, 9))

    expected, found = both(run)
    assert found == expected and "closed image" in found[0][1]


def test_a_limit_of_pixels_holds(photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> Any:
        image = Image.open(photo).convert("RGB")
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 3000)
        try:
            return facts(image.crop((0, 0, 60, 60))), facts(image.crop((0, 0, 140, 140)))
        finally:
            monkeypatch.undo()

    expected, found = both(run)
    assert found == expected


# ---- switching on and off --------------------------------------------------------------------------------


def test_pillows_opener_is_restored(photo: Path) -> None:
    before = dict(Image.OPEN), list(Image.ID)
    fastpipe.pillow.register()
    fastpipe.pillow.register()
    image = Image.open(photo)
    fastpipe.pillow.unregister()
    fastpipe.pillow.unregister()
    assert before == (Image.OPEN, Image.ID)
    with Image.open(photo) as stock:
        assert type(stock) is class_of(photo)
        assert image == stock


@pytest.mark.parametrize("name", ["JPEG", "PNG"])
def test_a_plugin_of_the_scripts_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Image.OPEN, name, (lambda fp, name: None, lambda head: True))
    with pytest.raises(OptionError, match="its own plugin"):
        fastpipe.pillow.register()


def test_fastpipes_own_reader_is_as_fast_with_it(tree: Path, lazily: None) -> None:
    dataset = fastpipe.FastImageFolder(tree, v2.Compose([v2.RandomResizedCrop(32), v2.ToImage()]))
    assert dataset._running().is_native


class Own(Dataset[Any]):
    """The commonest dataset of all."""

    def __init__(self, root: Path, transform: Callable[[Any], Any]) -> None:
        self.paths, self.transform = sorted(root.rglob("*.jpg")), transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int, str]:
        image = Image.open(self.paths[index]).convert("RGB")
        kind = type(image).__module__
        return self.transform(image), index, kind


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_own_datasets_open_images_lazily(tree: Path, context: str) -> None:
    dataset = Own(tree, v2.Compose([v2.RandomResizedCrop(32), v2.ToImage(), v2.ToDtype(torch.float32, True)]))

    def batches(loader: Callable[..., DataLoader[Any]]) -> list[Any]:
        torch.manual_seed(3)
        made = loader(dataset, batch_size=2, shuffle=True, num_workers=2, multiprocessing_context=context)
        return list(made)

    expected, found = batches(DataLoader), batches(FastLoader)
    assert [same(a[:2], b[:2]) for a, b in zip(expected, found, strict=True)] == [True] * len(expected)
    assert {kind for batch in found for kind in batch[2]} == {"fastpipe.pillow"}
    assert {kind for batch in expected for kind in batch[2]} == {"PIL.Image"}
    assert Own(tree, v2.Identity())[0][2] == "PIL.Image"  # this process is left alone


def _switch_off(worker: int) -> None:
    fastpipe.pillow.unregister()


def test_worker_init_fn_may_switch_it_off(tree: Path) -> None:
    loader = FastLoader(Own(tree, v2.ToImage()), num_workers=1, worker_init_fn=_switch_off)
    assert {batch[2][0] for batch in loader} == {"PIL.Image"}


def test_the_plan_names_it(tree: Path) -> None:
    dataset = Own(tree, v2.ToImage())
    assert "fastpipe.pillow" in repr(FastLoader(dataset, num_workers=1).plan)
    assert "fastpipe.pillow" not in repr(FastLoader(dataset).plan)


def test_a_dataset_without_pillow_loads_no_pillow() -> None:
    code = (
        "import sys, torch\n"
        "from fastpipe import FastLoader\n"
        "list(FastLoader(torch.arange(4), num_workers=1))\n"
        "print('fastpipe.pillow' in sys.modules, 'PIL' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    name, pillow = found.split()
    assert name == "False" or pillow == "True"


class _Kind:
    """A transform of the script's own."""

    def __init__(self, transform: Callable[[Any], Any]) -> None:
        self.transform = transform

    def __call__(self, image: Any) -> tuple[Any, str]:
        return self.transform(image), type(image).__module__


@pytest.mark.parametrize("seed", [None, 4])
@pytest.mark.parametrize("cache", ["off", "ram"])
def test_own_transforms_of_our_folder_get_lazy_images_unless_a_cache_has_them(
    tree: Path, cache: Any, seed: int | None
) -> None:
    view = _Kind(v2.Compose([v2.RandomResizedCrop(32), v2.RandomHorizontalFlip(), v2.ToImage()]))
    dataset = fastpipe.FastImageFolder(tree, view, cache=cache, seed=seed)

    def batches(**options: Any) -> list[Any]:
        torch.manual_seed(3)
        return list(FastLoader(dataset, 2, num_workers=2, **options))

    lazy, decoded = batches(), batches(worker_init_fn=_switch_off)
    assert {kind for (_, kinds), _ in lazy for kind in kinds} == {
        "fastpipe.pillow" if cache == "off" else "PIL.Image"
    }
    assert {kind for (_, kinds), _ in decoded for kind in kinds} == {"PIL.Image"}
    assert same([views[0] for views, _ in lazy], [views[0] for views, _ in decoded])
    assert same([labels for _, labels in lazy], [labels for _, labels in decoded])
