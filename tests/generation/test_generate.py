"""``generate``: the rows are those of a loop, the file is one and the same, and h5py reads it."""

from __future__ import annotations

import errno
import logging
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from failure import raising
from generated import contents, failing_in, made
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpipe
from fastpipe import FastHDF5Dataset, FastLoader
from fastpipe.errors import GenerationError, OptionError
from fastpipe.generation import Generated, generate

N = 60
STEPS, R = {"steps": ("int16", (None,))}, {"r": ("int64", (None,))}


def wave(index: int, rng: np.random.Generator) -> dict[str, Any]:
    steps = np.arange(index % 4 + 1, dtype="i2")
    return {
        "wave": rng.normal(size=(5, 3)).astype("f4"),
        "steps": steps,
        "theme": "wäve" * (index % 3),
        "index": index,
    }


def batched(calls: list[list[int]] | None = None) -> Callable[..., Any]:
    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        phase, times = rng.uniform(0, 6, size=3), rng.integers(1, 5)
        return {"x": np.sin(phase * index), "times": times, "text": f"{index}", "r": np.arange(times)}

    def batch(indices: np.ndarray, rng: Any) -> dict[str, Any]:
        if calls is not None:
            calls.append(indices.tolist())
        phase, times = rng.uniform(0, 6, size=3), rng.integers(1, 5)
        texts, ranges = [f"{index}" for index in indices], [np.arange(each) for each in times]
        return {"x": np.sin(phase * indices[:, None]), "times": times, "text": texts, "r": ranges}

    sample.batch = batch  # type: ignore[attr-defined]
    return sample


def column(found: Generated, name: str) -> np.ndarray:
    """A column of all files of a job."""
    parts = []
    for path in found.paths:
        with h5py.File(path) as file:
            parts.append(file[name][:])
    return np.concatenate(parts)


def assert_same_rows(one: Generated, other: Generated) -> None:
    with h5py.File(one.paths[0]) as file:
        names = list(file)
    for name in names:
        assert np.array_equal(column(one, name), column(other, name)), name


def test_rows_are_those_of_a_loop(tmp_path: Path) -> None:
    assert fastpipe.generate is generate
    found = made(wave, tmp_path / "waves.h5", columns=STEPS)
    assert found.rows == found.made == N and not found.failed
    with h5py.File(found.paths[0]) as file:
        assert set(file) == {"wave", "steps", "steps_length", "theme", "index"}
        for index in range(N):
            own, length = wave(index, np.random.default_rng([5, index])), file["steps_length"][index]
            assert np.array_equal(file["wave"][index], own["wave"])
            assert np.array_equal(file["steps"][index, :length], own["steps"])
            assert not file["steps"][index, length:].any()
            assert file["theme"].asstr()[index] == own["theme"] and file["index"][index] == index
        assert file["wave"].dtype == np.float32 and file["steps"].attrs["lengths"] == "steps_length"
        assert file.attrs["seed"] == "5" and file.attrs["rows"] == N
        assert file.attrs["function"].endswith("wave")
    dataset = FastHDF5Dataset(found.paths, ["wave", "steps", "steps_length"], seed=0)
    waves, _, lengths = next(iter(FastLoader(dataset, batch_size=N)))
    assert waves.shape == (N, 5, 3) and lengths.tolist() == [index % 4 + 1 for index in range(N)]


@settings(max_examples=20)
@given(
    st.integers(1, 40), st.sampled_from(["f2", "f4", "<i8", ">i4", "u1", "?", "c8", "S3"]),
    st.lists(st.integers(1, 4), max_size=3), st.integers(1, 9), st.integers(1, 12),
)  # fmt: skip
def test_any_type_shape_and_chunk_is_what_h5py_reads(
    tmp_path_factory: pytest.TempPathFactory, n: int, dtype: str, shape: list[int], chunk: int, block: int
) -> None:
    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        value = rng.integers(0, 200, size=shape)
        return {"x": np.asarray(value).astype(dtype), "y": np.float64(index)}

    found = made(sample, tmp_path_factory.mktemp("any") / "x.h5", n, chunk_rows=chunk, max_bytes=block * 50)
    for key in ("x", "y"):
        own = np.stack([sample(index, np.random.default_rng([5, index]))[key] for index in range(n)])
        assert np.array_equal(column(found, key), own) and column(found, key).dtype == own.dtype
    with h5py.File(found.paths[0]) as file:
        assert file["x"].chunks[0] <= chunk


