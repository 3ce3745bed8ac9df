"""Batches are those of a stock ``DataLoader`` over a dataset that opens the file with h5py."""

from __future__ import annotations

import functools
import multiprocessing
import random
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    default_collate,
    random_split,
)

from fastpipe import FastHDF5Dataset, FastLoader
from fastpipe.torch.loader import FastLoader as Loader

BY_PROCESSES = functools.partial(FastLoader, workers="processes")

pytestmark = pytest.mark.usefixtures("same_generators")

FORMS: dict[str, Any] = {
    "value": "mels",
    "scalar": "label",
    "texts": "text",
    "tuple": ["mels", "label"],
    "one in a tuple": ("packed",),
    "dict": {"x": "mels", 5: "label", "t": "text"},
    "all kinds": ["plain", "packed", "text", "code", "scaled", "grid"],
}
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "in process": {},
    "1 forked": {"num_workers": 1, "multiprocessing_context": "fork"},
    "2 forked, persistent": {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True},
    "forkserver, persistent": {
        "num_workers": 1, "multiprocessing_context": "forkserver", "persistent_workers": True
    },
}  # fmt: skip


def kinds(topology: dict[str, Any]) -> tuple[Any, Any]:
    if topology.get("multiprocessing_context", "fork") not in multiprocessing.get_all_start_methods():
        pytest.skip("run it on Linux, where processes can fork")
    return DataLoader, FastLoader


@pytest.mark.few(5)
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("form", ["value", "scalar", "dict", "all kinds"])
def test_every_topology(file: Path, naive: Any, same: Any, form: str, topology: str) -> None:
    options = TOPOLOGIES[topology]
    expected = list(DataLoader(naive(file, FORMS[form]), 8))
    for kind in kinds(options):
        loader = kind(FastHDF5Dataset(file, FORMS[form]), 8, **options)
        for _ in range(3):  # the chunks are kept from the second on
            batches = list(loader)
            assert same(batches, expected), kind
        del loader, batches


