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
        Image.fromarray(rng.integers(0, 255, (40, 44, 3), dtype=np.uint8)).save(
            root / "a" / f"{number}.{end}"
        )
    text = PngImagePlugin.PngInfo()
    text.add_text("key", "value" * 500, zip=True)
    Image.new("RGB", (30, 30), (1, 2, 3)).save(root / "b" / "text.png", pnginfo=text)
    return settled(root)  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _same_pillow() -> Iterator[None]:
    """Pillow's settings and plugins are as they were behind each test."""
    Image.init()
    before = [dict(table) for table in TABLES], Image.ID[:], Image.MAX_IMAGE_PIXELS
    yield
    for table, found in zip(TABLES, before[0], strict=True):
        table.clear()
        table.update(found)
    Image.ID[:], Image.MAX_IMAGE_PIXELS = before[1], before[2]
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    PngImagePlugin.MAX_TEXT_CHUNK = 1 << 20


def _set(target: Any, name: str, value: Any) -> Undo:
    before = getattr(target, name)
    setattr(target, name, value)
    return lambda: setattr(target, name, before)


def _set_each(datasets: Any, name: str, value: Callable[[Any], Any]) -> Undo:
    undone = [_set(one, name, value(one)) for one in datasets]
    return lambda: [undo() for undo in undone]


def _image(*_: Any) -> Any:
    """An image of a plugin, or loader, of the script's own."""
    image = Image.new("RGB", (33, 33), (0, 255, 0))
    image.format = "OWN"
    return image


def _plugin(name: str, accept: Any = None, first: bool = False) -> Callable[..., Undo]:
    def change(tree: Path, datasets: Any) -> Undo:
        before, order = Image.OPEN.get(name), Image.ID[:]
        Image.register_open(name, _image, accept or (before and before[1]))  # type: ignore[arg-type, misc]
        if first:
            Image.ID.insert(0, Image.ID.pop())

        def undo() -> None:
            Image.ID[:] = order
            if before is None:
                del Image.OPEN[name]
            else:
                Image.OPEN[name] = before

        return undo

    return change


def _no_plugin(name: str) -> Callable[..., Undo]:
    def change(tree: Path, datasets: Any) -> Undo:
        found, at = Image.OPEN.pop(name), Image.ID.index(name)
        Image.ID.remove(name)
        return lambda: (Image.OPEN.update({name: found}), Image.ID.insert(at, name))

    return change


def _file(name: str, made: Callable[[bytes], bytes | None]) -> Callable[..., Undo]:
    """Another content of a file, with its size and time where those are the same; or no file."""

    def change(tree: Path, datasets: Any) -> Undo:
        path, status = tree / name, os.stat(tree / name)
        content = path.read_bytes()

        def write(new: bytes | None) -> None:
            if new is None:
                path.unlink()
                return
            path.write_bytes(new)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

        write(made(content))
        return lambda: write(content)

    return change