def test_batches_make_the_rows_that_the_function_makes(tmp_path: Path) -> None:
    calls: list[list[int]] = []
    fn = batched(calls)
    many = made(fn, tmp_path / "many.h5", 700, columns=R)
    assert {len(call) for call in calls} == {256, 700 - 512}  # a row has the same company in any call
    assert all(call[0] % 256 == 0 for call in calls)
    del fn.batch  # type: ignore[attr-defined]
    assert_same_rows(many, made(fn, tmp_path / "single.h5", 700, columns=R))


def test_a_batch_that_makes_other_rows_is_refused(tmp_path: Path) -> None:
    fn = batched()
    inner = fn.batch  # type: ignore[attr-defined]
    for rows, words in (
        (None, r"fn\.batch makes other rows than fn: 'x' of row 255 differs"),
        (1, r"fn.batch of rows 0 to 255: 'x' has shape \(1, 3\)"),
    ):
        fn.batch = lambda indices, rng, rows=rows: {  # type: ignore[attr-defined]
            **inner(indices, rng), "x": np.zeros((rows or len(indices), 3))
        }  # fmt: skip
        with pytest.raises(OptionError, match=words):
            made(fn, tmp_path / "x.h5", 300, columns=R)
    assert not list(tmp_path.iterdir())


def test_a_size_makes_several_files(tmp_path: Path) -> None:
    whole = made(wave, tmp_path / "whole.h5", columns=STEPS)
    many = made(wave, tmp_path / "many.h5", columns=STEPS, max_bytes=1000)
    assert [path.name for path in many.paths[:2]] == ["many-00000.h5", "many-00001.h5"]
    assert len(many.paths) > 3
    dataset, parts = FastHDF5Dataset(whole.paths[0], "wave"), FastHDF5Dataset(many.paths, "wave")
    assert len(parts) == N and all((dataset[at] == parts[at]).all() for at in range(N))
    again = made(wave, tmp_path / "many.h5", columns=STEPS, max_bytes=1000)
    assert again.paths == many.paths and not again.made
    one = made(wave, tmp_path / "one.h5", columns=STEPS, max_bytes=10**6)
    assert one.paths == (tmp_path / "one.h5",)


@pytest.mark.parametrize("options", [{}, {"max_bytes": 1500}])
@pytest.mark.parametrize(("fn", "columns"), [(wave, STEPS), (batched(), R)])
def test_more_rows_extend_a_file(
    tmp_path: Path, fn: Callable[..., Any], columns: Any, options: dict[str, Any]
) -> None:
    first = made(fn, tmp_path / "x.h5", 30, columns=columns, **options)
    before = first.paths[0].stat().st_mtime_ns
    there = made(fn, tmp_path / "x.h5", 30, columns=columns, **options)
    assert there.rows == 30 and there.made == 0 and "all there already" in str(there)
    assert first.paths[0].stat().st_mtime_ns == before
    grown = made(fn, tmp_path / "x.h5", 75, columns=columns, **options)
    at_once = made(fn, tmp_path / "y.h5", 75, columns=columns, **options)
    assert first.made == 30 and grown.rows == 75 and (grown.made == 45 or fn is not wave)
    assert contents(grown) == contents(at_once)
    assert len(list(tmp_path.iterdir())) == 2 * len(grown.paths)


def test_a_function_may_use_its_arrays_again(tmp_path: Path) -> None:
    kept, many = np.zeros(3), np.zeros((5000, 3))

    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        kept[:] = index
        return {"x": kept, "r": kept[: index % 3 + 1]}

    def batch(indices: np.ndarray, rng: Any) -> dict[str, Any]:
        many[: len(indices)] = indices[:, None]
        ragged = [many[at, : index % 3 + 1] for at, index in enumerate(indices)]
        return {"x": many[: len(indices)], "r": ragged}

    for name in ("alone", "batch"):
        found = made(sample, tmp_path / f"{name}.h5", 600, columns={"r": ("float64", (None,))})
        assert (column(found, "x") == np.arange(600)[:, None]).all()
        assert all((row[: at % 3 + 1] == at).all() for at, row in enumerate(column(found, "r")))
        sample.batch = batch  # type: ignore[attr-defined]


def test_a_row_that_raises_is_named_and_the_rows_before_are_kept(tmp_path: Path) -> None:
    with pytest.raises(GenerationError) as caught:
        made(failing_in({41}), tmp_path / "x.h5", columns=R)
    error = caught.value
    assert error.index == 41
    assert "row 41 failed: ValueError: no scene 41" in str(error)
    assert "sample(41, np.random.default_rng([5, 41]))" in str(error) and "bad_samples='skip'" in str(error)
    assert "rows are kept in" in str(error) and "generated.py" in str(error.__cause__)
    with pytest.raises(GenerationError, match="the function has changed"):
        made(failing_in(set()), tmp_path / "x.h5", columns=R)
    (tmp_path / "x.h5.partial" / "0-5-0123abcd.part").write_bytes(b"rows")  # of an earlier version
    found = made(failing_in(set()), tmp_path / "x.h5", resume="changed", columns=R)
    assert 0 < found.made < N and found.rows == N
    assert [path.name for path in tmp_path.iterdir()] == ["x.h5"]
    assert_same_rows(found, made(failing_in(set()), tmp_path / "y.h5", columns=R))


