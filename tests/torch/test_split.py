"""``augment="split"`` and ``"auto"``: one half of a transform where images are decoded, the other after it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset
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
V2 = v2.Compose(
    [
        v2.ToImage(),
        v2.RandomResizedCrop(24),
        v2.ColorJitter(0.4),
        v2.ToDtype(torch.float32, scale=True),
        v2.RandomErasing(0.5),
    ]
)
PLACES = ["threads", "device"]


@pytest.fixture
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the second half is done: with ``"device"`` as beside CUDA, on the CPU."""
    if request.param == "device":
        monkeypatch.setattr(splitting.SplitChoice, "_place", lambda self, placing: "device")
    return str(request.param)


def loader_of(dataset: Any, place: str, **options: Any) -> FastLoader[Any]:
    given: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 3, "augment": "split", **options}
    if place == "device":
        given["device"] = "cpu"
    return FastLoader(dataset, **given)


def stream(loader: Any) -> list[Any]:
    return [(str(images.dtype), images.numpy().tobytes(), labels.tolist()) for images, labels in loader]


def expected_of(tree: Path, transform: Any, count: int, seed: int = 3) -> list[Any]:
    """The same, done by hand: the first half as a transform of its own, then the augmentations."""
    split = split_of(transform)
    items = list(transform.transforms)
    end = [] if isinstance(items[0], v2.ToImage) else [v1.PILToTensor()]
    head = v1.Compose([*items[: len(items) - len(split.rest)], *end])
    rest = augment.from_torchvision(split.rest)
    made = []
    for number, (images, labels) in enumerate(
        FastLoader(FastImageFolder(tree, head), 4, shuffle=True, seed=seed)
    ):
        first = 4 * number
        key = Key(seed, 0, np.arange(first, first + len(images)))
        made.append((rest(images, key=key), labels))
    assert len(made) == count
    return [(str(images.dtype), images.numpy().tobytes(), labels.tolist()) for images, labels in made]


@pytest.mark.few(2)
@pytest.mark.parametrize("place", PLACES, indirect=True)
@pytest.mark.parametrize("transform", [SIMCLR, V2], ids=["SimCLR", "v2"])
def test_batches_are_those_of_the_two_halves(tree: Path, transform: Any, place: str) -> None:
    expected = expected_of(tree, transform, 4)
    for dataset in (FastImageFolder(tree, transform), ImageFolder(tree, transform)):
        for options in ({}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}):
            loader = loader_of(dataset, place, **options)
            assert stream(loader) == expected
            assert stream(loader) != expected, "another epoch"


@pytest.mark.few(1)
@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_spawned_workers(tree: Path, place: str) -> None:
    dataset = FastImageFolder(tree, SIMCLR)
    loader = loader_of(dataset, place, num_workers=1, multiprocessing_context="spawn")
    assert stream(loader) == expected_of(tree, SIMCLR, 4)


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_samples_do_not_depend_on_their_batches(tree: Path, place: str) -> None:
    """Neither on the size of batches, nor on ranks, nor on the place of the second half."""
    dataset = FastImageFolder(tree, SIMCLR)
    whole = torch.cat([images for images, _ in loader_of(dataset, "threads", batch_size=15)])
    for size in (1, 4, 7):
        made = torch.cat([images for images, _ in loader_of(dataset, place, batch_size=size)])
        assert torch.equal(made, whole)
    of_ranks = [loader_of(dataset, place, shard=Shard(rank, 2)) for rank in range(2)]
    rows = {row.tobytes() for loader in of_ranks for row in _rows(loader)}
    assert {image.numpy().tobytes() for image in whole} <= rows


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_behind_wrappers_of_torchs(tree: Path, place: str) -> None:
    first, second = FastImageFolder(tree, SIMCLR), FastImageFolder(tree, SIMCLR)
    mixed = Subset(ConcatDataset([first, second]), [3, 20, 4, 0, 29, 12])
    made = stream(loader_of(mixed, place, shuffle=False, batch_size=6))
    alone = stream(loader_of(Subset(first, [3, 5, 4, 0, 14, 12]), place, shuffle=False, batch_size=6))
    assert made == alone


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_resuming_in_the_middle_of_an_epoch(tree: Path, place: str) -> None:
    dataset = FastImageFolder(tree, SIMCLR)
    loader = loader_of(dataset, place)
    iterator = iter(loader)
    next(iterator)
    again = loader_of(dataset, place, num_workers=1)
    again.load_state_dict(loader.state_dict())
    assert stream(again) == stream(iterator) == expected_of(tree, SIMCLR, 4)[1:]


