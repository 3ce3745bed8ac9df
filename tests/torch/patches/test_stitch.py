"""``stitch``: predictions of overlapping patches become volumes."""

from __future__ import annotations

import os
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Subset
from volume_kinds import random_array

from fastpipe import FastLoader, FastPatchDataset, stitch
from fastpipe.errors import OptionError
from fastpipe.sampling import Grid, Positions, Uniform
from fastpipe.torch import stitching
from fastpipe.volumes.blending import gaussian_weights

pytestmark = pytest.mark.usefixtures("same_generators")


def by_numpy(shape: Any, starts: Any, weights: Any, predictions: Any) -> Any:
    """All of it at once: the mean by weights, and 0 where there is no patch."""
    patch = weights.shape
    lead = predictions.shape[1 : predictions.ndim - len(patch)]
    sums, total = np.zeros((*lead, *shape)), np.zeros(shape)
    for start, prediction in zip(starts.tolist(), predictions, strict=True):
        box = tuple(slice(at, at + side) for at, side in zip(start, patch, strict=True))
        sums[(..., *box)] += prediction * weights.astype(np.float64)
        total[box] += weights
    return np.divide(sums, total, out=np.zeros_like(sums), where=np.broadcast_to(total > 0, sums.shape))


def in_batches(values: Any, size: int) -> Iterator[torch.Tensor]:
    for begin in range(0, len(values), size):
        yield torch.from_numpy(values[begin : begin + size])


def read(path: Any) -> Any:
    return np.load(path) if str(path).endswith(".npy") else zarr.open_array(path, mode="r")[...]


def dataset_of(shape: Any = (9, 10), patch: Any = (4, 5), stride: Any = (3, 2)) -> FastPatchDataset:
    return FastPatchDataset(np.zeros(shape, np.uint8), patch, sampling=Grid(stride=stride))


@st.composite
def cases(draw: st.DrawFn) -> Any:
    dims = draw(st.integers(1, 3))
    shape = tuple(draw(st.integers(1, 14)) for _ in range(dims))
    patch = tuple(draw(st.integers(1, size)) for size in shape)
    stride = tuple(draw(st.integers(1, side + 2)) for side in patch)
    lead = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    return shape, patch, stride, lead


@settings(max_examples=40)
@given(
    case=cases(), kind=st.sampled_from(["gaussian", "constant", "own"]), part=st.sampled_from([3, 5, 128]),
    max_bytes=st.sampled_from([0, 1000, 1 << 30]), size=st.integers(1, 7), seed=st.integers(0, 99),
)  # fmt: skip
def test_overlapping_predictions_are_blended_as_by_numpy(
    monkeypatch: pytest.MonkeyPatch, case: Any, kind: Any, part: int, max_bytes: int, size: int, seed: int
) -> None:
    shape, patch, stride, lead = case
    monkeypatch.setattr(stitching, "_PART", part)
    dataset = FastPatchDataset(np.zeros(shape, "u1"), patch, sampling=Grid(stride=stride))
    random = np.random.default_rng(seed)
    weights = {
        "gaussian": gaussian_weights(patch), "constant": np.ones(patch, "f4"),
        "own": random.uniform(0.2, 2, patch).astype("f4"),
    }[kind]  # fmt: skip
    predictions = random.normal(size=(len(dataset), *lead, *patch)).astype("f4")
    expected = by_numpy(shape, dataset.places()[1], weights, predictions)
    out = np.full((*lead, *shape), np.nan, "f4")
    option = weights if kind == "own" else kind
    found = stitch(in_batches(predictions, size), dataset, out, weights=option, max_bytes=max_bytes)
    assert found is out
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("loader", "workers"), [(DataLoader, 0), (FastLoader, 2)])
def test_the_dataset_itself_comes_back(tmp_path: Path, loader: Any, workers: int) -> None:
    array = random_array((20, 18, 17), "f4", 1)
    np.save(tmp_path / "x.npy", array)
    dataset = FastPatchDataset(tmp_path / "x.npy", (8, 7, 9), sampling=Grid(stride=(5, 7, 3)))
    out = stitch(loader(dataset, 4, num_workers=workers), dataset, np.empty(array.shape, "f4"))
    np.testing.assert_allclose(out, array, rtol=1e-5, atol=1e-6)


