"""``generate``: the rows are those of a loop, the file is one and the same, and h5py reads it."""

from __future__ import annotations

import errno
import hashlib
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpipe
from fastpipe import FastHDF5Dataset, FastLoader, errors
from fastpipe.generation import Generated, generate

_N = 60


def _made(fn: Callable, path: Path, n: int = _N, **options: Any) -> Generated:
    return generate(fn, n, path, **{"seed": 0, "workers": 0, "progress": False, **options})


def _digest(made: Generated) -> list[str]:
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in made.paths]


def _waves() -> Callable:
    def sample(index: int, rng: np.random.Generator) -> dict:
        return {
            "wave": rng.normal(size=(5, 3)).astype("f4"),
            "steps": np.arange(index % 4 + 1, dtype="i2"),
            "theme": "wäve" * (index % 3),
            "index": index,
        }

    return sample


_RAGGED = {"steps": ("int16", (None,))}


def test_rows_are_those_of_a_loop(tmp_path: Path) -> None:
    fn = _waves()
    made = _made(fn, tmp_path / "waves.h5", columns=_RAGGED)
    assert made.rows == made.made == _N and not made.failed
    with h5py.File(made.paths[0]) as file:
        assert set(file) == {"wave", "steps", "steps_length", "theme", "index"}
        for index in range(_N):
            own = fn(index, np.random.default_rng([0, index]))
            assert np.array_equal(file["wave"][index], own["wave"])
            length = file["steps_length"][index]
            assert np.array_equal(file["steps"][index, :length], own["steps"])
            assert not file["steps"][index, length:].any()
            assert file["theme"].asstr()[index] == own["theme"]
            assert file["index"][index] == index
        assert file["wave"].dtype == np.float32 and file["steps"].attrs["lengths"] == "steps_length"
        assert file.attrs["seed"] == "0" and file.attrs["rows"] == _N
        assert file.attrs["function"].endswith("sample")


@pytest.mark.parametrize("options", [{"workers": 2}, {"workers": 3, "executor": "threads"}, {"workers": 1}])
def test_the_file_is_the_same_however_it_is_made(tmp_path: Path, options: dict) -> None:
    alone = _made(_waves(), tmp_path / "alone.h5", columns=_RAGGED)
    other = _made(_waves(), tmp_path / "other.h5", columns=_RAGGED, **options)
    assert _digest(alone) == _digest(other)


def test_our_datasets_and_loaders_read_it(tmp_path: Path) -> None:
    made = _made(_waves(), tmp_path / "waves.h5", columns=_RAGGED)
    dataset = FastHDF5Dataset(made.paths, ["wave", "steps", "steps_length"], seed=0)
    assert len(dataset) == _N
    waves, _, lengths = next(iter(FastLoader(dataset, batch_size=_N)))
    assert waves.shape == (_N, 5, 3) and lengths.tolist() == [index % 4 + 1 for index in range(_N)]


@settings(max_examples=25)
@given(
    st.integers(1, 40), st.sampled_from(["f2", "f4", "<i8", ">i4", "u1", "?", "c8", "S3"]),
    st.lists(st.integers(1, 4), max_size=3), st.integers(1, 9), st.integers(1, 12),
)  # fmt: skip
def test_any_type_shape_and_chunk_is_what_h5py_reads(
    tmp_path_factory: pytest.TempPathFactory, n: int, dtype: str, shape: list[int], chunk: int, block: int
) -> None:
    def sample(index: int, rng: np.random.Generator) -> dict:
        value = rng.integers(0, 200, size=shape)
        return {"x": np.asarray(value).astype(dtype), "y": np.float64(index)}

    folder = tmp_path_factory.mktemp("any")
    made = _made(sample, folder / "x.h5", n, chunk_rows=chunk, max_bytes=block * 50)
    found = [h5py.File(path) for path in made.paths]
    try:
        assert sum(len(file["x"]) for file in found) == n
        assert all(file["x"].chunks[0] <= chunk for file in found)
        for key in ("x", "y"):
            rows = np.concatenate([file[key][:] for file in found])
            own = [sample(index, np.random.default_rng([0, index]))[key] for index in range(n)]
            assert np.array_equal(rows, np.stack(own)) and found[0][key].dtype == own[0].dtype
    finally:
        for file in found:
            file.close()