@pytest.mark.parametrize("place", PLACES, indirect=True)
@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_bad_samples(tmp_path: Path, place: str, policy: Any) -> None:
    root = photo_tree(tmp_path / "tree", classes=3, per_class=5, sizes=(52, 64))
    dataset = FastImageFolder(root, SIMCLR, bad_samples=policy)
    good = dict(enumerate(_rows(loader_of(dataset, place, shuffle=False))))
    for index in (0, 4, 5):
        Path(dataset.samples[index][0]).write_bytes(b"no picture")
    dataset.close()
    made = _rows(loader_of(FastImageFolder(root, SIMCLR, bad_samples=policy), place, shuffle=False))
    kept = [index for index in range(15) if index not in (0, 4, 5)]
    if policy == "skip":
        assert [row.tobytes() for row in made] == [good[index].tobytes() for index in kept]
    else:
        assert len(made) == 15
        assert all(made[index].tobytes() == good[index].tobytes() for index in kept)


def _rows(loader: Any) -> list[Any]:
    return [row for images, _ in loader for row in images.numpy()]


def test_the_crops_are_those_of_the_whole_transform(tree: Path) -> None:
    """Where the rest is not random, pixels are those of the stock way, up to the rounding of PIL's colours."""
    sure = v1.Compose([
        *HEAD, v1.ColorJitter((1.2, 1.2)), v1.ColorJitter(saturation=(1.3, 1.3)), v1.GaussianBlur(3, (1.0, 1.0)),
        v1.ToTensor(),
    ])  # fmt: skip
    dataset = FastImageFolder(tree, sure)
    split = list(loader_of(dataset, "threads"))
    whole = list(FastLoader(dataset, 4, shuffle=True, seed=3))
    for (images, labels), (others, targets) in zip(split, whole, strict=True):
        assert torch.equal(labels, targets)
        assert (images - others).abs().max() < 4 / 255


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_without_a_seed(tree: Path, place: str) -> None:
    def drawn() -> Any:
        torch.manual_seed(5)
        return stream(loader_of(FastImageFolder(tree, SIMCLR), place, seed=None))

    first = drawn()
    assert first == drawn()
    torch.manual_seed(6)
    assert stream(loader_of(FastImageFolder(tree, SIMCLR), place, seed=None)) != first


def test_layouts_and_modes(tree: Path) -> None:
    last = FastImageFolder(tree, SIMCLR, memory_format=torch.channels_last)
    plain = FastImageFolder(tree, SIMCLR)
    with torch.inference_mode():
        made = list(loader_of(plain, "threads"))
    for (images, _), (others, _), (inside, _) in zip(
        loader_of(plain, "threads"), loader_of(last, "threads"), made, strict=True
    ):
        assert torch.equal(images, others) and torch.equal(images, inside)
        assert images.is_contiguous()


def test_a_batch_is_the_users_for_as_long_as_it_is_kept(tree: Path) -> None:
    loader = loader_of(FastImageFolder(tree, SIMCLR), "threads", batch_size=2)
    kept = [(images, images.clone()) for images, _ in loader]
    list(loader)
    assert all(torch.equal(images, clone) for images, clone in kept)


# ---- what is split -------------------------------------------------------------------------------

WHOLE: dict[str, tuple[Any, str]] = {
    "kernel": (v1.Compose([*HEAD, v1.ToTensor(), NORMALIZE]), "all of the transform is in the decoding"),
    "own": (v1.Compose([*HEAD, lambda image: image, v1.ToTensor()]), "no augmentation of batches for"),
    "sizes": (v1.Compose([v1.ColorJitter(0.4), *HEAD, v1.ToTensor()]), "have no single size before"),
    "PIL": (v1.Compose([*HEAD, v1.ColorJitter(0.4)]), "does not end in tensors"),
    "none": (None, "have no single size"),
    "policy": (v1.Compose([*HEAD, v1.AutoAugment(), v1.ToTensor()]), "no augmentation of batches for .*AutoA"),
    "mean": (v1.Compose([*HEAD, v1.ColorJitter(0.4), v1.ToTensor(), v1.Normalize([0.5] * 2, [0.5] * 2)]), "it fails on an image"),
    "expand": (v1.Compose([*HEAD, v1.RandomRotation(9, expand=True), v1.ToTensor()]), "several sizes"),
}  # fmt: skip


