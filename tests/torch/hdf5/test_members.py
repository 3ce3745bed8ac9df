"""Samples that are datasets of their own, and attributes: the values are those that h5py reads."""

from __future__ import annotations

import os
import pickle
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from same import same
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, default_collate

from fastpipe import FastHDF5Dataset, FastLoader, Shuffle, group_batches
from fastpipe.core import array_cache
from fastpipe.errors import BadSampleError, HDF5Error, OptionError
from fastpipe.hdf5 import members

DTYPES = ["f4", ">f4", "u1", "i8", "?", "S5", "c8", [("a", "i2"), ("b", ">f8")]]
INNERS: list[tuple[int, ...]] = [(), (3,), (2, 3), (0,), (5, 1, 2)]


class Stock(Dataset[Any]):
    """A script's dataset: of each file the sorted groups, or ``rows`` of each, and of each group some values."""

    def __init__(
        self, paths: Any, values: Callable[..., Any], rows: Callable[[Any], int] | None = None
    ) -> None:
        self.values, self.has_rows = values, rows is not None
        self.table = []
        for path in paths:
            with h5py.File(path, "r") as file:
                for name in file:
                    self.table += [
                        (path, name, row) for row in range(1 if rows is None else rows(file[name]))
                    ]

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Any:
        path, name, row = self.table[index]
        with h5py.File(path, "r") as file:
            return self.values(file[name], row) if self.has_rows else self.values(file[name])


def noise(shape: tuple[int, ...], dtype: Any, random: Any) -> Any:
    dtype = np.dtype(dtype)
    raw = random.integers(0, 2 if dtype.kind == "b" else 99, int(np.prod(shape)) * dtype.itemsize, np.uint8)
    return raw.view(dtype).reshape(shape)


@st.composite
def files(draw: Any) -> Any:
    """Values of some kinds in the groups of some files: alike, or not."""
    kinds = st.fixed_dictionaries({
        "dtype": st.sampled_from(DTYPES), "inner": st.sampled_from(INNERS),
        "how": st.sampled_from(["contiguous", "chunked", "gzip", "lzf", "unwritten", "compact", "text", "vlen"]),
    })  # fmt: skip
    values = st.lists(kinds, min_size=1, max_size=1 if draw(st.booleans()) else 3)
    return {
        "columns": draw(st.lists(values, min_size=1, max_size=3)), "seed": draw(st.integers(0, 99)),
        "groups": draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)),
    }  # fmt: skip


def put(group: Any, name: str, kind: dict[str, Any], random: Any) -> None:
    dtype, inner, how = np.dtype(kind["dtype"]), kind["inner"], kind["how"]
    data, options = noise(inner, dtype, random), {}
    if how == "text":
        group.create_dataset(name, data=np.full(inner, f"ä{random.integers(99)}", h5py.string_dtype()))
        return
    if how == "vlen":
        target = group.create_dataset(name, inner, h5py.vlen_dtype("f4"))
        for place in np.ndindex(*inner):
            target[place] = random.random(random.integers(4)).astype("f4")
        return
    if how == "compact":
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_layout(h5py.h5d.COMPACT)
        kind = h5py.h5t.py_create(dtype, logical=True)
        h5py.h5d.create(group.id, name.encode(), kind, h5py.h5s.create_simple(inner), properties)
    elif inner and 0 not in inner and how in ("chunked", "gzip", "lzf"):
        options = {"chunks": tuple(max(1, side - 1) for side in inner)}
        options |= {} if how == "chunked" else {"compression": how}
        group.create_dataset(name, inner, dtype, **options)
    else:
        group.create_dataset(name, inner, dtype)
    if how != "unwritten":
        group[name][...] = data