def _batched(calls: list | None = None) -> Callable:
    def sample(index: int, rng: np.random.Generator) -> dict:
        phase = rng.uniform(0, 6, size=3)
        times = rng.integers(1, 5)
        return {"x": np.sin(phase * index), "times": times, "text": f"{index}", "r": np.arange(times)}

    def batch(indices: np.ndarray, rng: Any) -> dict:
        if calls is not None:
            calls.append(indices.tolist())
        phase = rng.uniform(0, 6, size=3)
        times = rng.integers(1, 5)
        return {
            "x": np.sin(phase * indices[:, None]),
            "times": times,
            "text": [f"{index}" for index in indices],
            "r": [np.arange(each) for each in times],
        }

    sample.batch = batch  # type: ignore[attr-defined]
    return sample


def test_batches_make_the_rows_that_the_function_makes(tmp_path: Path) -> None:
    fn, columns = _batched(), {"r": ("int64", (None,))}
    many = _made(fn, tmp_path / "many.h5", 700, columns=columns)
    with_workers = _made(fn, tmp_path / "workers.h5", 700, columns=columns, workers=2)
    del fn.batch  # type: ignore[attr-defined]
    single = _made(fn, tmp_path / "single.h5", 700, columns=columns)
    assert _digest(many) == _digest(with_workers)
    with h5py.File(many.paths[0]) as one, h5py.File(single.paths[0]) as other:
        for key in ("x", "times", "text", "r", "r_length"):
            assert np.array_equal(one[key][:], other[key][:]), key


def test_a_row_has_the_same_company_in_any_batch_call(tmp_path: Path) -> None:
    calls: list = []
    _made(_batched(calls), tmp_path / "x.h5", 700, columns={"r": ("int64", (None,))})
    assert {len(call) for call in calls} == {256, 700 - 512}
    assert all(call[0] % 256 == 0 for call in calls)


def test_a_batch_that_makes_other_rows_is_refused(tmp_path: Path) -> None:
    fn = _batched()
    inner = fn.batch  # type: ignore[attr-defined]
    fn.batch = lambda indices, rng: {**inner(indices, rng), "x": np.zeros((len(indices), 3))}  # type: ignore[attr-defined]
    with pytest.raises(
        errors.OptionError, match=r"fn\.batch makes other rows than fn: 'x' of row 255 differs"
    ):
        _made(fn, tmp_path / "x.h5", columns={"r": ("int64", (None,))}, n=300)
    fn.batch = lambda indices, rng: {**inner(indices, rng), "x": np.zeros((1, 3))}  # type: ignore[attr-defined]
    with pytest.raises(errors.OptionError, match=r"fn.batch of rows 0 to 255: 'x' has shape \(1, 3\)"):
        _made(fn, tmp_path / "x.h5", columns={"r": ("int64", (None,))}, n=300)
    assert not list(tmp_path.iterdir())


def test_files_beyond_a_size(tmp_path: Path) -> None:
    fn = _waves()
    whole = _made(fn, tmp_path / "whole.h5", columns=_RAGGED)
    many = _made(fn, tmp_path / "many.h5", columns=_RAGGED, max_bytes=1000)
    assert [path.name for path in many.paths[:2]] == ["many-00000.h5", "many-00001.h5"] and len(
        many.paths
    ) > 3
    dataset, parts = FastHDF5Dataset(whole.paths[0], "wave"), FastHDF5Dataset(many.paths, "wave")
    assert len(parts) == _N and all((dataset[at] == parts[at]).all() for at in range(_N))
    again = _made(fn, tmp_path / "many.h5", columns=_RAGGED, max_bytes=1000)
    assert again.paths == many.paths and not again.made
    one = _made(fn, tmp_path / "one.h5", columns=_RAGGED, max_bytes=10**6)
    assert one.paths == (tmp_path / "one.h5",)


