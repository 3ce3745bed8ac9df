"""``fastpipe.tf.Augment`` against ``fastpipe.augment``, and in the places where scripts put it."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpipe
import fastpipe.tf
from fastpipe import augment as of_torch
from fastpipe.core import keys
from fastpipe.core.native import native
from fastpipe.core.types import Key
from fastpipe.errors import AugmentError
from fastpipe.tf import Augment
from fastpipe.tf import augment as augment_module
from fastpipe.tf.augment_ops import uniforms

_ALL: dict[str, Any] = {
    "horizontal_flip": 0.5, "vertical_flip": 0.3, "rotation": 20, "translation": (0.1, 0.2),
    "zoom": (0.8, 1.3), "brightness": 0.3, "contrast": 0.3, "saturation": 0.4, "hue": 0.1, "cutout": 0.5,
}  # fmt: skip
_COLOURS: dict[str, Any] = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.2}
_WARP: dict[str, Any] = {"rotation": 30, "translation": (0.1, 0.2), "zoom": (0.8, 1.3)}
_CASES: list[tuple[dict[str, Any], list[Any]]] = [
    ({"horizontal_flip": 0.5}, [of_torch.RandomHorizontalFlip(0.5)]),
    ({"vertical_flip": 0.5}, [of_torch.RandomVerticalFlip(0.5)]),
    (_WARP, [of_torch.RandomAffine(30, (0.1, 0.2), (0.8, 1.3), interpolation="bilinear")]),
    ({"rotation": (10, 60), "fill": 1.0}, [of_torch.RandomAffine((10, 60), interpolation="bilinear", fill=1.0)]),
    ({"rotation": 30, "interpolation": "nearest"}, [of_torch.RandomAffine(30)]),
    ({"brightness": 0.4}, [of_torch.ColorJitter(0.4)]),
    ({"contrast": (0.5, 2.0)}, [of_torch.ColorJitter(0, (0.5, 2.0))]),
    (_COLOURS, [of_torch.ColorJitter(0.4, 0.4, 0.4, 0.2)]),
    ({"cutout": 0.7}, [of_torch.RandomErasing(0.7)]),
    (
        _ALL,
        [
            of_torch.RandomHorizontalFlip(0.5), of_torch.RandomVerticalFlip(0.3),
            of_torch.RandomAffine(20, (0.1, 0.2), (0.8, 1.3), interpolation="bilinear"),
            of_torch.ColorJitter(0.3, 0.3, 0.4, 0.1), of_torch.RandomErasing(0.5),
        ],
    ),
]  # fmt: skip
_KEY = Key(5, 2, np.arange(16))
_WAYS = ("eager", "map", "operations", "compiled", "compiled by the caller")


def _changed(augment: Any, images: Any, way: str, key: Any = _KEY) -> Any:
    """Images as a way changes them: the first two of ``_WAYS`` are the native core's."""
    key = tuple(tf.constant(one, tf.int64) for one in key)
    if way == "eager":
        return augment(images, key=key).numpy()
    if way == "map":
        dataset = tf.data.Dataset.from_tensors(images).map(lambda one: augment(one, key=key))
        assert dataset.element_spec.shape == images.shape
        return next(iter(dataset)).numpy()
    compiled = way == "compiled by the caller"
    return tf.function(lambda one: augment(one, key=key), jit_compile=compiled or None)(images).numpy()


def _images(dtype: str, shape: tuple[int, ...] = (16, 40, 52, 3)) -> Any:
    images = np.random.default_rng(0).random(shape, np.float32)
    return (images * 255).astype(np.uint8) if dtype == "uint8" else images


@settings(deadline=None, max_examples=20)
@given(
    st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40),
    st.lists(st.integers(0, 2**62), min_size=1, max_size=5), st.integers(1, 40),
)  # fmt: skip
def test_its_numbers_are_those_of_keys(seed: int, epoch: int, draws: list[int], count: int) -> None:
    given = (tf.constant(value, tf.int64) for value in (seed, epoch, draws))
    made = uniforms(*given, count)
    np.testing.assert_array_equal(made.numpy(), keys.uniforms(seed, epoch, np.array(draws, np.int64), count))


