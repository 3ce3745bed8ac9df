"""``device=`` and ``augment=``: the last part of a batch's way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from streams import outcomes, plain, stream
from torch.utils.data import ConcatDataset, Subset, _utils
from torchvision import transforms as v1
from torchvision.transforms import v2

from fastpipe import FastImageFolder, FastLoader, Shard
from fastpipe.bench.synthetic import photo_tree
from fastpipe.errors import BadSampleError, OptionError

pytestmark = pytest.mark.usefixtures("same_generators")

NORMALIZE = v1.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
RANDOM = v1.Compose([v1.RandomResizedCrop(24), v1.RandomHorizontalFlip(), v1.ToTensor(), NORMALIZE])
ENDS: dict[str, Any] = {
    "ToTensor": v1.Compose([v1.CenterCrop(20), v1.ToTensor()]),
    "ToTensor, Normalize": v1.Compose([v1.CenterCrop(20), v1.ToTensor(), NORMALIZE]),
    "ToDtype, Normalize": v2.Compose(
        [v2.ToImage(), v2.CenterCrop(20), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.3] * 3)]
    ),
}  # fmt: skip


def resumed(make: Any, count: int) -> tuple[list[Any], list[Any]]:
    """The rest of an epoch behind so many batches, and that of a loader that resumes there."""
    loader, again = make(), make()
    iterator = iter(loader)
    for number in range(1, count + 1):
        next(iterator)
        assert loader.state_dict()["batches"] == number, "what is under way has not been received"
    again.load_state_dict(loader.state_dict())
    return stream(iterator), stream(again)


@pytest.mark.few(3)
@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("end", [*ENDS.values(), RANDOM], ids=[*ENDS, "random"])
def test_bytes_normalised_on_the_device_are_the_same_numbers(tree: Path, end: Any, workers: int) -> None:
    dataset = FastImageFolder(tree, end, seed=3)
    mixed = Subset(ConcatDataset([dataset, FastImageFolder(tree, end)]), [3, 20, 4, 0, 29])
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    options |= {"workers": "processes", "seed": 3, "shuffle": True}
    for each in (dataset, mixed):
        here, there = FastLoader(each, 4, **options), FastLoader(each, 4, device="cpu", **options)
        for _ in range(2):
            assert stream(there) == stream(here)
        del here, there


@pytest.mark.usefixtures("ahead")
def test_a_transform_may_change_in_the_middle_of_an_epoch(tree: Path) -> None:
    before = ENDS["ToTensor, Normalize"]
    for after in (ENDS["ToDtype, Normalize"], v1.Compose([v1.CenterCrop(20), v1.PILToTensor()])):
        old, new = (stream(FastLoader(FastImageFolder(tree, each), 2, seed=1)) for each in (before, after))
        dataset = FastImageFolder(tree, before)
        iterator = iter(FastLoader(dataset, 2, seed=1, prefetch_batches=1, device="cpu"))
        found = [plain(next(iterator))]
        dataset.transform = after
        assert found + stream(iterator) == old[:1] + new[1:], "also those that had begun"


@pytest.mark.usefixtures("ahead")
def test_bad_samples_on_the_way_to_a_device_are_those_of_the_cpu(tmp_path: Path) -> None:
    root = photo_tree(tmp_path / "tree", classes=3, per_class=5, sizes=(32, 40))
    dataset = FastImageFolder(root, RANDOM, bad_samples="skip")
    for index in (0, 4, 5):
        Path(dataset.samples[index][0]).write_bytes(b"no picture")
    rest, again = resumed(lambda: FastLoader(dataset, 3, seed=1, device="cpu"), 1)
    assert rest == again == stream(FastLoader(dataset, 3, seed=1))[1:] != []
    raising = FastImageFolder(root, RANDOM)
    found = outcomes(FastLoader(raising, 2, seed=1, device="cpu"), lambda batch: batch[1].tolist())
    assert [type(one) for one in found] == [BadSampleError, list, BadSampleError] + [list] * 5
    assert "sample 4" in str(found[2]) and found[3] == [1, 1], "it comes when its batch is due"


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_under_way_to_the_device_are_not_counted_and_may_be_left(tree: Path, workers: int) -> None:
    def make(**options: Any) -> FastLoader[Any]:
        options = {"num_workers": workers, "persistent_workers": workers > 0, "seed": 3, **options}
        return FastLoader(FastImageFolder(tree, RANDOM), 2, **options)

    rest, again = resumed(lambda: make(shuffle=True, device="cpu"), 4)
    assert rest == again != []
    loader, expected = make(device="cpu"), make(num_workers=0, persistent_workers=False)
    for _ in zip(range(3), loader, strict=False):
        pass
    loader.set_epoch(1), expected.set_epoch(1)
    assert stream(loader) == stream(expected)


@pytest.mark.usefixtures("ahead")
def test_an_interrupt_is_raised_at_once(tree: Path) -> None:
    def collate(samples: Any) -> Any:
        if len(samples) == 3:
            raise KeyboardInterrupt
        return torch.stack([image for image, _ in samples])

    options: dict[str, Any] = {"batch_sampler": [[0], [1, 2, 3]], "collate_fn": collate, "device": "cpu"}
    batches = iter(FastLoader(FastImageFolder(tree, RANDOM), **options))
    with pytest.raises(KeyboardInterrupt):
        next(batches), next(batches)


MIXES: dict[str, Any] = {
    "MixUp": v2.MixUp(num_classes=3), "CutMix": v2.CutMix(num_classes=3),
    "either": v2.RandomChoice([v2.MixUp(num_classes=3), v2.CutMix(num_classes=3)]),
    "a function": lambda images, labels: (images + torch.rand(()), labels),
}  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_batches_are_mixed_by_their_key(tree: Path, mix: Any) -> None:
    def make(workers: int = 0, seed: int = 3) -> FastLoader[Any]:
        options: dict[str, Any] = {"num_workers": workers, "workers": "processes", "seed": seed}
        return FastLoader(FastImageFolder(tree, RANDOM), 4, augment=mix, **options)

    found = []
    for workers, seed in ((0, 3), (2, 3), (0, 4)):
        torch.manual_seed(workers)
        before = torch.get_rng_state()
        loader = make(workers, seed)
        found.append(stream(loader))
        assert torch.equal(torch.get_rng_state(), before)
        assert stream(loader) != stream(loader)
    assert found[0] == found[1] != found[2]
    assert resumed(make, 1) == (found[0][1:], found[0][1:])


def test_ranks_and_batches_mix_with_different_numbers(tree: Path) -> None:
    drawn = []

    def draw(images: Any, labels: Any) -> Any:
        drawn.append(float(torch.rand(())))
        return images, labels

    for rank in range(3):
        list(FastLoader(FastImageFolder(tree, RANDOM), 2, seed=3, augment=draw, shard=Shard(rank, 3)))
    assert len(drawn) == len(set(drawn)) == 9


def test_without_a_seed_augment_draws_from_the_scripts_generator(tree: Path) -> None:
    dataset = FastImageFolder(tree, ENDS["ToTensor"])
    torch.manual_seed(5)
    ((images, _),) = FastLoader(dataset, 15, augment=MIXES["a function"])
    torch.manual_seed(5)
    torch.empty((), dtype=torch.int64).random_()  # torch's base seed
    ((expected, _),) = FastLoader(dataset, 15, seed=1)
    assert torch.equal(images, expected + torch.rand(()))


def test_batches_may_be_dicts_and_options_are_attributes(tree: Path) -> None:
    def collate(samples: Any) -> Any:
        return {"x": torch.stack([image for image, _ in samples])}

    def double(batch: Any) -> Any:
        return {"x": batch["x"] * 2}

    dataset = FastImageFolder(tree, ENDS["ToTensor"])
    doubled = FastLoader(dataset, 4, collate_fn=collate, augment=double, device="cpu")
    assert stream(doubled) == [plain(double(batch)) for batch in FastLoader(dataset, 4, collate_fn=collate)]
    assert (doubled.device, doubled.augment) == ("cpu", double)
    with pytest.raises(OptionError, match="must be a torch device"):
        FastLoader(dataset, device="nothing")


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
def test_batches_to_be_pinned_are_made_in_page_locked_memory(tree: Path, locked: Any, kind: str) -> None:
    end = [v1.RandomErasing(1.0)] if kind == "stock end" else []
    dataset: Any = FastImageFolder(tree, v1.Compose([RANDOM, *end]), thread_safe=True)
    if kind == "concatenated":
        dataset = ConcatDataset([dataset, FastImageFolder(tree, RANDOM)])
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 3}
    expected = stream(FastLoader(dataset, **options))
    assert not locked
    batches = list(FastLoader(dataset, pin_memory=True, **options))
    assert stream(batches) == expected
    assert all(images.data_ptr() in locked for images, _ in batches)
    count = len(locked)
    assert stream(FastLoader(dataset, **options)) == expected  # another loader of the same dataset
    assert len(locked) == count


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_cuda_gets_the_same_numbers(tree: Path, end: Any, workers: int) -> None:
    options: dict[str, Any] = {"shuffle": True, "seed": 3, "num_workers": workers, "workers": "processes"}
    dataset = FastImageFolder(tree, end)
    batches = list(FastLoader(dataset, 4, device="cuda", **options))
    assert all(part.device.type == "cuda" for batch in batches for part in batch)
    assert stream(batches) == stream(FastLoader(dataset, 4, shuffle=True, seed=3))


@pytest.mark.gpu
@pytest.mark.parametrize("device", [None, "cuda"])
def test_nothing_is_copied_to_be_pinned(tree: Path, monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    dataset = FastImageFolder(tree, RANDOM)
    expected = stream(FastLoader(dataset, 4, shuffle=True, seed=3))
    pinned, pin = [], torch.Tensor.pin_memory

    def counted(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        if tensor.ndim == 4:
            pinned.append(tensor.is_pinned())
        return pin(tensor, *args)

    monkeypatch.setattr(torch.Tensor, "pin_memory", counted)
    loader = FastLoader(dataset, 4, shuffle=True, seed=3, pin_memory=device is None, device=device)
    for batch, wanted in zip(loader, expected, strict=True):
        assert batch[0].is_pinned() or device
        assert plain(batch) == wanted
    assert all(pinned)