@settings(max_examples=60)
@given(case=files())
def test_datasets_of_their_own_are_h5pys(case: dict[str, Any], settled: Any) -> None:
    random, names = np.random.default_rng(case["seed"]), "abc"[: len(case["columns"])]
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{number}.h5") for number in range(len(case["groups"]))]
        for path, groups in zip(paths, case["groups"], strict=True):
            with h5py.File(path, "w") as file:
                for number in range(groups):
                    for name, kinds in zip(names, case["columns"], strict=True):
                        put(
                            file.require_group(f"g{number}"), name, kinds[random.integers(len(kinds))], random
                        )
            settled(path)
        stock = Stock(paths, lambda group: tuple(group[name][()] for name in names))
        expected = [stock[index] for index in range(len(stock))]
        order = random.permutation(len(stock)).tolist() + [0, -1, 0]
        wanted = [expected[index] for index in order]
        for cache in ("off", "ram", "auto"):
            dataset = FastHDF5Dataset(paths, [f"*/{name}" for name in names], cache=cache, threads=2)  # type: ignore[arg-type]
            assert same(list(dataset), expected)
            for copy in (dataset, pickle.loads(pickle.dumps(dataset))):
                for loader in (DataLoader, FastLoader):
                    found = list(loader(copy, 4, sampler=order, collate_fn=list))
                    assert same([tuple(sample) for batch in found for sample in batch], wanted)
        assert same(
            [tuple(sample) for (sample,) in FastLoader(dataset, 1, collate_fn=list).reference()], expected
        )


def test_datasets_may_differ_in_type_or_filters_alone(tmp_path: Path) -> None:
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("i4", {}), ("f4", {}), (">i4", {}), ("u4", {}), ("i4", {"compression": "gzip"}), ("i4", {"compression": "lzf"}),
        ("i4", {"fillvalue": 7}), ("i4", {"shuffle": True}), ("i4", {"fillvalue": 8}), ("i4", {}),
    ]  # fmt: skip
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for number, (dtype, options) in enumerate(kinds):
            dataset = file.create_dataset(f"{number}/x", (4,), dtype, chunks=(4,), **options)
            if "fillvalue" not in options:
                dataset[...] = np.arange(4) + number
    stock = Stock([tmp_path / "x.h5"], lambda group: group["x"][()])
    dataset = FastHDF5Dataset(tmp_path / "x.h5", "*/x")
    assert same(list(dataset), [stock[index] for index in range(len(kinds))])


@pytest.fixture
def scans(tmp_path: Path, settled: Any) -> Path:
    """Twelve groups, with an image and frames of several lengths, and labels."""
    random = np.random.default_rng(0)
    with h5py.File(tmp_path / "scans.h5", "w") as file:
        file.attrs["max"] = 7.5
        for number in range(12):
            group = file.create_group(f"{number * 7 % 12:02}")
            group["image"], group["n"] = random.random((3, 4, 5), "f4"), number
            frames = random.integers(0, 99, (number % 3 + 1, 6, 2), "i2")
            group.create_dataset("frames", data=frames, chunks=(1, 4, 2), compression="gzip")
            group.attrs["label"], group.attrs["name"] = np.int16(number), f"name {number}"
            group.attrs["box"], group["image"].attrs["codes"] = np.arange(4.0) + number, np.arange(number)
    return settled(tmp_path / "scans.h5")  # type: ignore[no-any-return]


def test_attributes_are_h5pys(scans: Path) -> None:
    keys = {"x": "*/image", "l": "*@label", "n": "*@name", "b": "*@box", "c": "*/image@codes", "m": "@max"}
    names = ("label", "name", "box")
    stock = Stock([scans], lambda group: {
        "x": group["image"][()], **dict(zip("lnb", map(group.attrs.get, names), strict=True)),
        "c": group["image"].attrs["codes"], "m": group.file.attrs["max"],
    })  # fmt: skip
    dataset = FastHDF5Dataset(scans, keys)
    expected = [stock[index] for index in range(12)]
    assert same(list(dataset), expected)
    assert type(dataset[3]["n"]) is str and dataset[3]["l"].dtype == np.int16
    assert same(list(dataset), list(StockOf(dataset)))
    del keys["c"]
    for sample in expected:
        del sample["c"]
    dataset = FastHDF5Dataset(scans, keys)
    wanted = [default_collate(expected[first : first + 5]) for first in (0, 5, 10)]
    for loader in (DataLoader(dataset, 5), FastLoader(dataset, 5), FastLoader(dataset, 5, num_workers=2)):
        assert same(list(loader), wanted)
    # A script may change what it got.
    dataset = FastHDF5Dataset(scans, ["*/image@codes", "*@box"])
    for sample in dataset:
        sample[0][...], sample[1][...] = -1, -1
    assert [codes.tolist() for codes, _ in dataset] == [
        sample["c"].tolist() for sample in map(stock.__getitem__, range(12))
    ]


