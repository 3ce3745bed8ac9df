"""``stitch``: predictions of overlapping patches become volumes."""

from __future__ import annotations

import itertools
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from failure import raising
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

of_both_formats = pytest.mark.parametrize("suffix", [".npy", ".zarr"])
DATASET = FastPatchDataset(np.zeros((9, 10), np.uint8), (4, 5), sampling=Grid(stride=(3, 2)))
COUNT = len(DATASET)
ROWS = np.zeros((COUNT, 4, 5), "f4")
OUT = np.empty((9, 10), "f4")


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
    return (torch.from_numpy(values[begin : begin + size]) for begin in range(0, len(values), size))


def read(path: Any) -> Any:
    return np.load(path) if str(path).endswith(".npy") else zarr.open_array(path, mode="r")[...]


@st.composite
def cases(draw: st.DrawFn) -> Any:
    shape = tuple(draw(st.lists(st.integers(1, 14), min_size=1, max_size=3)))
    patch = tuple(draw(st.integers(1, size)) for size in shape)
    stride = tuple(draw(st.integers(1, side + 2)) for side in patch)
    return shape, patch, stride, tuple(draw(st.lists(st.integers(1, 3), max_size=2)))


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
    own = random.uniform(0.2, 2, patch).astype("f4")
    weights = {"gaussian": gaussian_weights(patch), "constant": np.ones(patch, "f4"), "own": own}[kind]
    predictions = random.normal(size=(len(dataset), *lead, *patch)).astype("f4")
    expected = by_numpy(shape, dataset.places()[1], weights, predictions)
    out, option = np.full((*lead, *shape), np.nan, "f4"), own if kind == "own" else kind
    assert stitch(in_batches(predictions, size), dataset, out, weights=option, max_bytes=max_bytes) is out
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stitching, "_PART", 3)


@pytest.mark.parametrize(("loader", "workers"), [(DataLoader, 0), (FastLoader, 2)])
def test_the_dataset_itself_comes_back(loader: Any, workers: int, tmp_path: Path) -> None:
    """Of several volumes each in a target of its own, from batches that have patches of both."""
    volumes = [random_array((20, 18, 17), "f4", 1), random_array((8, 9, 30), "f4", 2)]
    dataset = FastPatchDataset(volumes, (8, 7, 9), sampling=Grid(stride=(5, 7, 3)))
    outs = [f"{tmp_path}/a.npy", f"{tmp_path}/b.zarr"]
    assert stitch(loader(dataset, 5, num_workers=workers), dataset, outs) == outs
    for out, volume in zip(outs, volumes, strict=True):
        np.testing.assert_allclose(read(out), volume, rtol=1e-5, atol=1e-6)
    with pytest.raises(OptionError, match="the dataset has 2 volumes, and out= names 1"):
        stitch(DataLoader(dataset, 5), dataset, f"{tmp_path}/c.npy")


@pytest.mark.parametrize("max_bytes", [0, 1 << 30])
@of_both_formats
def test_files_have_what_an_array_has(tmp_path: Path, suffix: str, max_bytes: int) -> None:
    predictions = np.random.default_rng(0).normal(size=(COUNT, 3, 4, 5)).astype("f4")

    def stitched(out: Any, **options: Any) -> Any:
        return stitch(in_batches(predictions, 3), DATASET, out, **options)

    expected, path = stitched(np.empty((3, 9, 10), "f4")), tmp_path / f"out{suffix}"
    assert stitched(path, max_bytes=max_bytes) == path
    assert os.listdir(tmp_path) == [path.name]
    assert read(path).dtype == np.float32
    np.testing.assert_array_equal(read(path), expected)
    np.testing.assert_array_equal(FastPatchDataset(path, (3, 9, 10), sampling=Grid())[0], expected)
    labels = stitched(f"{tmp_path}/2{suffix}", apply=lambda part: part.argmax(0))
    np.testing.assert_array_equal(read(labels), expected.argmax(0))


@pytest.mark.parametrize("suffix", [".npy", ".zarr", None])
def test_places_without_a_patch_are_0(tmp_path: Path, suffix: str | None) -> None:
    volumes = [np.zeros((20, 20), "u1"), np.zeros((5, 6), "u1")]
    dataset = FastPatchDataset(volumes, (3, 3), sampling=Positions([[0, 1, 1], [0, 9, 10]]))
    in_memory = [np.full(one.shape, 7, "f4") for one in volumes]
    outs: Any = [f"{tmp_path}/{name}{suffix}" for name in "xy"] if suffix else in_memory
    stitch([np.ones((2, 3, 3))], dataset, outs)
    expected = np.zeros((20, 20), "f4")
    expected[1:4, 1:4] = expected[9:12, 10:13] = 1
    for out, right in zip(outs, (expected, np.zeros((5, 6))), strict=True):
        np.testing.assert_array_equal(read(out) if suffix else out, right)


