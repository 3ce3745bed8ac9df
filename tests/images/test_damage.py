"""Which errors mean that an image's file is bad: all others are raised as they are, whatever the policy."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image, ImageFile, WebPImagePlugin, features
from torch.utils.data import DataLoader
from torchvision.transforms import Compose, PILToTensor, Resize

from fastpipe import FastImageFolder, FastLoader
from fastpipe.errors import BadSampleError, MissingDependencyError

FORMAT, MAGIC = "FAULTY", b"faulty image"
TRANSFORM = Compose([Resize((8, 8)), PILToTensor()])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "folder"
    (made / "a").mkdir(parents=True)
    Image.new("RGB", (20, 20)).save(made / "a" / "0.png")
    return made


@pytest.fixture
def raises() -> Iterator[Callable[[Any, Any], None]]:
    """Registers a plugin of a script's own that raises an error when an image is loaded."""
    Image.init()  # all plugins are loaded: none is lost afterwards
    tables = dict(Image.OPEN), list(Image.ID)

    def register(kind: type[BaseException], arguments: tuple[Any, ...]) -> None:
        class Faulty(ImageFile.ImageFile):
            format = FORMAT

            def _open(self) -> None:
                self._size, self._mode = (4, 4), "RGB"

            def load(self) -> Any:
                raise kind(*arguments)

        Image.register_open(FORMAT, Faulty, lambda prefix: prefix.startswith(MAGIC))

    yield register
    Image.OPEN.clear()
    Image.OPEN.update(tables[0])
    Image.ID[:] = tables[1]


def _read(folder: Path, policy: Any) -> list[Callable[[], Any]]:
    """Calls that read a folder by loaders, the last of which keeps images."""

    def reads(loader: Any, cache: str) -> Callable[[], Any]:
        dataset = FastImageFolder(folder, TRANSFORM, bad_samples=policy, cache=cache, threads=2)
        return lambda: [len(batch) for batch in loader(dataset, 2, collate_fn=list)]

    return [reads(FastLoader, "off"), reads(DataLoader, "off"), reads(FastLoader, "ram")]


class ScriptsError(Exception):
    pass


@pytest.mark.few(8)
@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize(
    "error",
    [
        (MemoryError, ()), (ImportError, ("x",)), (MissingDependencyError, ("pip install x",)),
        (NameError, ("x",)), (AttributeError, ("x",)), (TypeError, ("x",)), (AssertionError, ("x",)),
        (RecursionError, ("x",)), (ScriptsError, ("x",)), (UserWarning, ("x",)),
        (Image.DecompressionBombWarning, ("x",)), (OSError, (errno.EMFILE, "x")),
        (OSError, (errno.ENFILE, "x")), (OSError, (errno.ENOMEM, "x")), (PermissionError, (errno.EACCES, "x")),
    ],
    ids=lambda one: one if isinstance(one, str) else f"{one[0].__name__} {one[1]}",
)  # fmt: skip
def test_an_error_that_says_nothing_of_the_file_is_raised(
    folder: Path, raises: Callable[[Any, Any], None], error: Any, policy: str
) -> None:
    (folder / "a" / "1.png").write_bytes(MAGIC)
    raises(*error)
    for read in _read(folder, policy):
        with pytest.raises(error[0]) as raised:
            read()
        assert not isinstance(raised.value, BadSampleError)


