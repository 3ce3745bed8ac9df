"""What every dataset does, in a stock loader and in ``FastLoader``: each row of ``KINDS`` by each test."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import json
import os
import pickle
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import h5py
import numpy as np
import pytest
import torch
from dataset_kinds import KINDS, Kind
from failure import failure
from resuming import check_goes_on
from same import same
from streams import BY_PROCESSES
from torch.utils.data import ConcatDataset, DataLoader, Subset, default_collate

import fastpipe
from fastpipe import BadSamples, FastImageFolder, FastLoader, Shard
from fastpipe.errors import BadSampleError, OptionError, TooManyBadSamplesError
from fastpipe.sampling import Grid

pytestmark = [
    pytest.mark.usefixtures("same_generators"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="run it where processes can fork: not on Windows"),
]

SIZE = 4
LOADERS: dict[str, Callable[..., Any]] = {
    "stock": DataLoader,
    "stock, 1 worker": functools.partial(DataLoader, num_workers=1),
    "stock, 2 workers": functools.partial(DataLoader, num_workers=2, persistent_workers=True),
    "fast": FastLoader,
    "fast, 2 threads": functools.partial(FastLoader, num_workers=2),
    "fast, 1 process": functools.partial(BY_PROCESSES, num_workers=1),
    "fast, 2 processes": functools.partial(BY_PROCESSES, num_workers=2, persistent_workers=True),
    "accelerated": lambda *given, **options: fastpipe.accelerate(DataLoader(*given, **options)),
}
of_every_kind = pytest.mark.parametrize("kind", KINDS, indirect=True)
of_every_kind_that_is_spoilt = pytest.mark.parametrize(
    "kind", [name for name in KINDS if KINDS[name].spoil], indirect=True
)


class Data:
    """A kind of dataset over data in a folder."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self._kind, self.folder = kind, folder
        self.stock = kind.stock(folder)

    def fast(self, **options: Any) -> Any:
        return self._kind.fast(self.folder, **options)

    def drawn(self, **options: Any) -> Any:
        """A dataset whose samples are other ones in each epoch."""
        return self._kind.fast(self.folder, **self._kind.drawn, **options)


@pytest.fixture(scope="module")
def _written(tmp_path_factory: pytest.TempPathFactory, settled: Any) -> Callable[[str], Path]:
    @functools.cache
    def write(name: str) -> Path:
        folder = tmp_path_factory.mktemp("kind")
        KINDS[name].write(folder)
        return settled(folder)  # type: ignore[no-any-return]

    return write


@pytest.fixture
def kind(request: pytest.FixtureRequest, _written: Callable[[str], Path]) -> Data:
    return Data(KINDS[request.param], _written(request.param))


@pytest.fixture
def spoilt(kind: Data, tmp_path: Path, settled: Any) -> tuple[Data, list[int]]:
    """Data of their own, some of which are damaged, and the indices of these."""
    kind._kind.write(tmp_path)
    wrong = kind._kind.spoil(tmp_path)  # type: ignore[misc]
    return Data(kind._kind, settled(tmp_path)), wrong


@pytest.fixture(scope="module", autouse=True)
def _empty_memory_again() -> Iterator[None]:
    yield
    fsspec.filesystem("memory").store.clear()


def leaf(batch: Any) -> torch.Tensor:
    """The first tensor of a batch."""
    while not isinstance(batch, torch.Tensor):
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return batch


def rows(loader: Any) -> list[bytes]:
    """The samples of an epoch."""
    return [row.numpy().tobytes() for batch in loader for row in leaf(batch)]


def reversed_without_the_first(samples: Any) -> Any:
    return len(samples), default_collate([*samples[1:]][::-1] or list(samples))