class StockOf(Dataset[Any]):
    def __init__(self, dataset: FastHDF5Dataset) -> None:
        self.stock = dataset._stock()

    def __len__(self) -> int:
        return len(self.stock)

    def __getitem__(self, index: int) -> Any:
        return self.stock[index]


def test_batches_of_one_shape_are_collated_without_a_copy(scans: Path) -> None:
    dataset = FastHDF5Dataset(scans, ["*/image", "*/n"])
    samples = dataset.__getitems__([3, 1, 4])
    batch = default_collate(samples)
    assert batch[0].data_ptr() == samples._parts[0].array.ctypes.data  # type: ignore[attr-defined]
    # Frames of one shape, too, though others have other shapes.
    dataset, lengths = FastHDF5Dataset(scans, "*/frames"), [number * 7 % 3 for number in range(12)]
    order = np.argsort([len(frames) for frames in dataset], kind="stable").tolist()
    assert sorted(lengths) == sorted(len(frames) - 1 for frames in dataset)
    samples = dataset.__getitems__(order[:4])
    batch = default_collate(samples)
    assert batch.shape == (4, 1, 6, 2) and batch.data_ptr() == samples._parts[0].array.ctypes.data  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="equal size"):
        default_collate(dataset.__getitems__([order[0], order[-1]]))


def padded(samples: Any) -> Any:
    longest = max(len(frames) for frames, _ in samples)
    frames = [np.pad(frames, ((0, longest - len(frames)), (0, 0), (0, 0))) for frames, _ in samples]
    return torch.from_numpy(np.stack(frames)), torch.tensor([int(label) for _, label in samples])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("form", [FastLoader, DataLoader])
def test_ragged_samples_go_to_the_scripts_collate_fn(scans: Path, form: Any, workers: int) -> None:
    stock = Stock([scans], lambda group: (group["frames"][()], group.attrs["label"]))
    dataset = FastHDF5Dataset(scans, ["*/frames", "*@label"])
    options = {"batch_size": 5, "shuffle": True, "num_workers": workers, "collate_fn": padded}
    torch.manual_seed(3)
    wanted = list(DataLoader(stock, **options))
    torch.manual_seed(3)
    assert same(list(form(dataset, **options)), wanted)
    both = ConcatDataset([Subset(dataset, [5, 2]), dataset])
    torch.manual_seed(3)
    wanted = list(DataLoader(ConcatDataset([Subset(stock, [5, 2]), stock]), **options))
    torch.manual_seed(3)
    assert same(list(form(both, **options)), wanted)


def test_a_transform_makes_samples_alike(scans: Path) -> None:
    stock = Stock([scans], lambda group: (group["frames"][()].mean(0), group.attrs["label"]))
    dataset = FastHDF5Dataset(scans, ["*/frames", "*@label"], transform=lambda frames: frames.mean(0))
    assert same(list(FastLoader(dataset, 5)), list(DataLoader(stock, 5)))