@pytest.mark.parametrize("max_bytes", [0, 1 << 30])
@of_both_formats
def test_an_error_leaves_nothing_behind(tmp_path: Path, suffix: str, max_bytes: int) -> None:
    """Too few and too many predictions, and errors of the model and of ``apply``."""
    fail = raising(RuntimeError("no more"))
    for predictions, options, message in (
        (in_batches(ROWS[1:], 4), {}, f"predictions for {COUNT - 1} of {COUNT} patches"),
        (in_batches(np.zeros((COUNT + 1, 4, 5), "f4"), 4), {}, f"for more than the {COUNT} patches"),
        (itertools.chain(in_batches(ROWS[:-1], 1), map(fail, [0])), {}, "no more"),
        ([ROWS], {"apply": fail}, "no more"),
    ):
        with pytest.raises((OptionError, RuntimeError), match=message):
            stitch(predictions, DATASET, f"{tmp_path}/out{suffix}", max_bytes=max_bytes, **options)
        assert os.listdir(tmp_path) == []


@of_both_formats
def test_an_existing_target_is_an_error_before_any_prediction(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"out{suffix}"
    path.write_bytes(b"precious")
    predictions = iter([ROWS])
    with pytest.raises(FileExistsError, match=r"out\.(npy|zarr) exists"):
        stitch(predictions, DATASET, path)
    assert len(list(predictions)) == 1
    assert path.read_bytes() == b"precious"


def test_files_of_a_killed_run_are_replaced(tmp_path: Path) -> None:
    for name, half in (("a.npy", "array.npy"), ("b.zarr", "array/zarr.json")):
        file = tmp_path / f"{name}.partial" / half
        file.parent.mkdir(parents=True)
        (tmp_path / f"{name}.partial" / "lock").touch()
        file.write_text("{}")
        stitch([ROWS + 1], DATASET, tmp_path / name)
        assert (read(tmp_path / name) == 1).all()
    assert sorted(os.listdir(tmp_path)) == ["a.npy", "b.zarr"]


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
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OptionError, match=r"a\.npy\.partial"):
        stitch([ROWS], DATASET, tmp_path / "a.npy")
    assert sorted(tmp_path.rglob("*")) == before