def views(dataset: Any) -> dict[str, Any]:
    return {
        "itself": dataset,
        "subset": Subset(Subset(dataset, [9, 8, -1, 6, 12, 5, 9]), [4, 0, 6, 2, -1]),
        "split": torch.utils.data.random_split(dataset, [0.6, 0.4], generator=torch.Generator().manual_seed(1))[0],
        "concat": ConcatDataset([Subset(dataset, [3, 1]), dataset, Subset(ConcatDataset([dataset] * 2), [-2, 13, 0])]),
    }  # fmt: skip


# ---- values -------------------------------------------------------------------------------------


@of_every_kind
def test_samples_are_those_of_the_stock_dataset(kind: Data) -> None:
    ours, count = kind.fast(), len(kind.stock)
    assert len(ours) == count
    expected = [kind.stock[index] for index in range(count)]
    assert same(list(ours), expected)
    for index in (-1, -count, np.int64(4), np.array(4), np.uint8(4), torch.tensor(4), True):
        assert same(ours[index], expected[int(index)])
    for indices in ([5, 2, 5, -1], (0, 7), np.array([3, 1]), torch.tensor([6, 6]), iter([1, 0])):
        listed = [int(index) for index in indices] if hasattr(indices, "__len__") else [1, 0]
        found = default_collate(ours.__getitems__(indices))
        assert same(found, default_collate([expected[index] for index in listed]))
    assert len(ours.__getitems__([])) == 0
    for index in (count, -count - 1, 10**12, 2**64 - 1):
        with pytest.raises(IndexError, match=str(index)):
            ours.__getitems__([0, index])
        with pytest.raises(IndexError):
            ours[index]
    for index in (1.0, "1", None, [1]):
        with pytest.raises(TypeError):
            ours[index]
        with pytest.raises(TypeError):
            ours.__getitems__([index])


@pytest.mark.few(24)
@pytest.mark.parametrize("loader", LOADERS)
@of_every_kind
def test_batches_are_those_of_a_stock_loader_and_outlive_the_dataset(kind: Data, loader: str) -> None:
    ours, theirs, kept = views(kind.fast()), views(kind.stock), {}
    for view in ours if loader.startswith("fast") else ("itself", "concat"):
        made = LOADERS[loader](ours[view], SIZE)
        kept[view] = [batch for _ in range(3) for batch in made]
    options = {"collate_fn": reversed_without_the_first, "sampler": [7, 9, 8, 3, 2, 2, 0, 11, 5]}
    expected = list(DataLoader(kind.stock, SIZE, **options))
    assert same(list(LOADERS[loader](ours["itself"], SIZE, **options)), expected)
    del ours, made
    gc.collect()
    for view, batches in kept.items():
        assert same(batches, list(DataLoader(theirs[view], SIZE)) * 3), view
        assert len({leaf(batch).data_ptr() for batch in batches}) == len(batches)


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("loader", [DataLoader, BY_PROCESSES], ids=["stock", "fast"])
@pytest.mark.parametrize("kind", ["images", "rows, staged", "patches of HDF5"], indirect=True)
def test_batches_are_the_same_from_workers_that_get_a_pickle(kind: Data, loader: Any, method: str) -> None:
    options = {"num_workers": 2, "multiprocessing_context": method, "persistent_workers": True}
    made = loader(kind.fast(), SIZE, **options)
    assert same([*made, *made], list(DataLoader(kind.stock, SIZE)) * 2)


ARGUMENTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "drop_last": lambda n: {"batch_size": 10, "drop_last": True},
    "one by one": lambda n: {"batch_size": 1}, "more than all": lambda n: {"batch_size": 99},
    "no batches": lambda n: {"batch_size": None},
    "sampler": lambda n: {"batch_size": 4, "sampler": [5, -2, 5, 0, n - 1]},
    "batches": lambda n: {"batch_sampler": [[3], [-1, 4, 4], (7, 8), np.array([9, 1])]},
    "torch's batches": lambda n: {"batch_sampler": torch.utils.data.BatchSampler(range(n), 6, False)},
    "shuffle": lambda n: {"batch_size": 8, "shuffle": True},
    "generator": lambda n: {"batch_size": 8, "shuffle": True, "generator": torch.Generator().manual_seed(3)},
    "replacement": lambda n: {"batch_size": 8, "sampler": torch.utils.data.RandomSampler(range(n), True, 70)},
}  # fmt: skip