@pytest.mark.parametrize("options", [{}, {"max_bytes": 1500}])
@pytest.mark.parametrize("make", [_waves, _batched])
def test_more_rows_extend_a_file(tmp_path: Path, make: Callable, options: dict) -> None:
    columns = _RAGGED if make is _waves else {"r": ("int64", (None,))}
    options = {**options, "columns": columns}
    first = _made(make(), tmp_path / "x.h5", 30, **options)
    grown = _made(make(), tmp_path / "x.h5", 75, **options)
    at_once = _made(make(), tmp_path / "y.h5", 75, **options)
    assert first.made == 30 and grown.rows == 75
    if make is _waves:
        assert grown.made == 45
    assert _digest(grown) == _digest(at_once)
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == ["x"] * len(grown.paths) + ["y"] * len(
        grown.paths
    )


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    calls: list = []

    def sample(index: int, rng: np.random.Generator) -> dict:
        return {"x": index}

    _made(sample, tmp_path / "x.h5")
    before = (tmp_path / "x.h5").stat()
    made = _made(sample, tmp_path / "x.h5")
    assert made.rows == _N and made.made == 0 and "all there already" in str(made)
    assert (tmp_path / "x.h5").stat().st_mtime_ns == before.st_mtime_ns and not calls


def test_a_function_may_use_its_arrays_again(tmp_path: Path) -> None:
    kept, many = np.zeros(3), np.zeros((5000, 3))

    def sample(index: int, rng: np.random.Generator) -> dict:
        kept[:] = index
        return {"x": kept, "r": kept[: index % 3 + 1]}

    def batch(indices: np.ndarray, rng: Any) -> dict:
        many[: len(indices)] = indices[:, None]
        return {
            "x": many[: len(indices)],
            "r": [many[at, : index % 3 + 1] for at, index in enumerate(indices)],
        }

    for name in ("alone", "batch"):
        made = _made(sample, tmp_path / f"{name}.h5", 600, columns={"r": ("float64", (None,))})
        with h5py.File(made.paths[0]) as file:
            assert (file["x"][:] == np.arange(600)[:, None]).all()
            assert all((file["r"][at, : at % 3 + 1] == at).all() for at in range(600))
        sample.batch = batch  # type: ignore[attr-defined]


# ---- rows that fail ----------------------------------------------------------------------------


def _failing(bad: set[int], until: int = 99) -> Callable:
    """Fails for some rows; until so many numbers were drawn, of another attempt each."""

    def sample(index: int, rng: np.random.Generator) -> dict:
        drawn = rng.integers(100)
        if index in bad and drawn < until + 1:
            raise ValueError(f"no scene {index}")
        return {"x": drawn, "r": np.arange(drawn % 5), "index": index}

    return sample


_R = {"columns": {"r": ("int64", (None,))}}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_row_that_raises_is_named_and_what_was_made_is_kept(tmp_path: Path, workers: int) -> None:
    with pytest.raises(errors.GenerationError) as caught:
        _made(_failing({41}), tmp_path / "x.h5", workers=workers, **_R)
    error = caught.value
    assert error.index == 41
    assert "row 41 failed: ValueError: no scene 41" in str(error)
    assert "sample(41, np.random.default_rng([0, 41]))" in str(error) and "bad_samples='skip'" in str(error)
    assert "rows are kept in" in str(error) and "test_generate.py" in str(error.__cause__)
    with pytest.raises(errors.GenerationError, match="the function has changed"):
        _made(_failing(set()), tmp_path / "x.h5", workers=workers, **_R)
    made = _made(_failing(set()), tmp_path / "x.h5", workers=workers, resume="changed", **_R)
    assert 0 < made.made < _N and made.rows == _N
    other = _made(_failing(set()), tmp_path / "y.h5", **_R)
    with h5py.File(made.paths[0]) as one, h5py.File(other.paths[0]) as two:
        assert all(np.array_equal(one[key][:], two[key][:]) for key in two)


