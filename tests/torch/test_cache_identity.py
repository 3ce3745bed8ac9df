"""What a script changes while it runs shows at once, also in images that are kept: as under torchvision."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile, PngImagePlugin
from streams import outcomes
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder, folder

from fastpipe import Cache, FastImageFolder, FastLoader, accelerate

Undo = Callable[[], object]
TABLES = (Image.OPEN, Image.DECODERS)


def transform_of(size: int) -> Any:
    return transforms.Compose([transforms.Resize((size, size)), transforms.ToTensor()])


@pytest.fixture
def tree(tmp_path: Path, settled: Any) -> Path:
    """Images of several formats, one of them with a large text."""
    root, rng = tmp_path / "tree", np.random.default_rng(0)
    for name in "ab":
        (root / name).mkdir(parents=True)
    for number, end in enumerate(["jpg", "png", "jpg", "png", "webp", "bmp"]):
        Image.fromarray(rng.integers(0, 255, (40, 44, 3), np.uint8)).save(root / "a" / f"{number}.{end}")
    text = PngImagePlugin.PngInfo()
    text.add_text("key", "value" * 500, zip=True)
    Image.new("RGB", (30, 30), (1, 2, 3)).save(root / "b" / "text.png", pnginfo=text)
    return settled(root)  # type: ignore[no-any-return]


def _pillow() -> Undo:
    """Gives Pillow the plugins and settings back that it has now."""
    tables, order = [dict(table) for table in TABLES], Image.ID[:]
    settings = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, PngImagePlugin.MAX_TEXT_CHUNK

    def undo() -> None:
        for table, found in zip(TABLES, tables, strict=True):
            table.clear()
            table.update(found)
        Image.ID[:] = order
        Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, PngImagePlugin.MAX_TEXT_CHUNK = settings

    return undo


@pytest.fixture(autouse=True)
def _same_pillow() -> Iterator[None]:
    Image.init()
    undo = _pillow()
    yield
    undo()


def _set(target: Any, name: str, value: Any) -> Undo:
    before = getattr(target, name)
    setattr(target, name, value)
    return lambda: setattr(target, name, before)


def _all(undone: list[Undo]) -> Undo:
    return lambda: [undo() for undo in undone]


def _set_each(datasets: Any, name: str, value: Callable[[Any], Any]) -> Undo:
    return _all([_set(one, name, value(one)) for one in datasets])


def _image(*_: Any) -> Any:
    """An image of a plugin, or loader, of the script's own."""
    image = Image.new("RGB", (33, 33), (0, 255, 0))
    image.format = "OWN"
    return image


def _plugin(name: str, accept: Any = None, first: bool = False) -> Undo:
    undo, before = _pillow(), Image.OPEN.get(name)
    Image.register_open(name, _image, accept or (before and before[1]))  # type: ignore[arg-type, misc]
    if first:
        Image.ID.insert(0, Image.ID.pop())
    return undo


def _no_plugin(name: str) -> Undo:
    undo = _pillow()
    del Image.OPEN[name]
    Image.ID.remove(name)
    return undo


def _file(path: Path, made: Callable[[bytes], bytes | None]) -> Undo:
    """Another content of a file, with its size and time where those are the same; or no file."""
    status, content = os.stat(path), path.read_bytes()

    def write(new: bytes | None) -> None:
        if new is None:
            path.unlink()
            return
        path.write_bytes(new)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    write(made(content))
    return lambda: write(content)


