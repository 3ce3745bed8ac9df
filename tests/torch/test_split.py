"""``augment="split"`` and ``"auto"``: one half of a transform where images are decoded, the other after it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from streams import Stream, plain, stream
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from fastpipe import FastImageFolder, FastLoader, Shard, accelerate, augment
from fastpipe.bench.synthetic import photo_tree
from fastpipe.core.types import Key
from fastpipe.errors import OptionError
from fastpipe.torch import split as splitting
from fastpipe.torch.source import SplitError
from fastpipe.torch.split import Costs, Placing, split_of

pytestmark = pytest.mark.usefixtures("same_generators")

NORMALIZE = v1.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
HEAD = [v1.RandomResizedCrop(24), v1.RandomHorizontalFlip()]
JITTER = [v1.RandomApply([v1.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8), v1.RandomGrayscale(0.2)]
SIMCLR = v1.Compose([*HEAD, *JITTER, v1.GaussianBlur(3), v1.ToTensor(), NORMALIZE])
V2 = v2.Compose([
    v2.ToImage(), v2.RandomResizedCrop(24), v2.ColorJitter(0.4), v2.ToDtype(torch.float32, scale=True),
    v2.RandomErasing(0.5),
])  # fmt: skip
of_each_place = pytest.mark.parametrize("place", ["threads", "device"], indirect=True)


@pytest.fixture
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the second half is done: with ``"device"`` as beside CUDA, on the CPU."""
    if request.param == "device":
        monkeypatch.setattr(splitting.SplitChoice, "_place", lambda self, placing: "device")
    return str(request.param)


def loader_of(dataset: Any, place: str = "threads", **options: Any) -> FastLoader[Any]:
    given: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 3, "augment": "split", **options}
    return FastLoader(dataset, **{"device": "cpu" if place == "device" else None, **given})


def expected_of(tree: Path, transform: Any) -> list[Any]:
    """The same, done by hand: the first half as a transform of its own, then the augmentations."""
    split, items = split_of(transform), list(transform.transforms)
    end = [] if isinstance(items[0], v2.ToImage) else [v1.PILToTensor()]
    head = v1.Compose([*items[: len(items) - len(split.rest)], *end])
    rest = augment.from_torchvision(split.rest)
    batches = enumerate(FastLoader(FastImageFolder(tree, head), 4, shuffle=True, seed=3))
    return [
        plain([rest(images, key=Key(3, 0, np.arange(4 * number, 4 * number + len(images)))), labels])
        for number, (images, labels) in batches
    ]


def rows_of(loader: Any) -> list[bytes]:
    return [row.numpy().tobytes() for images, _ in loader for row in images]


@pytest.mark.few(2)
@of_each_place
@pytest.mark.parametrize("transform", [SIMCLR, V2], ids=["SimCLR", "v2"])
def test_batches_are_those_of_the_two_halves(tree: Path, transform: Any, place: str) -> None:
    expected = expected_of(tree, transform)
    assert len(expected) == 4
    ours, theirs = FastImageFolder(tree, transform), ImageFolder(tree, transform)
    processes = {"num_workers": 1, "persistent_workers": True, "workers": "processes"}
    for dataset, options in ((ours, {}), (theirs, {"num_workers": 2}), (ours, processes)):
        loader = loader_of(dataset, place, **options)
        assert stream(loader) == expected
        assert stream(loader) != expected, "another epoch"


@of_each_place
def test_samples_do_not_depend_on_their_batches(tree: Path, place: str) -> None:
    """Neither on the size of batches, nor on ranks, wrappers, or the place of the second half."""
    dataset = FastImageFolder(tree, SIMCLR)
    whole = rows_of(loader_of(dataset, batch_size=15))
    for size in (1, 7):
        assert rows_of(loader_of(dataset, place, batch_size=size)) == whole
    ranks = [rows_of(loader_of(dataset, place, shard=Shard(rank, 2))) for rank in range(2)]
    assert set(whole) <= {*ranks[0], *ranks[1]}
    both = ConcatDataset([dataset, FastImageFolder(tree, SIMCLR)])
    options: dict[str, Any] = {"shuffle": False, "batch_size": 6}
    mixed = loader_of(Subset(both, [3, 20, 4, 0, 29, 12]), place, **options)
    assert stream(mixed) == stream(loader_of(Subset(dataset, [3, 5, 4, 0, 14, 12]), place, **options))


@of_each_place
def test_an_epoch_can_be_resumed_in_its_middle(tree: Path, place: str) -> None:
    dataset = FastImageFolder(tree, SIMCLR)
    loader = loader_of(dataset, place)
    iterator = iter(loader)
    next(iterator)
    again = loader_of(dataset, place, num_workers=1)
    again.load_state_dict(loader.state_dict())
    assert stream(again) == stream(iterator) == expected_of(tree, SIMCLR)[1:]