@pytest.mark.few(14)
@pytest.mark.parametrize("arguments", ARGUMENTS)
@of_every_kind
def test_arguments_of_a_loader_mean_what_they_mean_in_torch(kind: Data, arguments: str) -> None:
    results, states = [], []
    ours = kind.fast()
    for loader, dataset in ((DataLoader, kind.stock), (DataLoader, ours), (FastLoader, ours)):
        torch.manual_seed(4)
        results.append(list(loader(dataset, **ARGUMENTS[arguments](len(dataset)))))
        states.append(torch.get_rng_state())
    assert same(results, results[:1] * 3) and same(states, states[:1] * 3)


@pytest.mark.few(8)
@of_every_kind
def test_the_reference_is_a_stock_loader_with_the_same_batches(kind: Data) -> None:
    for options in ({}, {"shuffle": True, "seed": 3}, {"sampler": [3, 1, 2, 0]}):
        loader = FastLoader(Subset(kind.fast(), range(1, 13)), SIZE, **options)
        reference = loader.reference()
        assert type(reference) is DataLoader
        assert same(list(loader), list(reference))


# ---- orders and draws ---------------------------------------------------------------------------


@pytest.mark.few(5)
@of_every_kind
def test_a_seed_fixes_every_epoch_on_any_topology(kind: Data) -> None:
    dataset = kind.drawn(seed=5, threads=2)
    before = torch.get_rng_state()
    loader = FastLoader(dataset, SIZE, shuffle=True)
    wanted = [rows(loader) for _ in range(3)]
    assert torch.equal(torch.get_rng_state(), before)
    assert len(set(map(tuple, wanted))) == 3
    for other in (
        FastLoader(kind.drawn(seed=5, threads=1), 7, shuffle=True, prefetch_batches=0),
        FastLoader(kind.drawn(thread_safe=True), SIZE, shuffle=True, seed=5, num_workers=2),
        BY_PROCESSES(kind.drawn(seed=5), SIZE, shuffle=True, num_workers=2, persistent_workers=True),
    ):
        assert [rows(other) for _ in range(3)] == wanted
    loader.set_epoch(1)
    assert rows(loader) == wanted[1]
    assert rows(FastLoader(dataset, SIZE, shuffle=True, seed=6)) not in wanted


@pytest.mark.parametrize("loader", ["stock", "stock, 2 workers", "fast", "fast, 2 processes"])
@pytest.mark.few(7)
@of_every_kind
def test_without_a_seed_manual_seed_decides(kind: Data, loader: str) -> None:
    dataset, streams = kind.drawn(), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        made = LOADERS[loader](dataset, SIZE, shuffle=True)
        streams.append([rows(made) for _ in range(2)])
    assert streams[0] == streams[1] != streams[2]
    assert not set(streams[0][0]) & set(streams[0][1]), "each epoch has draws of its own"


@of_every_kind
def test_shards_partition_every_epoch(kind: Data) -> None:
    dataset = kind.fast()
    every = Counter(rows(DataLoader(dataset, SIZE)))
    for world, mode in itertools.product((2, 3), ("eval", "train")):
        shards = [Shard(rank, world, mode) for rank in range(world)]  # type: ignore[arg-type]
        loaders = [FastLoader(dataset, 3, shuffle=True, seed=2, shard=shard) for shard in shards]
        parts = [list(loader) for loader in loaders]
        assert list(map(len, loaders)) == list(map(len, parts))
        found = Counter(row for part in parts for row in rows(part))
        assert found.total() == every.total() + (-every.total() % world if mode == "train" else 0)
        assert found == every if mode == "eval" else set(found) == set(every)


