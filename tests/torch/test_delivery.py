"""``device=`` and ``augment=``: the last part of a batch's way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, _utils
from torchvision import transforms as v1
from torchvision.transforms import v2

from fastpipe import FastImageFolder, FastLoader, Shard
from fastpipe.bench.synthetic import photo_tree
from fastpipe.core.types import Key
from fastpipe.errors import BadSampleError, OptionError
from fastpipe.torch.samples import BatchSample

pytestmark = pytest.mark.usefixtures("same_generators")

NORMALIZE = v1.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
RANDOM = v1.Compose([v1.RandomResizedCrop(24), v1.RandomHorizontalFlip(), v1.ToTensor(), NORMALIZE])
ENDS: dict[str, Any] = {
    "ToTensor": v1.Compose([v1.CenterCrop(20), v1.ToTensor()]),
    "ToTensor, Normalize": v1.Compose([v1.CenterCrop(20), v1.ToTensor(), NORMALIZE]),
    "ToDtype, Normalize": v2.Compose(
        [
            v2.ToImage(),
            v2.CenterCrop(20),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5] * 3, [0.3] * 3),
        ]
    ),
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_tree(tmp_path_factory.mktemp("tree"), classes=3, per_class=5, sizes=(32, 40))


def hashed(batch: Any) -> Any:
    return [(str(part.dtype), tuple(part.shape), part.numpy().tobytes()) for part in batch]


def stream(loader: Any) -> list[Any]:
    return [hashed(batch) for batch in loader]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_device_gets_the_same_batches(tree: Path, workers: int) -> None:
    dataset = FastImageFolder(tree, RANDOM)
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 3, "num_workers": workers}
    assert stream(FastLoader(dataset, device="cpu", **options)) == stream(FastLoader(dataset, **options))


@pytest.mark.few(3)
@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_bytes_normalised_on_the_device_are_the_same_numbers(tree: Path, end: Any, workers: int) -> None:
    dataset = FastImageFolder(tree, end)
    mixed = Subset(ConcatDataset([dataset, FastImageFolder(tree, end)]), [3, 20, 4, 0, 29])
    for each in (dataset, mixed):
        expected = stream(
            FastLoader(each, 4, num_workers=workers, workers="processes", persistent_workers=workers > 0)
        )
        loader = FastLoader(
            each, 4, device="cpu", num_workers=workers, workers="processes", persistent_workers=workers > 0
        )
        assert stream(loader) == expected
        assert stream(loader) == expected, "and in the next epoch"
        del loader


def test_what_is_sent_as_bytes(tree: Path) -> None:
    def sent(*transforms: Any) -> tuple[torch.dtype, bool]:
        dataset = ConcatDataset([FastImageFolder(tree, transform) for transform in transforms])
        source = FastLoader(dataset, 4)._source()
        assert source is not None
        source.ask(sends_bytes=True)
        samples = source.start([0, 1, len(dataset) - 1], Key(0, 0, np.arange(3))).finish()
        has_end = isinstance(samples[0], BatchSample) and samples[0].whole.end is not None
        return samples[0][0].dtype, has_end

    for end in ENDS.values():
        assert sent(end) == (torch.uint8, True)
        assert sent(end, end) == (torch.uint8, True)
    assert sent(v1.Compose([v1.CenterCrop(20), v1.PILToTensor()])) == (torch.uint8, False), "to the end"
    assert sent(v1.Compose([v1.Resize(20), v1.ToTensor()])) == (torch.float32, False), "images of any width"
    assert sent(v1.Compose([v1.CenterCrop(20), v1.ToTensor(), lambda image: image])) == (torch.float32, False)
    assert sent(ENDS["ToTensor"], ENDS["ToTensor, Normalize"]) == (torch.float32, False), "not the same end"


@pytest.mark.usefixtures("ahead")
def test_a_transform_that_changes_in_the_middle_of_an_epoch(tree: Path) -> None:
    """Each batch brings along what is still to be done to it."""
    before = ENDS["ToTensor, Normalize"]
    for after in (ENDS["ToDtype, Normalize"], v1.Compose([v1.CenterCrop(20), v1.PILToTensor()])):
        old, new = (stream(FastLoader(FastImageFolder(tree, each), 2, seed=1)) for each in (before, after))
        dataset = FastImageFolder(tree, before)
        iterator = iter(FastLoader(dataset, 2, seed=1, prefetch_batches=1, device="cpu"))
        found = [hashed(next(iterator))]
        dataset.transform = after
        found += stream(iterator)
        assert found == old[:1] + new[1:], "also those that had begun"


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_under_way_to_the_device_has_not_been_received(tree: Path, workers: int) -> None:
    options: dict[str, Any] = {
        "batch_size": 2,
        "shuffle": True,
        "seed": 3,
        "device": "cpu",
        "num_workers": workers,
    }
    loader = FastLoader(FastImageFolder(tree, RANDOM), **options)
    iterator = iter(loader)
    for count in range(1, 5):
        next(iterator)
        assert loader.state_dict()["batches"] == count
    again = FastLoader(FastImageFolder(tree, RANDOM), **options)
    again.load_state_dict(loader.state_dict())
    assert stream(again) == stream(iterator)


@pytest.mark.usefixtures("ahead")
def test_left_out_samples_and_a_device(tmp_path: Path) -> None:
    root = photo_tree(tmp_path / "tree", classes=3, per_class=5, sizes=(32, 40))
    dataset = FastImageFolder(root, RANDOM, bad_samples="skip")
    for index in (0, 4, 5):
        Path(dataset.samples[index][0]).write_bytes(b"no picture")
    loader = FastLoader(dataset, 3, seed=1, device="cpu")
    iterator = iter(loader)
    next(iterator)
    again = FastLoader(dataset, 3, seed=1)
    again.load_state_dict(loader.state_dict())
    assert stream(again) == stream(iterator)


@pytest.mark.usefixtures("ahead")
def test_an_error_comes_when_its_batch_is_due(tmp_path: Path) -> None:
    root = photo_tree(tmp_path / "tree", classes=1, per_class=8, sizes=(32, 40))
    dataset = FastImageFolder(root, RANDOM)
    Path(dataset.samples[5][0]).write_bytes(b"no picture")
    iterator = iter(FastLoader(dataset, 2, seed=1, device="cpu"))
    labels = [next(iterator)[1].tolist() for _ in range(2)]
    with pytest.raises(BadSampleError, match="sample 5"):
        next(iterator)
    assert [*labels, next(iterator)[1].tolist()] == [[0, 0]] * 3
    with pytest.raises(StopIteration):
        next(iterator)


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_off_epoch_leaves_nothing_on_the_way(tree: Path, workers: int) -> None:
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    loader = FastLoader(FastImageFolder(tree, RANDOM), 2, seed=3, device="cpu", **options)
    for _ in zip(range(3), loader, strict=False):
        pass
    loader.set_epoch(1)
    plain = FastLoader(FastImageFolder(tree, RANDOM), 2, seed=3)
    plain.set_epoch(1)
    assert stream(loader) == stream(plain)


@pytest.mark.usefixtures("ahead")
def test_an_interrupt_is_not_put_off(tree: Path) -> None:
    def collate(samples: Any) -> Any:
        if len(samples) == 3:
            raise KeyboardInterrupt
        return torch.stack([image for image, _ in samples])

    batches = iter(
        FastLoader(
            FastImageFolder(tree, RANDOM), batch_sampler=[[0], [1, 2, 3]], collate_fn=collate, device="cpu"
        )
    )
    with pytest.raises(KeyboardInterrupt):
        next(batches), next(batches)


# ---- augmentation of batches ---------------------------------------------------------------------

MIXES: dict[str, Any] = {
    "MixUp": v2.MixUp(num_classes=3), "CutMix": v2.CutMix(num_classes=3),
    "either": v2.RandomChoice([v2.MixUp(num_classes=3), v2.CutMix(num_classes=3)]),
    "a function": lambda images, labels: (images + torch.rand(()), labels),
}  # fmt: skip


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_batches_are_mixed_by_their_key(tree: Path, mix: Any) -> None:
    streams = []
    for workers, seed in ((0, 3), (2, 3), (0, 4)):
        torch.manual_seed(workers)
        loader = FastLoader(
            FastImageFolder(tree, RANDOM), 4, seed=seed, augment=mix, num_workers=workers, workers="processes"
        )
        before = torch.get_rng_state()
        streams.append(stream(loader))
        assert torch.equal(torch.get_rng_state(), before)
        epochs = stream(loader), stream(loader)
        assert epochs[0] != epochs[1]
    assert streams[0] == streams[1] != streams[2]
    loader = FastLoader(FastImageFolder(tree, RANDOM), 4, seed=3, augment=mix)
    iterator = iter(loader)
    next(iterator)
    again = FastLoader(FastImageFolder(tree, RANDOM), 4, seed=3, augment=mix)
    again.load_state_dict(loader.state_dict())
    assert stream(again) == stream(iterator) == streams[0][1:]


def test_ranks_and_batches_mix_with_different_numbers(tree: Path) -> None:
    drawn = []

    def draw(images: Any, labels: Any) -> Any:
        drawn.append(float(torch.rand(())))
        return images, labels

    for rank in range(3):
        list(FastLoader(FastImageFolder(tree, RANDOM), 2, seed=3, augment=draw, shard=Shard(rank, 3)))
    assert len(drawn) == len(set(drawn)) == 9


def test_without_a_seed_the_scripts_generator_is_drawn_from(tree: Path) -> None:
    loader = FastLoader(FastImageFolder(tree, ENDS["ToTensor"]), 15, augment=MIXES["a function"])
    torch.manual_seed(5)
    (found,) = list(loader)
    torch.manual_seed(5)
    torch.empty((), dtype=torch.int64).random_()  # torch's base seed
    (plain,) = list(FastLoader(FastImageFolder(tree, ENDS["ToTensor"]), 15, seed=1))
    assert torch.equal(found[0], plain[0] + torch.rand(()))


def test_batches_that_are_no_tuples(tree: Path) -> None:
    def collate(samples: Any) -> Any:
        return {"x": torch.stack([image for image, _ in samples])}

    def double(batch: Any) -> Any:
        return {"x": batch["x"] * 2}

    dataset = FastImageFolder(tree, ENDS["ToTensor"])
    plain = FastLoader(dataset, 4, collate_fn=collate)
    for a, b in zip(
        plain, FastLoader(dataset, 4, collate_fn=collate, augment=double, device="cpu"), strict=True
    ):
        assert torch.equal(a["x"] * 2, b["x"])


def test_the_arguments_are_kept_as_they_were_given(tree: Path) -> None:
    loader = FastLoader(FastImageFolder(tree), device="cpu", augment=print)
    assert (loader.device, loader.augment) == ("cpu", print)
    with pytest.raises(OptionError, match="must be a device"):
        FastLoader(FastImageFolder(tree), device="nothing")


# ---- page-locked memory --------------------------------------------------------------------------


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> dict[int, torch.Tensor]:
    """Pieces of memory that were asked for page-locked, by address, as on a machine with a GPU."""
    found: dict[int, torch.Tensor] = {}
    empty = torch.empty

    def allocate(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        made = empty(*size, **options)
        if pin_memory:
            found[made.data_ptr()] = made
        return made

    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(_utils.pin_memory, "pin_memory", lambda data, device: data)
    return found


@pytest.mark.parametrize("kind", ["folder", "concatenated", "stock end"])
def test_batches_that_are_to_be_pinned_are_made_in_page_locked_memory(
    tree: Path, locked: dict[int, torch.Tensor], kind: str
) -> None:
    end = [v1.RandomErasing(1.0)] if kind == "stock end" else []
    dataset: Any = FastImageFolder(tree, v1.Compose([RANDOM, *end]), thread_safe=True)
    if kind == "concatenated":
        dataset = ConcatDataset([dataset, FastImageFolder(tree, RANDOM)])
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 3}
    expected = stream(FastLoader(dataset, **options))
    assert not locked
    batches = list(FastLoader(dataset, pin_memory=True, **options))
    assert [hashed(batch) for batch in batches] == expected
    assert all(images.data_ptr() in locked for images, _ in batches)
    count = len(locked)
    assert stream(FastLoader(dataset, **options)) == expected  # another loader of the same dataset
    assert len(locked) == count


# ---- with a GPU ----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_cuda_gets_the_same_numbers(tree: Path, end: Any, workers: int) -> None:
    dataset = FastImageFolder(tree, end)
    loader = FastLoader(
        dataset, 4, shuffle=True, seed=3, device="cuda", num_workers=workers, workers="processes"
    )
    expected = FastLoader(dataset, 4, shuffle=True, seed=3)
    for (images, labels), (plain, targets) in zip(loader, expected, strict=True):
        assert images.device.type == labels.device.type == "cuda"
        assert torch.equal(images.cpu(), plain)
        assert torch.equal(labels.cpu(), targets)


@pytest.mark.gpu
@pytest.mark.parametrize("device", [None, "cuda"])
def test_nothing_is_copied_to_be_pinned(tree: Path, monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    dataset = FastImageFolder(tree, RANDOM)
    expected = list(FastLoader(dataset, 4, shuffle=True, seed=3))
    pinned, pin = [], torch.Tensor.pin_memory

    def counted(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        if tensor.ndim == 4:
            pinned.append(tensor.is_pinned())
        return pin(tensor, *args)

    monkeypatch.setattr(torch.Tensor, "pin_memory", counted)
    for (images, _), (plain, _) in zip(
        FastLoader(dataset, 4, shuffle=True, seed=3, pin_memory=device is None, device=device),
        expected, strict=True,
    ):  # fmt: skip
        assert images.is_pinned() or device
        assert torch.equal(images.cpu(), plain)
    assert all(pinned)


@pytest.mark.gpu
def test_cuda_mixes_by_the_key(tree: Path) -> None:
    for mix in MIXES.values():
        streams = [
            [images.cpu().numpy().tobytes() for images, _ in FastLoader(
                FastImageFolder(tree, RANDOM), 4, seed=3, augment=mix, device="cuda", num_workers=workers, workers="processes")]
            for workers in (0, 1)
        ]  # fmt: skip
        assert streams[0] == streams[1]
