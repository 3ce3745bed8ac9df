"""``FastLoader``: order, seeds, iterators, errors, memory."""

from __future__ import annotations

import copy
import gc
import hashlib
import itertools
import pickle
import random
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader

from fastpipe import Decode, FastImageFolder, FastLoader
from fastpipe.images.batch import ImageBatch

pytestmark = pytest.mark.usefixtures("same_generators")

STEADY = v1.Compose([v1.Resize(40), v1.CenterCrop(32), v1.ToTensor()])
TINY = v1.Compose([v1.CenterCrop(8), v1.PILToTensor()])
RANDOM = v1.Compose([v1.RandomResizedCrop(24), v1.RandomHorizontalFlip(), v1.ToTensor()])
WAIT_S = 60.0


def equal(a: Iterable[Any], b: Iterable[Any]) -> bool:
    return all(torch.equal(x[0], y[0]) and torch.equal(x[1], y[1]) for x, y in itertools.zip_longest(a, b))


def digest(batches: Iterable[Any]) -> str:
    found = hashlib.sha256()
    for images, targets in batches:
        found.update(repr((images.shape, targets.tolist())).encode())
        found.update(images.numpy().tobytes())
    return found.hexdigest()


# ---- order, without a seed: torch's --------------------------------------------------------------


class _Eager(Sampler[list[int]]):
    """Draws when its iterator is made, not when it is first asked."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([part.tolist() for part in torch.randperm(15).split(4)])

    def __len__(self) -> int:
        return 4


def _shuffled(dataset: Any, generator: Any) -> dict[str, Any]:
    return {"shuffle": True, "batch_size": 4}


ORDERS: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "in order": lambda d, g: {"batch_size": 4},
    "shuffle": _shuffled,
    "shuffle, drop_last": lambda d, g: {"shuffle": True, "batch_size": 4, "drop_last": True},
    "shuffle, no batches": lambda d, g: {"shuffle": True, "batch_size": None},
    "RandomSampler": lambda d, g: {"sampler": RandomSampler(d, generator=g), "batch_size": 4},
    "with replacement": lambda d, g: {
        "sampler": RandomSampler(d, replacement=True, num_samples=70, generator=g), "batch_size": 8
    },
    "weighted": lambda d, g: {"sampler": WeightedRandomSampler(range(1, 16), 20, generator=g), "batch_size": 4},
    "subset": lambda d, g: {"sampler": SubsetRandomSampler([3, 1, 9, 12, 0], generator=g), "batch_size": 2},
    "batch_sampler": lambda d, g: {"batch_sampler": BatchSampler(RandomSampler(d, generator=g), 4, True)},
    "a list of batches": lambda d, g: {"batch_sampler": [[0, 2], (5, 5, 5), [14]]},
    "arrays": lambda d, g: {"batch_sampler": [np.array([0, 2]), torch.tensor([5, 6]), [np.int64(3), torch.tensor(4)]]},
    "generators": lambda d, g: {"batch_sampler": _Generators()},
    "draws in __iter__": lambda d, g: {"batch_sampler": _Eager()},
}  # fmt: skip


class _Generators:
    def __iter__(self) -> Iterator[Iterator[int]]:
        return iter([iter(range(3)), iter([7, 8])])


# Batches that cannot be, or are not well, sent to another process.
_HERE = ("generators", "arrays")
# Of the two generators, those of a loader with workers meet each order with one.
_ORDERS = [
    *((name, 0, own) for name in ORDERS for own in (False, True)),
    *((name, 2, number % 2 == 1) for number, name in enumerate(ORDERS) if name not in _HERE),
]


@pytest.mark.few(12)
@pytest.mark.parametrize(("name", "workers", "own_generator"), _ORDERS)
def test_order_and_generator_state_are_torchs(
    tree: Path, name: str, workers: int, own_generator: bool
) -> None:
    results = []
    for kind, dataset in ((DataLoader, ImageFolder(tree, TINY)), (FastLoader, FastImageFolder(tree, TINY))):
        torch.manual_seed(11)
        generator = torch.Generator().manual_seed(5) if own_generator else None
        arguments = ORDERS[name](dataset, generator)
        loader: Any = kind(dataset, num_workers=workers, generator=generator, **arguments)
        if name == "generators" and kind is DataLoader:
            # ImageFolder has no __getitems__, and so takes them.
            assert not hasattr(dataset, "__getitems__")
        batches = [[(i.clone(), torch.as_tensor(t)) for i, t in loader] for _ in range(2)]
        states = torch.get_rng_state(), None if generator is None else generator.get_state()
        results.append((batches, states))
    (theirs, their_states), (ours, our_states) = results
    assert all(map(equal, ours, theirs))
    assert torch.equal(our_states[0], their_states[0])
    if own_generator:
        assert torch.equal(our_states[1], their_states[1])


@pytest.mark.parametrize("prefetch", [0, 1, 5, "auto"])
@pytest.mark.parametrize("batch_size", [1, 4, 15, 40])
def test_any_number_of_batches_ahead_gives_the_same(tree: Path, prefetch: Any, batch_size: int) -> None:
    ours = FastLoader(FastImageFolder(tree, STEADY), batch_size, prefetch_batches=prefetch)
    assert equal(ours, DataLoader(ImageFolder(tree, STEADY), batch_size))


def test_batches_are_made_ahead(tree: Path) -> None:
    for ahead in (0, 1, 3):
        asked: list[int] = []

        class Sequence(SequentialSampler):
            def __iter__(self) -> Iterator[int]:
                for index in range(15):
                    asked.append(index)
                    yield index

        dataset = FastImageFolder(tree, TINY)
        iterator = iter(FastLoader(dataset, 1, sampler=Sequence(dataset), prefetch_batches=ahead))
        assert asked == []
        next(iterator)
        assert asked == list(range(ahead + 1))
        next(iterator)
        assert asked == list(range(ahead + 2))


def test_augmentation_without_a_seed_comes_from_manual_seed(tree: Path) -> None:
    loader = FastLoader(FastImageFolder(tree, RANDOM), 4, shuffle=True)
    torch.manual_seed(5)
    first, second = digest(loader), digest(loader)
    torch.manual_seed(5)
    assert (digest(loader), digest(loader)) == (first, second)
    assert first != second
    torch.manual_seed(6)
    assert digest(loader) != first
    torch.manual_seed(5)  # and it does not depend on where the work is done
    assert (
        digest(FastLoader(FastImageFolder(tree, RANDOM), 4, shuffle=True, num_workers=2, workers="processes"))
        == first
    )


# ---- seed -----------------------------------------------------------------------------------------


def _lambda_transform() -> Any:
    return v1.Compose([v1.RandomHorizontalFlip(), v1.CenterCrop(16), v1.PILToTensor(), _noise])


def _noise(image: torch.Tensor) -> torch.Tensor:
    """A transform that nobody knows, which draws from all the global generators."""
    return (
        image.float() + random.random() + np.random.rand() + torch.rand(()) + torch.randn_like(image.float())
    )


class _Subclass(FastImageFolder):
    def __getitem__(self, index: int) -> Any:
        image, target = super().__getitem__(index)
        return image + random.random(), target


def _wrapped(dataset: Any) -> Any:
    return Subset(Subset(dataset, list(range(14, -1, -1))), list(range(12)))


SEEDED: dict[str, Callable[[Path, int], Any]] = {
    "fused": lambda tree, threads: FastImageFolder(tree, RANDOM, threads=threads),
    "stock in threads": lambda tree, threads: FastImageFolder(
        tree, v1.Compose([v1.RandomPerspective(), RANDOM]), threads=threads
    ),
    "stock, serial": lambda tree, threads: FastImageFolder(tree, _lambda_transform(), threads=threads),
    "a user's loader": lambda tree, threads: FastImageFolder(
        tree, _lambda_transform(), loader=_load, threads=threads
    ),
    "a subclass": lambda tree, threads: _Subclass(tree, _lambda_transform(), threads=threads),
    "concatenated": lambda tree, threads: ConcatDataset(
        [FastImageFolder(tree, RANDOM, threads=threads), FastImageFolder(tree, RANDOM, threads=threads)]
    ),
    "torchvision's": lambda tree, threads: ImageFolder(tree, RANDOM),
}


def _load(path: str) -> Any:
    return default_loader(path).rotate(90 * random.random())


def _itself(dataset: Any) -> Any:
    return dataset


# Views are the same ones whatever is below: one dataset of each class, for every day.
_VIEWED = ("fused", "a subclass", "concatenated", "torchvision's")
_SEEDED = [
    *(pytest.param(name, _itself, id=name) for name in SEEDED),
    *(pytest.param(name, _wrapped, id=f"{name}, through Subset", marks=() if name in _VIEWED else pytest.mark.slow)
      for name in SEEDED),
]  # fmt: skip


@pytest.mark.few(4)
@pytest.mark.parametrize(("name", "through"), _SEEDED)
def test_a_seed_gives_one_stream_on_any_topology(
    tree: Path, name: str, through: Callable[[Any], Any]
) -> None:
    streams = set()
    for threads, workers, options in [
        (1, 0, {}), (2, 0, {"prefetch_batches": 0}), (4, 0, {"prefetch_batches": 5}), (1, 1, {}), (2, 2, {}),
        (1, 2, {"persistent_workers": True, "multiprocessing_context": "fork"}),
    ]:  # fmt: skip
        torch.manual_seed(threads + workers)
        random.seed(threads)
        np.random.seed(workers)
        dataset = through(SEEDED[name](tree, threads))
        loader = FastLoader(
            dataset, 4, shuffle=True, num_workers=workers, workers="processes", seed=3, **options
        )
        epochs = [digest(loader) for _ in range(3)]
        assert len(set(epochs)) == 3
        streams.add(tuple(epochs))
    assert len(streams) == 1


@pytest.mark.slow
def test_a_seed_gives_the_same_stream_under_spawn(tree: Path) -> None:
    streams = {
        digest(FastLoader(FastImageFolder(tree, RANDOM), 4, shuffle=True, num_workers=workers, workers="processes", seed=3, multiprocessing_context=method))
        for workers, method in ((0, None), (2, "spawn"), (1, "spawn"), (2, "fork"), (2, "forkserver"))
    }  # fmt: skip
    assert len(streams) == 1


def test_no_batches_under_a_seed(tree: Path) -> None:
    streams = set()
    for workers in (0, 2):
        loader = FastLoader(
            FastImageFolder(tree, RANDOM),
            None,
            shuffle=True,
            num_workers=workers,
            workers="processes",
            seed=3,
        )
        streams.add(digest((image, torch.tensor(target)) for image, target in loader))
    assert len(streams) == 1


def test_samplers_of_the_user_keep_their_order_under_a_seed(tree: Path) -> None:
    dataset = FastImageFolder(tree, TINY)
    loader = FastLoader(dataset, 4, sampler=[3, 14, 14, 0, 7], seed=3)
    expected = DataLoader(ImageFolder(tree, TINY), 4, sampler=[3, 14, 14, 0, 7])
    assert equal(loader, expected)


def test_a_sample_drawn_twice_is_augmented_twice(tree: Path) -> None:
    loader = FastLoader(FastImageFolder(tree, RANDOM), 2, sampler=[3] * 8, seed=3)
    assert len({image.numpy().tobytes() for images, _ in loader for image in images}) == 8


def test_the_seed_of_the_loader_wins_over_the_datasets(tree: Path) -> None:
    def stream(dataset_seed: int | None, loader_seed: int | None) -> str:
        dataset = Subset(FastImageFolder(tree, RANDOM, seed=dataset_seed), range(15))
        return digest(FastLoader(dataset, 4, shuffle=True, seed=loader_seed))

    assert stream(1, None) == stream(None, 1) == stream(2, 1) == stream(None, 1 + 2**64)
    assert stream(2, None) != stream(1, None)
    assert stream(None, None) != stream(None, None)
    assert stream(None, 0) != stream(None, None)


def test_epochs_are_numbered_and_may_be_set(tree: Path) -> None:
    def loader(workers: int = 0) -> FastLoader:
        return FastLoader(
            FastImageFolder(tree, RANDOM),
            4,
            shuffle=True,
            seed=3,
            num_workers=workers,
            workers="processes",
            persistent_workers=workers > 0,
        )

    epochs = [digest(one) for one in [loader()] * 4]
    assert len(set(epochs)) == 4
    for workers in (0, 1):
        other = loader(workers)
        other.set_epoch(2)
        assert [digest(other), digest(other)] == epochs[2:]
        other.set_epoch(0)
        assert digest(other) == epochs[0]


def test_a_seeded_shuffle_visits_each_sample_once(tree: Path) -> None:
    for options in ({"batch_size": 4}, {"batch_size": None}, {"batch_size": 4, "drop_last": True}):
        dataset = FastImageFolder(tree, TINY, target_transform=None)
        dataset.samples = [(path, number) for number, (path, _) in enumerate(dataset.samples)]
        loader = FastLoader(dataset, shuffle=True, seed=1, **options)
        seen = [int(t) for _, targets in loader for t in torch.as_tensor(targets).reshape(-1)]
        assert len(seen) == len(set(seen)) == (12 if options.get("drop_last") else 15)
        assert seen != sorted(seen)
        if options["batch_size"]:
            assert len(seen) == sum(1 for _ in loader) * 4 - (0 if options.get("drop_last") else 1)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("make", [lambda tree: FastImageFolder(tree, _lambda_transform()), lambda tree: FastImageFolder(tree, RANDOM),
                                  lambda tree: _Subclass(tree, _lambda_transform())], ids=["lambda", "fused", "subclass"])  # fmt: skip
def test_a_seeded_epoch_leaves_the_global_generators_alone(tree: Path, make: Any, workers: int) -> None:
    loader = FastLoader(make(tree), 4, shuffle=True, seed=3, num_workers=workers, workers="processes")
    before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    for _ in loader:
        now = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
        assert torch.equal(before[0], now[0])
        assert before[1:] == now[1:]


def test_random_code_of_the_user_in_workers_differs_by_epoch_under_a_seed(tree: Path) -> None:
    loader = FastLoader(
        FastImageFolder(tree, TINY), 8, seed=3, num_workers=1, workers="processes", collate_fn=_draw
    )
    draws = [number for _ in range(3) for number in loader]
    assert len(set(draws)) == len(draws) == 6
    again = FastLoader(
        FastImageFolder(tree, TINY), 8, seed=3, num_workers=1, workers="processes", collate_fn=_draw
    )
    assert [number for _ in range(3) for number in again] == draws


def _draw(samples: list[Any]) -> float:
    return random.random()


# ---- transforms that fastpipe does not know -----------------------------------------------------------


def _recording(where: list[Any]) -> Callable[[Any], Any]:
    def transform(image: Any) -> Any:
        where.append(threading.current_thread())
        return torch.zeros(1)

    return transform


def test_an_unknown_transform_runs_in_the_consumers_thread_in_order(tree: Path) -> None:
    threads: list[Any] = []
    dataset = FastImageFolder(tree, v1.Compose([v1.PILToTensor(), _recording(threads)]), threads=3)
    list(FastLoader(dataset, 4))
    assert threads == [threading.current_thread()] * 15


def test_thread_safe_runs_it_in_the_decoding_threads(tree: Path) -> None:
    threads: list[Any] = []
    dataset = FastImageFolder(tree, _recording(threads), threads=3, thread_safe=True)
    list(FastLoader(dataset, 4))
    assert len(threads) == 15
    assert all(thread.name.startswith("fastpipe-decode") for thread in threads)


def test_an_unknown_transform_draws_as_in_image_folder_without_a_seed(tree: Path) -> None:
    """One after the other, in order, from whatever the script seeded."""
    transform = v1.Compose([v1.Lambda(lambda image: image.crop((0, 0, 16, 16))), v1.PILToTensor(), _noise])
    results = []
    for kind, dataset in ((DataLoader, ImageFolder), (DataLoader, FastImageFolder)):
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        results.append(list(kind(dataset(tree, transform), 4)))
    assert all(x[0].shape == y[0].shape for x, y in zip(*results, strict=True))
    ours = results[1]
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    assert equal(list(DataLoader(FastImageFolder(tree, transform), 4)), ours)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("where", ["consumer", "threads", "target"])
def test_an_error_of_a_transform_keeps_its_type_and_names_the_sample(
    tree: Path, where: str, workers: int
) -> None:
    transforms = {"target_transform": _fail} if where == "target" else {"transform": _fail}
    dataset = FastImageFolder(tree, **transforms, bad_samples="skip", thread_safe=where == "threads")  # type: ignore[arg-type]
    loader, text = (
        FastLoader(dataset, 4, num_workers=workers, workers="processes", collate_fn=list),
        "no error",
    )
    try:
        list(loader)
    except ZeroDivisionError as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        error.__traceback__ = None  # torch's own refers to itself, and so would keep the workers
    assert "division" in text
    if hasattr(Exception, "add_note"):
        assert "sample 0" in text
        assert dataset.samples[0][0] in text


def _fail(image: Any) -> Any:
    return 1 // 0


# ---- iterators ------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_iterators_side_by_side(tree: Path, workers: int) -> None:
    loader = FastLoader(FastImageFolder(tree, STEADY), 4, num_workers=workers, workers="processes")
    expected = list(DataLoader(ImageFolder(tree, STEADY), 4))
    pairs = list(zip(loader, loader, strict=True))
    assert equal([pair[0] for pair in pairs], expected)
    assert equal([pair[1] for pair in pairs], expected)


def test_nested_iterators(tree: Path) -> None:
    loader = FastLoader(FastImageFolder(tree, STEADY), 8)
    expected = list(DataLoader(ImageFolder(tree, STEADY), 8))
    for number, outer in enumerate(loader):
        assert equal(loader, expected)
        assert equal([outer], [expected[number]])


@pytest.mark.parametrize("workers", [0, 1])
def test_breaking_off_and_beginning_again(tree: Path, workers: int) -> None:
    loader = FastLoader(FastImageFolder(tree, STEADY), 4, num_workers=workers, workers="processes")
    expected = list(DataLoader(ImageFolder(tree, STEADY), 4))
    for stop in range(4):
        for number, batch in enumerate(loader):
            assert equal([batch], [expected[number]])
            if number == stop:
                break
    assert equal(loader, expected)


def test_an_error_in_the_users_loop(tree: Path) -> None:
    loader = FastLoader(FastImageFolder(tree, STEADY), 4)
    with pytest.raises(KeyError, match="mine"):
        for _ in loader:
            raise KeyError("mine")
    assert equal(loader, DataLoader(ImageFolder(tree, STEADY), 4))


def test_an_exhausted_iterator_stays_exhausted(tree: Path) -> None:
    iterator = iter(FastLoader(FastImageFolder(tree, STEADY), 8))
    assert len(list(iterator)) == 2
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)


def test_the_iterator_outlives_its_loader(tree: Path) -> None:
    iterator = iter(FastLoader(FastImageFolder(tree, STEADY), 4))
    gc.collect()
    assert equal(iterator, DataLoader(ImageFolder(tree, STEADY), 4))


def test_collate_fn_runs_in_the_consumers_thread(tree: Path) -> None:
    threads = []

    def collate(samples: list[Any]) -> list[int]:
        threads.append(threading.current_thread())
        assert all(isinstance(sample, tuple) for sample in samples)
        return [target for _, target in samples]

    loader = FastLoader(FastImageFolder(tree, STEADY), 4, collate_fn=collate)
    assert list(itertools.chain.from_iterable(loader)) == [0] * 5 + [1] * 5 + [2] * 5
    assert threads == [threading.current_thread()] * 4


def test_an_error_of_collate_fn_spoils_its_batch_alone(tree: Path) -> None:
    def collate(samples: list[Any]) -> list[int]:
        if samples[0][1] == 1:
            raise LookupError("collate")
        return [target for _, target in samples]

    iterator = iter(FastLoader(FastImageFolder(tree, STEADY), 5, collate_fn=collate))
    assert next(iterator) == [0] * 5
    with pytest.raises(LookupError):
        next(iterator)
    assert next(iterator) == [2] * 5


def _show(worker_id: int) -> None:
    worker = get_worker_info()
    assert worker is not None
    assert (worker.id, worker.num_workers) == (worker_id, 2)
    worker.dataset.target_transform = lambda target: (target, type(worker.dataset).__name__)


@pytest.mark.parametrize("seed", [None, 3])
def test_worker_init_fn_sees_the_users_dataset(tree: Path, seed: int | None) -> None:
    loader = FastLoader(
        FastImageFolder(tree, TINY), 5, num_workers=2, workers="processes", worker_init_fn=_show, seed=seed
    )
    assert [names[0] for _, (_, names) in loader] == ["FastImageFolder"] * 3


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("used", [False, True])
def test_copies_of_a_loader(tree: Path, duplicate: Any, used: bool) -> None:
    loader = FastLoader(FastImageFolder(tree, RANDOM), 4, shuffle=True, seed=3)
    first = digest(loader) if used else ""
    copied = duplicate(loader)
    assert digest(copied) == digest(loader)
    assert not used or digest(loader) != first


# ---- errors of samplers and indices ---------------------------------------------------------------------


class _Breaks(Sampler[int]):
    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __iter__(self) -> Iterator[int]:
        yield from range(6)
        raise self.error("sampler")


@pytest.mark.parametrize("error", [ValueError, IndexError, KeyError])
@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_a_samplers_error_appears_at_its_batch(tree: Path, error: type[Exception], ahead: int) -> None:
    for kind in (DataLoader, FastLoader):
        options = {"prefetch_batches": ahead} if kind is FastLoader else {}
        loader = kind(FastImageFolder(tree, TINY), 2, sampler=_Breaks(error), **options)
        for _ in range(2):
            iterator = iter(loader)
            for _ in range(3):
                next(iterator)
            with pytest.raises(error, match="sampler"):
                next(iterator)
            with pytest.raises(StopIteration):
                next(iterator)


class _Stumbles:
    """An iterator, not a generator: it goes on after an error."""

    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> _Stumbles:
        return self

    def __next__(self) -> list[int]:
        self.count += 1
        if self.count == 2:
            raise LookupError("stumbled")
        if self.count > 4:
            raise StopIteration
        return [self.count]


def test_a_sampler_that_goes_on_after_its_error_is_gone_on_with(tree: Path) -> None:
    for kind in (DataLoader, FastLoader):
        iterator = iter(kind(FastImageFolder(tree, TINY), batch_sampler=_Stumbles()))
        seen: list[Any] = []
        while True:
            try:
                seen.append(len(next(iterator)))
            except LookupError:
                seen.append("error")
            except StopIteration:
                break
        assert seen == [2, "error", 2, 2]


@pytest.mark.parametrize(
    ("index", "error"), [(99, IndexError), (-99, IndexError), ("x", TypeError), (1.5, TypeError)]
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_index_spoils_its_batch_alone(
    tree: Path, index: Any, error: type[Exception], workers: int
) -> None:
    for kind in (DataLoader, FastLoader):
        loader = kind(FastImageFolder(tree, TINY), batch_sampler=[[0], [1, index], [2]], num_workers=workers)
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(error):
            next(iterator)
        assert len(next(iterator)[0]) == 1
        with pytest.raises(StopIteration):
            next(iterator)


def test_an_empty_batch_fails_as_in_data_loader(tree: Path) -> None:
    for kind in (DataLoader, FastLoader):
        for policy in ("raise", "skip"):
            with pytest.raises(IndexError):
                list(kind(FastImageFolder(tree, TINY, bad_samples=policy), batch_sampler=[[]]))


def test_an_empty_epoch(tree: Path) -> None:
    assert list(FastLoader(FastImageFolder(tree, TINY), 20, drop_last=True)) == []
    assert list(FastLoader(FastImageFolder(tree, TINY), sampler=[])) == []


# ---- memory ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("seed", [None, 3])
def test_batches_that_nobody_keeps_use_the_same_memory(tree: Path, seed: int | None) -> None:
    dataset = FastImageFolder(tree, RANDOM)
    loader = FastLoader(dataset, 3, sampler=list(range(15)) * 20, prefetch_batches=2, seed=seed)
    addresses = {images.data_ptr() for images, _ in loader}
    assert len(addresses) <= 5
    assert {images.data_ptr() for images, _ in loader} <= addresses
    stock = DataLoader(dataset, 3, sampler=list(range(15)) * 4)
    assert len({images.data_ptr() for images, _ in stock}) <= 5


@pytest.mark.usefixtures("no_gc")
def test_dropping_loader_and_dataset_frees_the_threads(tree: Path) -> None:
    before = set(threading.enumerate())
    dataset = FastImageFolder(tree, RANDOM, threads=2, decode=Decode(backend="pillow"))  # in Python's threads
    loader = FastLoader(dataset, 3)
    iterator = iter(loader)
    next(iterator)
    started = set(threading.enumerate()) - before
    assert len(started) == 2
    del iterator, loader, dataset
    for thread in started:
        thread.join(WAIT_S)
        assert not thread.is_alive()


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("kind", [DataLoader, FastLoader])
def test_dropping_a_loader_with_persistent_workers_ends_them(tree: Path, kind: Any) -> None:
    processes = {"workers": "processes"} if kind is FastLoader else {}
    loader = kind(FastImageFolder(tree, RANDOM), 3, num_workers=2, persistent_workers=True, **processes)
    list(loader)
    workers = list(loader._iterator._workers)
    assert all(worker.is_alive() for worker in workers)
    del loader
    assert not any(worker.is_alive() for worker in workers)


def test_dropping_an_iterator_cancels_what_was_not_begun(tree: Path) -> None:
    entered, opened, ran = threading.Event(), threading.Event(), []

    def hold(image: Any) -> Any:
        ran.append(1)
        entered.set()
        assert opened.wait(WAIT_S)
        return torch.zeros(1)

    dataset = FastImageFolder(tree, hold, threads=1, thread_safe=True)
    loader = FastLoader(dataset, 1, prefetch_batches=5)
    iterator: Any = iter(loader)
    iterator._begin_batches()
    assert entered.wait(WAIT_S)
    iterator = None
    opened.set()
    dataset.transform = TINY
    assert len(list(loader)) == 15
    assert len(ran) == 1


@pytest.fixture(params=["python", "native"])
def slow_first(
    request: pytest.FixtureRequest, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[], None], Callable[[], None]], FastImageFolder]:
    """Makes a dataset which calls a function before its first image is read, and another for each other image
    that is read: by Python's threads, or by those of the native core, which leave the first, a PNG, to Python."""

    def make(before_first: Callable[[], None], of_another: Callable[[], None]) -> FastImageFolder:
        shutil.copytree(tree, tmp_path / "slow")
        if request.param == "native":
            path = min((tmp_path / "slow").rglob("*.jpg"))
            Image.open(path).save(path, "PNG")
        decode = Decode(backend="pillow" if request.param == "python" else "auto")
        dataset = FastImageFolder(tmp_path / "slow", STEADY, threads=2, decode=decode)
        maker, first, look = dataset._running().maker, dataset.samples[0][0], ImageBatch._look
        read = maker.read

        def read_and_tell(path: str) -> Any:
            (before_first if path == first else of_another)()
            return read(path)

        def look_and_tell(self: Any) -> None:
            for item in self.items:
                if item.path != first:
                    of_another()
            look(self)

        maker.read = read_and_tell
        monkeypatch.setattr(ImageBatch, "_look", look_and_tell)
        return dataset

    return make