def _moved_over(tree: Path) -> Undo:
    """A rename puts a file of the same size and time over another."""
    path, other, kept = tree / "a" / "0.jpg", tree / "a" / "2.jpg", tree / "kept"
    status, size = os.stat(path), max(path.stat().st_size, other.stat().st_size)
    for name in (path, other):
        name.write_bytes(name.read_bytes().ljust(size, b"\0"))
        os.utime(name, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.rename(path, kept)
    os.link(other, path)
    return lambda: os.replace(kept, path)


def _cut_off(tree: Path, allowed: bool) -> Undo:
    cut = [_file(tree / "a" / name, lambda old: old[: len(old) // 2]) for name in ("0.jpg", "1.png")]
    return _all([*cut, _set(ImageFile, "LOAD_TRUNCATED_IMAGES", allowed)])


CHANGES: dict[str, Callable[..., Undo]] = {
    "transform": lambda tree, all_: _set_each(all_, "transform", lambda one: transform_of(10)),
    "transform in place": lambda tree, all_: _set_each(
        [one.transform.transforms[0] for one in all_], "size", lambda one: (12, 12)
    ),
    "target_transform": lambda tree, all_: _set_each(all_, "target_transform", lambda one: lambda n: n + 5),
    "loader": lambda tree, all_: _set_each(all_, "loader", lambda one: _image),
    "torchvision's loader": lambda tree, all_: _set(folder, "pil_loader", _image),
    "samples": lambda tree, all_: _set_each(
        all_, "samples", lambda one: [(path, n + 1) for path, n in reversed(list(one.samples))]
    ),
    "MAX_IMAGE_PIXELS, an error": lambda tree, all_: _set(Image, "MAX_IMAGE_PIXELS", 500),
    "MAX_IMAGE_PIXELS, a warning": lambda tree, all_: _set(Image, "MAX_IMAGE_PIXELS", 1700),
    "MAX_TEXT_CHUNK": lambda tree, all_: _set(PngImagePlugin, "MAX_TEXT_CHUNK", 1000),
    "LOAD_TRUNCATED_IMAGES, all whole": lambda tree, all_: _set(ImageFile, "LOAD_TRUNCATED_IMAGES", True),
    "LOAD_TRUNCATED_IMAGES": lambda tree, all_: _cut_off(tree, True),
    "cut off": lambda tree, all_: _cut_off(tree, False),
    "a plugin for PNG": lambda tree, all_: _plugin("PNG"),
    "a plugin for JPEG": lambda tree, all_: _plugin("JPEG"),
    "a plugin that is asked last": lambda tree, all_: _plugin("OWN", lambda begins: True),
    "a plugin that is asked first": lambda tree, all_: _plugin("OWN", lambda begins: True, first=True),
    "a plugin that is asked first, and declines": lambda tree, all_: _plugin(
        "OWN", lambda begins: begins[:4] == b"OWN!", first=True
    ),
    "no plugin for WebP": lambda tree, all_: _no_plugin("WEBP"),
    "no plugin for JPEG": lambda tree, all_: _no_plugin("JPEG"),
    "another file, of the same size and time": lambda tree, all_: _file(
        tree / "a/5.bmp", lambda old: old[:99] + bytes(len(old) - 99)
    ),
    "another file of the same size and time, moved": lambda tree, all_: _moved_over(tree),
    "no file": lambda tree, all_: _file(tree / "a/2.jpg", lambda old: None),
    "a bad file": lambda tree, all_: _file(tree / "a/3.png", lambda old: b"no image"),
}  # fmt: skip


class Ways:
    """torchvision's loader, and fastpipe's in its place."""

    def __init__(self, tree: Path, cache: Path) -> None:
        def fast(where: Any) -> FastImageFolder:
            return FastImageFolder(tree, transform_of(20), cache=where)

        stock, replaced = (ImageFolder(tree, transform_of(20)) for _ in range(2))
        self.datasets: dict[str, Any] = {
            "stock": stock, "accelerate": replaced, "auto": fast("auto"), "ram": fast("ram"),
            "disk": fast(Cache("disk", dir=cache)), "off": fast("off"), "stock loader": fast("ram"),
        }  # fmt: skip
        self._loaders = {
            name: (DataLoader if name.startswith("stock") else FastLoader)(one, 3)
            for name, one in self.datasets.items()
        }
        self._loaders["accelerate"] = accelerate(DataLoader(replaced, 3))

    def epoch(self, name: str) -> Any:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            found = [one if isinstance(one, tuple) else "an error" for one in outcomes(self._loaders[name])]
        return found, any(issubclass(one.category, Image.DecompressionBombWarning) for one in seen)

    def check(self, epochs: int = 2) -> Any:
        for number in range(epochs):
            wanted = self.epoch("stock")
            for name in self.datasets:
                assert self.epoch(name) == wanted, (name, number)
        return wanted


# After these there are the same images.
_SAME = {
    "LOAD_TRUNCATED_IMAGES, all whole", "a plugin that is asked last", "a plugin that is asked first, and declines"
}  # fmt: skip


@pytest.mark.few(6)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_shows_as_under_torchvision(change: str, tree: Path, tmp_path: Path, settled: Any) -> None:
    ways = Ways(tree, tmp_path / "cache")
    before = ways.check(3)
    undo = CHANGES[change](tree, ways.datasets.values())
    settled(tree)
    changed = ways.check(3)
    assert (changed == before) == (change in _SAME), changed
    undo()
    settled(tree)
    assert ways.check() == before


def test_a_truncated_image_is_refused_once_it_is_not_allowed_any_more(
    tree: Path, tmp_path: Path, settled: Any
) -> None:
    ways = Ways(tree, tmp_path / "cache")
    _cut_off(tree, True)
    settled(tree)
    part = ways.check(3)
    assert "an error" not in part[0]
    for allowed in (False, True, False):
        ImageFile.LOAD_TRUNCATED_IMAGES = allowed
        assert (ways.check() == part) == allowed


def test_images_of_other_plugins_are_not_kept(tree: Path, settled: Any) -> None:
    (tree / "b" / "own.png").write_bytes(b"OWN!")
    settled(tree)
    colours = iter(range(1, 255))

    def opened(file: Any, name: Any) -> Any:
        image = Image.new("RGB", (30, 30), (next(colours), 0, 0))
        image.__class__ = type("Own", (Image.Image,), {"__module__": "script"})
        return image

    Image.register_open("OWN", opened, lambda begins: begins[:4] == b"OWN!")
    dataset = FastImageFolder(tree, transforms.PILToTensor(), cache="ram")
    place = next(n for n, (path, _) in enumerate(dataset.samples) if path.endswith("own.png"))
    seen = [int(dataset[place][0][0, 0, 0]) for _ in range(4)]
    assert len(set(seen)) == 4


@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_a_file_found_bad_is_looked_at_again(policy: Any, tree: Path, settled: Any) -> None:
    dataset = FastImageFolder(tree, transform_of(20), cache="ram", bad_samples=policy)
    plain, loader = DataLoader(ImageFolder(tree, transform_of(20)), 16), FastLoader(dataset, 16)
    undo = CHANGES["a bad file"](tree, None)
    settled(tree)
    for _ in range(3):
        [(images, _)] = loader
        assert len(images) == (6 if policy == "skip" else 7)
    undo()
    for _ in range(3):
        [(images, _)], [(wanted, _)] = loader, plain
        assert torch.equal(images, wanted)