@pytest.mark.few(8)
@pytest.mark.parametrize(
    "error",
    [
        (OSError, ("broken data stream",)), (SyntaxError, ("x",)), (ValueError, ("x",)), (KeyError, (1,)),
        (IndexError, ("x",)), (ZeroDivisionError, ("x",)), (OverflowError, ("x",)), (EOFError, ("x",)),
        (RuntimeError, ("x",)), (NotImplementedError, ("x",)),
        (UnicodeDecodeError, ("ascii", b"x", 0, 1, "x")), (Image.DecompressionBombError, ("x",)),
        (FileNotFoundError, (errno.ENOENT, "x")),
    ],
    ids=lambda one: one if isinstance(one, str) else f"{one[0].__name__} {one[1]}",
)  # fmt: skip
def test_an_error_that_damage_makes_is_a_bad_sample(
    folder: Path, raises: Callable[[Any, Any], None], error: Any
) -> None:
    (folder / "a" / "1.png").write_bytes(MAGIC)
    raises(*error)
    for read in _read(folder, "skip"):
        assert read() == [1]
    for read in _read(folder, "raise"):
        with pytest.raises(BadSampleError) as raised:
            read()
        assert type(raised.value.__cause__) is error[0]


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize(
    ("kind", "decoder", "feature"), [("JPEG2000", "jpeg2k", "jpg_2000"), ("TIFF", "libtiff", "libtiff")]
)
def test_a_library_that_pillow_was_built_without_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, decoder: str, feature: str, policy: str
) -> None:
    options = {"compression": "tiff_lzw"} if kind == "TIFF" else {}
    Image.new("RGB", (9, 9)).save(folder / "a" / "1.png", kind, **options)
    assert _read(folder, policy)[0]() == [2]
    monkeypatch.delattr(Image.core, f"{decoder}_decoder")
    for read in _read(folder, policy):
        with pytest.raises(MissingDependencyError, match=f"built without '{feature}'.*pip install"):
            read()


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("kind", ["WEBP", "EPS"])
def test_a_missing_decoder_of_webp_or_eps_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, policy: str
) -> None:
    Image.new("RGB", (9, 9)).save(folder / "a" / "1.png", kind)
    monkeypatch.setattr(WebPImagePlugin, "SUPPORTED", False)
    monkeypatch.setattr(features, "check", lambda feature: feature != "webp")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", False)
    message = r"1\.png.*built without 'webp'" if kind == "WEBP" else r"Ghostscript.*apt-get install"
    for read in _read(folder, policy):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(MissingDependencyError, match=message):
                read()


STUBS = {
    "HDF5": b"\x89HDF\r\n\x1a\n", "GRIB": b"GRIB\0\0\0\1", "BUFR": b"BUFR", "FITS": b"SIMPLE  =",
    "WMF": b"\xd7\xcd\xc6\x9a\x00\x00" + bytes(range(16)), "empty": b"", "zeros": bytes(100),
    "cut off": b"\xff\xd8\xff\xe0\x00\x10JFIF\x00",
}  # fmt: skip


@pytest.mark.parametrize("transform", [None, TRANSFORM])
def test_a_file_that_pillow_cannot_decode_is_a_bad_sample(folder: Path, transform: Any) -> None:
    for name, content in STUBS.items():
        (folder / "a" / "1.png").write_bytes(content + bytes(100 if content else 0))
        dataset = FastImageFolder(folder, transform, bad_samples="skip", cache="off")
        assert [len(batch) for batch in FastLoader(dataset, 2, collate_fn=list)] == [1], name
        with pytest.raises(BadSampleError, match=r"1\.png"):
            FastImageFolder(folder, transform)[1]


def _of_a_script(image: Any) -> Any:
    raise AttributeError("of the transform")


def test_an_error_of_a_transform_is_raised(folder: Path) -> None:
    dataset = FastImageFolder(folder, _of_a_script, bad_samples="skip")
    with pytest.raises(AttributeError, match="of the transform"):
        list(FastLoader(dataset, 2))


def test_images_of_every_format_are_read_under_a_wrong_name(folder: Path) -> None:
    for number, kind in enumerate(("PNG", "BMP", "GIF", "TIFF", "PPM", "WEBP", "JPEG", "ICO", "PCX")):
        Image.new("RGB", (16, 16), (200, 10, number)).save(folder / "a" / f"{number + 1}.jpg", kind)
    dataset = FastImageFolder(folder, PILToTensor(), bad_samples="raise", cache="off")
    for number, (path, _) in enumerate(dataset.samples):
        with Image.open(path) as image:
            wanted = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
        assert np.array_equal(dataset[number][0].numpy(), wanted)