@pytest.mark.few(6)
@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("dtype", ["float32", "uint8"])
@pytest.mark.parametrize("number", range(len(_CASES)), ids=lambda number: "+".join(_CASES[number][0]))
def test_it_changes_images_as_fastpipe_augment_does(
    number: int, dtype: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch's products of matrices as Augment has them: on some processors its library fuses operations.
    monkeypatch.setattr("fastpipe.augment.geometry._library_fuses", lambda: False)
    arguments, chain = _CASES[number]
    images = _images(dtype)
    augment = Augment(value_range=(0, 1), jit_compile=way == "compiled", **arguments)
    by_torch = of_torch.Compose(chain)(torch.from_numpy(images).movedim(-1, 1).contiguous(), key=_KEY)
    made, wanted = _changed(augment, images, way), by_torch.movedim(1, -1).numpy()
    assert made.dtype == wanted.dtype == dtype
    assert np.any(wanted != images)
    if way in _WAYS[:2]:
        np.testing.assert_array_equal(made, wanted)
        return
    apart = np.abs(made.astype(np.float64) - wanted)
    if dtype == "uint8":  # what a warp rounds the other way, steps that come after it enlarge
        assert apart.max() <= (4 if "hue" in arguments else 1)
        assert (apart > 0).mean() < 1e-3
    else:
        assert apart.max() < 2e-5


@pytest.mark.few(5)
@pytest.mark.parametrize("dtype", ["uint8", "float16", "bfloat16", "float32"])
@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("size", [(1, 1), (1, 9), (7, 1), (17, 31)], ids=str)
def test_the_native_core_gives_what_the_operations_give(size: Any, channels: int, dtype: str) -> None:
    images = tf.cast(_images("float32", (16, *size, channels)) * 255, dtype)
    augment = Augment(jit_compile=False, fill=3, **_ALL)
    made, again, wanted = (
        _changed(augment, images, way).astype(np.float32) for way in ("eager", "map", "operations")
    )
    np.testing.assert_array_equal(made, again)
    apart = np.abs(made - wanted)
    if dtype in ("float16", "bfloat16"):
        one_unit = 0.25 if dtype == "float16" else 2  # in the last place of 255
        of_floats = tf.cast(_changed(augment, tf.cast(images, tf.float32), "eager"), dtype)
        assert max(apart.max(), np.abs(made - tf.cast(of_floats, tf.float32)).max()) <= one_unit
    elif dtype == "float32":
        assert apart.max() <= 0.01
    else:
        assert apart.max() <= 4 and (apart > 0).sum() <= 2 + 0.01 * apart.size


def test_nan_and_infinity_stay_where_they_are_and_an_endless_warp_reads_nothing_outside() -> None:
    images = _images("float32")
    images[:, 0, 0], images[:, 5, 5], images[:, 39, 51] = np.nan, np.inf, -np.inf
    made = Augment(horizontal_flip=0.5, vertical_flip=0.5)(images, key=_KEY).numpy()
    np.testing.assert_array_equal(np.sort(made.reshape(16, -1)), np.sort(images.reshape(16, -1)))
    warped = Augment(rotation=5, translation=0.1)(images, key=_KEY).numpy()
    assert 0 < np.isnan(warped).mean() < 0.05
    for endless in ({"rotation": (-np.inf, np.inf)}, {"zoom": (1e-30, 1e-30)}, {"zoom": (1e30, 1e30)}):
        with np.errstate(all="ignore"):
            made = Augment(fill=0.5, **endless)(_images("float32") + 1, key=_KEY).numpy()
        assert made.min() >= 0.5 and made.max() <= 2, endless


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32"])
def test_no_instruction_set_changes_a_bit(dtype: str) -> None:
    images = tf.cast(_images("float32", (16, 33, 51, 3)) * 255, dtype)
    augment, before = Augment(**_ALL), native.level()
    try:
        levels = [level for level in range(3) if native.force_level(level)]
        made = [augment(images, key=_KEY).numpy().tobytes() for level in levels if native.force_level(level)]
    finally:
        assert native.force_level(before)
    assert len(set(made)) == 1


def test_datasets_are_changed_natively_and_functions_by_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, change = list[Any](), augment_module.change_natively

    def noted(images: Any, *others: Any) -> Any:
        shapes.append(images.shape)
        return change(images, *others)

    monkeypatch.setattr(augment_module, "change_natively", noted)
    images, augment = tf.constant(_images("uint8")), Augment(jit_compile=False, rotation=20, contrast=0.3)
    dataset, function = tf.data.Dataset.from_tensors(images), tf.function(augment)
    function(images)
    tf.function(lambda image: function(image), jit_compile=True)(images)  # the trace is used again
    assert len(list(dataset.map(tf.function(augment)))) == 1
    assert shapes == []
    augment(images)
    assert shapes == [images.shape]
    assert len(list(dataset.map(augment, num_parallel_calls=2))) == 1
    assert len(list(dataset.map(lambda image: augment(image) // 2))) == 1
    assert len(list(dataset.flat_map(lambda image: dataset.map(augment)))) == 1
    assert len(shapes) == 4


def test_gradients_are_those_of_the_operations() -> None:
    some = {name: _ALL[name] for name in ("horizontal_flip", "rotation", "contrast", "cutout")}
    augment, images = Augment(jit_compile=False, **some), tf.constant(_images("float32") * 255)
    weights = tf.constant(np.random.default_rng(1).random(images.shape, np.float32))
    gradients = []
    for change in (augment, tf.function(augment)):
        with tf.GradientTape() as tape:
            tape.watch(images)
            loss = tf.reduce_sum(change(images * 1.0, key=tuple(map(tf.constant, _KEY))) * weights)
        gradients.append(tape.gradient(loss, images))
    assert np.any(gradients[0] != 0)
    np.testing.assert_allclose(gradients[0], gradients[1], atol=1e-5)


def test_a_sample_changes_by_its_own_key_only() -> None:
    augment, images = Augment(**_ALL), _images("float32") * 255
    whole = augment(images, key=_KEY).numpy()
    for draws in (np.random.default_rng(1).permutation(16), np.arange(3, 8)):
        some = augment(images[draws], key=Key(5, 2, draws))
        np.testing.assert_allclose(some, whole[draws], atol=1e-3)


def test_calls_differ_and_the_seed_repeats_them() -> None:
    images = np.repeat(_images("float32")[:1], 8, axis=0)
    first, again = (Augment(seed=3, jit_compile=False, **_ALL) for _ in range(2))
    one, two = first(images).numpy(), first(images).numpy()
    assert len(np.unique(one.reshape(8, -1), axis=0)) == 8
    assert np.all(np.any(one != two, axis=(1, 2, 3)))
    np.testing.assert_array_equal(one, again(images).numpy())
    np.testing.assert_array_equal(two, again(images).numpy())
    assert np.any(one != Augment(seed=4, jit_compile=False, **_ALL)(images).numpy())
    seeds = []
    for seed in (7, 7, None):
        if seed is not None:
            np.random.seed(seed)
        seeds.append(Augment(horizontal_flip=0.5).get_config()["seed"])
    assert seeds[0] == seeds[1] != seeds[2], "by default it comes from NumPy's global generator"


def test_modalities_share_their_geometry_whatever_their_sizes_and_name_what_is_changed() -> None:
    small = _images("float32", (16, 32, 32, 3))
    large = np.repeat(np.repeat(small, 2, axis=1), 2, axis=2)
    inputs = {"rgb": small, "depth": large, "age": np.arange(16.0)}
    made = Augment(horizontal_flip=0.5, vertical_flip=0.5, seed=1)(inputs, training=True)
    assert list(made) == list(inputs)
    np.testing.assert_array_equal(made["age"], inputs["age"])
    np.testing.assert_array_equal(made["depth"][:, ::2, ::2], made["rgb"])
    assert np.any(made["rgb"] != small)
    augment = Augment(horizontal_flip=0.5, brightness=0.5, modalities=["rgb", "depth"], colours=["rgb"])
    made = augment({"rgb": small, "depth": small, "mask": small}, key=_KEY)
    flips = Augment(horizontal_flip=0.5)(small, key=_KEY).numpy()
    np.testing.assert_array_equal(made["mask"], small)
    np.testing.assert_array_equal(made["depth"], flips)
    assert np.any(made["rgb"] != flips)


def test_labels_are_handed_through() -> None:
    images, labels = _images("uint8"), np.arange(16)
    np.testing.assert_array_equal(Augment(horizontal_flip=0.5)(images, labels)[1], labels)
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(4)
    augment = Augment(seed=5, **_ALL)
    mapped = dataset.map(augment, num_parallel_calls=2)
    assert mapped.element_spec == dataset.element_spec
    assert np.concatenate([one[1].numpy() for one in mapped]).tolist() == labels.tolist()
    for inputs, _ in dataset.map(lambda image, label: ({"a": image, "b": image}, label)).map(augment):
        np.testing.assert_array_equal(inputs["a"], inputs["b"])


def _model(augment: Any, **options: Any) -> Any:
    model = keras.Sequential([
        keras.Input((16, 16, 3)), augment, keras.layers.Rescaling(1 / 255),
        keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(3),
    ])  # fmt: skip
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    return model


def test_a_model_augments_while_it_trains_only_and_is_saved_and_loaded(tmp_path: Any) -> None:
    augment = Augment(seed=1, name="changes", modalities=None, cutout_scale=(0.1, 0.2), **_ALL)
    assert Augment.from_config(augment.get_config()).get_config() == augment.get_config()
    model = keras.Sequential([keras.Input((40, 52, 3)), augment])
    images = _images("float32") * 255
    np.testing.assert_array_equal(model(images, training=False), images)
    np.testing.assert_array_equal(model.predict(images, verbose=0), images)
    assert np.any(model(images, training=True).numpy() != images)
    assert np.any(augment(images).numpy() != images)  # as a function, always
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Keras's own calls of NumPy
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(images, training=True), model(images, training=True))


@pytest.mark.few(1)
@pytest.mark.parametrize("jit_compile", [True, False])
def test_a_model_with_it_fits(jit_compile: bool) -> None:
    augment = Augment(seed=1, **_ALL)
    images = _images("uint8", (20, 16, 16, 3)).astype(np.float32)
    model = _model(augment, jit_compile=jit_compile)
    history = model.fit(images, np.arange(20) % 3, batch_size=8, epochs=2, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    assert int(augment.calls.value) == 6  # the last batch, of 4, among them


def test_replicas_draw_other_numbers_and_fit(two_replicas: Any) -> None:
    with two_replicas.scope():
        augment, other = (Augment(seed=1, zoom=(0.5, 2), brightness=0.4) for _ in range(2))
        model = _model(other)
    images = tf.constant(np.repeat(_images("float32")[:1], 4, axis=0))

    @tf.function
    def step() -> Any:
        return two_replicas.run(lambda: augment(images))

    seen = [one.numpy() for _ in range(2) for one in two_replicas.experimental_local_results(step())]
    assert len(np.unique(np.concatenate(seen).reshape(16, -1), axis=0)) == 16
    assert int(augment.calls.numpy()) == 2
    model.fit(_images("uint8", (16, 16, 16, 3)), np.arange(16) % 3, batch_size=8, verbose=0)


def test_a_dataset_draws_by_seed_epoch_and_position(photo_table: Any) -> None:
    both = {"boxes": "box", "image_size": 32, "seed": 9, "rescale": 1 / 255, "batch_size": 5}
    augment = Augment(value_range=(0, 1), **_ALL)
    made = fastpipe.tf.image_dataset(photo_table.table, augment=augment, **both)
    plain = fastpipe.tf.image_dataset(photo_table.table, **both)
    for epoch in range(2):
        at = 0
        for (images, labels), (before, wanted) in zip(made, plain, strict=True):
            key = Key(9, epoch, np.arange(at, at + len(before)))
            np.testing.assert_array_equal(labels, wanted)
            np.testing.assert_allclose(images, augment(before, key=key), atol=1e-5)
            at += len(before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"horizontal_flip": 1.5}, "horizontal_flip must be a probability"),
        ({"rotation": (10, -10)}, "rotation= must be a number of at least 0, or two"),
        ({"rotation": -5}, "rotation="), ({"rotation": None}, "rotation="), ({"zoom": 1.5}, "zoom="),
        ({"zoom": 1.0}, "zoom= must give factors above 0"), ({"translation": 2}, "translation must"),
        ({"translation": (0.1, 0.2, 0.3)}, "translation must"), ({"translation": (0.1,)}, "translation must"),
        ({"brightness": (-1, 1)}, "brightness="), ({"hue": 0.7}, "hue="),
        ({"cutout": float("nan")}, "cutout must"), ({"cutout_scale": (0.5, 0.1)}, "cutout_scale must"),
        ({"interpolation": "cubic"}, "interpolation"), ({"value_range": (1, 0)}, "value_range="),
        ({"seed": 1.75}, "float"),
    ],
    ids=str,
)  # fmt: skip
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((fastpipe.errors.FastpipeError, TypeError), match=message):
        Augment(**{"horizontal_flip": 0.5, **arguments})


@pytest.mark.parametrize(
    ("options", "inputs", "message"),
    [
        ({}, np.zeros((8, 8, 3), np.float32), r"takes batches \(N, H, W, C\); the input has shape \(8, 8, 3\)"),
        ({}, np.zeros((2, 3, 32, 32), np.float32), "channels last"),
        ({}, np.zeros((2, 8, 8, 3), np.int32), "the input is int32"),
        ({}, {"a": np.zeros((2, 3))}, r"there are no images \(N, H, W, C\) among the inputs \['a'\]"),
        ({"modalities": ["b"]}, {"a": np.zeros((2, 8, 8, 3), np.float32)}, "modalities= names 'b'"),
        *(
            ({"cutout": 1.0, "fill": fill}, np.zeros((2, 8, 8, 3), np.uint8), "uint8 need a whole number")
            for fill in (300, -1, 0.5)
        ),
    ],
    ids=["no batch", "channels first", "int32", "no images", "no modality", "300", "-1", "0.5"],
)  # fmt: skip
def test_inputs_that_do_not_fit_are_refused(options: dict[str, Any], inputs: Any, message: str) -> None:
    with pytest.raises(AugmentError, match=message):
        Augment(**{"horizontal_flip": 0.5, **options})(inputs)
