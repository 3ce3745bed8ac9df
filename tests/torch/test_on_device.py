"""Batches that are made on a device.  Here the device is the CPU, with decoders and operations of a device's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from odd_images import damaged_at_random
from PIL import Image
from streams import OwnSampler, outcomes
from torch.utils.data import ConcatDataset, Subset
from torchvision import transforms as v1
from torchvision.transforms import v2

from fastpipe import Decode, FastImageFolder, FastLoader
from fastpipe.bench.synthetic import photo_tree
from fastpipe.core.native import native
from fastpipe.core.transfer import Transfer
from fastpipe.core.types import Box
from fastpipe.errors import BadSampleError
from fastpipe.images import gpu_batches as decoders
from fastpipe.images import gpu_share as sharing
from fastpipe.images.gpu_batches import device_decoder
from fastpipe.images.gpu_share import Share
from fastpipe.torch.split import SplitChoice

NORMALIZE = v1.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
TRANSFORMS = {
    "training": v1.Compose([v1.RandomResizedCrop(48), v1.RandomHorizontalFlip(), v1.ToTensor(), NORMALIZE]),
    "evaluation": v1.Compose([v1.Resize(40), v1.CenterCrop(32), v1.ToTensor(), NORMALIZE]),
    "bytes": v1.Compose([v1.RandomResizedCrop(32), v1.RandomVerticalFlip(), v1.PILToTensor()]),
    "v2": v2.Compose([
        v2.RandomResizedCrop(32), v2.ToImage(), v2.ToDtype(torch.float32, scale=True),
        v2.Normalize((0.5,) * 3, (0.2,) * 3),
    ]),
    "padded": v1.Compose([v1.RandomCrop(100, padding=30), v1.ToTensor()]),
    "grey": v1.Compose([v1.RandomResizedCrop(32), v1.Grayscale(3), v1.ToTensor()]),
    "sixteen bits": v2.Compose([v2.RandomResizedCrop(32), v2.ToImage(), v2.ToDtype(torch.float16, scale=True)]),
    "rotation": v1.Compose([v1.RandomResizedCrop(32), v1.RandomRotation(9), v1.ToTensor()]),
    "own": v1.Compose([v1.Resize((8, 8)), lambda image: torch.tensor(np.asarray(image).mean())]),
}  # fmt: skip
of_both_layouts = pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)


class Decoder:
    """Decodes to the memory of a device."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def decode(self, parts: Sequence[tuple[bytes, Box]], stream: Any) -> list[Any]:
        assert stream is None
        self.calls.append(len(parts))
        found = [native.decode(blob, *box) for blob, box in parts]
        return [None if pixels is None else torch.from_numpy(pixels) for pixels in found]

    def describe(self) -> str:
        return "a device's decoder"


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """The decoder of a device, which is the CPU."""
    made = Decoder()
    monkeypatch.setattr(Transfer, "is_elsewhere", True)
    choose = lambda decode, *_: made if decode.backend == "nvimgcodec" else None  # noqa: E731
    monkeypatch.setattr(decoders, "device_decoder", choose)
    return made


def folders(root: Any, transform: Any = TRANSFORMS["training"], **options: Any) -> list[Any]:
    """A dataset whose batches are made on the device, and one whose are made here."""
    options = {"cache": "off", "seed": 2, **options}
    return [
        FastImageFolder(root, transform, **{"decode": Decode(backend), **options})  # type: ignore[arg-type]
        for backend in ("nvimgcodec", "auto")
    ]


def loaders(datasets: Any, **options: Any) -> tuple[Any, Any]:
    options = {"batch_size": 8, "shuffle": True, **options}
    return FastLoader(datasets[0], device="cpu", **options), FastLoader(datasets[1], **options)


def same(made: Any, expected: Any) -> bool:
    """Whether batches have the same values and strides, and errors are of the same sample."""
    if isinstance(expected, BadSampleError):
        return (made.index, made.path, str(made)) == (expected.index, expected.path, str(expected))
    return all(
        torch.equal(one, other) and one.stride() == other.stride() for one, other in zip(made, expected, strict=True)
    )  # fmt: skip


def same_epochs(loaders: tuple[Any, Any], epochs: int = 1) -> bool:
    there, here = ([outcomes(loader, list) for _ in range(epochs)] for loader in loaders)
    return all(len(a) == len(b) and all(map(same, a, b)) for a, b in zip(there, here, strict=True))