def test_rows_of_each_dataset_are_samples(scans: Path, tmp_path: Path) -> None:
    stock = Stock(
        [scans],
        lambda group, row: (group["frames"][row], group.attrs["label"]),
        lambda group: len(group["frames"]),
    )
    dataset = FastHDF5Dataset(scans, ["*/frames", "*@label"], sample_dims=1)
    assert same(list(dataset), [stock[index] for index in range(len(stock))])
    assert [name for _, name in dataset.names] == [name for _, name, _ in stock.table]
    # By dataset, as for files.
    for (frames, _), numbers in group_batches(dataset, 3):
        assert len(frames) == len(numbers) and len(numbers.unique()) == 3
    with h5py.File(tmp_path / "few.h5", "w") as file:
        for number, rows in enumerate((0, 2, 0, 3, 1)):
            file[f"{number}/frames"] = np.arange(rows * 4.0).reshape(rows, 4)
            file[f"{number}/empty"] = np.zeros((rows, 0, 2))
    stock = Stock(
        [tmp_path / "few.h5"], lambda group, row: (group["frames"][row], group["empty"][row]),
        lambda group: len(group["frames"]),
    )  # fmt: skip
    for cache in ("off", "ram"):
        few = FastHDF5Dataset(tmp_path / "few.h5", ["*/frames", "*/empty"], sample_dims=1, cache=cache)
        assert same(list(few), [stock[index] for index in range(6)])
        assert same(list(FastLoader(few, 4)), list(DataLoader(stock, 4)))
    # Files of several lengths and shapes, as those of fastMRI.
    paths = [tmp_path / f"{number}.h5" for number in range(4)]
    for number, path in enumerate(paths):
        with h5py.File(path, "w") as file:
            file["kspace"] = np.arange(6 * (number + 1) ** 2).reshape(number + 1, 2, -1).astype("c8")
            file["rss"], file.attrs["max"] = np.ones((number + 1, 3), "f4") * number, float(number)
    expected = []
    for path in paths:
        with h5py.File(path) as file:
            for row in range(len(file["rss"])):
                expected.append((file["kspace"][row], file["rss"][row], file.attrs["max"]))
    dataset = FastHDF5Dataset(paths, ["kspace", "rss", "@max"])
    assert same(list(dataset), expected) and same(list(StockOf(dataset)), expected)
    assert same(list(FastLoader(dataset, 1)), list(DataLoader(expected, 1)))  # type: ignore[arg-type]
    assert [Path(path).name for path, _ in dataset.names] == ["0.h5"] + ["1.h5"] * 2 + ["2.h5"] * 3 + [
        "3.h5"
    ] * 4
    assert FastHDF5Dataset(paths, "rss").names[:2] == [(str(paths[0]), ""), (str(paths[1]), "")]
    # Without attributes, too: plain rows of several shapes.
    dataset = FastHDF5Dataset(paths, ["kspace", "rss"])
    found = [tuple(sample) for batch in FastLoader(dataset, 4, collate_fn=list) for sample in batch]
    assert same(found, [sample[:2] for sample in expected])
    assert "several shapes" in repr(dataset)