@pytest.mark.parametrize("options", [{}, {"max_bytes": 700}])
def test_skipped_rows_are_left_out(tmp_path: Path, options: dict, caplog: pytest.LogCaptureFixture) -> None:
    bad = {0, 7, 8, 30, _N - 1}
    caplog.set_level(logging.WARNING, "fastpipe.generate")
    made = _made(_failing(bad), tmp_path / "x.h5", bad_samples="skip", **_R, **options)
    assert {index for index, _ in made.failed} == bad and made.rows == _N - len(bad)
    assert made.failed[1] == (7, "ValueError: no scene 7") and "5 rows are left out" in caplog.text
    fn, kept = _failing(set()), [index for index in range(_N) if index not in bad]
    found = [h5py.File(path) for path in made.paths]
    try:
        assert np.concatenate([file["index"][:] for file in found]).tolist() == kept
        own = [fn(index, np.random.default_rng([0, index])) for index in kept]
        assert np.concatenate([file["x"][:] for file in found]).tolist() == [one["x"] for one in own]
        lengths = np.concatenate([file["r_length"][:] for file in found])
        assert lengths.tolist() == [len(one["r"]) for one in own]
        skipped = [index for file in found for index in file.attrs.get("skipped", [])]
        assert set(skipped) == bad
    finally:
        for file in found:
            file.close()
    again = _made(_failing(bad), tmp_path / "x.h5", bad_samples="skip", **_R, **options)
    assert {index for index, _ in again.failed} == bad and again.rows == made.rows
    grown = _made(_failing(bad), tmp_path / "x.h5", 90, bad_samples="skip", **_R, **options)
    whole = _made(_failing(bad), tmp_path / "y.h5", 90, bad_samples="skip", **_R, **options)
    assert _digest(grown) == _digest(whole)


def test_a_row_tried_again_has_other_numbers(tmp_path: Path) -> None:
    made = _made(_failing(set(range(_N)), until=49), tmp_path / "x.h5", bad_samples="retry", **_R)
    with h5py.File(made.paths[0]) as file:
        found = file["x"][:]
    assert found.min() > 49
    for index in range(_N):
        tries = (
            np.random.default_rng([0, index, at] if at else [0, index]).integers(100) for at in range(10)
        )
        assert found[index] == next(drawn for drawn in tries if drawn > 49)
    with pytest.raises(errors.GenerationError, match="row 3 failed"):
        _made(_failing({3}), tmp_path / "y.h5", bad_samples="retry", **_R)


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_the_row_of_a_batch_that_fails_is_found(tmp_path: Path, policy: str) -> None:
    def sample(index: int, rng: np.random.Generator) -> dict:
        if index == 300:
            raise ValueError("no scene")
        return {"x": rng.random()}

    def batch(indices: np.ndarray, rng: Any) -> dict:
        if 300 in indices:
            raise ValueError("no scene")
        return {"x": rng.random()}

    sample.batch = batch  # type: ignore[attr-defined]
    if policy == "raise":
        with pytest.raises(
            errors.GenerationError, match=r"row 300 failed: ValueError: no scene.* 256 of 600 rows"
        ):
            _made(sample, tmp_path / "x.h5", 600)
        return
    made = _made(sample, tmp_path / "x.h5", 600, bad_samples="skip")
    assert [index for index, _ in made.failed] == [300]
    with h5py.File(made.paths[0]) as file:
        assert file["x"][300] == np.random.default_rng([0, 301]).random()


def test_a_sample_of_another_shape_is_a_failure_with_a_remedy(tmp_path: Path) -> None:
    def sample(index: int, rng: np.random.Generator) -> dict:
        return {"x": np.zeros(3 if index != 20 else 4, "f4")}

    with pytest.raises(errors.GenerationError, match=r"row 20 failed.*columns=\{'x': \('<f4', \(None,\)\)\}"):
        _made(sample, tmp_path / "x.h5")
    made = _made(sample, tmp_path / "y.h5", bad_samples="skip")
    assert [index for index, _ in made.failed] == [20]


