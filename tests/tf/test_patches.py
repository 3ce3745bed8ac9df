"""``fastpipe.tf.patch_dataset``: patches as NumPy cuts them, where seed and epoch put them."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastpipe import Shard, Shuffle
from fastpipe.errors import OptionError
from fastpipe.sampling import Foreground, Grid, Positions, Uniform
from fastpipe.stores.fetching import ObjectReader
from fastpipe.tf import Augment, patch_dataset

_SHAPE = (20, 26, 23)


@pytest.fixture(scope="module")
def volume() -> Any:
    """A volume, and labels of the same voxels that can be told from it."""
    voxels = np.random.default_rng(0).integers(0, 60000, _SHAPE, np.uint16)
    return voxels, (voxels % 3).astype(np.uint8)


@pytest.fixture(scope="module")
def zarrs(volume: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The same in Zarr's folders."""
    folder = tmp_path_factory.mktemp("zarr")
    for name, values in zip(("image", "labels"), volume, strict=True):
        zarr.create_array(str(folder / name), data=values, chunks=(8, 9, 10))
    return str(folder / "image"), str(folder / "labels")


def _all(dataset: Any) -> Any:
    """The patches of an epoch, one array for each value of a sample."""
    batches = [tf.nest.flatten(element) for element in dataset]
    return [np.concatenate([batch[at].numpy() for batch in batches]) for at in range(len(batches[0]))]


# ---- the same values ------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("channels", ["as_stored", "last"])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_patches_are_those_of_slices(zarrs: Any, volume: Any, channels: Any, batch_size: Any) -> None:
    made = patch_dataset(
        zarrs[0],
        (4, 5, 6),
        zarrs[1],
        batch_size,
        False,
        1,
        sampling=Grid(),
        padding="reflect",
        channels=channels,
    )
    reference = made.reference()
    assert made.element_spec == reference.element_spec
    assert made.cardinality() == len(list(reference))
    for element, expected in zip(made, reference, strict=True):
        for one, other in zip(element, expected, strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy())
    first = next(iter(made))[0].numpy()
    first = first if batch_size is None else first[0]
    np.testing.assert_array_equal(first.reshape(4, 5, 6), volume[0][:4, :5, :6])
    assert first.shape == ((4, 5, 6, 1) if channels == "last" else (4, 5, 6))


def test_channels_go_behind(volume: Any) -> None:
    two = np.stack([volume[0], volume[0] + 1])
    made = patch_dataset(two, (4, 5, 6), sampling=Positions([(1, 2, 3)]), channels="last")
    (batch,) = list(made)
    np.testing.assert_array_equal(batch[0].numpy(), np.moveaxis(two[:, 1:5, 2:7, 3:9], 0, -1))
    with pytest.raises(OptionError, match="channels='last' takes one dimension in front"):
        patch_dataset(two[None], (4, 5, 6), channels="last")


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_patches_are_those_of_slices(zarrs: Any, data: st.DataObject) -> None:
    size = data.draw(st.tuples(*(st.integers(1, 9) for _ in _SHAPE)))
    sampling = data.draw(
        st.sampled_from([Uniform(7), Grid(), Foreground(6, 0.5), Positions([(0, 1, 2), (3, 3, 3)])])
    )
    shuffle = data.draw(st.sampled_from([False, True, Shuffle(2, "group"), Shuffle(unit="group")]))
    made = patch_dataset(
        zarrs[0], size, zarrs[1], data.draw(st.integers(1, 8)), shuffle, data.draw(st.integers(0, 99)),
        sampling=sampling, padding="edge", cache=data.draw(st.sampled_from(["off", "auto"])),
    )  # fmt: skip
    patches, labels = _all(made)
    np.testing.assert_array_equal(patches % 3, labels)
    expected, _ = _all(made.reference())
    found = sorted(patch.tobytes() for patch in patches)
    assert found == sorted(patch.tobytes() for patch in expected)  # those of epoch 0, in any order


# ---- orders ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True, Shuffle(unit="group")], ids=str)
def test_epochs_differ_and_repeat_by_their_seed(zarrs: Any, shuffle: Any) -> None:
    def dataset() -> Any:
        return patch_dataset(zarrs[0], (4, 5, 6), None, 4, shuffle, 5, sampling=Uniform(11))

    made = dataset()
    (first,), (second,) = _all(made), _all(made)
    assert first.shape == (11, 4, 5, 6)
    assert not np.array_equal(first, second)
    again = dataset()
    again.set_epoch(1)
    np.testing.assert_array_equal(_all(again)[0], second)


def test_a_tour_decodes_less(zarrs: Any) -> None:
    plan = patch_dataset(zarrs[0], (4, 5, 6), None, 4, Shuffle(unit="group"), 5, sampling=Uniform(50)).plan
    assert "neighbourhood" in plan and "decoded parts" in plan


@pytest.mark.parametrize("shuffle", [False, True, Shuffle(unit="group")], ids=str)
def test_ranks_share_an_epoch(zarrs: Any, shuffle: Any) -> None:
    def dataset(shard: Any = None) -> Any:
        return patch_dataset(zarrs[0], (4, 5, 6), None, 2, shuffle, 5, sampling=Uniform(11), shard=shard)

    every = sorted(patch.tobytes() for patch in _all(dataset())[0])
    ranks = [_all(dataset(Shard(rank, 3, "eval")))[0] for rank in range(3)]
    assert sorted(patch.tobytes() for rank in ranks for patch in rank) == every


