"""``FastLoader``: order, seeds, iterators, errors, memory."""

from __future__ import annotations

import gc
import itertools
import pickle
import random
import shutil
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dataset_kinds import RANDOM, STEADY
from PIL import Image
from streams import BY_PROCESSES, OwnSampler, outcomes, plain, stream
from torch.utils import data
from torch.utils.data import DataLoader, Subset
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader

from fastpipe import Decode, FastImageFolder, FastLoader, accelerate
from fastpipe.errors import OptionError
from fastpipe.images.batch import ImageBatch

pytestmark = pytest.mark.usefixtures("same_generators")

TINY = v1.Compose([v1.CenterCrop(8), v1.PILToTensor()])
BOTH = pytest.mark.parametrize("kind", [DataLoader, FastLoader])
WAIT_S = 60.0
Sample = namedtuple("Sample", "image name")


def _named(samples: list[Any]) -> Any:
    return Sample(torch.stack([image for image, _ in samples]), [str(target) for _, target in samples])


def _dict(samples: list[Any]) -> Any:
    images, targets = data.default_collate(samples)
    return {"x": images, "first": images[:1], "y": targets}


# Others are in test_determinism.py.
ORDERS: dict[str, dict[str, Any]] = {
    "shuffle": {"shuffle": True, "batch_size": 4},
    "a list of batches": {"batch_sampler": [[0, 2], (5, 5, 5), [14]]},
    "own tuples": {"batch_size": 4, "collate_fn": _named, "drop_last": True},
    "dicts": {"batch_size": 4, "collate_fn": _dict},
    "draws in __iter__": {"batch_sampler": OwnSampler(lambda: [part.tolist() for part in torch.randperm(15).split(4)], 4)},
    # The last batches of these cannot be, or are not well, sent to another process.
    "arrays": {"batch_sampler": [np.array([0, 2]), torch.tensor([5, 6]), [np.int64(3), torch.tensor(4)]]},
    "generators": {"batch_sampler": OwnSampler(lambda: [iter(range(3)), iter([7, 8])], 2)},
}  # fmt: skip


@pytest.mark.few(8)
@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize(
    ("name", "workers"), [*((name, 0) for name in ORDERS), *((name, 2) for name in list(ORDERS)[:5])]
)
def test_orders_and_generators_are_torchs(tree: Path, name: str, workers: int, own_generator: bool) -> None:
    def run(kind: Any, make: Any = DataLoader, change: Any = lambda loader: loader) -> Any:
        torch.manual_seed(11)
        generator = torch.Generator().manual_seed(5) if own_generator else None
        loader = change(make(kind(tree, TINY), num_workers=workers, generator=generator, **ORDERS[name]))
        epochs = [stream(loader), stream(loader)]
        states = [torch.get_rng_state(), None if generator is None else generator.get_state()]
        return len(loader), epochs, plain(states)

    expected = run(ImageFolder)
    assert run(FastImageFolder, FastLoader) == expected
    for change in (accelerate, lambda it: accelerate(it).reference(), lambda it: accelerate(accelerate(it))):
        if workers == 0 or change is accelerate:
            assert run(ImageFolder, change=change) == expected


def test_batches_are_made_ahead(tree: Path) -> None:
    for ahead in (0, 1, 3):
        asked: list[int] = []

        class Sequence(data.SequentialSampler):
            def __iter__(self) -> Iterator[int]:
                return (asked.append(index) or index for index in range(15))  # type: ignore[func-returns-value]

        dataset = FastImageFolder(tree, TINY)
        iterator = iter(FastLoader(dataset, 1, sampler=Sequence(dataset), prefetch_batches=ahead))
        assert asked == []
        for count in (1, 2):
            next(iterator)
            assert asked == list(range(ahead + count))


def _noise(image: torch.Tensor) -> torch.Tensor:
    """An unknown transform, which draws from all the global generators."""
    drawn = random.random() + np.random.rand() + torch.rand(())
    return image.float() + drawn + torch.randn_like(image.float())