@pytest.mark.slow  # each starts interpreters that import torch
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_of_their_own(file: Path, naive: Any, same: Any, method: str) -> None:
    expected = list(DataLoader(naive(file, FORMS["tuple"]), 8))
    for kind in (DataLoader, BY_PROCESSES):
        loader = kind(FastHDF5Dataset(file, FORMS["tuple"]), 8, num_workers=2, multiprocessing_context=method)
        assert same(list(loader), expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_sample_is_what_h5py_gives(file: Path, naive: Any, same: Any, form: str) -> None:
    dataset, expected = FastHDF5Dataset(file, FORMS[form]), naive(file, FORMS[form])
    for index in (0, 52, 13, -1, -53, np.int64(7), torch.tensor(8)):
        assert same(dataset[index], expected[int(index)]), index
    assert type(dataset[3]) in (tuple, dict, np.ndarray, np.int64, bytes)
    assert len(dataset) == 53


def test_a_loop_over_the_dataset_ends(file: Path) -> None:
    assert [int(label) for label in FastHDF5Dataset(file, "label")] == list(range(53))
    for index in (53, -54, 10**6):
        with pytest.raises(IndexError, match=f"sample {index} of a dataset of 53"):
            FastHDF5Dataset(file, "label")[index]
        with pytest.raises(IndexError):
            list(FastLoader(FastHDF5Dataset(file, "label"), 2, sampler=[0, index]))


@pytest.mark.parametrize("kind", [DataLoader, BY_PROCESSES])
def test_an_index_that_is_no_integer(file: Path, kind: Any) -> None:
    with pytest.raises(TypeError, match="float"):
        list(kind(FastHDF5Dataset(file, "label"), 2, sampler=[1.5, 2.5]))


# ---- Subset, ConcatDataset, random_split ----------------------------------------------------------


def _views(make: Any) -> list[Any]:
    one, two = make(0), make(1)
    return [
        Subset(one, [3, 1, 50, 1, -1, -53]),
        Subset(Subset(one, [9, 8, 7, 6, 52, 5]), [4, 0, -1]),
        Subset(one, torch.tensor([4, 2])),  # type: ignore[arg-type]
        *random_split(one, [40, 13], generator=torch.Generator().manual_seed(1)),
        ConcatDataset([one, two]),
        ConcatDataset([one, one]),
        ConcatDataset([Subset(one, [0, 2, 51]), two, Subset(ConcatDataset([two, one]), [30, 20, 21, 0])]),
    ]


@pytest.mark.parametrize("form", ["tuple", "scalar"])
@pytest.mark.parametrize("view", range(8))
def test_views(file: Path, other: Path, naive: Any, same: Any, view: int, form: str) -> None:
    def of(kind: Any) -> Any:
        return _views(lambda number: kind((file, other)[number], FORMS[form]))[view]

    expected = of(naive)
    shuffled = torch.randperm(len(expected)).tolist() * 2
    wanted = [list(DataLoader(expected, 7)), list(DataLoader(expected, 5, sampler=shuffled))]
    for kind in (DataLoader, BY_PROCESSES):
        dataset = of(FastHDF5Dataset)
        assert same([list(kind(dataset, 7)), list(kind(dataset, 5, sampler=shuffled))], wanted)
        if kind is FastLoader:
            assert kind(dataset, 7).plan.is_fast


@pytest.mark.parametrize("index", [-75, 74])
def test_outside_of_several_datasets(file: Path, other: Path, naive: Any, index: int) -> None:
    def both(kind: Any) -> Any:
        return ConcatDataset([kind(file, "label"), kind(other, "label")])

    with pytest.raises((ValueError, IndexError)) as theirs:
        list(DataLoader(both(naive), 2, sampler=[index]))
    with pytest.raises(type(theirs.value)):
        list(FastLoader(both(FastHDF5Dataset), 2, sampler=[index]))
    negative = [list(kind(both(dataset), 2, sampler=[-1, -74, -22])) for kind, dataset in
                ((DataLoader, naive), (FastLoader, FastHDF5Dataset))]  # fmt: skip
    assert [batch.tolist() for batch in negative[0]] == [batch.tolist() for batch in negative[1]]


@pytest.mark.parametrize("form", ["value", "tuple", "dict"])
def test_several_files_are_one_dataset(file: Path, other: Path, naive: Any, same: Any, form: str) -> None:
    paths, order = [file, other, file], torch.randperm(127).tolist()
    dataset = FastHDF5Dataset(paths, FORMS[form])
    assert len(dataset) == 127
    wanted = list(DataLoader(naive(paths, FORMS[form]), 6, sampler=order))
    for kind in (DataLoader, BY_PROCESSES):
        assert same(list(kind(dataset, 6, sampler=order)), wanted)


# ---- arguments of the loader ----------------------------------------------------------------------

ARGUMENTS: dict[str, Any] = {
    "drop_last": lambda: {"batch_size": 10, "drop_last": True},
    "one by one": lambda: {"batch_size": 1},
    "more than all": lambda: {"batch_size": 99},
    "no batches": lambda: {"batch_size": None},
    "sampler": lambda: {"batch_size": 4, "sampler": [5, -2, 5, 0, 52]},
    "batch sampler": lambda: {"batch_sampler": [[3], [-1, 4, 4], (7, 8), np.array([9, 1])]},
    "torch's batch sampler": lambda: {"batch_sampler": BatchSampler(SequentialSampler(range(20)), 6, False)},
    "shuffle": lambda: {"batch_size": 8, "shuffle": True},
    "generator": lambda: {"batch_size": 8, "shuffle": True, "generator": torch.Generator().manual_seed(3)},
    "random sampler": lambda: {"batch_size": 8, "sampler": RandomSampler(range(53), True, num_samples=70)},
    "pin_memory": lambda: {"batch_size": 8, "pin_memory": True},
    "any order": lambda: {"batch_size": 8, "in_order": False},
}


@pytest.mark.few(8)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(file: Path, naive: Any, same: Any, name: str, workers: int) -> None:
    results, states = [], []
    for kind, dataset in ((DataLoader, naive), (DataLoader, FastHDF5Dataset), (FastLoader, FastHDF5Dataset)):
        torch.manual_seed(4)
        count = workers if dataset is FastHDF5Dataset else 0
        batches = list(kind(dataset(file, ["mels", "label"]), num_workers=count, **ARGUMENTS[name]()))
        states.append(torch.get_rng_state())
        if name == "any order" and count:
            batches.sort(key=lambda batch: int(batch[1][0]))
        results.append(batches)
        del batches
    assert same(results[1], results[0])
    assert same(results[2], results[0])
    assert all(torch.equal(state, states[0]) for state in states), "no generator is touched otherwise"


def _sorting(samples: Any) -> Any:
    samples.sort(key=lambda sample: -int(sample[1]))
    return default_collate(samples)


def _zipping(samples: Any) -> Any:
    mels, labels = zip(*samples, strict=True)
    return torch.stack([torch.from_numpy(one.copy()) for one in mels]), torch.tensor(list(map(int, labels)))


def _indexing(samples: Any) -> Any:
    ends = samples[0][1], samples[-1][1], samples[1][0].sum(), len(samples), [one[1] for one in samples[1:3]]
    return [np.asarray(end).tolist() for end in ends[:3]], ends[3], [int(end) for end in ends[4]]


def _shuffling(samples: Any) -> Any:
    random.Random(5).shuffle(samples)
    samples.append(samples.pop(0))
    samples.insert(1, samples[2])
    del samples[0]
    samples[0] = samples[1]
    samples.reverse()
    return default_collate(samples)


def _filtering(samples: Any) -> Any:
    return default_collate([sample for sample in samples if int(sample[1]) % 2])


def _twice(samples: Any) -> Any:
    return default_collate(samples), default_collate(samples)


def _listing(samples: Any) -> Any:
    return [(np.array(mels), label) for mels, label in samples]


def _unpacked(samples: Any) -> Any:
    return {
        "mels": default_collate([mels for mels, _ in samples]),
        "n": default_collate([n for _, n in samples]),
    }


COLLATES = [_sorting, _zipping, _indexing, _shuffling, _filtering, _twice, _listing, _unpacked]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("collate", COLLATES, ids=lambda function: function.__name__)
def test_collate_functions_of_the_users(
    file: Path, naive: Any, same: Any, collate: Any, workers: int
) -> None:
    options = {"batch_size": 6, "collate_fn": collate, "sampler": [7, 9, 8, 3, 52, 41, 2, 2, 0, 11]}
    wanted = list(DataLoader(naive(file, ["mels", "label"]), **options))
    for kind in (DataLoader, BY_PROCESSES):
        made = list(kind(FastHDF5Dataset(file, ["mels", "label"]), num_workers=workers, **options))
        assert same(made, wanted)


def test_two_collations_of_a_batch_do_not_share_memory(file: Path) -> None:
    for first, second in FastLoader(FastHDF5Dataset(file, ["mels", "label"]), 6, collate_fn=_twice):
        assert first[0].data_ptr() != second[0].data_ptr()
        before = second[0].clone()
        first[0].fill_(-1)
        assert torch.equal(second[0], before)


def test_the_samples_of_a_batch_are_a_mutable_sequence(file: Path) -> None:
    samples = FastHDF5Dataset(file, ["mels", "label"]).__getitems__([3, 1, 2])
    assert [int(label) for _, label in samples] == [3, 1, 2]
    assert all(isinstance(sample, tuple) for sample in samples)
    assert "SampleRows([(" in repr(samples)
    with pytest.raises(IndexError):
        samples[3]
    assert len(FastHDF5Dataset(file, "mels").__getitems__([])) == 0
    assert type(FastHDF5Dataset(file, "label").__getitems__([1])) is list


# ---- what default_collate cannot --------------------------------------------------------------------


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("odd") / "x.h5"
    with h5py.File(path, "w") as file:
        compound = np.zeros((20, 3), np.dtype([("a", "i1"), ("b", "<f8")]))
        compound["b"] = np.arange(60).reshape(20, 3)
        file["compound"], file["point"] = compound, compound[:, 0]
        file["big"], file["bigs"] = np.arange(60, dtype=">f4").reshape(20, 3), np.arange(20, dtype=">i4")
        file["strings"] = np.array([[b"a", b"b"]] * 20, "S3")
        ragged = file.create_dataset("ragged", (20,), h5py.vlen_dtype("i4"))
        for row in range(20):
            ragged[row] = np.arange(row % 4)
        arrays = file.create_dataset("arrays", (20, 4000), np.dtype(("f4", (3,))))
        arrays[...] = np.random.default_rng(0).random((20, 4000, 3))
        file["u8"] = np.arange(20, dtype="u8")
    return path


def error_of(make: Any) -> tuple[type[BaseException], str]:
    """How a loader fails, without the traceback, which refers to iterators and workers."""
    try:
        list(make())
    except (TypeError, RuntimeError) as error:
        # Else it is in a cycle with torch's iterator, whose workers may take 5 s to end when garbage is collected.
        error.__traceback__ = None
        return type(error), str(error)
    raise AssertionError("no error")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", ["compound", "point", "strings", "ragged"])
@pytest.mark.parametrize("form", ["value", "tuple"])
def test_torch_says_that_it_cannot_collate(odd: Path, naive: Any, name: str, form: str, workers: int) -> None:
    keys = name if form == "value" else [name, "bigs"]
    theirs = error_of(lambda: DataLoader(naive(odd, keys), 4))
    for kind in (DataLoader, BY_PROCESSES):
        ours = error_of(lambda kind=kind: kind(FastHDF5Dataset(odd, keys), 4, num_workers=workers))
        assert ours[0] is theirs[0]
        assert theirs[1].split("found")[0] in ours[1]


@pytest.mark.parametrize("name", ["compound", "point", "strings", "ragged", "big", "bigs", "u8"])
def test_the_samples_are_there_for_other_collate_functions(
    odd: Path, naive: Any, same: Any, name: str
) -> None:
    wanted = [sample for batch in DataLoader(naive(odd, [name]), 4, collate_fn=list) for sample in batch]
    for kind in (DataLoader, BY_PROCESSES):
        loader = kind(FastHDF5Dataset(odd, [name]), 4, collate_fn=list)
        made = [tuple(sample) for batch in loader for sample in batch]
        assert same(made, wanted)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_order_of_bytes_becomes_the_machines(odd: Path, workers: int) -> None:
    for keys in ("big", ["big", "bigs"], {"x": "big", "y": "bigs"}, "bigs"):
        for kind in (DataLoader, Loader):
            batches = list(kind(FastHDF5Dataset(odd, keys), 6, num_workers=workers))
            parts = [list(batch.values()) if isinstance(batch, dict) else batch for batch in batches]
            columns = list(zip(*parts, strict=True)) if isinstance(keys, (list, dict)) else [parts]
            for column in columns:
                joined = torch.cat(list(column))
                assert joined.dtype in (torch.float32, torch.int32)
                assert joined.flatten().tolist() == list(range(joined.numel()))


@pytest.mark.parametrize("workers", [0, 1])
def test_elements_that_are_arrays_in_large_batches(odd: Path, naive: Any, same: Any, workers: int) -> None:
    wanted = list(DataLoader(naive(odd, ["arrays", "bigs"]), 10))
    assert wanted[0][0].nbytes > 1 << 18
    for kind in (DataLoader, BY_PROCESSES):
        assert same(list(kind(FastHDF5Dataset(odd, ["arrays", "bigs"]), 10, num_workers=workers)), wanted)