@pytest.mark.few(7)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("seed", [None, 3])
@of_every_kind
def test_a_loader_goes_on_where_another_was(kind: Data, seed: int | None, workers: int) -> None:
    def make() -> FastLoader[Any]:
        return BY_PROCESSES(kind.drawn(seed=seed), SIZE, shuffle=True, num_workers=workers)

    cuts = slice(None, None, -3 if workers else -2)  # also after the last batch
    check_goes_on(make, lambda batch: rows([batch]), is_seeded=seed is not None, cuts=cuts)


# ---- processes, threads and memory --------------------------------------------------------------


@pytest.mark.few(7)
@of_every_kind
def test_copies_and_forks_have_the_same_samples(kind: Data, in_child: Any) -> None:
    dataset = kind.drawn(seed=3, bad_samples="replace", threads=2)
    unused = pickle.dumps(dataset)
    wanted = list(FastLoader(dataset, SIZE, shuffle=True))
    running = iter(FastLoader(dataset, SIZE))
    next(running)
    pickled = pickle.dumps(dataset)
    for other in (pickle.loads(unused), pickle.loads(pickled), copy.copy(dataset), copy.deepcopy(dataset)):
        assert repr(other) == repr(dataset)
        assert same(list(FastLoader(other, SIZE, shuffle=True)), wanted)
        other.close()

    def child() -> None:
        assert same(list(FastLoader(dataset, SIZE, shuffle=True)), wanted)
        assert same(list(BY_PROCESSES(dataset, SIZE, shuffle=True, num_workers=1)), wanted)

    in_child(child)
    assert len(list(running)) == len(wanted) - 1
    assert same(list(FastLoader(dataset, SIZE, shuffle=True)), wanted)


@pytest.mark.parametrize("loader", ["stock", "stock, 1 worker", "fast", "fast, 1 process"])
@pytest.mark.parametrize("what", ["rows", "patches"])
def test_large_batches_that_are_kept_are_never_overwritten(what: str, loader: str, tmp_path: Path) -> None:
    """Of a size at which the memory of batches is used again."""
    values = np.random.default_rng(0).integers(0, 255, (12, 1 << 17), np.uint8)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(5, 1 << 17), compression="lzf")
    patches = fastpipe.FastPatchDataset(values.reshape(12, 256, 512), (1, 256, 512), sampling=Grid())
    made = LOADERS[loader](fastpipe.FastHDF5Dataset(tmp_path / "x.h5", "x") if what == "rows" else patches, 4)
    kept = [batch for _ in range(3) for batch in made]
    assert torch.cat(kept).numpy().tobytes() == values.tobytes() * 3
    assert len({batch.data_ptr() for batch in kept}) == len(kept)


def _threads() -> set[threading.Thread]:
    """Those that a dataset may have started: not those that the process keeps."""
    kept = ("Dummy", "zarr", "asyncio_", "fsspec", "fastpipe-watcher")
    return {thread for thread in threading.enumerate() if not thread.name.startswith(kept)}


def assert_ended(threads: set[threading.Thread]) -> None:
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.few(7)
@of_every_kind
def test_epochs_that_are_broken_off_leave_nothing(kind: Data, workers: int) -> None:
    loader = BY_PROCESSES(kind.fast(threads=2), 2, num_workers=workers)
    for _ in range(3):
        list(loader)  # until Python's threads have something to keep, and are there
    threads, descriptors = _threads(), _descriptors()
    for _ in range(2 if workers else 15):
        next(iter(loader))
    with pytest.raises(KeyError):
        for _ in loader:
            raise KeyError
    gc.collect()
    # A worker's, which ends; a pool's would not.  A stage's are as many as are needed.
    assert_ended({one for one in _threads() - threads if not one.name.startswith("fastpipe-fetch")})
    assert _descriptors() <= descriptors + 2
    assert same(list(loader), list(DataLoader(kind.stock, 2)))