def _load(path: str) -> Any:
    return default_loader(path).rotate(90 * random.random())


class _Subclass(FastImageFolder):
    def __getitem__(self, index: int) -> Any:
        image, target = super().__getitem__(index)
        return image + random.random(), target


UNKNOWN = v1.Compose([v1.RandomHorizontalFlip(), v1.CenterCrop(16), v1.PILToTensor(), _noise])
STOCK = v1.Compose([v1.RandomPerspective(), RANDOM])
SEEDED: dict[str, Callable[[Path, int], Any]] = {
    "fused": lambda tree, threads: FastImageFolder(tree, RANDOM, threads=threads),
    "stock in threads": lambda tree, threads: FastImageFolder(tree, STOCK, threads=threads),
    "stock, serial": lambda tree, threads: FastImageFolder(tree, UNKNOWN, threads=threads),
    "a user's loader": lambda tree, threads: FastImageFolder(tree, UNKNOWN, loader=_load, threads=threads),
    "a subclass": lambda tree, threads: _Subclass(tree, UNKNOWN, threads=threads),
    "concatenated": lambda tree, threads: data.ConcatDataset([FastImageFolder(tree, RANDOM, threads=threads)] * 2),
    "torchvision's": lambda tree, threads: ImageFolder(tree, RANDOM),
    "through Subset": lambda tree, threads: Subset(
        Subset(FastImageFolder(tree, RANDOM, threads=threads), list(range(14, -1, -1))), list(range(12))
    ),
}  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.parametrize("name", SEEDED)
def test_a_seed_gives_one_stream_on_any_topology(tree: Path, name: str) -> None:
    streams = []
    for threads, workers, options in [
        (1, 0, {}), (2, 0, {"prefetch_batches": 0}), (4, 0, {"prefetch_batches": 5}), (2, 2, {}),
        (1, 1, {"persistent_workers": True, "multiprocessing_context": "fork"}),
    ]:  # fmt: skip
        torch.manual_seed(threads + workers), random.seed(threads), np.random.seed(workers)
        loader = BY_PROCESSES(SEEDED[name](tree, threads), 4, True, seed=3, num_workers=workers, **options)
        epochs = [stream(loader) for _ in range(3)]
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
        streams.append(epochs)
    assert all(found == streams[0] for found in streams)


def test_single_samples_of_a_seed_are_those_of_batches(tree: Path) -> None:
    options: dict[str, Any] = {"shuffle": True, "seed": 3}
    batches = FastLoader(FastImageFolder(tree, RANDOM), 4, **options)
    expected = [plain(image) for images, _ in batches for image in images]
    for workers in (0, 2):
        loader = BY_PROCESSES(FastImageFolder(tree, RANDOM), None, num_workers=workers, **options)
        assert [plain(image) for image, _ in loader] == expected


def test_samplers_of_the_user_keep_their_order_under_a_seed(tree: Path) -> None:
    order = [3, 14, 14, 0, 7]
    loader = FastLoader(FastImageFolder(tree, TINY), 4, sampler=order, seed=3)
    assert stream(loader) == stream(DataLoader(ImageFolder(tree, TINY), 4, sampler=order))
    drawn = FastLoader(FastImageFolder(tree, RANDOM), 2, sampler=[3] * 8, seed=3)
    assert len({image.numpy().tobytes() for images, _ in drawn for image in images}) == 8


def test_the_seed_of_the_loader_wins_over_the_datasets(tree: Path) -> None:
    def made(dataset_seed: int | None, loader_seed: int | None) -> Any:
        dataset = Subset(FastImageFolder(tree, RANDOM, seed=dataset_seed), range(15))
        return stream(FastLoader(dataset, 4, shuffle=True, seed=loader_seed))

    assert made(1, None) == made(None, 1) == made(2, 1) == made(None, 1 + 2**64)
    assert made(2, None) != made(1, None)
    assert made(None, None) != made(None, None) != made(None, 0)