# ---- stores -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_staged", [False, True], ids=["ahead", "staged"])
@pytest.mark.parametrize("shuffle", [True, Shuffle(unit="group")], ids=str)
def test_chunks_of_a_store_are_fetched_ahead(
    zarrs: Any, tmp_path: Path, shuffle: Any, is_staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = {"patch_size": (4, 5, 6), "batch_size": 4, "shuffle": shuffle, "seed": 5, "sampling": Uniform(30)}
    expected = patch_dataset(*zarrs[:1], **both)
    followed: list[int] = []
    real = ObjectReader.follow

    def follow(self: Any, order: Any, uses: Any, *, is_here: bool) -> None:
        def counted() -> Any:
            for rows in order:
                followed.append(len(rows))
                yield rows

        real(self, counted(), uses, is_here=is_here)

    monkeypatch.setattr(ObjectReader, "follow", follow)
    made = patch_dataset(f"file://{zarrs[0]}", stage=tmp_path / "stage" if is_staged else None, **both)
    for _ in range(2):
        for batch, other in zip(made, expected, strict=True):
            np.testing.assert_array_equal(batch.numpy(), other.numpy())
    assert sum(followed) > 0  # each chunk once, as all of them are remembered
    assert sum(followed) <= 3 * 3 * 3
    for _ in made.take(1):  # an epoch that is left
        pass
    assert len(list(made)) == 8


# ---- life, Keras, faults -----------------------------------------------------------------------


def test_the_array_is_let_go_of_with_the_dataset(volume: Any) -> None:
    array = volume[0].copy()
    gone = weakref.ref(array)
    made = patch_dataset(array, (4, 5, 6), sampling=Uniform(4))
    _all(made)
    _all(made.reference())
    del array, made
    deadline = time.monotonic() + 30  # TensorFlow's threads let go when they like
    while gone() is not None and time.monotonic() < deadline:
        gc.collect()
    assert gone() is None


def test_keras_trains_on_it(zarrs: Any) -> None:
    made = patch_dataset(
        zarrs[0], (4, 4, 4), zarrs[1], 2, seed=1, sampling=Uniform(6), channels="last",
        augment=lambda image, labels: (tf.cast(image, tf.float32) / 60000, labels),
    )  # fmt: skip
    model = keras.Sequential([keras.Input((4, 4, 4, 1)), keras.layers.Conv3D(3, 3, padding="same")])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(made, epochs=2, verbose=0, shuffle=False)
    assert np.isfinite(history.history["loss"]).all()


def test_augment_takes_slices(volume: Any) -> None:
    made = patch_dataset(
        volume[0].astype(np.float32), (1, 8, 8), None, 4, seed=1, sampling=Uniform(8), channels="as_stored",
        augment=lambda images: tf.squeeze(images, 1),
    )  # fmt: skip
    assert next(iter(made)).shape == (4, 8, 8)
    both = {"seed": 1, "sampling": Uniform(8), "channels": "last"}
    slices = volume[0][0].astype(np.float32)
    flat = patch_dataset(slices, (8, 8), augment=Augment(horizontal_flip=1.0), **both)
    plain = patch_dataset(slices, (8, 8), **both)
    np.testing.assert_array_equal(_all(flat)[0], _all(plain)[0][:, :, ::-1])


def test_a_damaged_chunk_is_named(volume: Any, tmp_path: Path) -> None:
    zarr.create_array(str(tmp_path / "image"), data=volume[0], chunks=(8, 9, 10))
    (tmp_path / "image" / "c" / "0" / "0" / "0").write_bytes(bytes(30))
    places = Positions([(0, 0, 0), (12, 12, 12), (3, 2, 1), (9, 0, 0)])
    both = {"shuffle": False, "sampling": places, "cache": "off"}
    made = patch_dataset(str(tmp_path / "image"), (4, 5, 6), None, 2, **both)
    with pytest.raises(tf.errors.OpError, match=r"image, patch of 4×5×6 at \(0, 0, 0\)"):
        list(made)
    skipped = patch_dataset(str(tmp_path / "image"), (4, 5, 6), None, 2, bad_samples="skip", **both)
    (batch,) = list(skipped)
    for patch, (z, y, x) in zip(batch.numpy(), [(12, 12, 12), (9, 0, 0)], strict=True):
        np.testing.assert_array_equal(patch, volume[0][z : z + 4, y : y + 5, x : x + 6])
    replaced = patch_dataset(str(tmp_path / "image"), (4, 5, 6), None, 2, bad_samples="replace", **both)
    assert len(_all(replaced)[0]) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"channels": "first"}, r"channels must be one of 'as_stored', 'last'"),
        ({"batch_size": 0}, r"batch_size must be a number from 1"),
        ({"shuffle": 1}, r"shuffle must be True, False or a fastpipe.Shuffle"),
        ({"patch_size": (30, 5, 6)}, r"30"),
        ({"labels": np.zeros((3, 3, 3), np.uint8)}, r"labels"),
        ({"shard": Shard(0, 2)}, r"needs seed="),
    ],
    ids=range(6),
)
def test_what_cannot_be_is_said(volume: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        patch_dataset(**{"volume": volume[0], "patch_size": (4, 5, 6), **arguments})
    with pytest.raises(OptionError, match="TensorFlow has no type"):
        patch_dataset(np.zeros((4, 4), np.longdouble), (2, 2))
