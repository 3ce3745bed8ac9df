"""``hdf5_dataset`` and ``patch_dataset``: rows as h5py gives them, patches as NumPy cuts them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tensorflow as tf
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastpipe import BadSamples, Cache, Shard, Shuffle, ZScore
from fastpipe.errors import HDF5Error, OptionError, TooManyBadSamplesError
from fastpipe.sampling import Foreground, Grid, Positions, Uniform
from fastpipe.stores.fetching import ObjectReader
from fastpipe.tf import Augment, Dataset, ImageDataset, hdf5_dataset, patch_dataset

_ROWS, _SHAPE, _SIZE = 53, (20, 26, 23), (4, 5, 6)
_ANY = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def speech(tmp_path: Path) -> Path:
    """A file of log-mels in compressed chunks, with their words, speakers and names."""
    path = tmp_path / "speech.h5"
    with h5py.File(path, "w") as file:
        mels = np.random.default_rng(0).normal(size=(_ROWS, 6, 5)).astype(np.float32)
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


def test_datasets_of_their_own_are_samples(tmp_path: Path, same: Callable[..., None]) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for number in range(9):
            file[f"{number}/x"], file[f"{number}/y"] = (
                np.full((2, 3), number, ">f4"),
                np.zeros(number % 2 + 1),
            )
            file[f"{number}"].attrs.update({"n": number, "name": f"Zoë {number}"})
    made = hdf5_dataset(tmp_path / "x.h5", {"x": "*/x", "name": "*@name"}, "*@n", 4, Shuffle(), seed=1)
    assert sorted(_numbers(made)) == list(range(9))
    for inputs, words in made:
        np.testing.assert_array_equal(inputs["x"][:, 1, 1], words)
        assert [name.decode() for name in inputs["name"].numpy()] == [f"Zoë {word}" for word in words]
    made = hdf5_dataset(tmp_path / "x.h5", "*/x", "*@n", 4, False)
    same(made, made.reference())
    with pytest.raises(
        OptionError, match=r"'\*/y' are \(1,\) float64 in .*x\.h5, 0/y and \(2,\) float64 in .*, 1/y"
    ):
        hdf5_dataset(tmp_path / "x.h5", "*/y")


@pytest.mark.parametrize("name", ["mels", "words", "half", "names", "codes", "is_read"])
@pytest.mark.parametrize("batch_size", [None, 7])
def test_values_are_those_of_h5py(speech: Path, name: str, batch_size: int | None) -> None:
    made = hdf5_dataset(speech, name, batch_size=batch_size, shuffle=False)
    with h5py.File(speech) as file:
        expected = file[name][...]
    batches = [batch.numpy() for batch in made]
    found = np.concatenate(batches) if batch_size else np.stack(batches)
    np.testing.assert_array_equal(found, expected)
    assert made.element_spec.dtype == tf.string or found.dtype == expected.dtype.newbyteorder("=")
    assert len(made) == (_ROWS if batch_size is None else 8)


def test_elements_have_the_form_of_the_keys(speech: Path, same: Callable[..., None]) -> None:
    for keys, labels in (
        ("mels", None), ("mels", "words"), (["mels", "words"], None), ({"x": "mels", "n": "names"}, "words"),
    ):  # fmt: skip
        made = hdf5_dataset(speech, keys, labels, 10, shuffle=False)
        same(made, made.reference())
        assert isinstance(made, Dataset) and not isinstance(made, ImageDataset)


@pytest.mark.parametrize("policy", ["raise", "replace"])
def test_oddly_stored_rows_are_read(odd_hdf5: Path, policy: Any) -> None:
    with h5py.File(odd_hdf5) as file:
        expected = {name: file[name][...] for name in file}
    named = {str(number): name for number, name in enumerate(expected)}
    found = list(hdf5_dataset(odd_hdf5, named, batch_size=4, shuffle=False, bad_samples=policy))
    for number, name in named.items():
        np.testing.assert_array_equal(np.concatenate([batch[number] for batch in found]), expected[name])


@_ANY
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


def test_several_files_and_dimensions_are_one_table(tmp_path: Path) -> None:
    for number in range(3):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"] = np.arange(6).reshape(2, 3) + 10 * number
    made = hdf5_dataset(sorted(tmp_path.iterdir()), "x", shuffle=False, sample_dims=2, batch_size=100)
    assert next(iter(made)).numpy().tolist() == [10 * n + k for n in range(3) for k in range(6)]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (slice(3, 9, 2), [3, 5, 7]), ([8, 1, 1], [8, 1, 1]), ([-1], [52]), (range(2), [0, 1]),
        (np.arange(_ROWS) % 10 == 0, [0, 10, 20, 30, 40, 50]),
    ],
    ids=["slice", "numbers", "from the end", "range", "mask"],
)  # fmt: skip
def test_some_rows_are_chosen(speech: Path, rows: Any, expected: list[int]) -> None:
    made = hdf5_dataset(speech, "mels", "words", 2, False, rows=rows)
    assert _numbers(made) == expected == _numbers(made.reference())
    shuffled = hdf5_dataset(speech, "mels", "words", 2, Shuffle(2, "group"), rows=rows)
    assert sorted(_numbers(shuffled)) == sorted(expected)


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_chunks_are_decoded_once(speech: Path, tmp_path: Path, settled: Any, where: Any) -> None:
    settled(speech)
    cache = Cache(where, max_bytes=1 << 26, dir=tmp_path / "kept" if where == "disk" else None)
    made, seconds = hdf5_dataset(speech, "mels", "words", 8, cache=cache), []
    for _ in range(3):
        assert sorted(_numbers(made)) == list(range(_ROWS))
        seconds.append(made.stage_seconds["decode"])
    assert seconds == [seconds[0]] * 3 and "kept in" in made.plan


def test_a_file_of_a_store_is_staged(speech: Path, tmp_path: Path, same: Callable[..., None]) -> None:
    made = hdf5_dataset(f"file://{speech}", "mels", "words", 8, False, stage=tmp_path / "stage")
    same(made, hdf5_dataset(speech, "mels", "words", 8, False))
    with pytest.raises(OptionError, match="stage"):
        hdf5_dataset(f"file://{speech}", "mels")


def test_augment_of_rows_draws_by_position(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.random.default_rng(0).random((12, 8, 8, 3), np.float32)
        file["n"] = np.arange(12)
    flip = Augment(horizontal_flip=0.5, value_range=(0, 1), seed=1)
    one, other = (
        {int(n): image.numpy() for image, n in made.unbatch()}
        for made in (hdf5_dataset(tmp_path / "x.h5", "x", "n", s, seed=2, augment=flip) for s in (3, 5))
    )
    for number in range(12):
        np.testing.assert_array_equal(one[number], other[number])
    mapped = hdf5_dataset(tmp_path / "x.h5", "x", augment=lambda images: images + 1)
    assert float(tf.reduce_min(next(iter(mapped)))) >= 1


def test_rows_of_a_damaged_chunk_are_named_skipped_or_replaced(speech: Path) -> None:
    with h5py.File(speech) as file:
        info = file["mels"].id.get_chunk_info(2)
    with open(speech, "r+b") as raw:
        raw.seek(info.byte_offset)
        raw.write(b"\xff" * info.size)
    bad, off = {8, 9, 10, 11}, {"cache": "off"}
    with pytest.raises(tf.errors.OpError, match=r"sample 8 .*speech\.h5"):
        list(hdf5_dataset(speech, "mels", "words", 4, False, **off))
    skipped = hdf5_dataset(speech, "mels", "words", 10, False, bad_samples="skip", **off)
    batches = [words.numpy().tolist() for _, words in skipped]
    assert [len(batch) for batch in batches] == [10, 10, 10, 10, 9]
    assert sum(batches, []) == [row for row in range(_ROWS) if row not in bad]
    first, again = (
        _numbers(hdf5_dataset(speech, "mels", "words", size, seed=1, bad_samples="replace", **off))
        for size in (10, 4)
    )
    assert len(first) == _ROWS and not bad & set(first)
    assert again == first  # which takes whose place does not depend on batches
    few = hdf5_dataset(speech, "mels", "words", 4, bad_samples=BadSamples("skip", max_errors=2), **off)
    with pytest.raises(tf.errors.OpError, match=TooManyBadSamplesError.__name__):
        list(few)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"keys": "pairs"}, OptionError, r"pairs has elements of .*, for which TensorFlow has no type"),
        ({"keys": "ragged"}, OptionError, r"ragged has elements of object, for which TensorFlow has no type"),
        ({"labels": 3}, OptionError, r"labels must be the path of a dataset"),
        ({"rows": [53]}, OptionError, r"rows= must be whole numbers below 53"),
        ({"rows": "all"}, OptionError, r"rows= must be whole numbers below 53"),
        ({"rows": []}, OptionError, r"there are no rows"), ({"rows": [True]}, OptionError, r"rows= must be"),
        ({"batch_size": 0}, OptionError, r"batch_size must be a number from 1"),
        ({"shuffle": "yes"}, OptionError, r"shuffle must be True, False or a fastpipe.Shuffle"),
        ({"keys": ["mels", "words", "half"], "augment": Augment(horizontal_flip=0.5)}, OptionError, r"name two datasets"),
        ({"shard": Shard(0, 2)}, OptionError, r"needs seed="), ({"threads": 0}, OptionError, r"threads must be"),
        ({"keys": "no_such"}, KeyError, "no_such"), ({"path": "none.h5"}, FileNotFoundError, "none.h5"),
        ({"path": __file__}, HDF5Error, "HDF5"),
    ],
    ids=range(15),
)  # fmt: skip
def test_rows_that_do_not_fit_are_refused(
    speech: Path, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        hdf5_dataset(**{"path": speech, "keys": "mels", **arguments})


_VOXELS = np.random.default_rng(0).integers(0, 60000, _SHAPE, np.uint16)


@pytest.fixture(scope="module")
def zarrs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A volume in Zarr's folders, and labels of the same voxels that can be told from it."""
    folder = tmp_path_factory.mktemp("zarr")
    for name, values in (("image", _VOXELS), ("labels", (_VOXELS % 3).astype(np.uint8))):
        zarr.create_array(str(folder / name), data=values, chunks=(8, 9, 10))
    return str(folder / "image"), str(folder / "labels")