def test_a_seeded_epoch_leaves_the_global_generators_alone(tree: Path) -> None:
    def states() -> Any:
        return plain(torch.get_rng_state()), random.getstate(), repr(np.random.get_state())

    before, unknown = states(), FastImageFolder(tree, UNKNOWN)
    cases = (FastImageFolder(tree, RANDOM), 0), (unknown, 0), (unknown, 1), (_Subclass(tree, UNKNOWN), 0)
    for dataset, workers in cases:
        for _ in BY_PROCESSES(dataset, 4, shuffle=True, seed=3, num_workers=workers):
            assert states() == before


def test_random_code_of_the_user_in_workers_differs_by_epoch_under_a_seed(tree: Path) -> None:
    def draws() -> list[float]:
        options: dict[str, Any] = {"seed": 3, "num_workers": 1, "collate_fn": lambda samples: random.random()}
        loader = BY_PROCESSES(FastImageFolder(tree, TINY), 8, **options)
        return [number for _ in range(3) for number in loader]

    first = draws()
    assert len(set(first)) == len(first) == 6 and draws() == first


def test_an_unknown_transform_runs_in_order_here_or_if_it_may_in_threads(tree: Path) -> None:
    threads: list[threading.Thread] = []

    def record(image: Any) -> Any:
        threads.append(threading.current_thread())
        return torch.zeros(1)

    list(FastLoader(FastImageFolder(tree, v1.Compose([v1.PILToTensor(), record]), threads=3), 4))
    assert threads == [threading.current_thread()] * 15
    threads.clear()
    list(FastLoader(FastImageFolder(tree, record, threads=3, thread_safe=True), 4))
    assert len(threads) == 15 and all(thread.name.startswith("fastpipe-decode") for thread in threads)