@pytest.mark.parametrize(("transform", "why"), WHOLE.values(), ids=WHOLE)
def test_what_is_not_split(tree: Path, transform: Any, why: str) -> None:
    with pytest.raises(SplitError, match=why):
        split_of(transform)
    dataset = FastImageFolder(tree, transform)
    with pytest.raises(OptionError, match=f"augment='split': .*{why}.*'auto' splits where it can"):
        FastLoader(dataset, augment="split")
    assert "the transform is not split: " in str(FastLoader(dataset, augment="auto").plan)


def test_other_default_dtypes_and_changed_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(SplitError, match=r"images of torch.float32, .* and it makes torch.float64"):
            split_of(SIMCLR)
    finally:
        torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(v1.RandomGrayscale, "forward", lambda self, image: image)
    with pytest.raises(SplitError, match=r"no augmentation of batches for .*RandomGrayscale"):
        split_of(SIMCLR)


def test_datasets_that_are_left_alone(tree: Path) -> None:
    folder = FastImageFolder(tree, SIMCLR)
    other = FastImageFolder(tree, v1.Compose(list(SIMCLR.transforms[:-1])))
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ([1, 2], {}, "does not make the batches"),
        (ConcatDataset([folder, other]), {}, "2 datasets have transforms of their own"),
        (folder, {"collate_fn": list}, "not collated by torch's default_collate"),
        (folder, {"batch_size": None}, "not collated by torch's default_collate"),
    ]
    for dataset, options, why in cases:
        assert why in str(FastLoader(dataset, augment="auto", **options).plan)
        with pytest.raises(OptionError, match=why):
            FastLoader(dataset, augment="split", **options)


def test_augment_is_checked(tree: Path) -> None:
    with pytest.raises(OptionError, match="must be 'auto', 'split' or a function of batches, got 'all'"):
        FastLoader(FastImageFolder(tree, SIMCLR), augment="all")  # type: ignore[arg-type]

    class Stream(IterableDataset[int]):
        def __iter__(self):
            return iter(())

    with pytest.raises(OptionError, match="no effect on an IterableDataset"):
        FastLoader(Stream(), augment="auto")


def test_a_transform_that_changes(tree: Path) -> None:
    dataset = FastImageFolder(tree, SIMCLR)
    loader = loader_of(dataset, "threads")
    list(loader)
    dataset.transform = V2
    loader.set_epoch(0)
    assert stream(loader) == expected_of(tree, V2, 4)
    iterator = iter(loader_of(dataset, "threads", prefetch_batches=0))
    next(iterator)
    dataset.transform = plain = v1.Compose([v1.CenterCrop(20), v1.ToTensor()])
    rest = stream(iterator)
    assert rest == stream(FastLoader(FastImageFolder(tree, plain), 4, shuffle=True, seed=3))[1:], "at once"


def test_a_split_has_a_pickle() -> None:
    split = split_of(SIMCLR, "channels_last", "decoded somehow")
    again = pickle.loads(pickle.dumps(split))
    assert (again.like, again.notes, len(again.rest)) == (split.like, split.notes, 5)
    assert again.head.output == split.head.output
    assert "decoded somehow" in again.describe("here")


def test_the_plan_says_what_is_done_where(tree: Path) -> None:
    plan = str(loader_of(FastImageFolder(tree, SIMCLR), "threads").plan)
    assert "GaussianBlur(kernel_size=(3, 3), sigma=(0.1, 2.0))  →  fastpipe.augment, in the decoding" in plan
    assert "RandomHorizontalFlip(p=0.5)  →  region decode and kernel" in plan
    assert "augment='split': the transform is split\n" in plan
    views = augment.Compose([augment.RandomHorizontalFlip()])
    loader = FastLoader(FastImageFolder(tree, SIMCLR), augment=views)
    assert "augment: Compose([ RandomHorizontalFlip(p=0.5), ]), of batches in the loop's thread" in str(
        loader.plan
    )