def test_nothing_is_left_where_the_first_row_fails(tmp_path: Path) -> None:
    def sample(index: int, rng: np.random.Generator) -> dict:
        raise KeyError("scene")

    with pytest.raises(errors.GenerationError, match="row 0 failed: KeyError: 'scene'"):
        _made(sample, tmp_path / "x.h5")
    with pytest.raises(errors.GenerationError, match="all of the first 60 rows failed"):
        _made(sample, tmp_path / "x.h5", bad_samples="skip")
    assert not list(tmp_path.iterdir())


def test_nan_are_kept_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def sample(index: int, rng: np.random.Generator) -> dict:
        x = np.full((2, 2), np.inf if index == 3 else 1.0)
        x[0, 0] = np.nan if index in (11, 40) else -x[1, 1]
        return {"x": x, "r": np.full(index % 3, np.nan if index == 17 else 0.0)}

    caplog.set_level(logging.WARNING, "fastpipe.generate")
    made = _made(sample, tmp_path / "x.h5", columns={"r": ("float64", (None,))})
    again = _made(sample, tmp_path / "x.h5", columns={"r": ("float64", (None,))})
    grown = _made(sample, tmp_path / "x.h5", _N + 9, columns={"r": ("float64", (None,))})
    assert (again.nan_rows, again.made, grown.nan_rows, grown.made) == (3, 0, 3, 9)
    assert made.nan_rows == 3 and "3 rows have NaN, which are kept; the first: 11, 17, 40" in caplog.text
    with h5py.File(made.paths[0]) as file:
        assert np.isnan(file["x"][11, 0, 0]) and np.isinf(file["x"][3]).all()


def test_global_generators_can_be_seeded_for_code_that_draws_from_them(tmp_path: Path) -> None:
    def sample(index: int, rng: np.random.Generator) -> dict:
        return {"a": random.random(), "b": np.random.rand(), "c": torch.rand(2)}

    state = random.getstate()
    one = _made(sample, tmp_path / "one.h5", seed_globals=True)
    two = _made(sample, tmp_path / "two.h5", seed_globals=True, workers=2)
    assert _digest(one) == _digest(two) and random.getstate() == state
    with h5py.File(one.paths[0]) as file:
        assert len(np.unique(file["a"][:])) == len(np.unique(file["b"][:])) == _N


def test_what_an_earlier_version_left_is_removed(tmp_path: Path) -> None:
    def sample(index: int, rng: np.random.Generator) -> dict:
        if index == 30 and not (tmp_path / "mended").exists():
            raise ValueError("no scene")
        return {"x": index}

    with pytest.raises(errors.GenerationError, match="row 30 failed"):
        _made(sample, tmp_path / "x.h5", workers=0)
    (tmp_path / "x.h5.partial" / "0-5-0123abcd.part").write_bytes(b"rows")
    (tmp_path / "mended").touch()
    _made(sample, tmp_path / "x.h5", workers=0)
    assert {path.name for path in tmp_path.iterdir()} == {"x.h5", "mended"}


def test_a_file_all_of_whose_rows_failed_is_left_out(tmp_path: Path) -> None:
    whole = _made(_failing(set()), tmp_path / "whole.h5", max_bytes=300, **_R)
    with h5py.File(whole.paths[1]) as file:
        bad = set(range(file.attrs["first_row"], file.attrs["last_row"])) | {_N - 1}
    options = {"bad_samples": "skip", "max_bytes": 300, **_R}
    made = _made(_failing(bad), tmp_path / "x.h5", **options)
    assert len(made.paths) == len(whole.paths) - 1 > 1 and made.paths[1].name == "x-00001.h5"
    assert {index for index, _ in made.failed} == bad and made.rows == _N - len(bad)
    there = _made(_failing(bad), tmp_path / "x.h5", **options)
    assert (
        {index for index, _ in there.failed} == bad and there.rows == made.rows and there.paths == made.paths
    )
    grown = _made(_failing(bad), tmp_path / "x.h5", 90, **options)
    at_once = _made(_failing(bad), tmp_path / "y.h5", 90, **options)
    assert _digest(grown) == _digest(at_once)