def _all(dataset: Any) -> Any:
    """The patches of an epoch, one array for each value of a sample."""
    batches = [tf.nest.flatten(element) for element in dataset]
    return [np.concatenate([batch[at].numpy() for batch in batches]) for at in range(len(batches[0]))]


def _in_any_order(patches: Any) -> list[bytes]:
    return sorted(patch.tobytes() for patch in patches)


@pytest.mark.parametrize(("batch_size", "channels"), [(3, "last"), (None, "as_stored")])
def test_patches_are_those_of_slices(zarrs: Any, channels: Any, batch_size: Any, same: Any) -> None:
    options: Any = {"sampling": Grid(), "padding": "reflect", "channels": channels}
    made = patch_dataset(zarrs[0], _SIZE, zarrs[1], batch_size, False, 1, **options)
    same(made, made.reference())
    assert made.cardinality() == len(list(made.reference()))
    first = next(iter(made))[0].numpy()
    first = first if batch_size is None else first[0]
    np.testing.assert_array_equal(first.reshape(_SIZE), _VOXELS[:4, :5, :6])
    assert first.shape == ((*_SIZE, 1) if channels == "last" else _SIZE)


def test_channels_go_behind() -> None:
    two = np.stack([_VOXELS, _VOXELS + 1])
    (batch,) = list(patch_dataset(two, _SIZE, sampling=Positions([(1, 2, 3)]), channels="last"))
    np.testing.assert_array_equal(batch[0].numpy(), np.moveaxis(two[:, 1:5, 2:7, 3:9], 0, -1))
    behind = np.moveaxis(two, 0, -1)  # as they are stored
    (other,) = list(
        patch_dataset(behind, _SIZE, sampling=Positions([(1, 2, 3)]), channels="last", channel_dim=-1)
    )
    np.testing.assert_array_equal(other.numpy(), batch.numpy())
    with pytest.raises(OptionError, match="channels='last' takes one dimension in front"):
        patch_dataset(two[None], _SIZE, channels="last")