@pytest.mark.usefixtures("no_gc")
@of_every_kind
def test_a_dropped_dataset_is_freed_with_its_threads_and_files(kind: Data) -> None:
    """``no_leaks`` looks for files and memory; and a closed dataset opens them again."""
    expected = list(DataLoader(kind.stock, SIZE))
    before = _threads()
    dataset = kind.fast()
    for _ in range(2):
        assert same(list(FastLoader(dataset, SIZE)), expected)
        assert same(list(DataLoader(dataset, SIZE)), expected)
        assert same(dataset[3], kind.stock[3])
        dataset.close()
    list(FastLoader(dataset, SIZE))
    refer = weakref.ref(dataset)
    del dataset
    assert refer() is None, "without a collection of garbage"
    gc.collect()
    assert_ended(_threads() - before)


@pytest.mark.few(6)
@of_every_kind
def test_no_objects_pile_up(kind: Data, grown_in_epochs: Any) -> None:
    for loader in (
        FastLoader(kind.drawn(), SIZE, shuffle=True), DataLoader(kind.fast(), SIZE),
        FastLoader(Subset(kind.fast(), range(12)), None), FastLoader(kind.fast(transform=Failing(0)), SIZE),
    ):  # fmt: skip
        list(loader)
        descriptors = _descriptors()
        assert grown_in_epochs(loader) == {}
        assert _descriptors() == descriptors


@pytest.mark.few(7)
@of_every_kind
def test_many_threads_share_a_dataset_from_the_first_moment(kind: Data) -> None:
    dataset, expected, start = kind.fast(threads=2), list(DataLoader(kind.stock, SIZE)), threading.Barrier(4)

    def work(number: int) -> bool:
        start.wait(60)
        loader = (FastLoader, DataLoader)[number % 2](dataset, SIZE)
        return same([list(loader), list(loader)], [expected] * 2)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


# ---- bad samples --------------------------------------------------------------------------------


@of_every_kind_that_is_spoilt
def test_a_bad_sample_is_an_error_that_says_which(spoilt: tuple[Data, list[int]]) -> None:
    data, wrong = spoilt
    dataset = data.fast(threads=2)
    for ask in (
        lambda: dataset[wrong[0]],
        lambda: dataset.__getitems__(range(len(dataset))),
        lambda: list(FastLoader(dataset, SIZE)),
        lambda: list(DataLoader(dataset, SIZE)),
        lambda: list(BY_PROCESSES(dataset, SIZE, num_workers=1)),
        lambda: list(FastLoader(ConcatDataset([Subset(dataset, wrong), dataset]), SIZE)),
    ):
        error = failure(ask)
        assert type(error) is BadSampleError
        for said in (f"sample {wrong[0]} ", str(data.folder), "bad_samples='replace' or 'skip'"):
            assert said in str(error)
    assert failure(lambda: dataset[wrong[-1]]).index == wrong[-1]
    good = [index for index in range(len(dataset)) if index not in wrong]
    assert same([dataset[index] for index in good], [data.stock[index] for index in good])


@pytest.mark.few(3)
@of_every_kind_that_is_spoilt
def test_bad_samples_are_left_out(
    spoilt: tuple[Data, list[int]], tmp_path: Path, grown_in_epochs: Any
) -> None:
    (data, wrong), log = spoilt, tmp_path / "bad.jsonl"
    dataset = data.fast(bad_samples=BadSamples("skip", log=log))
    good = [index for index in range(len(dataset)) if index not in wrong]
    full = list(DataLoader(data.stock, SIZE, sampler=good))
    for _ in range(2):
        assert same(list(FastLoader(dataset, SIZE)), full)  # which fills up its batches
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert sorted(line["index"] for line in lines) == wrong
    assert {line["action"] for line in lines} == {"skip"}
    shorter = np.array_split(range(len(dataset)), range(SIZE, len(dataset), SIZE))
    batches = [kept for part in shorter if (kept := [index for index in part.tolist() if index in good])]
    if len(batches) == len(shorter):  # else there is one of bad samples alone, which is an error
        assert same(list(DataLoader(dataset, SIZE)), list(DataLoader(data.stock, batch_sampler=batches)))
    for loader in (DataLoader, FastLoader, functools.partial(BY_PROCESSES, num_workers=1)):
        error = failure(lambda: list(loader(dataset, batch_sampler=[wrong[:2]])))
        assert "all 2 samples of a batch are bad" in str(error)
    with pytest.raises(TooManyBadSamplesError, match="max_errors=1"):
        list(FastLoader(data.fast(bad_samples=BadSamples("skip", max_errors=1)), SIZE))
    for policy in ("raise", "skip", "replace"):
        assert grown_in_epochs(FastLoader(data.fast(bad_samples=policy), SIZE)) == {}, policy