def _moved_over(tree: Path, datasets: Any) -> Undo:
    """A rename puts a file of the same size and time over another."""
    path, other, kept = tree / "a" / "0.jpg", tree / "a" / "2.jpg", tree / "kept"
    status, size = os.stat(path), max(path.stat().st_size, other.stat().st_size)
    for name in (path, other):
        name.write_bytes(name.read_bytes().ljust(size, b"\0"))
        os.utime(name, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.rename(path, kept)
    os.link(other, path)
    return lambda: os.replace(kept, path)


def _cut_off(allowed: bool) -> Callable[..., Undo]:
    def change(tree: Path, datasets: Any) -> Undo:
        files = [tree / "a" / "0.jpg", tree / "a" / "1.png"]
        whole = [path.read_bytes() for path in files]
        for path, content in zip(files, whole, strict=True):
            path.write_bytes(content[: len(content) // 2])
        undo = _set(ImageFile, "LOAD_TRUNCATED_IMAGES", allowed)
        return lambda: (
            undo(),
            [path.write_bytes(content) for path, content in zip(files, whole, strict=True)],
        )

    return change


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
    "LOAD_TRUNCATED_IMAGES": _cut_off(True),
    "cut off": _cut_off(False),
    "a plugin for PNG": _plugin("PNG"),
    "a plugin for JPEG": _plugin("JPEG"),
    "a plugin that is asked last": _plugin("OWN", lambda begins: True),
    "a plugin that is asked first": _plugin("OWN", lambda begins: True, first=True),
    "a plugin that is asked first, and declines": _plugin("OWN", lambda begins: begins[:4] == b"OWN!", first=True),
    "no plugin for WebP": _no_plugin("WEBP"),
    "no plugin for JPEG": _no_plugin("JPEG"),
    "another file, of the same size and time": _file("a/5.bmp", lambda old: old[:99] + bytes(len(old) - 99)),
    "another file of the same size and time, moved": _moved_over,
    "no file": _file("a/2.jpg", lambda old: None),
    "a bad file": _file("a/3.png", lambda old: b"no image"),
}  # fmt: skip


class Ways:
    """torchvision's loader, and fastpipe's in its place."""

    def __init__(self, tree: Path, cache: Path) -> None:
        def fast(where: Any) -> FastImageFolder:
            return FastImageFolder(tree, transform_of(20), cache=where)

        self.stock = ImageFolder(tree, transform_of(20))
        self.datasets: dict[str, Any] = {
            "stock": self.stock, "accelerate": ImageFolder(tree, transform_of(20)), "auto": fast("auto"),
            "ram": fast("ram"), "disk": fast(Cache("disk", dir=cache)), "off": fast("off"),
            "stock loader": fast("ram"),
        }  # fmt: skip
        self._loaders = {
            name: DataLoader(one, 3) if name.startswith("stock") else FastLoader(one, 3)
            for name, one in self.datasets.items()
            if name != "accelerate"
        }
        self._loaders["accelerate"] = accelerate(DataLoader(self.datasets["accelerate"], 3))

    def epoch(self, name: str) -> Any:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                batches = list(self._loaders[name])
                found: Any = [
                    torch.cat([torch.as_tensor(one[n]) for one in batches]).tolist() for n in (0, 1)
                ]
            except (OSError, ValueError, RuntimeError, Image.DecompressionBombError) as error:
                return f"an error: {error.__cause__ or error}"
        return found, any(issubclass(one.category, Image.DecompressionBombWarning) for one in seen)

    def check(self, epochs: int = 2) -> Any:
        for number in range(epochs):
            wanted = self.epoch("stock")
            for name in self.datasets:
                found = self.epoch(name)
                if isinstance(wanted, str):
                    assert isinstance(found, str), (name, number, wanted)
                else:
                    assert not isinstance(found, str), (name, number, found)
                    assert found == wanted, (name, number)
        return wanted


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


# After these there are the same images.
_SAME = {
    "LOAD_TRUNCATED_IMAGES, all whole", "a plugin that is asked last", "a plugin that is asked first, and declines"
}  # fmt: skip


def test_a_truncated_image_is_refused_once_it_is_not_allowed_any_more(
    tree: Path, tmp_path: Path, settled: Any
) -> None:
    ways = Ways(tree, tmp_path / "cache")
    _cut_off(True)(tree, None)
    settled(tree)
    part = ways.check(3)
    assert not isinstance(part, str)
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
    plain = DataLoader(ImageFolder(tree, transform_of(20)), 16)
    loader = FastLoader(dataset, 16)
    undo = CHANGES["a bad file"](tree, None)
    settled(tree)
    for _ in range(3):
        [(images, _)] = loader
        assert len(images) == (6 if policy == "skip" else 7)
    undo()
    for _ in range(3):
        [(images, _)], [(wanted, _)] = loader, plain
        assert torch.equal(images, wanted)