@pytest.mark.few(4)
@pytest.mark.parametrize("suffix", [".npy", ".zarr"])
@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("max_bytes", [0, 1 << 30])
def test_files_have_what_an_array_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, lead: Any, max_bytes: int
) -> None:
    monkeypatch.setattr(stitching, "_PART", 4)
    dataset = dataset_of()
    predictions = np.random.default_rng(0).normal(size=(len(dataset), *lead, 4, 5)).astype("f4")
    expected = stitch(in_batches(predictions, 3), dataset, np.empty((*lead, 9, 10), "f4"))
    path = tmp_path / f"out{suffix}"
    assert stitch(in_batches(predictions, 3), dataset, path, max_bytes=max_bytes) == path
    assert os.listdir(tmp_path) == [path.name]
    found = read(path)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)
    again = FastPatchDataset(path, (*lead, 9, 10), sampling=Grid())
    np.testing.assert_array_equal(again[0], expected)


def test_several_volumes_have_a_target_each(tmp_path: Path) -> None:
    volumes = [
        np.random.default_rng(n).normal(size=shape).astype("f4") for n, shape in enumerate([(7, 9), (12, 5)])
    ]
    dataset = FastPatchDataset(volumes, (4, 5), sampling=Grid(stride=2))
    outs = [f"{tmp_path}/a.npy", f"{tmp_path}/b.zarr"]
    # Batches that have patches of both.
    assert stitch(DataLoader(dataset, 5), dataset, outs) == outs
    for out, volume in zip(outs, volumes, strict=True):
        np.testing.assert_allclose(read(out), volume, rtol=1e-5, atol=1e-6)
    with pytest.raises(OptionError, match="the dataset has 2 volumes, and out= names 1"):
        stitch(DataLoader(dataset, 5), dataset, f"{tmp_path}/c.npy")


@pytest.mark.parametrize("suffix", [".npy", ".zarr", None])
def test_places_without_a_patch_are_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str | None
) -> None:
    monkeypatch.setattr(stitching, "_PART", 4)
    dataset = FastPatchDataset(np.zeros((20, 20), "u1"), (3, 3), sampling=Positions([[1, 1], [9, 10]]))
    out: Any = np.full((20, 20), 7, "f4") if suffix is None else f"{tmp_path}/x{suffix}"
    stitch([np.ones((2, 3, 3))], dataset, out)
    found = read(out) if suffix else out
    expected = np.zeros((20, 20), "f4")
    expected[1:4, 1:4] = expected[9:12, 10:13] = 1
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("suffix", [".npy", ".zarr"])
@pytest.mark.parametrize("max_bytes", [0, 1 << 30])
def test_too_few_and_too_many_predictions_leave_nothing_behind(
    tmp_path: Path, suffix: str, max_bytes: int
) -> None:
    dataset = dataset_of()
    path, count = f"{tmp_path}/out{suffix}", len(dataset)
    few = np.zeros((count - 1, 4, 5), "f4")
    with pytest.raises(OptionError, match=rf"predictions for {count - 1} of {count} patches"):
        stitch(in_batches(few, 4), dataset, path, max_bytes=max_bytes)
    assert os.listdir(tmp_path) == []
    with pytest.raises(OptionError, match=rf"for more than the {count} patches"):
        stitch(in_batches(np.zeros((count + 1, 4, 5), "f4"), 4), dataset, path, max_bytes=max_bytes)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("suffix", [".npy", ".zarr"])
@pytest.mark.parametrize("where", ["model", "apply"])
def test_an_error_of_the_script_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, where: str
) -> None:
    monkeypatch.setattr(stitching, "_PART", 3)
    dataset, calls = dataset_of(), 0

    def predictions() -> Iterator[Any]:
        for number in range(len(dataset)):
            if where == "model" and number == len(dataset) - 1:
                raise RuntimeError("no more")
            yield np.zeros((1, 4, 5), "f4")

    def apply(part: Any) -> Any:
        nonlocal calls
        calls += 1
        if where == "apply" and calls == 3:
            raise RuntimeError("no more")
        return part

    with pytest.raises(RuntimeError, match="no more"):
        stitch(predictions(), dataset, f"{tmp_path}/out{suffix}", apply=apply, max_bytes=0)
    assert os.listdir(tmp_path) == []
    assert calls >= 3


