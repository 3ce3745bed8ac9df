"""Batches of datasets of any dtype and layout, as from h5py: found by hypothesis."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from dataset_kinds import H5pyRows
from hypothesis import event, given, settings
from hypothesis import strategies as st
from same import same
from torch.utils.data import ConcatDataset, DataLoader, Subset

from fastpipe import Cache, FastHDF5Dataset, FastLoader

PLAIN: list[Any] = [
    "<f2", "<f4", "<f8", "i1", "u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "?", "<c8", "<c16",
    h5py.enum_dtype({"A": 1, "B": 2}, basetype="<i2"),
]  # fmt: skip
ODD: list[Any] = [
    ">f4", ">i2", ">f8", ">u4", ">c8", "S3", "V5", np.dtype([("a", "i1"), ("b", ">f8")]),
    np.dtype([("a", "i1"), ("b", "<f8")], align=True), np.dtype(("f4", (3,))),
    h5py.string_dtype(), h5py.string_dtype("utf-8", 6), h5py.vlen_dtype("i4"),
]  # fmt: skip


def content(shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    """Random values; of few bytes, so that they compress."""
    dtype, random = np.dtype(dtype), np.random.default_rng(seed)
    if dtype.hasobject:
        made, is_text = np.empty(shape, object), h5py.check_string_dtype(dtype) is not None
        for number, place in enumerate(np.ndindex(shape)):
            row = random.integers(0, 9, random.integers(0, 4)).astype("i4")
            made[place] = f"t{number}é" if is_text else row
        return made
    base, inner = dtype.subdtype or (dtype, ())
    if base.kind in "fc":  # no NaN: two of them differ in their bytes where complex numbers are copied
        return random.integers(-9, 9, (*shape, *inner)).astype(base)
    bytes_of = np.array([0, 1] if base.kind == "b" else [0, 1, 7, 255], np.uint8)
    raw = random.choice(bytes_of, math.prod((*shape, *inner)) * base.itemsize)
    return raw.view(base).reshape(*shape, *inner)


@st.composite
def cases(draw: Any, dtypes: list[Any]) -> dict[str, Any]:
    """Layouts are few here: ``tests/hdf5/test_reader.py`` has all of them."""
    dims = draw(st.integers(1, 3))
    inner = tuple(draw(st.integers(1, 4)) for _ in range(dims - 1))
    leads = [(draw(st.integers(1, 11)), *inner) for _ in range(draw(st.sampled_from([1, 1, 2, 3])))]
    form = draw(st.sampled_from(["value", "tuple", "dict"]))
    datasets = [
        {
            "inner": tuple(draw(st.lists(st.integers(1, 5), max_size=2))), "dtype": draw(st.sampled_from(dtypes)),
            "layout": draw(st.sampled_from(["contiguous", "chunked", "gzip", "lzf", "scale-offset"])),
            "side": draw(st.integers(1, 5)), "is_written": draw(st.sampled_from([True, True, False])),
            "seed": draw(st.integers(0, 99)),
        }
        for _ in range(1 if form == "value" else draw(st.integers(1, 3)))
    ]  # fmt: skip
    total = sum(map(math.prod, leads))
    return {
        "dims": dims, "leads": leads, "form": form, "datasets": datasets,
        "cache": draw(st.sampled_from(["off", "ram", "disk", "auto"])),
        "indices": draw(st.lists(st.integers(-total, total - 1), min_size=1, max_size=40)),
        "size": draw(st.integers(1, 9)), "view": draw(st.sampled_from(["itself", "itself", "Subset", "twice"])),
    }  # fmt: skip


def write(path: Path, lead: tuple[int, ...], case: dict[str, Any], number: int) -> None:
    with h5py.File(path, "w") as file:
        for name, each in zip("abc", case["datasets"], strict=False):
            shape, kind, layout = lead + each["inner"], np.dtype(each["dtype"]), each["layout"]
            data, options = content(shape, each["dtype"], each["seed"] + number), {}
            if layout != "contiguous":
                options["chunks"] = tuple(min(side, each["side"]) for side in shape)
            if layout in ("gzip", "lzf"):
                options["compression"] = layout
            elif layout == "scale-offset" and kind.kind in "iu" and kind.isnative and not kind.metadata:
                options["scaleoffset"] = 0
                data %= 50  # of the whole range the library cannot read what it wrote
            dataset = file.create_dataset(name, shape, each["dtype"], **options)
            if each["is_written"]:
                dataset[...] = data


def viewed(dataset: Any, view: str) -> Any:
    if view == "Subset":
        return Subset(dataset, range(len(dataset)))
    return ConcatDataset([dataset, dataset]) if view == "twice" else dataset


def check(case: dict[str, Any], settled: Any, collate: dict[str, Any]) -> None:
    keys: Any = list("abc"[: len(case["datasets"])])
    if case["form"] != "tuple":
        keys = keys[0] if case["form"] == "value" else {f"of {key}": key for key in keys}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.h5" for number in range(len(case["leads"]))]
        for number, (path, lead) in enumerate(zip(paths, case["leads"], strict=True)):
            write(path, lead, case, number)
            if case["cache"] != "off":  # else nothing is kept
                settled(path)
        options = {"batch_size": case["size"], "sampler": case["indices"], **collate}
        oracle = viewed(H5pyRows(paths, keys, case["dims"]), case["view"])
        wanted = list(DataLoader(oracle, **options))
        cache = Cache("disk", dir=folder) if case["cache"] == "disk" else case["cache"]
        event(case["cache"])
        for kind in (FastLoader, DataLoader):
            dataset = FastHDF5Dataset(paths, keys, sample_dims=case["dims"], cache=cache, threads=2)
            assert len(dataset) == len(oracle) // (2 if case["view"] == "twice" else 1)
            loader = kind(viewed(dataset, case["view"]), **options)
            for _ in range(3 if kind is FastLoader else 1):
                assert same(list(loader), wanted)
        if not collate:
            assert same(list(FastLoader(viewed(dataset, case["view"]), **options).reference()), wanted)
        for index in case["indices"][:3]:
            assert same(viewed(dataset, case["view"])[index], oracle[index])


@settings(max_examples=30)
@given(case=cases(PLAIN))
def test_batches_are_those_of_h5py_rows(case: dict[str, Any], settled: Any) -> None:
    for each in case["datasets"]:  # torch makes no tensor of a list of such scalars
        if each["dtype"] == "<u8" and not each["inner"]:
            each["dtype"] = "<i8"
    check(case, settled, {})


def plain(samples: Any) -> list[Any]:
    """Samples as torch would hand them over: plain objects."""
    return [_plain(sample) for sample in samples]


def _plain(sample: Any) -> Any:
    if isinstance(sample, tuple):
        return tuple(map(_plain, sample))
    if isinstance(sample, dict):
        return {key: _plain(value) for key, value in sample.items()}
    return sample.view(np.ndarray) if isinstance(sample, np.ndarray) else sample


@settings(max_examples=30)
@given(case=cases(PLAIN + ODD * 2))
def test_samples_of_any_kind_are_h5pys(case: dict[str, Any], settled: Any) -> None:
    check(case, settled, {"collate_fn": plain})


@pytest.mark.parametrize("inner", [(), (0,), (0, 3), (3, 0)])
@pytest.mark.parametrize("rows", [0, 5])
def test_datasets_without_elements_are_read(tmp_path: Path, rows: int, inner: tuple[int, ...]) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        most = (None,) * (1 + len(inner))
        file.create_dataset("x", (rows, *inner), "f4", maxshape=most, compression="gzip")
        file.create_dataset("y", (rows,), "i8")
    wanted = list(DataLoader(H5pyRows(tmp_path / "x.h5", ["x", "y"]), 2))
    for cache in ("off", "auto", "ram"):
        for kind in (DataLoader, FastLoader):
            dataset = FastHDF5Dataset(tmp_path / "x.h5", ["x", "y"], cache=cache)  # type: ignore[arg-type]
            assert len(dataset) == rows
            assert same(list(kind(dataset, 2)), wanted)
            assert "x: " in repr(dataset)
    assert torch.is_tensor(wanted[0][0]) if rows else wanted == []