def test_an_error_of_a_target_transform_keeps_its_type_and_names_the_sample(tree: Path) -> None:
    dataset = FastImageFolder(tree, TINY, target_transform=lambda target: 1 // (target - 1))
    with pytest.raises(ZeroDivisionError) as caught:
        list(FastLoader(dataset, 4))
    said = f"while making sample 5 from '{dataset.samples[5][0]}'"
    assert not hasattr(Exception, "add_note") or said in str(getattr(caught.value, "__notes__", ""))


def test_collate_fn_runs_in_the_consumers_thread_and_its_error_spoils_its_batch_alone(tree: Path) -> None:
    threads = []

    def collate(samples: list[Any]) -> list[int]:
        threads.append(threading.current_thread())
        assert all(isinstance(sample, tuple) for sample in samples)
        if samples[0][1] == 1:
            raise LookupError("collate")
        return [target for _, target in samples]

    found = outcomes(FastLoader(FastImageFolder(tree, TINY), 5, collate_fn=collate), list)
    assert found[0::2] == [[0] * 5, [2] * 5] and isinstance(found[1], LookupError)
    assert threads == [threading.current_thread()] * 3


def _show(worker_id: int) -> None:
    worker = data.get_worker_info()
    assert worker is not None and (worker.id, worker.num_workers) == (worker_id, 2)
    worker.dataset.target_transform = lambda target: (target, type(worker.dataset).__name__)


@pytest.mark.parametrize("seed", [None, 3])
def test_worker_init_fn_sees_the_users_dataset(tree: Path, seed: int | None) -> None:
    dataset = FastImageFolder(tree, TINY)
    loader = BY_PROCESSES(dataset, 5, num_workers=2, worker_init_fn=_show, seed=seed)
    assert [names[0] for _, (_, names) in loader] == ["FastImageFolder"] * 3


@pytest.mark.parametrize("workers", [0, 1])
def test_iterators_do_not_disturb_each_other_and_outlive_their_loader(tree: Path, workers: int) -> None:
    loader = BY_PROCESSES(FastImageFolder(tree, STEADY), 8, num_workers=workers)
    expected = stream(DataLoader(ImageFolder(tree, STEADY), 8))
    pairs = [(plain(one), plain(other)) for one, other in zip(loader, loader, strict=True)]
    assert pairs == list(zip(expected, expected, strict=True)), "side by side"
    for number, outer in enumerate(loader):
        assert stream(loader) == expected, "within each other"
        assert plain(outer) == expected[number]
    iterator = iter(loader)
    del loader
    gc.collect()
    assert stream(iterator) == expected and list(iterator) == list(iterator) == []


@pytest.mark.parametrize(("error", "ahead"), [(ValueError, 0), (IndexError, 1), (KeyError, 5)])
def test_a_samplers_error_appears_at_its_batch(tree: Path, error: type[Exception], ahead: int) -> None:
    def broken() -> Iterator[int]:
        yield from range(6)
        raise error("sampler")

    for kind in (DataLoader, partial(FastLoader, prefetch_batches=ahead)):
        loader = kind(FastImageFolder(tree, TINY), 2, sampler=OwnSampler(broken, 15))
        for _ in range(2):
            found = outcomes(loader, lambda batch: len(batch[0]))
            assert found[:-1] == [2, 2, 2]
            assert type(found[-1]) is error and "sampler" in str(found[-1])


@pytest.mark.parametrize("workers", [0, 1])
@BOTH
def test_a_bad_index_spoils_its_batch_alone(tree: Path, kind: Any, workers: int) -> None:
    bad = {99: IndexError, -99: IndexError, "x": TypeError, 1.5: TypeError}
    batches = [part for index in bad for part in ([0], [1, index])]
    loader = kind(FastImageFolder(tree, TINY), batch_sampler=batches, num_workers=workers)
    found = outcomes(loader, lambda batch: len(batch[0]))
    assert found[0::2] == [1] * 4 and [type(error) for error in found[1::2]] == list(bad.values())


@BOTH
def test_an_empty_batch_is_an_error_and_an_empty_epoch_is_none(tree: Path, kind: Any) -> None:
    for policy in ("raise", "skip"):
        with pytest.raises(IndexError):
            list(kind(FastImageFolder(tree, TINY, bad_samples=policy), batch_sampler=[[]]))
    assert list(kind(FastImageFolder(tree, TINY), 20, drop_last=True)) == []
    assert list(kind(FastImageFolder(tree, TINY), sampler=[])) == []


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("seed", [None, 3])
def test_dropped_batches_leave_their_memory_to_the_next(tree: Path, seed: int | None) -> None:
    dataset = FastImageFolder(tree, RANDOM)
    loader = FastLoader(dataset, 3, sampler=list(range(15)) * 20, prefetch_batches=2, seed=seed)
    assert len(addresses := {images.data_ptr() for images, _ in loader}) <= 5
    assert {images.data_ptr() for images, _ in loader} <= addresses
    stock = DataLoader(dataset, 3, sampler=list(range(15)) * 4)
    assert len({images.data_ptr() for images, _ in stock}) <= 5


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("kind", [DataLoader, BY_PROCESSES])
def test_dropping_a_loader_with_persistent_workers_ends_them(tree: Path, kind: Any) -> None:
    loader = kind(FastImageFolder(tree, RANDOM), 3, num_workers=2, persistent_workers=True)
    list(loader)
    workers = list(loader._iterator._workers)
    assert all(worker.is_alive() for worker in workers)
    del loader
    assert not any(worker.is_alive() for worker in workers)


@pytest.fixture(params=["python", "native"])
def slow_first(
    request: pytest.FixtureRequest, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[], None], Callable[[], None]], FastImageFolder]:
    """Makes a dataset which calls a function before its first image is read, and another for each other image
    that is read: by Python's threads, or by those of the native core, which leave the first, a BMP, to Python."""

    def make(before_first: Callable[[], None], before_another: Callable[[], None]) -> FastImageFolder:
        shutil.copytree(tree, tmp_path / "slow")
        if request.param == "native":
            path = min((tmp_path / "slow").rglob("*.jpg"))
            Image.open(path).save(path, "BMP")
        decode = Decode(backend="pillow" if request.param == "python" else "auto")
        dataset = FastImageFolder(tmp_path / "slow", STEADY, threads=2, decode=decode)
        maker, first, look = dataset._running().maker, dataset.samples[0][0], ImageBatch._look
        read = maker.read

        def read_and_call(path: str) -> Any:
            (before_first if path == first else before_another)()
            return read(path)

        def look_and_call(self: Any) -> None:
            for item in self.items:
                if item.path != first:
                    before_another()
            look(self)

        maker.read = read_and_call
        monkeypatch.setattr(ImageBatch, "_look", look_and_call)
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
    batches = stream(FastLoader(dataset, 2, prefetch_batches=prefetch))
    assert waited == [True] * (14 if prefetch == "auto" else 6)
    assert batches == stream(DataLoader(ImageFolder(dataset.root, STEADY), 2))


