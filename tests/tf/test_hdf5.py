"""``fastpipe.tf.hdf5_dataset``: rows of HDF5 files as h5py gives them, each once in an epoch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastpipe import BadSamples, Cache, Shard, Shuffle
from fastpipe.errors import HDF5Error, OptionError, TooManyBadSamplesError
from fastpipe.tf import Augment, Dataset, ImageDataset, hdf5_dataset

_ROWS = 53


@pytest.fixture
def speech(tmp_path: Path) -> Path:
    """A file of log-mels in compressed chunks, with their words, speakers and names."""
    rng = np.random.default_rng(0)
    path = tmp_path / "speech.h5"
    with h5py.File(path, "w") as file:
        mels = rng.normal(size=(_ROWS, 6, 5)).astype(np.float32)
        file.create_dataset("mels", data=mels, chunks=(4, 6, 5), compression="gzip", shuffle=True)
        file["words"] = np.arange(_ROWS)
        file["half"] = np.arange(_ROWS).astype(">f2")
        file["names"] = [f"Zoë {row}" for row in range(_ROWS)]
        file["codes"] = np.array([b"%d" % row for row in range(_ROWS)])
        file["is_read"] = np.arange(_ROWS) % 2 == 0
        file["pairs"] = np.zeros(_ROWS, [("a", "f4"), ("b", "i4")])
        ragged = file.create_dataset("ragged", (_ROWS,), h5py.vlen_dtype(np.int32))
        ragged[:] = [np.arange(row % 3) for row in range(_ROWS)]
    return path


def _numbers(dataset: Any) -> list[int]:
    """The words of an epoch."""
    return [int(word) for _, words in dataset for word in np.atleast_1d(words.numpy())]


# ---- the same values ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mels", "words", "half", "names", "codes", "is_read"])
@pytest.mark.parametrize("batch_size", [None, 7])
def test_values_are_those_of_h5py(speech: Path, name: str, batch_size: int | None) -> None:
    made = hdf5_dataset(speech, name, batch_size=batch_size, shuffle=False)
    with h5py.File(speech) as file:
        expected = file[name][...]
    found = [batch.numpy() for batch in made]
    found = [np.concatenate(found)] if batch_size else [np.stack(found)]
    wanted = expected if expected.dtype.isnative else expected.astype(expected.dtype.newbyteorder("="))
    if made.element_spec.dtype == tf.string:
        assert found[0].tolist() == wanted.tolist()
    else:
        assert found[0].dtype == wanted.dtype
        np.testing.assert_array_equal(found[0], wanted)
    assert len(made) == (_ROWS if batch_size is None else 8)


@pytest.mark.parametrize(
    ("keys", "labels"),
    [("mels", None), ("mels", "words"), (["mels", "words"], None), ({"x": "mels", "n": "names"}, "words")],
    ids=str,
)
def test_the_form_of_elements(speech: Path, keys: Any, labels: str | None) -> None:
    made = hdf5_dataset(speech, keys, labels, 10, shuffle=False)
    reference = made.reference()
    assert made.element_spec == reference.element_spec
    for element, expected in zip(made, reference, strict=True):
        tf.nest.assert_same_structure(element, expected)
        for one, other in zip(tf.nest.flatten(element), tf.nest.flatten(expected), strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy())
    assert isinstance(made, Dataset) and not isinstance(made, ImageDataset)
    assert isinstance(made.map(lambda *element: element).prefetch(1), Dataset)


@pytest.mark.parametrize("policy", ["raise", "replace"])
def test_what_is_stored_in_odd_ways(odd_hdf5: Path, policy: Any) -> None:
    with h5py.File(odd_hdf5) as file:
        expected = {name: file[name][...] for name in file}
    named = {str(number): name for number, name in enumerate(expected)}
    found = list(hdf5_dataset(odd_hdf5, named, batch_size=4, shuffle=False, bad_samples=policy))
    for number, name in named.items():
        np.testing.assert_array_equal(np.concatenate([batch[number] for batch in found]), expected[name])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_layout_gives_the_rows(tmp_path: Path, data: st.DataObject) -> None:
    count, width = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 9))
    dtype = data.draw(st.sampled_from(["u1", "<i2", ">i4", "<f4", ">f8", "c8", "?"]))
    values = np.random.default_rng(0).integers(0, 2, (count, width)).astype(dtype)
    how = data.draw(st.sampled_from([
        {}, {"chunks": True}, {"chunks": (min(3, count), width), "compression": "gzip"},
        {"chunks": (1, 1), "compression": "lzf", "shuffle": True},
    ]))  # fmt: skip
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=values, **how)
        file["n"] = np.arange(count)
    shuffle = data.draw(st.sampled_from([False, True, Shuffle(2, "group")]))
    size = data.draw(st.integers(1, 50))
    made = hdf5_dataset(path, "x", "n", size, shuffle, 3, cache=data.draw(st.sampled_from(["off", "auto"])))
    seen: list[int] = []
    for rows, numbers in made:
        np.testing.assert_array_equal(rows.numpy(), values[numbers.numpy()])
        seen += numbers.numpy().tolist()
    assert sorted(seen) == list(range(count))
    assert shuffle is not False or seen == list(range(count))


def test_several_files_and_dimensions(tmp_path: Path) -> None:
    for number in range(3):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"] = np.arange(6).reshape(2, 3) + 10 * number
    paths = sorted(tmp_path.iterdir())
    made = hdf5_dataset(paths, "x", shuffle=False, sample_dims=2, batch_size=100)
    assert next(iter(made)).numpy().tolist() == [10 * n + k for n in range(3) for k in range(6)]


# ---- orders ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, Shuffle(3, "group")], ids=str)
def test_epochs_differ_and_repeat_by_their_seed(speech: Path, shuffle: Any) -> None:
    made = hdf5_dataset(speech, "mels", "words", 8, shuffle, 5)
    first, second = _numbers(made), _numbers(made)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(_ROWS))
    again = hdf5_dataset(speech, "mels", "words", 8, shuffle, 5)
    again.set_epoch(1)
    assert _numbers(again) == second


def test_groups_come_together(speech: Path) -> None:
    made = hdf5_dataset(speech, "mels", "words", 8, Shuffle(2, "group"), 1, cache="off")
    rows = _numbers(made)
    windows = [{row // 4 for row in rows[at : at + 8]} for at in range(0, 48, 8)]
    assert all(len(window) <= 3 for window in windows)  # two chunks, or parts of them as one has one row
    assert "groups, 2 of 14 at a time" in made.plan


@pytest.mark.parametrize("shuffle", [True, Shuffle(3, "group")], ids=str)
def test_ranks_share_an_epoch(speech: Path, shuffle: Any) -> None:
    ranks = [
        _numbers(hdf5_dataset(speech, "mels", "words", 4, shuffle, 1, shard=Shard(rank, 3, "eval")))
        for rank in range(3)
    ]
    assert sorted(sum(ranks, [])) == list(range(_ROWS))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (slice(3, 9, 2), [3, 5, 7]),
        ([8, 1, 1], [8, 1, 1]),
        (np.arange(_ROWS) % 10 == 0, [0, 10, 20, 30, 40, 50]),
        ([-1], [52]),
        (range(2), [0, 1]),
    ],
    ids=["slice", "numbers", "mask", "from the end", "range"],
)
def test_some_rows(speech: Path, rows: Any, expected: list[int]) -> None:
    made = hdf5_dataset(speech, "mels", "words", 2, False, rows=rows)
    assert _numbers(made) == expected == _numbers(made.reference())
    shuffled = hdf5_dataset(speech, "mels", "words", 2, Shuffle(2, "group"), rows=rows)
    assert sorted(_numbers(shuffled)) == sorted(expected)


def test_the_last_batch(speech: Path) -> None:
    made = hdf5_dataset(speech, "mels", "words", 10, drop_remainder=True)
    assert [len(words) for _, words in made] == [10] * 5
    assert made.element_spec[0].shape == (10, 6, 5)
    assert len(made) == 5


# ---- what is kept, and the memory of batches --------------------------------------------------


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_chunks_are_decoded_once(speech: Path, tmp_path: Path, settled: Any, where: Any) -> None:
    settled(speech)
    cache = Cache(where, max_bytes=1 << 26, dir=tmp_path / "kept" if where == "disk" else None)
    made = hdf5_dataset(speech, "mels", "words", 8, cache=cache)
    assert sorted(_numbers(made)) == list(range(_ROWS))
    before = made.stage_seconds["decode"]
    for _ in range(3):
        assert sorted(_numbers(made)) == list(range(_ROWS))
    assert made.stage_seconds["decode"] == before
    assert "kept in" in made.plan


def test_batches_that_are_kept_are_never_written_to_again(speech: Path) -> None:
    made = hdf5_dataset(speech, "mels", batch_size=4, shuffle=False, cache="off")
    batches = list(made.repeat(3))
    with h5py.File(speech) as file:
        mels = file["mels"][...]
    for number, batch in enumerate(batches):
        first = number % 14 * 4
        np.testing.assert_array_equal(batch.numpy(), mels[first : first + 4])


def test_an_epoch_may_be_left(speech: Path) -> None:
    made = hdf5_dataset(speech, "mels", "words", 4)
    for _ in range(3):
        for _ in made:
            break
    assert sorted(_numbers(made)) == list(range(_ROWS))


def test_a_file_of_a_store_is_staged(speech: Path, tmp_path: Path) -> None:
    made = hdf5_dataset(f"file://{speech}", "mels", "words", 8, False, stage=tmp_path / "stage")
    for element, expected in zip(made, hdf5_dataset(speech, "mels", "words", 8, False), strict=True):
        for one, other in zip(element, expected, strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy())
    with pytest.raises(OptionError, match="stage"):
        hdf5_dataset(f"file://{speech}", "mels")


# ---- Keras ------------------------------------------------------------------------------------


def test_keras_trains_on_it(speech: Path) -> None:
    train = hdf5_dataset(speech, {"mel": "mels"}, "words", 8, seed=1, rows=slice(0, 40))
    test = hdf5_dataset(speech, {"mel": "mels"}, "words", 8, False, rows=slice(40, None))
    mel = keras.Input((6, 5), name="mel")
    model = keras.Model({"mel": mel}, keras.layers.Dense(_ROWS)(keras.layers.Flatten()(mel)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(train, validation_data=test, epochs=2, verbose=0, shuffle=False)
    assert np.isfinite(history.history["val_loss"]).all()


def test_augment_takes_the_numbers_of_the_position(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.random.default_rng(0).random((12, 8, 8, 3), np.float32)
        file["n"] = np.arange(12)
    flip = Augment(horizontal_flip=0.5, value_range=(0, 1), seed=1)
    sizes = [hdf5_dataset(tmp_path / "x.h5", "x", "n", size, seed=2, augment=flip) for size in (3, 5)]
    rows: list[dict[int, Any]] = [
        {int(n): image for images, numbers in made for n, image in zip(numbers, images.numpy(), strict=True)}
        for made in sizes
    ]
    for number in range(12):
        np.testing.assert_array_equal(rows[0][number], rows[1][number])
    mapped = hdf5_dataset(tmp_path / "x.h5", "x", augment=lambda images: images + 1)
    assert float(tf.reduce_min(next(iter(mapped)))) >= 1


# ---- faults -----------------------------------------------------------------------------------


def _damage(path: Path, row: int) -> None:
    """Overwrite the chunk of a row."""
    with h5py.File(path) as file:
        info = file["mels"].id.get_chunk_info(row // 4)
    with open(path, "r+b") as raw:
        raw.seek(info.byte_offset)
        raw.write(b"\xff" * info.size)


def test_a_damaged_chunk_is_named(speech: Path) -> None:
    _damage(speech, 9)
    made = hdf5_dataset(speech, "mels", "words", 4, False, cache="off")
    with pytest.raises(tf.errors.OpError, match=r"sample 8 .*speech\.h5"):
        list(made)


def test_bad_rows_are_skipped_or_replaced(speech: Path, tmp_path: Path) -> None:
    _damage(speech, 9)
    bad = {8, 9, 10, 11}
    skipped = hdf5_dataset(speech, "mels", "words", 10, False, cache="off", bad_samples="skip")
    batches = [words.numpy().tolist() for _, words in skipped]
    assert [len(batch) for batch in batches] == [10, 10, 10, 10, 9]
    assert sum(batches, []) == [row for row in range(_ROWS) if row not in bad]
    replaced = hdf5_dataset(speech, "mels", "words", 10, seed=1, cache="off", bad_samples="replace")
    first, again = (
        _numbers(replaced),
        hdf5_dataset(speech, "mels", "words", 4, seed=1, cache="off", bad_samples="replace"),
    )
    assert len(first) == _ROWS and not bad & set(first)
    assert _numbers(again) == first  # which takes whose place does not depend on batches
    few = hdf5_dataset(speech, "mels", "words", 4, cache="off", bad_samples=BadSamples("skip", max_errors=2))
    with pytest.raises(tf.errors.OpError, match=TooManyBadSamplesError.__name__):
        list(few)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keys": "pairs"}, r"pairs has elements of .*, for which TensorFlow has no type"),
        ({"keys": "ragged"}, r"ragged has elements of object, for which TensorFlow has no type"),
        ({"labels": 3}, r"labels must be the path of a dataset"),
        ({"rows": [53]}, r"rows= must be whole numbers below 53"),
        ({"rows": "all"}, r"rows= must be whole numbers below 53"),
        ({"rows": []}, r"there are no rows"),
        ({"rows": [True]}, r"rows= must be"),
        ({"batch_size": 0}, r"batch_size must be a number from 1"),
        ({"shuffle": "yes"}, r"shuffle must be True, False or a fastpipe.Shuffle"),
        ({"keys": ["mels", "words", "half"], "augment": Augment(horizontal_flip=0.5)}, r"name two datasets"),
        ({"shard": Shard(0, 2)}, r"needs seed="),
        ({"threads": 0}, r"threads must be"),
    ],
    ids=range(12),
)  # fmt: skip
def test_what_cannot_be_is_said(speech: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        hdf5_dataset(**{"path": speech, "keys": "mels", **arguments})


def test_what_is_no_file_of_rows_is_said(speech: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        hdf5_dataset(tmp_path / "none.h5", "mels")
    with pytest.raises(KeyError, match="no_such"):
        hdf5_dataset(speech, "no_such")
    (tmp_path / "text.h5").write_text("no HDF5")
    with pytest.raises(HDF5Error):
        hdf5_dataset(tmp_path / "text.h5", "mels")


def test_torch_is_not_needed(speech: Path) -> None:
    code = f"""
import sys
class NoTorch:  # as where it is not installed: SciPy takes a None among the modules for torch
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, NoTorch())
import fastpipe
made = fastpipe.tf.hdf5_dataset({str(speech)!r}, "mels", "words", 53)
assert len(next(iter(made))[1]) == 53
from fastpipe.sampling import Uniform
import numpy
patches = fastpipe.tf.patch_dataset(numpy.zeros((8, 8, 8)), (2, 2, 2), sampling=Uniform(5), batch_size=5)
assert next(iter(patches)).shape == (5, 2, 2, 2)
print("done")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["done"], done.stderr[-2000:]
