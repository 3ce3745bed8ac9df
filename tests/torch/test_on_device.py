"""Batches that are made on a device.  Here the device is the CPU, with decoders and operations of a device's."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from odd_images import damaged_at_random
from PIL import Image
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
TRAINING = v1.Compose([v1.RandomResizedCrop(48), v1.RandomHorizontalFlip(), v1.ToTensor(), NORMALIZE])
TRANSFORMS = {
    "training": TRAINING,
    "evaluation": v1.Compose([v1.Resize(40), v1.CenterCrop(32), v1.ToTensor(), NORMALIZE]),
    "bytes": v1.Compose([v1.RandomResizedCrop(32), v1.RandomVerticalFlip(), v1.PILToTensor()]),
    "padded": v1.Compose([v1.RandomCrop(100, padding=30), v1.ToTensor()]),
    "grey": v1.Compose([v1.RandomResizedCrop(32), v1.Grayscale(3), v1.ToTensor()]),
    "v2": v2.Compose([
        v2.RandomResizedCrop(32), v2.ToImage(), v2.ToDtype(torch.float32, scale=True),
        v2.Normalize((0.5,) * 3, (0.2,) * 3),
    ]),
    "sixteen bits": v2.Compose([v2.RandomResizedCrop(32), v2.ToImage(), v2.ToDtype(torch.float16, scale=True)]),
    "rotation": v1.Compose([v1.RandomResizedCrop(32), v1.RandomRotation(9), v1.ToTensor()]),
    "own": v1.Compose([v1.Resize((8, 8)), lambda image: torch.tensor(np.asarray(image).mean())]),
}  # fmt: skip


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
def decoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Decoder]:
    """Of a device, which is the CPU."""
    made = Decoder()
    monkeypatch.setattr(Transfer, "is_elsewhere", True)
    monkeypatch.setattr(
        decoders, "device_decoder", lambda decode, *_: made if decode.backend == "nvimgcodec" else None
    )
    yield made


def loaders(root: Any, transform: Any, options: dict[str, Any] | None = None, **more: Any) -> tuple[Any, Any]:
    """A loader that makes batches on the device, and one that makes them here."""
    folders = [
        FastImageFolder(
            root,
            transform,
            **{"cache": "off", "decode": Decode(backend=backend), "seed": 2, **(options or {})},
        )
        for backend in ("nvimgcodec", "auto")
    ]
    there = FastLoader(folders[0], batch_size=8, shuffle=True, device="cpu", **more)
    return there, FastLoader(folders[1], batch_size=8, shuffle=True, **more)


def same(made: Any, expected: Any) -> bool:
    return all(
        torch.equal(one, other) and one.stride() == other.stride()
        for one, other in zip(made, expected, strict=True)
    )


@pytest.mark.few(6)
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["planes", "last"])
def test_batches_are_the_same(photos: Path, name: str, layout: Any, decoder: Decoder) -> None:
    there, here = loaders(photos, TRANSFORMS[name], {"memory_format": layout})
    for made, expected in zip(there, here, strict=True):
        assert same(made, expected)
    on_device = name in ("training", "evaluation", "bytes", "v2", "padded")
    assert bool(decoder.calls) == on_device, "what is more than resampling is done here"
    if name in ("training", "evaluation", "bytes", "v2"):
        assert sum(decoder.calls) == len(there.dataset) and len(decoder.calls) == len(there)


@pytest.mark.parametrize("cache", ["auto", "ram"])
def test_every_epoch_is_decoded_there_whatever_is_kept(tmp_path: Path, decoder: Decoder, cache: Any) -> None:
    tree = photo_tree(tmp_path, classes=2, per_class=7, sizes=(52, 64))
    Image.new("RGB", (90, 80), "teal").save(tree / "class_000" / "other.png")  # which no device decodes
    there, here = loaders(tree, TRAINING, {"cache": cache})
    for epoch in range(4):
        decoder.calls.clear()
        for made, expected in zip(there, here, strict=True):
            assert same(made, expected)
        assert sum(decoder.calls) == len(there.dataset) - 1, epoch


def test_the_scripts_sampler_runs_on_the_scripts_stream(
    photos: Path, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, seen, collated = [0], [], []

    @contextmanager
    def on_stream(self: Transfer) -> Iterator[None]:
        inside[0] += 1
        collated.append(True)
        yield
        inside[0] -= 1

    class Sampler(torch.utils.data.Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            for index in range(24):
                seen.append(inside[0])
                yield index

        def __len__(self) -> int:
            return 24

    monkeypatch.setattr(Transfer, "on_stream", on_stream)
    folder = FastImageFolder(photos, TRAINING, decode=Decode(backend="nvimgcodec"))
    assert len(list(FastLoader(folder, 8, sampler=Sampler(), device="cpu"))) == 3
    assert decoder.calls and collated and seen == [0] * 24


def test_what_the_device_declines_is_made_here(photos: Path, decoder: Decoder) -> None:
    decode = decoder.decode

    def some(parts: Sequence[tuple[bytes, Box]], stream: Any) -> list[Any]:
        return [None if number % 3 == 0 else one for number, one in enumerate(decode(parts, stream))]

    decoder.decode = some  # type: ignore[method-assign]
    there, here = loaders(photos, TRAINING)
    for made, expected in zip(there, here, strict=True):
        assert same(made, expected)


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
    found: list[list[Any]] = []
    for loader in loaders(damaged, TRAINING, {"bad_samples": policy}):
        outcomes: list[Any] = []
        batches = iter(loader)
        while True:
            try:
                outcomes.append(next(batches))
            except BadSampleError as error:
                outcomes.append((error.index, error.path))
            except StopIteration:
                break
        found.append(outcomes)
    assert decoder.calls and len(found[0]) == len(found[1])
    for made, expected in zip(*found, strict=True):
        assert made == expected if isinstance(expected, tuple) else same(made, expected)


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
def test_a_batch_with_nothing_left_is_the_same_error(
    photos: Path, several: bool, decoder: Decoder, tmp_path: Path
) -> None:
    for number in range(4):
        path = tmp_path / "class" / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"no image")
    bad, good = (loaders(root, TRAINING, {"bad_samples": "skip"}) for root in (tmp_path, photos))
    messages = []
    for folder, other, device in zip(bad, good, ("cpu", None), strict=True):
        dataset: Any = folder.dataset
        if several:
            dataset = ConcatDataset([dataset, Subset(dataset, [1, 2]), Subset(other.dataset, range(8))])  # type: ignore[no-untyped-call]
        batches = iter(
            FastLoader(dataset, batch_size=6 if several else 4, drop_last=not several, device=device)
        )
        try:
            messages.append([images.shape for images, _ in batches])
        except BadSampleError as error:
            messages.append(str(error))
    assert messages[0] == messages[1]


def test_an_epoch_that_was_left_goes_on(photos: Path, decoder: Decoder) -> None:
    there, here = loaders(photos, TRAINING)
    whole, batches = list(here), iter(there)
    next(batches)
    state = there.state_dict()
    again, _ = loaders(photos, TRAINING)
    again.load_state_dict(state)
    rest = list(again)
    assert len(rest) == len(whole) - 1 and all(map(same, rest, whole[1:]))


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["planes", "last"])
def test_subsets_and_several_folders_are_made_there(
    photos: Path, damaged: Path, layout: Any, decoder: Decoder
) -> None:
    options = {"memory_format": layout, "bad_samples": "skip"}
    one, other = (loaders(root, TRAINING, options) for root in (photos, damaged))
    for wrap in (
        lambda folder, _: Subset(folder, range(1, 17)),
        lambda folder, _: ConcatDataset([folder, Subset(folder, [0, 1])]),
        lambda folder, more: ConcatDataset([folder, more]),
    ):
        decoder.calls.clear()
        there, here = (
            FastLoader(wrap(first.dataset, second.dataset), batch_size=8, shuffle=True, seed=4, device=device)  # type: ignore[no-untyped-call]
            for first, second, device in zip(one, other, ("cpu", None), strict=True)
        )
        assert all(map(same, list(there), list(here))) and decoder.calls


def test_folders_that_make_other_tensors_are_made_here_or_one_by_one(photos: Path, decoder: Decoder) -> None:
    one, other = (loaders(photos, TRANSFORMS[name]) for name in ("training", "v2"))
    batches = [
        list(
            FastLoader(
                ConcatDataset([first.dataset, second.dataset]), batch_size=1, shuffle=True, seed=4,  # type: ignore[no-untyped-call]
                device=device,
            )
        )
        for first, second, device in zip(one, other, ("cpu", None), strict=True)
    ]  # fmt: skip
    assert all(map(same, *batches))


@pytest.mark.few(3)
@pytest.mark.parametrize("share", [0.0, 0.25, 0.6, 1.0, "auto"])
@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
def test_the_cpu_decodes_what_is_not_of_the_devices_share(
    photos: Path, share: Any, several: bool, decoder: Decoder
) -> None:
    decode = Decode("nvimgcodec", gpu_share=share)
    there, here = loaders(photos, TRAINING, {"decode": decode}), loaders(photos, TRAINING)
    datasets: list[Any] = [Subset(pair[n].dataset, range(24)) for n, pair in enumerate((there, here))]
    if several:
        datasets = [ConcatDataset([dataset, Subset(dataset, range(7))]) for dataset in datasets]  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {"batch_size": 8, "shuffle": True, "seed": 5, "drop_last": True}
    made, expected = FastLoader(datasets[0], device="cpu", **options), FastLoader(datasets[1], **options)
    for _ in range(3):
        assert all(map(same, list(made), list(expected)))
    if share == 0.0:
        assert not decoder.calls
    elif share != "auto" and not several:
        assert set(decoder.calls) == {int(8 * share)}


def test_a_batch_of_several_parts_is_handed_out_once(
    photos: Path, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    class Heard(Share):
        def given(self, share: float) -> None:
            given.append(share)

    monkeypatch.setattr(sharing, "Share", lambda share: Heard(0.5))
    folder = loaders(photos, TRAINING)[0].dataset
    parts = ConcatDataset([Subset(folder, range(12)), folder, Subset(folder, [0, 1])])  # type: ignore[no-untyped-call]
    loader = FastLoader(parts, batch_size=8, shuffle=True, device="cpu")
    assert len(list(loader)) == len(given) and set(given) == {0.5}


def test_a_share_is_measured_by_the_steps_of_a_training(
    photos: Path, decoder: Decoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr(sharing, "Share", lambda share: Share("auto", 0.1, lambda: now[0]))
    caplog.set_level("INFO", "fastpipe")
    there, here = loaders(photos, TRAINING)
    assert "being measured" in repr(there.plan)
    for _ in range(200):
        for made, expected in zip(there, here, strict=True):
            now[0] += 0.01 * (1 + abs(sum(decoder.calls) / 8 - 0.75))
            decoder.calls.clear()
            assert same(made, expected)
        if "gpu_share" in caplog.text:
            break
    else:
        pytest.fail("no share was chosen")
    assert "of each batch, by the time from batch to batch" in repr(there.plan)


@pytest.mark.parametrize("place", ["device", "threads"])
def test_a_split_transform_is_finished_there_or_by_threads(
    photos: Path, place: Any, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SplitChoice, "_place", lambda self, placing: place)
    transform = v1.Compose([
        v1.RandomResizedCrop(32), v1.ColorJitter(0.3), v1.RandomHorizontalFlip(), v1.ToTensor(), NORMALIZE
    ])  # fmt: skip
    folders = loaders(photos, transform)
    there = FastLoader(folders[0].dataset, batch_size=8, shuffle=True, device="cpu", augment="split")
    made = list(there)
    assert bool(decoder.calls) == (place == "device"), "what threads augment they decode"
    monkeypatch.setattr(SplitChoice, "_place", lambda self, placing: "threads")
    here = list(FastLoader(folders[1].dataset, batch_size=8, shuffle=True, augment="split"))
    for one, other in zip(made, here, strict=True):
        assert torch.allclose(one[0], other[0], atol=1e-5)


def test_workers_and_other_collations_make_batches_here(photos: Path, decoder: Decoder) -> None:
    there, here = loaders(photos, TRAINING)
    made = FastLoader(
        there.dataset, batch_size=8, shuffle=True, device="cpu", num_workers=1, workers="processes"
    )
    assert all(map(same, made, here)) and not decoder.calls
    own: Callable[[Any], Any] = lambda samples: torch.stack([image for image, _ in samples])  # noqa: E731
    made = FastLoader(there.dataset, batch_size=8, device="cpu", collate_fn=own)
    assert len(list(made)) == len(made) and not decoder.calls


def test_a_batch_that_is_given_up_is_freed(photos: Path, decoder: Decoder) -> None:
    there, _ = loaders(photos, TRAINING)
    batches = iter(there)
    gone = weakref.ref(next(batches)[0].untyped_storage())
    del batches
    there.dataset.close()
    gc.collect()
    assert gone() is None


def test_it_is_told_who_decodes(photos: Path, decoder: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fastpipe")
    there, _ = loaders(photos, TRAINING)
    next(iter(there))
    assert "decoded on cpu: a device's decoder, resampled there by torch's operations" in caplog.text
    assert "on cpu  →  JPEGs by a device's decoder, resampled there by torch's operations" in repr(there.plan)


def test_a_device_that_cannot_decode_leaves_it_to_threads(
    photos: Path, decoder: Decoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(decoders, "device_decoder", fails)
    there, here = loaders(photos, TRAINING)
    assert all(map(same, there, here))
    assert "decoded on the CPU, not on cpu: RuntimeError: the driver is too old" in caplog.text


def test_it_is_told_where_the_device_declines_everything(
    photos: Path, decoder: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    decoder.decode = lambda parts, stream: [None] * len(parts)  # type: ignore[method-assign]
    there, here = loaders(photos, TRAINING)
    for _ in range(2):
        assert all(map(same, there, here))
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1 and "declined all 8 of a batch; it needs nvJPEG 13.2 or later" in told[0]


def test_which_decoder_a_device_has() -> None:
    assert device_decoder(Decode(), torch.device("cuda"), 1) is None, "pixels would not be Pillow's"
    assert device_decoder(Decode("simplejpeg"), torch.device("cuda"), 1) is None
    assert device_decoder(Decode("nvimgcodec"), torch.device("cpu"), 1) is None
    assert device_decoder(Decode("nvimgcodec", scaled=True), torch.device("cuda"), 1) is None
    assert device_decoder(Decode("dali", gpu_share=0), torch.device("cuda"), 1) is None


@pytest.mark.gpu
@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("backend", ["nvimgcodec", "dali"])
def test_a_gpus_batches_are_nearly_the_same(photos: Path, backend: Any, pin_memory: bool) -> None:
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="pip install 'fastpipe[dali]'")
    there = FastImageFolder(photos, TRANSFORMS["bytes"], seed=2, cache="off", decode=Decode(backend))
    here = FastImageFolder(photos, TRANSFORMS["bytes"], seed=2, cache="off")
    options: dict[str, Any] = {"batch_size": 16, "shuffle": True}
    differences = []
    for made, expected in zip(
        FastLoader(there, device="cuda", pin_memory=pin_memory, **options),
        FastLoader(here, **options),
        strict=True,
    ):
        assert made[0].is_cuda and torch.equal(made[1].cpu(), expected[1])
        differences.append((made[0].cpu().float() - expected[0].float()).abs().mean().item())
    assert np.mean(differences) <= 0.5, "of 255"