def test_options_that_cannot_work_are_named(tmp_path: Path) -> None:
    anywhere = FastPatchDataset(np.zeros((9, 9)), (2, 2), sampling=Uniform(3))
    volumes = [np.zeros((4, 5), "u1")] * 2
    two = FastPatchDataset(volumes, (4, 5), sampling=Grid())
    turned = FastPatchDataset(volumes, (2, 2), sampling=Positions([[1, 0, 0], [0, 0, 0]]))
    policies: Any = ("replace", "skip")
    bad = [FastPatchDataset(OUT, (4, 5), sampling=Grid(), bad_samples=one) for one in policies]
    channels = np.zeros((COUNT, 3, 4, 5), "f4")
    a, b = (f"{tmp_path}/{name}.npy" for name in "ab")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        others = (
            torch.empty(9, 10), file.create_dataset("x", (9, 10)),
            zarr.create_array(tmp_path / "x.zarr", shape=(9, 10), chunks=(4, 4), dtype="f4"),
        )  # fmt: skip
        before = sorted(tmp_path.rglob("*"))
        for rows, dataset, out, options, message in (
            (ROWS, anywhere, OUT, {}, r"sampling=Grid\(…\), not Uniform"),
            (ROWS, Subset(DATASET, [0]), OUT, {}, r"FastPatchDataset itself, got Subset; .*Positions\(array\)"),
            *((ROWS[:4], one, OUT, {}, f"bad_samples='{one.bad_samples.policy}' .*'raise'") for one in bad),
            (ROWS, turned, [a, b], {}, "patches of a volume after each other"),
            (ROWS, DATASET, OUT, {"weights": "mean"}, "weights must be 'gaussian', 'constant' or an array, got 'mean'"),
            (ROWS, DATASET, OUT, {"weights": np.ones((4, 4))}, r"numbers of shape \(4, 5\), got \(4, 4\)"),
            *((ROWS, DATASET, OUT, {"weights": np.full((4, 5), n)}, "must be positive") for n in (0, 1e-60, 1e60, np.inf)),
            (ROWS, DATASET, "x.tif", {}, r"ends in \.zarr or \.npy, got .*x\.tif"),
            (ROWS, DATASET, OUT[1:], {}, r"out= has shape \(8, 10\), and the volume \(9, 10\)"),
            *((channels, DATASET, np.empty((*lead, 9, 10), "f4"), {}, r"in front .* \(3,\)") for lead in ((), (4,), (1, 3))),
            (ROWS[..., 1:], DATASET, OUT, {}, r"a prediction has shape \(4, 4\)"),
            (ROWS[0], DATASET, OUT, {}, r"batches \(N, \*channels, \*patch_size\), got one of \(4, 5\)"),
            (ROWS, DATASET, OUT, {"apply": lambda part: part[1:]}, r"apply= has made \(2, 3\) of \(3, 3\)"),
            *((ROWS, DATASET, out, {}, "must be a NumPy array, or a path .* got a (Tensor|Data|Arr)") for out in others),
            (ROWS, two, [a, f"{tmp_path}/./a.npy"], {}, "another target for each volume, but several times"),
            (ROWS, two, [OUT, OUT], {}, "another target for each volume, but several times"),
        ):  # fmt: skip
            with pytest.raises(OptionError, match=message):
                stitch([rows], dataset, out, **options)  # type: ignore[arg-type]
        assert sorted(tmp_path.rglob("*")) == before


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
    def changing(part: Any) -> Any:
        first = next(made, None)
        return np.zeros_like(part[0], first) if first else (apply(part) if apply else part[0])

    lead, rows = () if apply else (1,), np.full((COUNT, 1, 4, 5), values, "f4")
    with pytest.raises(OptionError, match="which cannot hold those of"):
        stitch([rows], DATASET, np.empty((*lead, 9, 10), out), apply=apply)
    made = iter([np.dtype(out)])
    tall = FastPatchDataset(np.zeros((300, 10), "f4"), (4, 5), sampling=Grid())
    row = np.full((len(tall), 1, 4, 5), values, "f4")
    with pytest.raises(OptionError, match=r"has made elements of .* first, which cannot hold"):
        stitch([row], tall, str(tmp_path / "out.npy"), apply=changing, max_bytes=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "value", [np.array(2**24 + 1), np.array(1e300), np.array(1j), torch.tensor(2**24 + 1), torch.tensor(1j)]
)
def test_predictions_that_float32_cannot_hold_are_refused(value: Any) -> None:
    shape = (COUNT, 1, 4, 5)
    batch = value.expand(shape) if isinstance(value, torch.Tensor) else np.broadcast_to(value, shape)
    with pytest.raises(OptionError, match="blended as float32, which cannot hold"):
        stitch([batch], DATASET, np.empty((1, 9, 10), "f8"))


def test_predictions_may_be_of_any_float_type() -> None:
    rows = np.random.default_rng(2).normal(size=(COUNT, 4, 5)).astype("f4")
    expected, tensor = stitch([rows], DATASET, np.empty((9, 10), "f4")), torch.from_numpy(rows)
    for batch in (tensor.double(), tensor.clone().requires_grad_(), rows.astype("f8")):
        np.testing.assert_array_equal(stitch([batch], DATASET, np.empty((9, 10), "f4")), expected)
    half = stitch([tensor.bfloat16()], DATASET, np.empty((9, 10), "f4"))
    np.testing.assert_allclose(half, expected, atol=0.03)


def test_memory_is_bounded_however_many_channels_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stitching, "_PART", 128)  # as it is
    out, patch, limit = np.empty((96, 96, 96), "u1"), np.ones((1, 20, 16, 16, 16), "f4"), 1 << 20
    dataset = FastPatchDataset(out, (16, 16, 16), sampling=Grid())
    predictions = (patch for _ in range(len(dataset)))
    tracemalloc.start()
    try:
        stitch(predictions, dataset, out, max_bytes=limit, apply=lambda part: part.argmax(0).astype("u1"))
        assert tracemalloc.get_traced_memory()[1] < limit + 3 * patch.nbytes
    finally:
        tracemalloc.stop()
    assert not out.any()