@pytest.mark.parametrize("suffix", [".npy", ".zarr"])
def test_an_existing_target_is_an_error_before_any_prediction(tmp_path: Path, suffix: str) -> None:
    dataset = dataset_of()
    path = tmp_path / f"out{suffix}"
    path.write_bytes(b"precious")

    def none() -> Iterator[Any]:
        raise AssertionError("no prediction is to be made in vain")
        yield

    with pytest.raises(FileExistsError, match=r"out\.(npy|zarr) exists"):
        stitch(none(), dataset, path)
    assert path.read_bytes() == b"precious"


def test_files_of_a_killed_run_are_replaced(tmp_path: Path) -> None:
    dataset = dataset_of()
    for name in ("a.npy.partial", "b.zarr.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    (tmp_path / "a.npy.partial" / "array.npy").write_bytes(b"half")
    (tmp_path / "b.zarr.partial" / "array").mkdir()
    (tmp_path / "b.zarr.partial" / "array" / "zarr.json").write_text("{}")
    for name in ("a.npy", "b.zarr"):
        stitch([np.ones((len(dataset), 4, 5))], dataset, tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["a.npy", "b.zarr"]
    assert (np.load(tmp_path / "a.npy") == 1).all()


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_files_of_others_are_not_touched(tmp_path: Path, kind: str) -> None:
    partial, precious = tmp_path / "a.npy.partial", tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("mine")
    if kind == "file":
        partial.write_text("mine")
    elif kind == "folder":
        precious.rename(partial)
    else:
        partial.symlink_to(precious)
    dataset, before = dataset_of(), sorted(tmp_path.rglob("*"))
    with pytest.raises(OptionError, match=r"a\.npy\.partial"):
        stitch([np.ones((len(dataset), 4, 5))], dataset, tmp_path / "a.npy")
    assert sorted(tmp_path.rglob("*")) == before


def test_options_that_cannot_work_are_named() -> None:
    dataset, out = dataset_of(), np.empty((9, 10), "f4")
    rows = [np.zeros((len(dataset), 4, 5), "f4")]
    channels = [np.zeros((len(dataset), 3, 4, 5), "f4")]
    anywhere = FastPatchDataset(np.zeros((9, 9)), (2, 2), sampling=Uniform(3))
    for arguments, options, message in (
        ((rows, anywhere, out), {}, r"sampling=Grid\(…\), not Uniform"),
        ((rows, dataset, out), {"weights": "mean"}, "weights must be 'gaussian', 'constant' or an array, got 'mean'"),
        ((rows, dataset, out), {"weights": np.ones((4, 4))}, r"positive numbers of shape \(4, 5\), got \(4, 4\)"),
        *(((rows, dataset, out), {"weights": np.full((4, 5), n)}, "weights= must be positive") for n in (0, 1e-60, np.inf)),
        ((rows, dataset, "x.tif"), {}, r"ends in \.zarr or \.npy, got .*x\.tif"),
        ((rows, dataset, np.empty((8, 10), "f4")), {}, r"out= has shape \(8, 10\), and the volume \(9, 10\)"),
        (([np.zeros((len(dataset), 4, 4), "f4")], dataset, out), {}, r"a prediction has shape \(4, 4\)"),
        ((iter(rows[0]), dataset, out), {}, r"batches \(N, \*channels, \*patch_size\), got one of \(4, 5\)"),
        *(
            ((channels, dataset, np.empty((*lead, 9, 10), "f4")), {}, r"out= has \(.*\) in front .* \(3,\)")
            for lead in ((), (4,), (1, 3))
        ),
        ((rows, dataset, out), {"apply": lambda part: part[1:]}, r"apply= has made \(8, 10\) of \(9, 10\)"),
        ((rows, Subset(dataset, [0]), out), {}, r"FastPatchDataset itself, got Subset; .*Positions\(array\)"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=message):
            stitch(*arguments, **options)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        twice = FastPatchDataset(
            [np.zeros((4, 4), "u1")] * 2, (2, 2), sampling=Positions([[1, 0, 0], [0, 0, 0]])
        )
        with pytest.raises(OptionError, match="patches of a volume after each other"):
            stitch([], twice, [f"{folder}/a.npy", f"{folder}/b.npy"])
        assert os.listdir(folder) == []


@pytest.mark.parametrize("policy", ["replace", "skip"])
def test_bad_patches_cannot_be_left_out(policy: Any) -> None:
    """Another patch's prediction would be put into the place of a bad one."""
    volume = np.ones((1, 16), "f4")
    volume[0, 0] = np.nan
    dataset = FastPatchDataset(volume, (1, 4), sampling=Grid(), nan="error", bad_samples=policy, seed=3)
    with pytest.raises(OptionError, match=f"with bad_samples='{policy}' .* with bad_samples='raise'"):
        stitch(FastLoader(dataset, 2), dataset, np.empty((1, 16), "f4"))


def test_targets_that_cannot_be_are_named(tmp_path: Path) -> None:
    dataset, rows = dataset_of(), [np.zeros((16, 4, 5), "f4")]
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for target in (
            torch.empty(9, 10), file.create_dataset("x", (9, 10)),
            zarr.create_array(tmp_path / "x.zarr", shape=(9, 10), chunks=(4, 4), dtype="f4"),
        ):  # fmt: skip
            with pytest.raises(
                OptionError, match=r"must be a NumPy array, or a path .* got a (Tensor|Data|Arr)"
            ):
                stitch(rows, dataset, target)
    two = FastPatchDataset([np.zeros((4, 5), "u1")] * 2, (4, 5), sampling=Grid())
    small = np.empty((4, 5), "f4")
    for pair in ([tmp_path / "a.npy", f"{tmp_path}/./a.npy"], [small, small]):
        with pytest.raises(OptionError, match="another target for each volume, but several times"):
            stitch([], two, pair)
    assert not (tmp_path / "a.npy").exists()


@pytest.mark.parametrize(
    ("values", "out", "apply"),
    [
        (300, "i1", lambda part: part[0].astype("i8")),  # would be 44
        (300, "u1", lambda part: part[0].astype("u2")),
        (-1, "u2", lambda part: part[0].astype("i4")),
        (2.0**25, "f4", lambda part: part[0].astype("i4") + 1),
        (1e5, "f2", None),  # would be infinite
        (1e30, "f4", lambda part: part[0].astype("f8") ** 2),
        (1.0, "f4", lambda part: part[0] * 1j),
    ],
)
def test_values_that_the_target_cannot_hold_are_refused(
    values: float, out: str, apply: Any, tmp_path: Path
) -> None:
    dataset = dataset_of()
    rows = np.full((len(dataset), 1, 4, 5), values, "f4")
    lead = () if apply else (1,)
    with pytest.raises(OptionError, match="which cannot hold those of"):
        stitch([rows], dataset, np.empty((*lead, 9, 10), out), apply=apply)
    with pytest.raises(OptionError, match=r"has made elements of .* first, which cannot hold"):
        made = iter([np.zeros(2, out).dtype, None])

        def changing(part: Any) -> Any:
            first = next(made, None)
            return np.zeros_like(part[0], first) if first else (apply(part) if apply else part[0])

        tall = FastPatchDataset(np.zeros((300, 10), "f4"), (4, 5), sampling=Grid())
        row = np.full((len(tall), 1, 4, 5), values, "f4")
        stitch([row], tall, str(tmp_path / "out.npy"), apply=changing, max_bytes=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "rows", [np.array(2**24 + 1), np.array(1e300), np.array(1j), torch.tensor(2**24 + 1), torch.tensor(1j)]
)
def test_predictions_that_float32_cannot_hold_are_refused(rows: Any) -> None:
    dataset = dataset_of()
    shape = (len(dataset), 1, 4, 5)
    batch = rows.expand(shape) if isinstance(rows, torch.Tensor) else np.broadcast_to(rows, shape)
    with pytest.raises(OptionError, match="blended as float32, which cannot hold"):
        stitch([batch], dataset, np.empty((1, 9, 10), "f8"))


def test_memory_is_bounded_however_many_channels_there_are() -> None:
    channels, limit = 20, 1 << 20
    dataset = FastPatchDataset(np.zeros((96, 96, 96), "u1"), (16, 16, 16), sampling=Grid())
    out = np.empty((96, 96, 96), "u1")
    patch = np.ones((1, channels, 16, 16, 16), "f4")
    tracemalloc.start()
    try:
        stitch(
            (patch for _ in range(len(dataset))), dataset, out, max_bytes=limit,
            apply=lambda part: part.argmax(0).astype("u1"),
        )  # fmt: skip
        assert tracemalloc.get_traced_memory()[1] < limit + 3 * patch.nbytes
    finally:
        tracemalloc.stop()
    assert not out.any()