def test_a_file_is_a_sample(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.h5" for number in range(5)]
    for number, path in enumerate(paths):
        with h5py.File(path, "w") as file:
            file["image"], file.attrs["label"] = np.full((2, 3), number, "f4"), number
    dataset = FastHDF5Dataset(paths, ["image", "@label"], sample_dims=0)
    batch = next(iter(FastLoader(dataset, 5)))
    assert batch[0][:, 0, 0].tolist() == batch[1].tolist() == [0, 1, 2, 3, 4]
    assert [files.tolist() for _, files in group_batches(dataset, 2)] == [[0, 1], [2, 3], [4]]


def test_several_stars_and_links(tmp_path: Path) -> None:
    """A star in each of several names; links to groups, datasets and other files; names in order of creation."""
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["far"] = np.arange(3)
    with h5py.File(tmp_path / "x.h5", "w", track_order=True) as file:
        subjects = file.create_group("subjects", track_order=True)
        for subject in ("z", "a"):
            subjects.create_group(subject, track_order=True)
            for run in ("run 2", "run 1", "rest"):
                file[f"subjects/{subject}/{run}/x"] = np.full(3, len(run) + ord(subject))
            file[f"subjects/{subject}"].attrs["age"] = ord(subject)
        file["subjects/a/run 3"] = h5py.SoftLink("/subjects/z/run 1")
        file["subjects/b/run 0/x"] = h5py.ExternalLink("other.h5", "far")
        file["subjects/b"].attrs["age"] = 1
        file["subjects/nothing"] = 5
        wanted = [
            (run["x"][()], subject.attrs["age"])
            for subject in file["subjects"].values() if isinstance(subject, h5py.Group)
            for name, run in subject.items() if name.startswith("run ")
        ]  # fmt: skip
    dataset = FastHDF5Dataset(tmp_path / "x.h5", ["/subjects/*/run */x", "subjects/*@age"])
    assert same(list(dataset), wanted)
    assert [name for _, name in dataset.names] == ["z/2", "z/1", "a/2", "a/1", "a/3", "b/0"]
    assert "1 dataset through h5py, one thread at a time, as it lies in another file" in repr(dataset)
    assert same(list(DataLoader(dataset, 6)), list(FastLoader(dataset, 6)))


def test_orders_and_resuming_are_those_of_rows(scans: Path) -> None:
    dataset = FastHDF5Dataset(scans, ["*/image", "*/n"], seed=5)
    loader = FastLoader(dataset, 5, shuffle=True)
    first = [batch[1].tolist() for batch in loader]
    assert [batch[1].tolist() for batch in FastLoader(dataset, 5, shuffle=True)] == first
    state = None
    for number, _ in enumerate(loader):
        if number == 0:
            state = loader.state_dict()
            break
    again = FastLoader(dataset, 5, shuffle=True)
    again.load_state_dict(state)
    rest = [batch[1].tolist() for batch in again]
    assert len(rest) == 2
    dataset = FastHDF5Dataset(scans, ["*/frames", "*/n"], seed=5)
    by_group = FastLoader(dataset, 5, shuffle=Shuffle(window=4, unit="group"), collate_fn=list)
    assert sorted(int(n) for batch in by_group for _, n in batch) == list(range(12))


# ---- what is found once is kept ---------------------------------------------------------------------


def test_the_table_is_kept_until_the_file_changes(
    scans: Path, settled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "_KEEP_FROM_S", 0)
    monkeypatch.setattr(array_cache, "is_settled", lambda *_: True)
    keys = ["*/frames", "*/image", "*@label", "*@name", "*@box"]
    before = list(FastHDF5Dataset(scans, keys, sample_dims=0))
    read, real = list[Any](), members._Table.read
    monkeypatch.setattr(members._Table, "read", lambda table: read.append(table))
    assert same(list(FastHDF5Dataset(scans, keys)), before) and not read
    monkeypatch.setattr(members._Table, "read", real)
    with h5py.File(scans, "a") as file:
        file["00"].attrs["label"] = 99
        file["99/image"], file["99/frames"] = np.zeros((1, 1)), np.zeros((1, 2, 2))
        file["99"].attrs.update({"label": 5, "name": "new", "box": 1})
    settled(scans)
    after = list(FastHDF5Dataset(scans, keys))
    assert len(after) == 13 and after[0][2] == 99 and after[12][3] == "new"
    assert same(list(FastHDF5Dataset(scans, keys)), after)


def test_other_keys_have_tables_and_kept_chunks_of_their_own(
    scans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "_KEEP_FROM_S", 0)
    monkeypatch.setattr(array_cache, "is_settled", lambda *_: True)
    with h5py.File(scans, "a") as file:  # by these, datasets are joined in other ways
        for number, group in enumerate(file.values()):
            group["odd"], group["even"] = np.zeros(number % 5), np.zeros(number % 2)
    for names in (["frames"], ["frames", "odd"], ["even", "frames"], ["frames", "image"]):
        stock = Stock([scans], lambda group, names=names: tuple(group[name][()] for name in names))
        expected = [stock[index] for index in range(12)]
        for _ in range(2):
            dataset = FastHDF5Dataset(scans, [f"*/{name}" for name in names], cache="ram")
            assert same(list(dataset), expected) and same(list(dataset), expected)


# ---- errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "options", "error", "message"),
    [
        ("*/nothing", {}, KeyError, r"scans\.h5 has nothing that '\*/nothing' matches: it has 00, 01, .*, …"),
        (["*/image", "*/lost"], {}, KeyError, r"scans\.h5 has no dataset '00/lost': it has frames, image, n"),
        (["*/image", "*@lost"], {}, KeyError, r"'00' has no attribute 'lost': it has box, label, name"),
        (["*/image", "@lost"], {}, KeyError, r"'' has no attribute 'lost'|'/' has no attribute 'lost'"),
        (["*/image", "lost/x@y"], {}, KeyError, r"has no group 'lost/x': it has 00"),
        ("@max", {}, OptionError, "sample_dims=1 counts dimensions of datasets, and all keys name attributes"),
        (["*/image", "*/n"], {"sample_dims": 1}, OptionError, r"'00/image' \(3, 4, 5\), '00/n' \(\)"),
        (["*/image", "*/frames"], {"sample_dims": 1}, OptionError, "alike along their first dimension"),
        ("*/image", {"sample_dims": -1}, OptionError, "sample_dims must be a number from 0, got -1"),
    ],
)  # fmt: skip
def test_keys_that_cannot_be_are_named(
    scans: Path, keys: Any, options: Any, error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        FastHDF5Dataset(scans, keys, **options)


def test_a_dataset_without_values_is_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["a/x"], file["b/x"] = 1.0, h5py.Empty("f8")
    with pytest.raises(OptionError, match=r"'b/x' is empty: it has neither values nor a shape"):
        FastHDF5Dataset(tmp_path / "x.h5", "*/x")


@pytest.mark.parametrize("key", ["*/image", "*/frames"])
@pytest.mark.parametrize("policy", ["raise", "skip", "replace"])
def test_damaged_samples_are_named(scans: Path, key: str, policy: Any) -> None:
    dataset = FastHDF5Dataset(scans, [key, "*/n"], bad_samples=policy, cache="off")
    expected = {name: sample for (_, name), sample in zip(dataset.names, dataset, strict=True)}
    with h5py.File(scans, "r") as file:
        place = file["05/frames"].id.get_chunk_info(0) if "frames" in key else None
        offset = file["05/image"].id.get_offset() if place is None else place.byte_offset
    status, raw = scans.stat(), bytearray(scans.read_bytes())
    raw = raw[: offset + 4] if place is None else raw[:offset] + bytes(8) + raw[offset + 8 :]
    scans.write_bytes(raw)
    if place is None:  # cut off: the file's size is another
        with pytest.raises(HDF5Error, match=r"scans\.h5"):
            list(FastLoader(dataset, 4, collate_fn=list))
        with pytest.raises(HDF5Error, match=r"scans\.h5"):
            FastHDF5Dataset(scans, [key, "*/n"])
        return

    os.utime(scans, ns=(status.st_atime_ns, status.st_mtime_ns))
    found: list[Any] = []
    try:
        found = [sample for batch in FastLoader(dataset, 4, collate_fn=list) for sample in batch]
    except BadSampleError as error:
        assert policy == "raise" and re.search(r"scans\.h5.*dataset 05/frames", str(error))
        return
    assert policy != "raise"
    wanted = [sample for name, sample in expected.items() if name != "05"]
    if policy == "skip":
        assert same([tuple(one) for one in found], wanted)
    else:
        assert len(found) == 12 and any(same(tuple(found[5]), sample) for sample in wanted)
        assert same([tuple(one) for one in found[:5] + found[6:]], wanted)
        # Also where the substitute has another shape than the batch would have had.
        for _ in range(5):
            (only,) = next(iter(FastLoader(Subset(dataset, [5]), 1, collate_fn=list)))
            assert any(same(only[0], frames) for frames, _ in wanted)


def test_a_changed_file_is_an_error(scans: Path) -> None:
    dataset = FastHDF5Dataset(scans, ["*/image", "*@label"])
    dataset[0]
    with h5py.File(scans, "a") as file:
        file["00/image"][...] = 0
    with pytest.raises(HDF5Error, match=r"scans\.h5 has changed since it was opened"):
        dataset[0]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="run it where named pipes exist: not on Windows")