def test_normalised_patches_are_those_of_the_normalised_volume(zarrs: Any, same: Any) -> None:
    made = patch_dataset(zarrs[0], _SIZE, zarrs[1], 3, False, 1, sampling=Grid(), normalize=ZScore())
    assert made.element_spec[0].dtype == tf.float32 and "normalised" in str(made.plan)
    same(made, made.reference())
    whole = (_VOXELS - _VOXELS.mean()) / _VOXELS.std()
    np.testing.assert_allclose(_all(made)[0][0], whole[:4, :5, :6], rtol=1e-5, atol=1e-6)


@_ANY
@given(st.data())
def test_any_patches_are_those_of_slices(zarrs: Any, data: st.DataObject) -> None:
    size = data.draw(st.tuples(*(st.integers(1, 9) for _ in _SHAPE)))
    places = [Uniform(7), Grid(), Foreground(6, 0.5), Positions([(0, 1, 2), (3, 3, 3)])]
    shuffles = [False, True, Shuffle(2, "group"), Shuffle(unit="group")]
    made = patch_dataset(
        zarrs[0], size, zarrs[1], data.draw(st.integers(1, 8)), data.draw(st.sampled_from(shuffles)),
        data.draw(st.integers(0, 99)), sampling=data.draw(st.sampled_from(places)), padding="edge",
        cache=data.draw(st.sampled_from(["off", "auto"])),
    )  # fmt: skip
    patches, labels = _all(made)
    np.testing.assert_array_equal(patches % 3, labels)
    assert _in_any_order(patches) == _in_any_order(_all(made.reference())[0])  # those of epoch 0