def test_rows_that_all_fail_leave_no_file(tmp_path: Path) -> None:
    fn = _failing(set(range(1, _N)))
    made = _made(fn, tmp_path / "one.h5", bad_samples="skip", **_R)
    assert made.rows == 1

    def sample(index: int, rng: np.random.Generator) -> dict:
        if (tmp_path / "begun").exists():
            raise ValueError("no scene")
        (tmp_path / "begun").touch()
        return {"x": index}

    with pytest.raises(errors.GenerationError, match=r"all 60 rows failed.*no scene.* No row is kept"):
        _made(sample, tmp_path / "x.h5", bad_samples="skip")
    assert not (tmp_path / "x.h5").exists()


# ---- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [({"n": 0}, "n= is a whole number from 1, got 0"), ({"seed": -1}, "seed= is a whole number from 0"),
     ({"workers": -1}, "workers="), ({"workers": "many"}, "workers="), ({"chunk_rows": 0}, "chunk_rows="),
     ({"max_bytes": 0}, "max_bytes="), ({"bad_samples": "drop"}, "bad_samples= is one of"),
     ({"executor": "ray"}, "executor= is 'processes', 'threads'"), ({"resume": "yes"}, "resume= is"),
     ({"columns": "xy"}, "columns= is names"),
     ({"seed_globals": True, "executor": "threads", "workers": 2}, "threads share the global generators")],
)  # fmt: skip
def test_options_that_cannot_work(tmp_path: Path, options: dict, words: str) -> None:
    with pytest.raises(errors.OptionError, match=words):
        _made(_waves(), tmp_path / "x.h5", **options)
    assert not list(tmp_path.iterdir())


def test_a_function_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(errors.OptionError, match="fn= is a function"):
        _made(3, tmp_path / "x.h5")  # type: ignore[arg-type]


def test_places_where_no_file_can_be(tmp_path: Path) -> None:
    with pytest.raises(errors.OptionError, match="is a folder"):
        _made(_waves(), tmp_path)
    with pytest.raises(errors.OptionError, match="there is no folder"):
        _made(_waves(), tmp_path / "none" / "x.h5")
    for content in (b"mine", b""):
        (tmp_path / "x.h5").write_bytes(content)
        with pytest.raises(errors.OptionError, match=r"fastpipe\.generate has not made it"):
            _made(_waves(), tmp_path / "x.h5")
        assert (tmp_path / "x.h5").read_bytes() == content
    with h5py.File(tmp_path / "y.h5", "w") as file:
        file["x"] = [1, 2]
    with pytest.raises(errors.OptionError, match=r"fastpipe\.generate has not made it"):
        _made(_waves(), tmp_path / "y.h5")


def test_a_file_that_cannot_be_read_is_not_said_to_be_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _made(_waves(), tmp_path / "x.h5", columns=_RAGGED)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(h5py, "File", broken)
    with pytest.raises(OSError, match="Input/output error"):
        _made(_waves(), tmp_path / "x.h5", columns=_RAGGED)


def test_files_of_two_jobs_under_one_name(tmp_path: Path) -> None:
    made = _made(_waves(), tmp_path / "x.h5", columns=_RAGGED, max_bytes=1500)
    other = _made(_waves(), tmp_path / "y.h5", columns=_RAGGED, max_bytes=1500, seed=1)
    other.paths[1].replace(made.paths[1])
    with pytest.raises(errors.OptionError, match=r"x-00001\.h5 is of another job than .*x-00000\.h5"):
        _made(_waves(), tmp_path / "x.h5", columns=_RAGGED, max_bytes=1500)


def test_the_name_at_top_level(tmp_path: Path) -> None:
    assert fastpipe.generate is generate


def test_progress_is_lines_where_there_is_no_terminal(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    _made(_waves(), tmp_path / "x.h5", columns=_RAGGED, progress=True)
    told = capfd.readouterr()
    assert not told.out and "x.h5: 60 rows" in told.err and "rows/s" in told.err
    _made(_waves(), tmp_path / "y.h5", columns=_RAGGED)
    assert capfd.readouterr() == ("", "")