def test_a_link_into_a_pipe_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["a/x"], file["b"] = 1.0, h5py.ExternalLink("pipe", "/")
    with pytest.raises(HDF5Error, match=r"'b' is a link into .*pipe, which is not a file"):
        FastHDF5Dataset(tmp_path / "x.h5", "*/x")


def test_a_group_that_is_damaged_is_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for name in "abc":
            file[f"{name}/x"] = np.zeros(5)
        place = h5py.h5o.get_info(file["b/x"].id).addr
    raw = bytearray((tmp_path / "x.h5").read_bytes())
    raw[place : place + 40] = bytes(40)
    (tmp_path / "x.h5").write_bytes(raw)
    with pytest.raises(HDF5Error, match=r"x\.h5, 'b/x' cannot be read, it may be damaged"):
        FastHDF5Dataset(tmp_path / "x.h5", "*/x")


def test_a_file_that_a_swmr_writer_has_open_is_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w", libver="latest") as file:
        for number in range(4):
            file[f"{number}/x"], file[f"{number}"].attrs["n"] = np.full(3, number), number
        file.swmr_mode = True
        dataset = FastHDF5Dataset(tmp_path / "x.h5", ["*/x", "*@n"])
        assert [(x.tolist(), int(n)) for x, n in dataset] == [([number] * 3, number) for number in range(4)]
        dataset.close()