@pytest.mark.few(3)
@pytest.mark.parametrize("name", TRANSFORMS)
@of_both_layouts
def test_batches_are_the_same(photos: Path, name: str, layout: Any, decoder: Decoder, caplog: Any) -> None:
    caplog.set_level("INFO", "fastpipe")
    both = loaders(folders(photos, TRANSFORMS[name], memory_format=layout))
    assert same_epochs(both)
    on_device = name in ("training", "evaluation", "bytes", "v2", "padded")
    assert bool(decoder.calls) == on_device, "what is more than resampling is done here"
    if on_device:
        assert "decoded on cpu: a device's decoder, resampled there by torch's operations" in caplog.text
        assert "JPEGs by a device's decoder, resampled there by" in repr(both[0].plan)
    if on_device and name != "padded":
        assert sum(decoder.calls) == len(both[0].dataset) and len(decoder.calls) == len(both[0])


@pytest.mark.parametrize("cache", ["auto", "ram"])
def test_every_epoch_is_decoded_there_whatever_is_kept(tmp_path: Path, decoder: Decoder, cache: Any) -> None:
    tree = photo_tree(tmp_path, classes=2, per_class=7, sizes=(52, 64))
    Image.new("RGB", (90, 80), "teal").save(tree / "class_000" / "other.png")  # which no device decodes
    both = loaders(folders(tree, cache=cache))
    for _ in range(3):
        decoder.calls.clear()
        assert same_epochs(both) and sum(decoder.calls) == 14


def test_the_scripts_sampler_runs_on_its_stream(photos: Path, decoder: Any, monkeypatch: Any) -> None:
    inside, seen, entered = [0], [], []

    @contextmanager
    def on_stream(self: Transfer) -> Iterator[None]:
        inside[0] += 1
        entered.append(True)
        yield
        inside[0] -= 1

    sampler = OwnSampler(lambda: (seen.append(inside[0]) or index for index in range(24)), 24)
    monkeypatch.setattr(Transfer, "on_stream", on_stream)
    there, _ = loaders(folders(photos), shuffle=None, sampler=sampler)
    assert len(list(there)) == 3
    assert decoder.calls and entered and seen == [0] * 24