@of_each_place
@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_bad_samples_leave_the_others_as_they_were(tmp_path: Path, place: str, policy: Any) -> None:
    root = photo_tree(tmp_path / "tree", classes=3, per_class=5, sizes=(52, 64))
    dataset = FastImageFolder(root, SIMCLR, bad_samples=policy)
    good = rows_of(loader_of(dataset, place, shuffle=False))
    for index in (0, 4, 5):
        Path(dataset.samples[index][0]).write_bytes(b"no picture")
    dataset.close()
    made = rows_of(loader_of(FastImageFolder(root, SIMCLR, bad_samples=policy), place, shuffle=False))
    kept = [index for index in range(15) if index not in (0, 4, 5)]
    if policy == "replace":
        assert len(made) == 15
        made = [made[index] for index in kept]
    assert made == [good[index] for index in kept]


def test_the_crops_are_those_of_the_whole_transform(tree: Path) -> None:
    """If the rest is not random, pixels are those of the stock way, up to the rounding of PIL's colours."""
    sure = v1.Compose([
        *HEAD, v1.ColorJitter((1.2, 1.2)), v1.ColorJitter(saturation=(1.3, 1.3)), v1.GaussianBlur(3, (1.0, 1.0)),
        v1.ToTensor(),
    ])  # fmt: skip
    dataset = FastImageFolder(tree, sure)
    whole = FastLoader(dataset, 4, shuffle=True, seed=3)
    for (images, labels), (others, targets) in zip(loader_of(dataset), whole, strict=True):
        assert torch.equal(labels, targets) and (images - others).abs().max() < 4 / 255


@of_each_place
def test_without_a_seed_torchs_generator_decides(tree: Path, place: str) -> None:
    dataset = FastImageFolder(tree, SIMCLR)
    first, again, other = (stream(loader_of(dataset, place, seed=None), seed) for seed in (5, 5, 6))
    assert first == again != other


def test_layouts_modes_and_kept_batches_change_nothing(tree: Path) -> None:
    dataset = FastImageFolder(tree, SIMCLR)
    expected = stream(loader_of(dataset))
    with torch.inference_mode():
        assert stream(loader_of(dataset)) == expected
    last = list(loader_of(FastImageFolder(tree, SIMCLR, memory_format=torch.channels_last)))
    assert stream(last) == expected and all(images.is_contiguous() for images, _ in last)
    loader = loader_of(dataset)
    kept, _ = list(loader), list(loader)
    assert stream(kept) == expected


COLOUR = v1.ColorJitter(0.4)
WHOLE: dict[str, tuple[Any, str]] = {
    "kernel": (v1.Compose([*HEAD, v1.ToTensor(), NORMALIZE]), "all of the transform is in the decoding"),
    "own": (v1.Compose([*HEAD, lambda image: image, v1.ToTensor()]), "no augmentation of batches for"),
    "sizes": (v1.Compose([COLOUR, *HEAD, v1.ToTensor()]), "have no single size before"),
    "PIL": (v1.Compose([*HEAD, COLOUR]), "does not end in tensors"),
    "none": (None, "have no single size"),
    "policy": (v1.Compose([*HEAD, v1.AutoAugment(), v1.ToTensor()]), "no augmentation of batches for .*AutoA"),
    "mean": (v1.Compose([*HEAD, COLOUR, v1.ToTensor(), v1.Normalize([0.5] * 2, [0.5] * 2)]), "it fails on an image"),
    "expand": (v1.Compose([*HEAD, v1.RandomRotation(9, expand=True), v1.ToTensor()]), "several sizes"),
}  # fmt: skip


@pytest.mark.parametrize(("transform", "why"), WHOLE.values(), ids=WHOLE)
def test_transforms_that_cannot_be_split_are_named(tree: Path, transform: Any, why: str) -> None:
    dataset = FastImageFolder(tree, transform)
    with pytest.raises(OptionError, match=f"augment='split': .*{why}.*'auto' splits where it can"):
        FastLoader(dataset, augment="split")
    assert "the transform is not split: " in str(FastLoader(dataset, augment="auto").plan)


def test_other_default_dtypes_and_changed_methods_are_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(SplitError, match=r"images of torch.float32, .* and it makes torch.float64"):
            split_of(SIMCLR)
    finally:
        torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(v1.RandomGrayscale, "forward", lambda self, image: image)
    with pytest.raises(SplitError, match=r"no augmentation of batches for .*RandomGrayscale"):
        split_of(SIMCLR)


def test_datasets_and_options_that_cannot_be_split_are_refused(tree: Path) -> None:
    folder = FastImageFolder(tree, SIMCLR)
    other = FastImageFolder(tree, v1.Compose(list(SIMCLR.transforms[:-1])))
    collated = "not collated by torch's default_collate"
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ([1, 2], {}, "does not make the batches"), (folder, {"collate_fn": list}, collated),
        (ConcatDataset([folder, other]), {}, "2 datasets have transforms of their own"),
        (folder, {"batch_size": None}, collated),
    ]  # fmt: skip
    for dataset, options, why in cases:
        assert why in str(FastLoader(dataset, augment="auto", **options).plan)
        with pytest.raises(OptionError, match=why):
            FastLoader(dataset, augment="split", **options)
    with pytest.raises(OptionError, match="must be 'auto', 'split' or a function of batches, got 'all'"):
        FastLoader(folder, augment="all")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="no effect on an IterableDataset"):
        FastLoader(Stream(), augment="auto")