# ---- by measurement ------------------------------------------------------------------------------


def costs(monkeypatch: pytest.MonkeyPatch, *found: float) -> None:
    monkeypatch.setattr(splitting, "measured", lambda split, batch_size, device: Costs(*found))


def test_the_faster_way_is_taken(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = FastImageFolder(tree, SIMCLR)
    whole, split = (
        stream(FastLoader(dataset, 4, seed=3)),
        stream(FastLoader(dataset, 4, seed=3, augment="split")),
    )
    for found, expected, words in (((0.1, 0.0999), whole, "is not split"), ((0.1, 0.05), split, "is split")):
        costs(monkeypatch, *found)
        loader = FastLoader(dataset, 4, seed=3, augment="auto")
        assert stream(loader) == expected
        assert f"augment='auto': the transform {words}: what follows the split takes" in str(loader.plan)


def test_the_costs_are_measured(tree: Path) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    found = splitting.measured(split_of(SIMCLR), 64, None)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.device is None and 0 < found.threads < found.whole, "the kernels are tens of times as fast"
    on_cpu = splitting._seconds_there(split_of(SIMCLR), 8, torch.device("cpu"))
    assert on_cpu > 0


def test_beside_a_device() -> None:
    def places(found: Costs, *epochs: tuple[float, float]) -> list[str]:
        placing, seen = Placing(found), []
        for epoch in epochs:
            seen.append(placing.place)
            placing.seen(*epoch)
        return [*seen, placing.place]

    assert places(Costs(1.0, 0.2, 0.005), (1, 0)) == ["device"] * 2, "so little is not to be seen"
    # The device waits for longer than it would take: it gets the work, and keeps it if that is faster.
    waits = Costs(1.0, 0.2, 0.02)
    assert places(waits, (0.3, 0.1), (0.15, 0.0), (0.4, 0.0)) == ["threads", "device", "device", "device"]
    assert places(waits, (0.3, 0.1), (0.31, 0.0), (0.1, 0.0)) == ["threads", "device", "threads", "threads"]
    assert places(waits, (0.3, 0.01), (0.3, 0.01)) == ["threads"] * 3, "it has no time to spare"
    assert places(Costs(0.1, 0.2, 0.02), (0.3, 0.1), (0.2, 0.0)) == ["whole", "device", "device"]
    assert places(Costs(0.1, 0.2), (0.3, 0.3)) == ["whole"] * 2


def test_an_epochs_pace_is_told(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[float, float]] = []
    monkeypatch.setattr(splitting.SplitChoice, "seen", lambda self, *found: told.append(found))
    loader = loader_of(FastImageFolder(tree, SIMCLR), "threads", device="cpu")
    for batch in loader:
        assert len(batch) == 2 and not told
    ((period, waited),) = told
    assert period >= waited > 0
    next(iter(loader))
    assert len(told) == 1, "of a whole epoch"


def test_with_workers_chosen_and_accelerated(tree: Path) -> None:
    dataset = FastImageFolder(tree, SIMCLR)
    expected = stream(loader_of(dataset, "threads"))
    loader = loader_of(dataset, "threads", num_workers="auto")
    assert stream(loader) == expected
    plain = DataLoader(ImageFolder(tree, SIMCLR), 4, shuffle=True, num_workers=2)
    fast = accelerate(plain, seed=3, augment="split")
    assert (fast.num_workers, fast.num_processes, fast.augment) == (2, 0, "split")
    assert stream(fast) == expected
    assert accelerate(fast).augment == "split"


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 1])
def test_cuda_makes_nearly_the_same(tree: Path, workers: int) -> None:
    dataset = FastImageFolder(tree, SIMCLR)
    there = loader_of(dataset, "threads", device="cuda", num_workers=workers)
    assert "fastpipe.augment, on the device" in str(there.plan)
    for (images, labels), (others, targets) in zip(there, loader_of(dataset, "threads"), strict=True):
        assert images.device.type == "cuda"
        assert torch.equal(labels.cpu(), targets)
        assert (images.cpu() - others).abs().mean() < 0.02