def test_batches_begun_ahead_are_bounded_in_bytes(slow_first: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, begun = threading.Event(), threading.Semaphore(0)
    dataset = slow_first(lambda: opened.wait(WAIT_S), begun.release)
    monkeypatch.setattr("fastpipe.torch.source.MOST_SPARE", 2 * 3 * 32 * 32 * 4)
    iterator: Any = iter(FastLoader(dataset, 1))
    consumer = threading.Thread(target=lambda: next(iterator))
    consumer.start()
    for _ in range(iterator._depth + 2):
        assert begun.acquire(timeout=WAIT_S)
    opened.set()
    consumer.join(WAIT_S)
    assert not consumer.is_alive() and len(iterator._pending) <= iterator._depth + 2


KEEPERS: list[Callable[[Any], Any]] = [
    lambda batch: batch, lambda batch: batch[0][1], lambda batch: batch[0][:, :, 2:5], lambda batch: batch[0].numpy(),
    lambda batch: np.from_dlpack(batch[0]), lambda batch: list(batch[0].unbind(0)),
    lambda batch: batch[0].permute(1, 0, 2, 3), lambda batch: pickle.loads(pickle.dumps(batch)),
]  # fmt: skip


def _content(value: Any) -> bytes:
    if isinstance(value, (list, tuple)):
        return b"".join(map(_content, value))
    return np.ascontiguousarray(np.asarray(value)).tobytes()


@pytest.mark.parametrize("ahead", [None, 0, 4])
def test_kept_values_are_never_overwritten(tree: Path, ahead: int | None) -> None:
    dataset = FastImageFolder(tree, RANDOM, threads=2)
    loader = (DataLoader if ahead is None else partial(FastLoader, prefetch_batches=ahead))(dataset, 3)
    held: list[tuple[Any, bytes]] = []
    keepers, rng = itertools.cycle(KEEPERS), random.Random(0)
    for _ in range(8):
        for batch in loader:
            value = next(keepers)(batch)
            held.append((value, _content(value)))
            del batch, value
            while len(held) > 1 and rng.random() < 0.5:
                del held[rng.randrange(len(held))]
            assert all(_content(value) == content for value, content in held)


@pytest.mark.parametrize(
    ("dataset", "remedy"),
    [
        (DataLoader([1, 2]), r"write accelerate\(loader\)"),
        ("data/train", r"FastLoader\(FastImageFolder\(path, transform\)"),
        (Path("data/train"), r"FastLoader\(FastImageFolder\(path, transform\)"),
    ],
    ids=["a loader", "a path", "a Path"],
)
def test_what_is_no_dataset_is_an_error_with_the_remedy(dataset: Any, remedy: str) -> None:
    with pytest.raises(OptionError, match=remedy):
        FastLoader(dataset, batch_size=2)


def test_num_workers_is_any_whole_number() -> None:
    assert len(list(FastLoader(list(range(4)), 2, num_workers=np.int64(0)))) == 2  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="num_workers must be a number from 0, or 'auto', got 'all'"):
        FastLoader([1], num_workers="all")  # type: ignore[arg-type]