def test_a_transform_may_change(tree: Path) -> None:
    dataset = FastImageFolder(tree, SIMCLR)
    loader = loader_of(dataset)
    list(loader)
    dataset.transform = V2
    loader.set_epoch(0)
    assert stream(loader) == expected_of(tree, V2)
    iterator = iter(loader_of(dataset, prefetch_batches=0))
    next(iterator)
    dataset.transform = crop = v1.Compose([v1.CenterCrop(20), v1.ToTensor()])
    rest = stream(FastLoader(FastImageFolder(tree, crop), 4, shuffle=True, seed=3))[1:]
    assert stream(iterator) == rest, "at once"


def test_the_plan_of_a_split_and_of_its_pickle_say_where(tree: Path) -> None:
    plan = str(loader_of(FastImageFolder(tree, SIMCLR)).plan)
    assert "GaussianBlur(kernel_size=(3, 3), sigma=(0.1, 2.0))  →  fastpipe.augment, in the decoding" in plan
    assert "RandomHorizontalFlip(p=0.5)  →  region decode and kernel" in plan
    assert "augment='split': the transform is split\n" in plan
    views = augment.Compose([augment.RandomHorizontalFlip()])
    plan = str(FastLoader(FastImageFolder(tree, SIMCLR), augment=views).plan)
    assert "augment: Compose([ RandomHorizontalFlip(p=0.5), ]), of batches in the loop's thread" in plan
    split = split_of(SIMCLR, "channels_last", "decoded somehow")
    again = pickle.loads(pickle.dumps(split))
    assert (again.like, again.notes, len(again.rest)) == (split.like, split.notes, 5)
    assert again.head.output == split.head.output and "decoded somehow" in again.describe("here")


def test_the_faster_way_is_taken(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = FastImageFolder(tree, SIMCLR)
    whole, split = (stream(FastLoader(dataset, 4, seed=3, augment=how)) for how in (None, "split"))
    for found, expected, words in (((0.1, 0.0999), whole, "is not split"), ((0.1, 0.05), split, "is split")):
        monkeypatch.setattr(splitting, "measured", lambda *_, found=found: Costs(*found))
        loader = FastLoader(dataset, 4, seed=3, augment="auto")
        assert stream(loader) == expected
        assert f"augment='auto': the transform {words}: what follows the split takes" in str(loader.plan)


def test_the_costs_are_measured() -> None:
    before = torch.get_rng_state()
    found = splitting.measured(split_of(SIMCLR), 64, None)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.device is None and 0 < found.threads < found.whole, "the kernels are tens of times as fast"
    assert splitting._seconds_there(split_of(SIMCLR), 8, torch.device("cpu")) > 0


@pytest.mark.parametrize(
    ("costs", "epochs", "places"),
    [
        pytest.param((1.0, 0.2, 0.005), [(1, 0)], "device device", id="so little is not noticed"),
        # The device waits for longer than it would take: it gets the work, and keeps it if that is faster.
        pytest.param((1.0, 0.2, 0.02), [(0.3, 0.1), (0.15, 0.0), (0.4, 0.0)], "threads device device device", id="faster"),
        pytest.param((1.0, 0.2, 0.02), [(0.3, 0.1), (0.31, 0.0), (0.1, 0.0)], "threads device threads threads", id="slower"),
        pytest.param((1.0, 0.2, 0.02), [(0.3, 0.01), (0.3, 0.01)], "threads threads threads", id="no time to spare"),
        pytest.param((0.1, 0.2, 0.02), [(0.3, 0.1), (0.2, 0.0)], "whole device device", id="whole before"),
        pytest.param((0.1, 0.2), [(0.3, 0.3)], "whole whole", id="no device"),
    ],
)  # fmt: skip
def test_a_device_gets_the_work_if_epochs_become_faster(costs: Any, epochs: Any, places: str) -> None:
    placing = Placing(Costs(*costs))
    found = [placing.place]
    for epoch in epochs:
        placing.seen(*epoch)
        found.append(placing.place)
    assert found == places.split()


def test_accelerated_loaders_and_chosen_workers_split_as_well(tree: Path) -> None:
    dataset = FastImageFolder(tree, SIMCLR)
    expected = stream(loader_of(dataset))
    assert stream(loader_of(dataset, num_workers="auto")) == expected
    stock: Any = DataLoader(ImageFolder(tree, SIMCLR), 4, shuffle=True, num_workers=2)
    fast = accelerate(stock, seed=3, augment="split")
    assert (fast.num_workers, fast.num_processes, accelerate(fast).augment) == (2, 0, "split")
    assert stream(fast) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 1])
def test_cuda_makes_nearly_the_same(tree: Path, workers: int) -> None:
    dataset = FastImageFolder(tree, SIMCLR)
    there = loader_of(dataset, device="cuda", num_workers=workers)
    assert "fastpipe.augment, on the device" in str(there.plan)
    for (images, labels), (others, targets) in zip(there, loader_of(dataset), strict=True):
        assert images.device.type == "cuda" and torch.equal(labels.cpu(), targets)
        assert (images.cpu() - others).abs().mean() < 0.02