@pytest.mark.parametrize("options", [{}, {"max_bytes": 700}])
def test_skipped_rows_are_left_out(
    tmp_path: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    options = {"bad_samples": "skip", "columns": R, **options}
    bad = {0, 7, 8, 30, N - 1}
    found = made(failing_in(bad), tmp_path / "x.h5", **options)
    assert {index for index, _ in found.failed} == bad and found.rows == N - len(bad)
    assert found.failed[1] == (7, "ValueError: no scene 7") and "5 rows are left out" in caplog.text
    kept = [index for index in range(N) if index not in bad]
    own = [failing_in(set())(index, np.random.default_rng([5, index])) for index in kept]
    assert column(found, "index").tolist() == kept
    assert column(found, "x").tolist() == [one["x"] for one in own]
    assert column(found, "r_length").tolist() == [len(one["r"]) for one in own]
    skipped: set[int] = set()
    for path in found.paths:
        with h5py.File(path) as file:
            skipped |= set(file.attrs.get("skipped", []))
    assert skipped == bad
    again = made(failing_in(bad), tmp_path / "x.h5", **options)
    assert {index for index, _ in again.failed} == bad and again.rows == found.rows
    grown = made(failing_in(bad), tmp_path / "x.h5", 90, **options)
    assert contents(grown) == contents(made(failing_in(bad), tmp_path / "y.h5", 90, **options))


def test_a_file_all_of_whose_rows_failed_is_left_out(tmp_path: Path) -> None:
    options = {"bad_samples": "skip", "max_bytes": 300, "columns": R}
    whole = made(failing_in(set()), tmp_path / "whole.h5", **options)
    with h5py.File(whole.paths[1]) as file:
        bad = set(range(file.attrs["first_row"], file.attrs["last_row"])) | {N - 1}
    found = made(failing_in(bad), tmp_path / "x.h5", **options)
    assert len(found.paths) == len(whole.paths) - 1 > 1 and found.paths[1].name == "x-00001.h5"
    there = made(failing_in(bad), tmp_path / "x.h5", **options)
    for one in (found, there):
        assert {index for index, _ in one.failed} == bad and one.rows == N - len(bad)
    grown = made(failing_in(bad), tmp_path / "x.h5", 90, **options)
    assert contents(grown) == contents(made(failing_in(bad), tmp_path / "y.h5", 90, **options))


def test_a_row_that_is_tried_again_has_other_numbers(tmp_path: Path) -> None:
    found = made(failing_in(set(range(N)), until=49), tmp_path / "x.h5", bad_samples="retry", columns=R)
    for index, x in enumerate(column(found, "x")):
        seeds = ([5, index, at] if at else [5, index] for at in range(10))
        tries = (np.random.default_rng(seed).integers(100) for seed in seeds)
        assert x == next(drawn for drawn in tries if drawn > 49)
    with pytest.raises(GenerationError, match="row 3 failed"):
        made(failing_in({3}), tmp_path / "y.h5", bad_samples="retry", columns=R)


def test_the_row_of_a_batch_that_fails_is_found(tmp_path: Path) -> None:
    def sample(indices: Any, rng: Any) -> dict[str, Any]:
        if np.any(indices == 300):
            raise ValueError("no scene")
        return {"x": rng.random()}

    sample.batch = sample  # type: ignore[attr-defined]
    with pytest.raises(GenerationError, match=r"row 300 failed: ValueError: no scene.* 256 of 600 rows"):
        made(sample, tmp_path / "x.h5", 600)
    found = made(sample, tmp_path / "y.h5", 600, bad_samples="skip")
    assert [index for index, _ in found.failed] == [300]
    assert column(found, "x")[300] == np.random.default_rng([5, 301]).random()


def test_a_sample_of_another_shape_is_a_failure_with_a_remedy(tmp_path: Path) -> None:
    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        return {"x": np.zeros(3 if index != 20 else 4, "f4")}

    with pytest.raises(GenerationError, match=r"row 20 failed.*columns=\{'x': \('<f4', \(None,\)\)\}"):
        made(sample, tmp_path / "x.h5")
    found = made(sample, tmp_path / "y.h5", bad_samples="skip")
    assert [index for index, _ in found.failed] == [20]


def test_rows_that_all_fail_leave_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()

    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        if (tmp_path / "begun").exists():
            raise KeyError("scene")
        (tmp_path / "begun").touch()
        return {"x": index}

    with pytest.raises(GenerationError, match=r"all 60 rows failed.*scene.* No row is kept"):
        made(sample, folder / "x.h5", bad_samples="skip")
    with pytest.raises(GenerationError, match="row 0 failed: KeyError: 'scene'"):
        made(sample, folder / "y.h5")
    with pytest.raises(GenerationError, match="all of the first 60 rows failed"):
        made(sample, folder / "y.h5", bad_samples="skip")
    assert not list(folder.glob("*.h5")) and not (folder / "y.h5.partial").exists()
    found = made(failing_in(set(range(1, N))), tmp_path / "one.h5", bad_samples="skip", columns=R)
    assert found.rows == 1


def test_nan_are_kept_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        x = np.full((2, 2), np.inf if index == 3 else 1.0)
        x[0, 0] = np.nan if index in (11, 40) else -x[1, 1]
        return {"x": x, "r": np.full(index % 3, np.nan if index == 17 else 0.0)}

    caplog.set_level(logging.WARNING, "fastpipe.generate")
    columns = {"r": ("float64", (None,))}
    first, again, grown = (made(sample, tmp_path / "x.h5", n, columns=columns) for n in (N, N, N + 9))
    assert (again.nan_rows, again.made, grown.nan_rows, grown.made) == (3, 0, 3, 9)
    assert first.nan_rows == 3 and "3 rows have NaN, which are kept; the first: 11, 17, 40" in caplog.text
    x = column(first, "x")
    assert np.isnan(x[11, 0, 0]) and np.isinf(x[3]).all()


@pytest.mark.slow
def test_global_generators_can_be_seeded(tmp_path: Path) -> None:
    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        return {"a": random.random(), "b": np.random.rand(2000), "c": torch.rand(2)}

    state = random.getstate()
    one = made(sample, tmp_path / "one.h5", seed_globals=True)
    two = made(sample, tmp_path / "two.h5", seed_globals=True, workers=2)
    with ThreadPoolExecutor(4) as pool:
        other = made(sample, tmp_path / "other.h5", executor=pool, seed_globals=True)
    assert contents(one) == contents(two) == contents(other) and random.getstate() == state
    assert len(np.unique(column(one, "a"))) == len(np.unique(column(one, "b")[:, 0])) == N


@pytest.mark.parametrize(
    ("options", "words"),
    [({"n": 0}, "n must be a whole number from 1, got 0"), ({"seed": -1}, "seed must be a whole number from 0"),
     ({"workers": -1}, "workers must"), ({"workers": "many"}, "workers must"), ({"chunk_rows": 0}, "chunk_rows must"),
     ({"max_bytes": 0}, "max_bytes must"), ({"bad_samples": "drop"}, "bad_samples must be one of"),
     ({"executor": "ray"}, "executor must"), ({"resume": "yes"}, "resume must"),
     ({"columns": "xy"}, "columns must"), ({"fn": 3}, "fn must be a function"),
     ({"seed_globals": True, "executor": "threads", "workers": 2}, "threads share the global generators")],
)  # fmt: skip
def test_options_that_cannot_work_are_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        made(**{"fn": wave, "out": tmp_path / "x.h5", **options})
    assert not list(tmp_path.iterdir())


def test_a_place_where_no_file_can_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents_of = {"text.h5": b"mine", "empty.h5": b""}
    for name, content in contents_of.items():
        (tmp_path / name).write_bytes(content)
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = [1, 2]
    files: dict[str, Any] = {"columns": STEPS, "max_bytes": 1500}
    found, another = (made(wave, tmp_path / f"{seed}.h5", seed=seed, **files) for seed in (5, 6))
    another.paths[1].replace(found.paths[1])
    for name, options, words in (
        ("", {}, "is a folder"), ("none/x.h5", {}, "there is no folder"),
        *((name, {}, r"was not made by fastpipe\.generate") for name in ("text.h5", "empty.h5", "other.h5")),
        ("5.h5", files, r"5-00001\.h5 belongs to another job than .*5-00000\.h5"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=words):
            made(wave, tmp_path / name, **options)
    assert {name: (tmp_path / name).read_bytes() for name in contents_of} == contents_of
    # Where a file cannot be read, it is not said to be another.
    made(wave, tmp_path / "x.h5", columns=STEPS)
    monkeypatch.setattr(h5py, "File", raising(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"):
        made(wave, tmp_path / "x.h5", columns=STEPS)
