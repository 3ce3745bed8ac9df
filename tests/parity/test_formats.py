"""Every kind of file, good and bad, through the dataset: torchvision's sample, or an error
that names the file, and never a word on stderr."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from odd_images import OddImage, damaged_at_random, odd_images
from PIL import Image, ImageOps
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader

from fastpipe import Decode, FastImageFolder
from fastpipe.bench.synthetic import photo_tree
from fastpipe.errors import BadSampleError
from fastpipe.torch.randomness import take_key

BACKENDS = ["auto", "nvimgcodec", "simplejpeg", "pillow", "dali"]
TRANSFORM = v1.Compose([v1.Resize(40), v1.CenterCrop(32), v1.ToTensor()])
TRAINING = v1.Compose([v1.RandomResizedCrop(32), v1.RandomHorizontalFlip(), v1.ToTensor()])

# Pillow warns of palettes with transparency and of truncated metadata, as it does in ImageFolder.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL", "ignore:Palette images with Transparency")


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, OddImage]]:
    """A tree of one class, and its files by path."""
    root = tmp_path_factory.mktemp("odd")
    return root, {str(case.path): case for case in odd_images(root / "all")}


@pytest.mark.few(3)
@pytest.mark.parametrize("transform", [None, TRANSFORM], ids=["none", "usual"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_file(
    odd: tuple[Path, dict[str, OddImage]], backend: Any, transform: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    root, cases = odd
    decode: Any = Decode(backend=backend)
    fast, stock = FastImageFolder(root, transform, decode=decode, threads=2), ImageFolder(root, transform)
    assert list(fast.samples) == stock.samples
    assert len(stock) > 120
    good = []
    for index, (path, _) in enumerate(stock.samples):
        try:
            expected = stock[index][0]
        except Exception as error:
            assert cases[path].expect == "bad", path
            for call in (lambda: fast[index], lambda: fast.__getitems__([index])):
                with pytest.raises(BadSampleError, match=f"sample {index} ") as raised:
                    call()
                assert repr(path) in str(raised.value)
                assert (raised.value.path, raised.value.index) == (path, index)
                assert type(raised.value.__cause__) is type(error), path
            continue
        assert cases[path].expect == "ok", path
        good.append(index)
        ((together, _),) = fast.__getitems__([index])
        for made in (fast[index][0], together):
            if transform is None:
                assert (made.mode, made.size) == (expected.mode, expected.size), path
                assert made.tobytes() == expected.tobytes(), path
                assert set(made.info) == set(expected.info), path
            else:
                assert torch.equal(made, expected), path
    skipping = FastImageFolder(root, TRAINING, decode=decode, bad_samples="skip", threads=4)
    for _ in range(3):
        assert len(fast.__getitems__(good)) == len(skipping.__getitems__(range(len(stock)))) == len(good)
    assert 60 < len(good) < len(stock)
    if backend != "dali":
        assert capfd.readouterr().err == ""


def test_damage_gives_pillow_s_pixels_or_pillow_s_error(tmp_path: Path, capfd: Any) -> None:
    photo = Image.open(next(photo_tree(tmp_path / "photos", classes=1, per_class=1).rglob("*.jp*g")))
    photo = photo.convert("RGB").resize((150, 120))
    rng = np.random.default_rng(4)
    folder = tmp_path / "tree" / "all"
    folder.mkdir(parents=True)
    options = itertools.product(("4:4:4", "4:2:2", "4:2:0"), (False, True), (0, 3))
    for number, (sampling, progressive, restarts) in enumerate(options):
        whole, option = folder / f"{number:02}.jpg", {"subsampling": sampling, "progressive": progressive}
        photo.save(whole, quality=85, restart_marker_blocks=restarts, **option)
        for variant in range(15):
            (folder / f"{number:02}_{variant:02}.jpg").write_bytes(damaged_at_random(whole.read_bytes(), rng))
    transform = v1.Compose([v1.RandomResizedCrop(32, scale=(0.05, 0.5)), v1.PILToTensor()])
    fast, stock = FastImageFolder(tmp_path / "tree", transform), ImageFolder(tmp_path / "tree")
    good = 0
    for index, (path, _) in enumerate(stock.samples):
        torch.manual_seed(index)
        try:
            whole_image = default_loader(path)
        except OSError:
            with pytest.raises(BadSampleError):
                fast[index]
            continue
        good += 1
        torch.manual_seed(index)
        made = fast[index][0]
        torch.manual_seed(index)
        parameters = fast.plan.draw(take_key(1)[0])[0].tolist()  # from torch's global generator
        expected = fast.plan.reference(whole_image, parameters)
        assert torch.equal(made, expected), path
    assert 12 < good < len(stock)
    assert capfd.readouterr().err == ""


# ---- what is no image at all -----------------------------------------------------------------------


def test_a_sample_that_became_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "a" / "x.jpg")
    fast = FastImageFolder(tmp_path)
    (tmp_path / "a" / "x.jpg").unlink()
    (tmp_path / "a" / "x.jpg").mkdir()
    with pytest.raises(BadSampleError, match=r"IsADirectoryError.*x\.jpg"):
        fast[0]


@pytest.mark.skipif(sys.platform == "win32", reason="there is no other user to be: run it elsewhere")
@pytest.mark.parametrize("policy", ["raise", "skip", "replace"])
@pytest.mark.parametrize("backend", ["auto", "pillow"])
def test_a_file_without_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_child: Any, backend: Any, policy: Any
) -> None:
    """That somebody else may read it says nothing of the file: it is not damaged, and never left out."""
    (tmp_path / "a").mkdir()
    for name in ("x", "y"):
        Image.new("RGB", (8, 8)).save(tmp_path / "a" / f"{name}.jpg")
    (tmp_path / "a" / "x.jpg").chmod(0)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # the folders above are this user's alone
    fast = FastImageFolder(".", TRANSFORM, decode=Decode(backend=backend), bad_samples=policy)

    def as_another_user() -> None:
        if os.geteuid() == 0:  # a superuser may read anything
            os.seteuid(65534)
        for call in (lambda: fast[0], lambda: fast.__getitems__([0, 1])):
            with pytest.raises(PermissionError, match=r"Permission denied.*x\.jpg"):
                call()

    in_child(as_another_user)


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="run it on Linux, which has files that fail")
@pytest.mark.parametrize("backend", ["auto", "pillow"])
def test_a_file_that_opens_and_cannot_be_read(tmp_path: Path, backend: Any) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.jpg").symlink_to("/proc/self/mem")
    fast = FastImageFolder(tmp_path, TRANSFORM, decode=Decode(backend=backend))
    for call in (lambda: fast[0], lambda: fast.__getitems__([0])):
        with pytest.raises(BadSampleError, match=r"x\.jpg.*Input/output error"):
            call()


# ---- options of Decode ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_exif_turns_the_images_of_the_dataset(odd: tuple[Path, dict[str, OddImage]], backend: Any) -> None:
    root, cases = odd
    fast = FastImageFolder(root, decode=Decode(backend=backend, exif=True))
    turned = 0
    for index, (path, _) in enumerate(fast.samples):
        if "exif" not in cases[path].name:
            continue
        opened = Image.open(path)
        expected = ImageOps.exif_transpose(opened).convert("RGB")
        turned += expected.tobytes() != opened.convert("RGB").tobytes()
        assert fast[index][0].size == expected.size
        assert fast[index][0].tobytes() == expected.tobytes()
        with_crop = FastImageFolder(root, TRANSFORM, decode=Decode(backend=backend, exif=True))
        assert torch.equal(with_crop[index][0], TRANSFORM(expected))
    assert turned >= 7


@pytest.mark.parametrize("backend", BACKENDS)
def test_too_many_pixels(tmp_path: Path, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    Image.new("RGB", (30, 20)).save(tmp_path / "a" / "x.jpg")
    limited = FastImageFolder(tmp_path, TRANSFORM, decode=Decode(backend=backend, max_pixels=599))
    with pytest.raises(BadSampleError, match=r"x\.jpg.*600 pixels.*max_pixels=599"):
        limited[0]
    fast = FastImageFolder(tmp_path, TRANSFORM, decode=Decode(backend=backend, max_pixels=600))
    assert fast[0][0].shape == (3, 32, 32)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 299)
    with pytest.raises(BadSampleError, match="DecompressionBombError"):
        fast[0]