@pytest.mark.parametrize("shuffle", [False, True, Shuffle(unit="group")], ids=str)
def test_drawn_places_change_with_the_epoch_and_are_shared_by_ranks(zarrs: Any, shuffle: Any) -> None:
    def dataset(shard: Any = None) -> Any:
        return patch_dataset(zarrs[0], _SIZE, None, 2, shuffle, 5, sampling=Uniform(11), shard=shard)

    made = dataset()
    (first,), (second,) = _all(made), _all(made)
    assert first.shape == (11, *_SIZE) and not np.array_equal(first, second)
    again = dataset()
    again.set_epoch(1)
    np.testing.assert_array_equal(_all(again)[0], second)
    parts = np.concatenate([_all(dataset(Shard(rank, 3, "eval")))[0] for rank in range(3)])
    assert _in_any_order(parts) == _in_any_order(first)
    assert ("neighbourhood" in made.plan and "decoded parts" in made.plan) == isinstance(shuffle, Shuffle)


@pytest.mark.parametrize("is_staged", [False, True], ids=["ahead", "staged"])
@pytest.mark.parametrize("shuffle", [True, Shuffle(unit="group")], ids=str)
def test_chunks_of_a_store_are_fetched_ahead(
    zarrs: Any, tmp_path: Path, shuffle: Any, is_staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = {"patch_size": _SIZE, "batch_size": 4, "shuffle": shuffle, "seed": 5, "sampling": Uniform(30)}
    expected = patch_dataset(zarrs[0], **both)
    followed, real = list[int](), ObjectReader.follow

    def follow(self: Any, order: Any, uses: Any, *, is_here: bool) -> None:
        real(self, (followed.append(len(rows)) or rows for rows in order), uses, is_here=is_here)

    monkeypatch.setattr(ObjectReader, "follow", follow)
    made = patch_dataset(f"file://{zarrs[0]}", stage=tmp_path / "stage" if is_staged else None, **both)
    for _ in range(2):
        for batch, other in zip(made, expected, strict=True):
            np.testing.assert_array_equal(batch.numpy(), other.numpy())
    assert 0 < sum(followed) <= 3 * 3 * 3  # each chunk once, as all of them are remembered
    assert len(list(made.take(1))) == 1  # an epoch that is left
    assert len(list(made)) == 8


def test_augment_takes_slices() -> None:
    slices, both = _VOXELS.astype(np.float32), {"seed": 1, "sampling": Uniform(8)}
    made = patch_dataset(
        slices, (1, 8, 8), None, 4, channels="as_stored", augment=lambda images: tf.squeeze(images, 1), **both
    )
    assert next(iter(made)).shape == (4, 8, 8)
    flat = patch_dataset(slices[0], (8, 8), augment=Augment(horizontal_flip=1.0), channels="last", **both)
    plain = patch_dataset(slices[0], (8, 8), channels="last", **both)
    np.testing.assert_array_equal(_all(flat)[0], _all(plain)[0][:, :, ::-1])


def test_patches_of_a_damaged_chunk_are_named_skipped_or_replaced(tmp_path: Path) -> None:
    path = tmp_path / "image"
    zarr.create_array(str(path), data=_VOXELS, chunks=(8, 9, 10))
    (path / "c" / "0" / "0" / "0").write_bytes(bytes(30))
    places = Positions([(0, 0, 0), (12, 12, 12), (3, 2, 1), (9, 0, 0)])
    both = {"batch_size": 2, "shuffle": False, "sampling": places, "cache": "off"}
    with pytest.raises(tf.errors.OpError, match=r"image, patch of 4×5×6 at \(0, 0, 0\)"):
        list(patch_dataset(str(path), _SIZE, **both))
    (batch,) = list(patch_dataset(str(path), _SIZE, bad_samples="skip", **both))
    for patch, (z, y, x) in zip(batch.numpy(), [(12, 12, 12), (9, 0, 0)], strict=True):
        np.testing.assert_array_equal(patch, _VOXELS[z : z + 4, y : y + 5, x : x + 6])
    assert len(_all(patch_dataset(str(path), _SIZE, bad_samples="replace", **both))[0]) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"channels": "first"}, r"channels must be one of 'as_stored', 'last'"),
        ({"batch_size": 0}, r"batch_size must be a number from 1"), ({"shard": Shard(0, 2)}, r"needs seed="),
        ({"shuffle": 1}, r"shuffle must be True, False or a fastpipe.Shuffle"),
        ({"patch_size": (30, 5, 6)}, r"30"), ({"labels": np.zeros((3, 3, 3), np.uint8)}, r"labels"),
        ({"volume": np.zeros(_SHAPE, np.longdouble)}, "TensorFlow has no type"),
    ],
    ids=range(7),
)  # fmt: skip
def test_patches_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        patch_dataset(**{"volume": _VOXELS, "patch_size": _SIZE, **arguments})