@pytest.mark.parametrize("prefetch", ["auto", 2])
def test_one_slow_image_does_not_leave_threads_idle(slow_first: Any, prefetch: Any) -> None:
    """The first image is read when those of all other batches have been, which needs them begun."""
    others = threading.Semaphore(0)
    waited: list[bool] = []

    def wait_for_others() -> None:
        count = 14 if prefetch == "auto" else 5  # with a number, no more than that are begun
        waited.extend(others.acquire(timeout=WAIT_S) for _ in range(count))
        if prefetch != "auto":
            waited.append(not others.acquire(blocking=False))

    dataset = slow_first(wait_for_others, others.release)
    batches = list(FastLoader(dataset, 2, prefetch_batches=prefetch))
    assert all(waited)
    assert len(waited) == (14 if prefetch == "auto" else 6)
    expected = list(DataLoader(ImageFolder(dataset.root, STEADY), 2))
    for (images, labels), (their_images, their_labels) in zip(batches, expected, strict=True):
        assert torch.equal(images, their_images)
        assert torch.equal(labels, their_labels)


def test_batches_begun_beyond_the_usual_are_bounded_in_bytes(
    slow_first: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, begun = threading.Event(), threading.Semaphore(0)

    def wait() -> None:
        assert opened.wait(WAIT_S)

    dataset = slow_first(wait, begun.release)
    sample = 3 * 32 * 32 * 4
    monkeypatch.setattr("fastpipe.torch.source.MOST_SPARE", 2 * sample)
    iterator: Any = iter(FastLoader(dataset, 1))
    consumer = threading.Thread(target=lambda: next(iterator))
    consumer.start()
    depth = iterator._depth
    for _ in range(depth + 2):
        assert begun.acquire(timeout=WAIT_S)
    opened.set()
    consumer.join(WAIT_S)
    assert not consumer.is_alive()
    assert len(iterator._pending) <= depth + 2


KEEPERS: dict[str, Callable[[Any], Any]] = {
    "batch": lambda batch: batch,
    "images": lambda batch: batch[0],
    "row": lambda batch: batch[0][1],
    "slice": lambda batch: batch[0][:, :, 2:5],
    "numpy": lambda batch: batch[0].numpy(),
    "row's numpy": lambda batch: batch[0][0].numpy()[:1],
    "dlpack": lambda batch: np.from_dlpack(batch[0]),
    "detached": lambda batch: batch[0].detach().view(-1),
    "unbound": lambda batch: list(batch[0].unbind(0)),
    "list": lambda batch: list(batch[0]),
    "pickled": lambda batch: pickle.loads(pickle.dumps(batch)),
    "copied": lambda batch: copy.copy(batch[0]),
    "permuted": lambda batch: batch[0].permute(1, 0, 2, 3),
}


def _content(value: Any) -> bytes:
    if isinstance(value, (list, tuple)):
        return b"".join(map(_content, value))
    return np.ascontiguousarray(np.asarray(value)).tobytes()


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(KEEPERS)), st.integers(0, 3)), min_size=1, max_size=15),
    st.sampled_from([0, 1, 4]), st.booleans(),
)  # fmt: skip
def test_what_is_kept_is_never_overwritten(
    tree: Path, choices: list[tuple[str, int]], ahead: int, fast: bool
) -> None:
    dataset = FastImageFolder(tree, RANDOM, threads=2)
    loader = FastLoader(dataset, 3, prefetch_batches=ahead) if fast else DataLoader(dataset, 3)
    held: list[tuple[Any, bytes]] = []
    cycle = itertools.cycle(choices)
    for _ in range(2):
        for batch in loader:
            name, drop = next(cycle)
            value = KEEPERS[name](batch)
            held.append((value, _content(value)))
            del batch, value
            for _ in range(min(drop, len(held) - 1)):
                del held[drop % len(held)]
            assert all(_content(value) == content for value, content in held)


def test_a_whole_epoch_in_a_list(tree: Path) -> None:
    loader = FastLoader(FastImageFolder(tree, STEADY), 2)
    expected = list(DataLoader(ImageFolder(tree, STEADY), 2))
    batches = [list(loader) for _ in range(3)]
    assert all(equal(epoch, expected) for epoch in batches)


def test_a_size_that_changes_between_batches(tree: Path) -> None:
    dataset = FastImageFolder(tree, v1.CenterCrop(8))
    kept: list[Any] = []
    for size in (8, 16, 8, 24, 16):
        dataset.transform = v1.Compose([v1.CenterCrop(size), v1.PILToTensor()])
        for images, _ in FastLoader(dataset, 4):
            assert images.shape[1:] == (3, size, size)
            kept.append((images, images.clone()))
    assert all(torch.equal(images, before) for images, before in kept)


def test_the_clock_tells_the_stages(tree: Path) -> None:
    loader = FastLoader(FastImageFolder(tree, STEADY), 4)
    list(loader)
    assert {"read", "decode", "transform", "wait"} <= set(loader.clock.totals())
    with pytest.raises(AttributeError, match="list"):
        FastLoader([1, 2]).clock