@pytest.mark.few(3)
@of_every_kind_that_is_spoilt
def test_bad_samples_are_replaced_alike_on_any_topology(spoilt: tuple[Data, list[int]]) -> None:
    data, wrong = spoilt
    good = [index for index in range(len(data.stock)) if index not in wrong]
    every = rows(DataLoader(data.stock, SIZE, sampler=good))
    streams = []
    for threads, workers in ((1, 0), (3, 0), (1, 2)):
        dataset = data.fast(bad_samples="replace", seed=3, threads=threads)
        loader = BY_PROCESSES(dataset, SIZE, num_workers=workers)
        streams.append([rows(loader) for _ in range(2)])
    assert streams[0] == streams[1] == streams[2]
    for stream in streams[0]:
        assert [stream[index] for index in good] == every
        assert set(stream) == set(every) and len(stream) == len(data.stock)
    torch.manual_seed(1)
    first = dataset[wrong[0]]
    torch.manual_seed(1)
    assert same(dataset[wrong[0]], first)


# ---- the script's own code, options -------------------------------------------------------------


class Failing:
    """A transform that fails at a call, by its number."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0

    def __call__(self, *values: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise KeyError("no such word")
        return torch.zeros(1)


@pytest.mark.parametrize("policy", ["raise", "skip"])
@of_every_kind
def test_an_error_of_a_transform_keeps_its_type_and_names_the_sample(kind: Data, policy: Any) -> None:
    for loader in (DataLoader, FastLoader):
        dataset = kind.fast(transform=Failing(7), bad_samples=policy)
        with pytest.raises(KeyError, match="no such word") as caught:
            list(loader(dataset, SIZE))
        notes = str(getattr(caught.value, "__notes__", ""))
        assert not hasattr(Exception, "add_note") or "while making sample 6 from" in notes
        del caught


@of_every_kind
def test_a_transform_may_be_changed(kind: Data) -> None:
    dataset = kind.fast()
    list(FastLoader(dataset, SIZE))
    dataset.transform = Failing(0)
    assert {leaf(batch).shape[1:] for batch in FastLoader(dataset, SIZE)} == {(1,)}
    assert leaf(default_collate([dataset[2]])).shape == (1, 1)


@of_every_kind
def test_repr_shows_options_and_errors_name_those_that_cannot_be(kind: Data) -> None:
    text = repr(kind.fast(seed=5, bad_samples="skip"))
    assert "Seed: 5" in text and "BadSamples(policy='skip')" in text
    assert "Seed" not in repr(kind.fast()) and "BadSamples" not in repr(kind.fast())
    options: dict[str, list[Any]] = {"threads": [0, 1.5, "many"], "bad_samples": ["drop"], "cache": ["disc"]}
    for name, value in [(name, value) for name, values in options.items() for value in values]:
        with pytest.raises(OptionError, match=f"{name}|{value}"):
            kind.fast(**{name: value})
    for seed in (1.5, "1"):
        with pytest.raises(TypeError):
            kind.fast(seed=seed)
    with pytest.raises(OptionError, match="needs a seed"):
        FastLoader(kind.fast(), shuffle=True, shard=Shard(0, 2))
    if isinstance(kind.fast(), FastImageFolder):  # the other kinds have groups
        with pytest.raises(OptionError, match="shuffle=True"):
            FastLoader(kind.fast(), shuffle=fastpipe.Shuffle(unit="group"))