@pytest.mark.slow
def test_images_that_the_device_declines_are_made_here(photos: Path, decoder: Decoder, caplog: Any) -> None:
    decode = decoder.decode
    decoder.decode = lambda *given: [None if n % 3 == 0 else x for n, x in enumerate(decode(*given))]  # type: ignore[method-assign]
    assert same_epochs(loaders(folders(photos))) and caplog.records == []
    decoder.decode = lambda parts, stream: [None] * len(parts)  # type: ignore[method-assign]
    assert same_epochs(loaders(folders(photos)), 2)
    (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert "declined all 8 of a batch; it needs nvJPEG 13.2 or later" in warning


def test_a_device_that_cannot_decode_leaves_it_to_threads(
    photos: Path, decoder: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fails = MagicMock(side_effect=RuntimeError("the driver is too old"))
    monkeypatch.setattr(decoders, "device_decoder", fails)
    assert same_epochs(loaders(folders(photos)))
    assert "decoded on the CPU, not on cpu: RuntimeError: the driver is too old" in caplog.text


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A tree of which a third is damaged, and one file is no JPEG."""
    rng = np.random.default_rng(3)
    for number in range(48):
        path = tmp_path / f"class{number % 2}" / f"{number:02}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (60, 80, 3), np.uint8)).resize((160, 120)).save(path, quality=80)
        if number % 3 == 0:
            path.write_bytes(damaged_at_random(path.read_bytes(), rng))
    Image.new("RGB", (50, 40), (9, 8, 7)).save(tmp_path / "class1" / "other.png")
    return tmp_path


@pytest.mark.parametrize("policy", ["skip", "replace", "raise"])
def test_damaged_files_follow_their_policy(damaged: Path, policy: Any, decoder: Decoder) -> None:
    assert same_epochs(loaders(folders(damaged, bad_samples=policy))) and decoder.calls


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
def test_an_empty_batch_is_the_same_error(photos: Path, several: bool, decoder: Any, tmp_path: Path) -> None:
    (tmp_path / "class").mkdir()
    for number in range(4):
        (tmp_path / "class" / f"{number}.jpg").write_bytes(b"no image")
    bad, good = (folders(root, bad_samples="skip") for root in (tmp_path, photos))
    if several:
        bad = [
            ConcatDataset([a, Subset(a, [1, 2]), Subset(b, range(8))]) for a, b in zip(bad, good, strict=True)
        ]
    both = loaders(bad, shuffle=False, batch_size=6 if several else 4, drop_last=not several)
    assert same_epochs(both)
    assert several or isinstance(outcomes(both[0])[0], BadSampleError)


def test_an_epoch_can_be_resumed(photos: Path, decoder: Decoder) -> None:
    there, here = loaders(datasets := folders(photos))
    next(iter(there))
    again, _ = loaders(datasets)
    again.load_state_dict(there.state_dict())
    rest, whole = list(again), list(here)
    assert len(rest) == len(whole) - 1 and all(map(same, rest, whole[1:]))


@pytest.mark.slow
@of_both_layouts
def test_subsets_and_folders_are_made_there(photos: Path, damaged: Path, layout: Any, decoder: Any) -> None:
    one, other = (folders(root, memory_format=layout, bad_samples="skip") for root in (photos, damaged))
    for wrap in (
        lambda a, b: Subset(a, range(1, 17)), lambda a, b: ConcatDataset([a, Subset(a, [0, 1])]),
        lambda a, b: ConcatDataset([a, b]),
    ):  # fmt: skip
        decoder.calls.clear()
        assert same_epochs(loaders(tuple(map(wrap, one, other)), seed=4))
        assert decoder.calls
    one, other = (folders(photos, TRANSFORMS[name]) for name in ("training", "v2"))
    mixed = tuple(ConcatDataset(pair) for pair in zip(one, other, strict=True))
    assert same_epochs(loaders(mixed, batch_size=1, seed=4)), "folders that make other tensors"


@pytest.mark.few(3)
@pytest.mark.parametrize("share", [0.0, 0.25, 0.6, 1.0, "auto"])
@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
def test_the_cpu_decodes_the_rest_of_the_share(photos: Path, share: Any, several: bool, decoder: Any) -> None:
    there, here = folders(photos, decode=Decode("nvimgcodec", gpu_share=share))[0], folders(photos)[1]
    datasets: Any = [Subset(dataset, range(24)) for dataset in (there, here)]
    if several:
        datasets = [ConcatDataset([dataset, Subset(dataset, range(7))]) for dataset in datasets]
    assert same_epochs(loaders(datasets, seed=5, drop_last=True), 3)
    if share == 0.0:
        assert not decoder.calls
    elif share != "auto" and not several:
        assert set(decoder.calls) == {int(8 * share)}


def test_a_batch_of_several_parts_has_one_share(photos: Path, decoder: Any, monkeypatch: Any) -> None:
    half, given = Share(0.5), []
    half.given = given.append  # type: ignore[method-assign]
    monkeypatch.setattr(sharing, "Share", lambda share: half)
    folder, _ = folders(photos)
    parts: Any = ConcatDataset([Subset(folder, range(12)), folder, Subset(folder, [0, 1])])
    there, _ = loaders((parts, parts))
    assert len(list(there)) == len(given) and set(given) == {0.5}


@pytest.mark.parametrize("place", ["device", "threads"])
def test_a_split_transform_is_finished_there_or_by_threads(
    photos: Path, place: Any, decoder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = [v1.ColorJitter(0.3), v1.RandomHorizontalFlip(), v1.ToTensor(), NORMALIZE]
    both = folders(photos, v1.Compose([v1.RandomResizedCrop(32), *end]))
    there, here = loaders(both, augment="split")
    monkeypatch.setattr(SplitChoice, "_place", lambda self, placing: place)
    made = list(there)
    assert bool(decoder.calls) == (place == "device"), "what threads augment they decode"
    monkeypatch.setattr(SplitChoice, "_place", lambda self, placing: "threads")
    for one, other in zip(made, here, strict=True):
        assert torch.allclose(one[0], other[0], atol=1e-5)


def test_workers_and_other_collations_make_batches_here(photos: Path, decoder: Decoder) -> None:
    datasets = folders(photos)
    assert same_epochs(loaders(datasets, num_workers=1, workers="processes"))
    own, _ = loaders(datasets, collate_fn=lambda samples: torch.stack([image for image, _ in samples]))
    assert len(list(own)) == len(own) and not decoder.calls


def test_only_backends_of_a_gpu_decode_there() -> None:
    scaled, without = Decode("nvimgcodec", scaled=True), Decode("dali", gpu_share=0)
    for decode in (Decode(), Decode("simplejpeg"), scaled, without):
        assert device_decoder(decode, torch.device("cuda"), 1) is None, decode
    assert device_decoder(Decode("nvimgcodec"), torch.device("cpu"), 1) is None


@pytest.mark.gpu
@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("backend", ["nvimgcodec", "dali"])
def test_a_gpus_batches_are_nearly_the_same(photos: Path, backend: Any, pin_memory: bool) -> None:
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="pip install '.[dali]'")
    there, _ = folders(photos, TRANSFORMS["bytes"], decode=Decode(backend))
    _, here = folders(photos, TRANSFORMS["bytes"])
    options: dict[str, Any] = {"batch_size": 16, "shuffle": True}
    differences = []
    made_there = FastLoader(there, device="cuda", pin_memory=pin_memory, **options)
    for made, expected in zip(made_there, FastLoader(here, **options), strict=True):
        assert made[0].is_cuda and torch.equal(made[1].cpu(), expected[1])
        differences.append((made[0].cpu().float() - expected[0].float()).abs().mean().item())
    assert np.mean(differences) <= 0.5, "of 255"
