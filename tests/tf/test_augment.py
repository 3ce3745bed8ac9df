"""``fastpipe.tf.Augment`` against ``fastpipe.augment``, and in the places where scripts put it."""

from __future__ import annotations

import subprocess
import sys
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
_CASES: list[tuple[dict[str, Any], list[Any]]] = [
    ({"horizontal_flip": 0.5}, [of_torch.RandomHorizontalFlip(0.5)]),
    ({"vertical_flip": 0.5}, [of_torch.RandomVerticalFlip(0.5)]),
    (
        {"rotation": 30, "translation": (0.1, 0.2), "zoom": (0.8, 1.3)},
        [of_torch.RandomAffine(30, (0.1, 0.2), (0.8, 1.3), interpolation="bilinear")],
    ),
    ({"rotation": (10, 60), "fill": 0.5}, [of_torch.RandomAffine((10, 60), interpolation="bilinear", fill=0.5)]),
    ({"rotation": 30, "interpolation": "nearest"}, [of_torch.RandomAffine(30)]),
    ({"brightness": 0.4}, [of_torch.ColorJitter(0.4)]),
    ({"contrast": (0.5, 2.0)}, [of_torch.ColorJitter(0, (0.5, 2.0))]),
    (
        {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.2},
        [of_torch.ColorJitter(0.4, 0.4, 0.4, 0.2)],
    ),
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


@pytest.fixture
def not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's products of matrices as Augment has them: on some processors its library fuses operations."""
    monkeypatch.setattr("fastpipe.augment.geometry._library_fuses", lambda: False)


@pytest.fixture
def natively_changed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of batches that the native core changes from now on."""
    shapes: list[tuple[int, ...]] = []
    changed = augment_module.change_natively

    def noted(images: Any, *others: Any) -> Any:
        shapes.append(images.shape)
        return changed(images, *others)

    monkeypatch.setattr(augment_module, "change_natively", noted)
    return shapes


def _images(dtype: str, shape: tuple[int, ...] = (16, 40, 52, 3)) -> Any:
    images = np.random.default_rng(0).random(shape, np.float32)
    return (images * 255).astype(np.uint8) if dtype == "uint8" else images


def _by_torch(chain: list[Any], images: Any) -> Any:
    made = of_torch.Compose(chain)(torch.from_numpy(images).movedim(-1, 1).contiguous(), key=_KEY)
    return made.movedim(1, -1).numpy()


# ---- equal to the torch side -----------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(
    st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40),
    st.lists(st.integers(0, 2**62), min_size=1, max_size=5), st.integers(1, 40),
)  # fmt: skip
def test_the_numbers_are_those_of_keys(seed: int, epoch: int, draws: list[int], count: int) -> None:
    made = uniforms(
        tf.constant(seed, tf.int64), tf.constant(epoch, tf.int64), tf.constant(draws, tf.int64), count
    )
    np.testing.assert_array_equal(made.numpy(), keys.uniforms(seed, epoch, np.array(draws, np.int64), count))


@pytest.mark.few(16)
@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("dtype", ["float32", "uint8"])
@pytest.mark.parametrize("number", range(len(_CASES)), ids=lambda number: "+".join(_CASES[number][0]))
def test_equal_to_torch(number: int, dtype: str, way: str, not_fused: None) -> None:
    arguments, chain = _CASES[number]
    if dtype == "uint8" and "fill" in arguments:
        arguments = {**arguments, "fill": 128}
        chain = [of_torch.RandomAffine((10, 60), interpolation="bilinear", fill=128)]
    images = _images(dtype)
    augment = Augment(value_range=(0, 1), jit_compile=way == "compiled", **arguments)
    made = _changed(augment, images, way)
    wanted = _by_torch(chain, images)
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


@pytest.mark.parametrize("dtype", ["uint8", "float16", "bfloat16", "float32"])
@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("size", [(1, 1), (1, 9), (7, 1), (17, 31)], ids=str)
def test_the_native_core_gives_what_the_operations_give(
    size: tuple[int, int], channels: int, dtype: str
) -> None:
    images = tf.cast(_images("float32", (16, *size, channels)) * 255, dtype)
    augment = Augment(jit_compile=False, fill=3, **_ALL)
    made, again, wanted = (
        _changed(augment, images, way).astype(np.float32) for way in ("eager", "map", "operations")
    )
    np.testing.assert_array_equal(made, again)
    apart = np.abs(made - wanted)
    if dtype in ("float16", "bfloat16"):
        assert apart.max() <= (0.25 if dtype == "float16" else 2)  # one unit in the last place of 255
    elif dtype == "float32":
        assert apart.max() <= 0.01
    else:
        assert apart.max() <= 4 and (apart > 0).sum() <= 2 + 0.01 * apart.size


@pytest.mark.parametrize("values", [(0, 1), (-1, 1), (-5, 20)], ids=str)
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_both_ways_agree_in_any_range_of_values(values: tuple[float, float], interpolation: Any) -> None:
    low, high = values
    images = _images("float32") * (high - low) + low
    augment = Augment(value_range=values, fill=low, interpolation=interpolation, jit_compile=False, **_ALL)
    one, other = (_changed(augment, images, way) for way in ("eager", "operations"))
    apart = np.abs(one - other)
    # A place in the middle between two pixels may be either's.
    assert (apart > 1e-4 * (high - low)).mean() < (1e-3 if interpolation == "nearest" else 1e-9)


def test_numbers_that_are_none_stay_where_they_are() -> None:
    images = _images("float32")
    images[:, 0, 0], images[:, 5, 5], images[:, 39, 51] = np.nan, np.inf, -np.inf
    made = Augment(horizontal_flip=0.5, vertical_flip=0.5)(images, key=_KEY).numpy()
    np.testing.assert_array_equal(np.sort(made.reshape(16, -1)), np.sort(images.reshape(16, -1)))
    warped = Augment(rotation=5, translation=0.1)(images, key=_KEY).numpy()
    assert 0 < np.isnan(warped).mean() < 0.05


def test_of_matrices_that_are_none_nothing_outside_is_read() -> None:
    images = _images("float32") + 1
    cases: list[dict[str, Any]] = [
        {"rotation": (-np.inf, np.inf)}, {"zoom": (1e-30, 1e-30)}, {"zoom": (1e30, 1e30)},
    ]  # fmt: skip
    for arguments in cases:
        with np.errstate(all="ignore"):
            made = Augment(fill=0.5, **arguments)(images, key=_KEY).numpy()
        assert made.min() >= 0.5 and made.max() <= 2


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32"])
def test_no_instruction_set_changes_a_bit(dtype: str) -> None:
    images = tf.cast(_images("float32", (16, 33, 51, 3)) * 255, dtype)
    augment, before = Augment(**_ALL), native.level()
    try:
        made = [
            augment(images, key=_KEY).numpy().tobytes() for level in range(3) if native.force_level(level)
        ]
    finally:
        assert native.force_level(before)
    assert len(set(made)) == 1


@pytest.mark.parametrize("shape", [(0, 8, 8, 3), (2, 0, 8, 3), (2, 8, 0, 3)], ids=str)
def test_images_of_no_pixels(shape: tuple[int, ...]) -> None:
    images = np.zeros(shape, np.float32)
    key = Key(0, 0, np.arange(shape[0]))
    assert Augment(**_ALL)(images, key=key).shape == shape
    assert _changed(Augment(**_ALL), images, "map", key).shape == shape


def test_without_changes_images_stay() -> None:
    images = _images("uint8")
    cases: list[tuple[dict[str, Any], int]] = [({}, 3), ({"brightness": 0.5}, 5), ({"hue": 0.5}, 1)]
    for arguments, channels in cases:
        given = np.resize(images, (16, 8, 9, channels))
        np.testing.assert_array_equal(Augment(**arguments)(given, key=_KEY), given)


# ---- where the native core is used -----------------------------------------------------------------


def test_values_in_memory_and_datasets_are_changed_natively(natively_changed: Any) -> None:
    images, augment = tf.constant(_images("uint8")), Augment(jit_compile=False, **_ALL)
    augment(images)
    assert natively_changed == [images.shape]
    dataset = tf.data.Dataset.from_tensors(images)
    assert len(list(dataset.map(augment, num_parallel_calls=2))) == 1
    assert len(list(dataset.map(lambda image: augment(image) // 2))) == 1
    assert len(list(dataset.flat_map(lambda image: dataset.map(augment)))) == 1
    assert len(natively_changed) == 4


def test_functions_are_made_of_operations(natively_changed: Any) -> None:
    images, augment = tf.constant(_images("uint8")), Augment(jit_compile=False, **_ALL)
    function = tf.function(augment)
    function(images)
    tf.function(augment, jit_compile=True)(images)
    tf.function(lambda image: function(image), jit_compile=True)(images)  # the trace is used again
    assert len(list(tf.data.Dataset.from_tensors(images).map(tf.function(augment)))) == 1
    assert natively_changed == []


def test_gradients_are_those_of_the_operations() -> None:
    augment, images = Augment(jit_compile=False, **_ALL), tf.constant(_images("float32") * 255)
    weights = tf.constant(np.random.default_rng(1).random(images.shape, np.float32))
    gradients = []
    for change in (augment, tf.function(augment)):
        with tf.GradientTape() as tape:
            tape.watch(images)
            loss = tf.reduce_sum(change(images * 1.0, key=tuple(map(tf.constant, _KEY))) * weights)
        gradients.append(tape.gradient(loss, images))
    assert np.any(gradients[0] != 0)
    np.testing.assert_allclose(gradients[0], gradients[1], atol=1e-5)


def test_neither_torch_nor_numba_is_imported() -> None:
    code = (
        "import sys, numpy as np; from fastpipe.tf import Augment\n"
        f"Augment(**{_ALL})(np.zeros((2, 8, 8, 3), np.float32))\n"
        "assert not {'torch', 'numba', 'llvmlite'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_keras_s_range_of_values_is_the_default() -> None:
    images = _images("float32")
    one = Augment(value_range=(0, 1), **_ALL)(images, key=_KEY).numpy()
    many = Augment(**_ALL)(images * 255, key=_KEY).numpy()
    np.testing.assert_allclose(many / 255, one, atol=1e-4)
    signed = Augment(value_range=(-1, 1), fill=-1, **_ALL)(images * 2 - 1, key=_KEY).numpy()
    np.testing.assert_allclose((signed + 1) / 2, one, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_the_float_s_rounded(dtype: str) -> None:
    images = tf.cast(_images("float32"), dtype)
    augment = Augment(value_range=(0, 1), **_ALL)
    made = augment(images, key=_KEY)
    assert made.dtype == dtype
    wanted = tf.cast(augment(tf.cast(images, tf.float32), key=_KEY), dtype)
    apart = np.abs(tf.cast(made, tf.float32).numpy() - tf.cast(wanted, tf.float32).numpy())
    assert apart.max() <= 2.0 ** (-8 if dtype == "bfloat16" else -11)


@pytest.mark.parametrize(
    ("channels", "colours", "jitter"),
    [
        (1, {"brightness": 0.4, "contrast": 0.3}, [of_torch.ColorJitter(0.4, 0.3)]),
        (1, {"brightness": 0.4, "contrast": 0.3, "saturation": 0.5, "hue": 0.2}, [of_torch.ColorJitter(0.4, 0.3, 0.5, 0.2)]),
        (1, {"hue": 0.2}, [of_torch.ColorJitter(hue=0.2)]),
        (5, {}, []),
    ],
    ids=["two of grey", "all of grey", "none of grey", "five channels"],
)  # fmt: skip
def test_grey_images_and_images_of_many_channels(channels: int, colours: Any, jitter: Any) -> None:
    images = _images("float32", (16, 24, 24, channels))
    made = Augment(horizontal_flip=0.5, value_range=(0, 1), **colours)(images, key=_KEY).numpy()
    chain = [of_torch.RandomHorizontalFlip(0.5), *jitter]
    np.testing.assert_allclose(made, _by_torch(chain, images), atol=2e-5)


# ---- each sample has numbers of its own -----------------------------------------------------------


def test_a_sample_s_change_depends_on_its_own_key_only() -> None:
    augment = Augment(**_ALL)
    images = _images("float32") * 255
    whole = augment(images, key=_KEY).numpy()
    order = np.random.default_rng(1).permutation(16)
    np.testing.assert_allclose(augment(images[order], key=Key(5, 2, order)).numpy(), whole[order], atol=1e-3)
    some = augment(images[3:8], key=Key(5, 2, np.arange(3, 8))).numpy()
    np.testing.assert_allclose(some, whole[3:8], atol=1e-3)


def test_calls_differ_and_the_seed_repeats_them() -> None:
    images = np.repeat(_images("float32")[:1], 8, axis=0)
    first, again = (Augment(seed=3, jit_compile=False, **_ALL) for _ in range(2))
    one, two = first(images).numpy(), first(images).numpy()
    assert len(np.unique(one.reshape(8, -1), axis=0)) == 8
    assert np.all(np.any(one != two, axis=(1, 2, 3)))
    np.testing.assert_array_equal(one, again(images).numpy())
    np.testing.assert_array_equal(two, again(images).numpy())
    assert np.any(one != Augment(seed=4, jit_compile=False, **_ALL)(images).numpy())


def test_the_seed_s_default_is_numpy_s_global_generator() -> None:
    np.random.seed(7)
    one = Augment(horizontal_flip=0.5).get_config()["seed"]
    np.random.seed(7)
    assert one == Augment(horizontal_flip=0.5).get_config()["seed"]
    assert one != Augment(horizontal_flip=0.5).get_config()["seed"]


# ---- inputs of several modalities ------------------------------------------------------------------


def test_modalities_share_their_geometry_whatever_their_sizes() -> None:
    small = _images("float32", (16, 32, 32, 3))
    inputs = {
        "rgb": small,
        "depth": np.repeat(np.repeat(small, 2, axis=1), 2, axis=2),
        "age": np.arange(16.0),
    }
    made = Augment(horizontal_flip=0.5, vertical_flip=0.5, seed=1)(inputs, training=True)
    assert list(made) == list(inputs)
    np.testing.assert_array_equal(made["age"], inputs["age"])
    np.testing.assert_array_equal(made["depth"][:, ::2, ::2], made["rgb"])
    assert np.any(made["rgb"] != small)


def test_modalities_and_colours_name_what_is_changed() -> None:
    images = _images("float32", (16, 32, 32, 3))
    inputs = {"rgb": images, "depth": images, "mask": images}
    augment = Augment(horizontal_flip=0.5, brightness=0.5, modalities=["rgb", "depth"], colours=["rgb"])
    made = {
        name: one.numpy() if hasattr(one, "numpy") else one for name, one in augment(inputs, key=_KEY).items()
    }
    flips = Augment(horizontal_flip=0.5)(images, key=_KEY).numpy()
    np.testing.assert_array_equal(made["mask"], images)
    np.testing.assert_array_equal(made["depth"], flips)
    assert np.any(made["rgb"] != flips)


def test_labels_are_handed_through() -> None:
    images, labels = _images("uint8"), np.arange(16)
    made = Augment(horizontal_flip=0.5)(images, labels)
    assert isinstance(made, tuple)
    np.testing.assert_array_equal(made[1], labels)
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(4)
    augment = Augment(seed=5, **_ALL)
    mapped = dataset.map(augment, num_parallel_calls=2)
    assert mapped.element_spec == dataset.element_spec
    assert np.concatenate([one[1].numpy() for one in mapped]).tolist() == labels.tolist()
    named = dataset.map(lambda image, label: ({"a": image, "b": image}, label)).map(augment)
    for inputs, _ in named:
        np.testing.assert_array_equal(inputs["a"], inputs["b"])


# ---- in a model ------------------------------------------------------------------------------------


def _model(augment: Any, classes: int = 3) -> Any:
    return keras.Sequential(
        [
            keras.Input((16, 16, 3)), augment, keras.layers.Rescaling(1 / 255),
            keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(classes),
        ]
    )  # fmt: skip


def test_in_a_model_it_works_while_training_only() -> None:
    augment = Augment(seed=1, **_ALL)
    model = keras.Sequential([keras.Input((40, 52, 3)), augment])
    images = _images("float32") * 255
    np.testing.assert_array_equal(model(images, training=False), images)
    np.testing.assert_array_equal(model.predict(images, verbose=0), images)
    assert np.any(model(images, training=True).numpy() != images)
    assert np.any(augment(images).numpy() != images)  # as a function, always


@pytest.mark.parametrize("jit_compile", [True, False])
def test_model_fit(jit_compile: bool) -> None:
    augment = Augment(seed=1, **_ALL)
    model = _model(augment)
    model.compile(
        "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=jit_compile
    )
    images = _images("uint8", (20, 16, 16, 3)).astype(np.float32)
    history = model.fit(images, np.arange(20) % 3, batch_size=8, epochs=2, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    assert int(augment.calls.value) == 6  # the last batch, of 4, among them


def test_a_layer_for_several_inputs() -> None:
    shapes = {"rgb": (16, 16, 3), "depth": (8, 8, 3), "age": (1,)}
    inputs = {name: keras.Input(shape, name=name) for name, shape in shapes.items()}
    changed = Augment(horizontal_flip=0.5, rotation=10, seed=1)(inputs)
    flat = [keras.layers.Flatten()(changed[name]) for name in ("rgb", "depth")]
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()([*flat, changed["age"]])))
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    given = {name: rng.random((10, *shape), np.float32) for name, shape in shapes.items()}
    model.fit(given, np.zeros(10), batch_size=5, verbose=0)


def test_mixed_precision() -> None:
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        augment = Augment(horizontal_flip=1.0)
        images = tf.cast(_images("uint8"), tf.float32)
        np.testing.assert_array_equal(augment(images).numpy(), images.numpy()[:, :, ::-1])
        model = _model(Augment(seed=1, **_ALL))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.fit(_images("uint8", (8, 16, 16, 3)), np.arange(8) % 3, verbose=0)
    finally:
        keras.mixed_precision.set_global_policy("float32")


def test_saved_and_loaded(tmp_path: Any) -> None:
    augment = Augment(seed=1, name="changes", modalities=None, cutout_scale=(0.1, 0.2), **_ALL)
    again = Augment.from_config(augment.get_config())
    assert again.get_config() == augment.get_config()
    model = keras.Sequential([keras.Input((40, 52, 3)), augment])
    images = _images("float32") * 255
    model(images, training=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Keras's own calls of NumPy
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(images, training=True), model(images, training=True))


def test_replicas_draw_other_numbers(two_replicas: Any) -> None:
    strategy = two_replicas
    with strategy.scope():
        augment = Augment(seed=1, **_ALL)
    images = tf.constant(np.repeat(_images("float32")[:1], 4, axis=0))

    @tf.function
    def step() -> Any:
        return strategy.run(lambda: augment(images))

    seen = [one.numpy() for _ in range(2) for one in strategy.experimental_local_results(step())]
    assert len(np.unique(np.concatenate(seen).reshape(16, -1), axis=0)) == 16
    assert int(augment.calls.numpy()) == 2


@pytest.mark.slow
def test_model_fit_on_two_replicas(two_replicas: Any) -> None:
    with two_replicas.scope():
        model = _model(Augment(seed=1, **_ALL))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(_images("uint8", (16, 16, 16, 3)), np.arange(16) % 3, batch_size=8, verbose=0)


# ---- in a dataset ----------------------------------------------------------------------------------


def test_of_a_dataset_numbers_are_of_seed_epoch_and_position(photo_table: Any) -> None:
    table = photo_table.table
    options: dict[str, Any] = {"boxes": "box", "image_size": (32, 32), "seed": 9, "rescale": 1 / 255}
    augment = Augment(value_range=(0, 1), **_ALL)
    made = fastpipe.tf.image_dataset(table, "label", batch_size=5, augment=augment, **options)
    plain = fastpipe.tf.image_dataset(table, "label", batch_size=5, **options)
    for epoch in range(2):
        at = 0
        for (images, labels), (before, wanted) in zip(made, plain, strict=True):
            count = len(before)
            key = Key(9, epoch, np.arange(at, at + count))
            np.testing.assert_array_equal(labels, wanted)
            np.testing.assert_allclose(images, augment(before, key=key), atol=1e-5)
            at += count


@pytest.mark.slow
def test_of_a_dataset_neither_threads_batches_nor_ranks_change_a_sample(photo_table: Any) -> None:
    table = {**photo_table.table, "number": np.arange(len(photo_table))}
    count = len(photo_table)

    def samples(**options: Any) -> dict[int, Any]:
        made = fastpipe.tf.image_dataset(
            table, "number", boxes="box", image_size=24, seed=2, augment=Augment(seed=1, **_ALL), **options
        )
        return {
            int(label): image for images, labels in made for image, label in zip(images, labels, strict=True)
        }

    wanted = samples(threads=1, batch_size=4)
    ranks = [samples(batch_size=3, shard=fastpipe.Shard(rank, 2), drop_remainder=False) for rank in range(2)]
    for other in (samples(threads=3, batch_size=7), ranks[0] | ranks[1]):
        assert sorted(other) == sorted(wanted) == list(range(count))
        for label, image in wanted.items():
            np.testing.assert_allclose(other[label], image, atol=1e-3)


def test_graph_engine_and_single_samples(photo_table: Any) -> None:
    options: dict[str, Any] = {"boxes": "box", "image_size": 24, "seed": 2, "parity": "tf"}
    augment = Augment(seed=1, **_ALL)
    made = fastpipe.tf.image_dataset(photo_table.table, "label", engine="graph", augment=augment, **options)
    assert sum(len(labels) for _, labels in made) == len(photo_table)
    single = fastpipe.tf.image_dataset(
        photo_table.table, "label", batch_size=None, augment=augment, **options
    )
    assert single.element_spec[0].shape == (24, 24, 3)
    assert len(list(single)) == len(photo_table)


# ---- what it refuses -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"horizontal_flip": 1.5}, "horizontal_flip= is a probability"),
        ({"rotation": (10, -10)}, "rotation= must be a number of at least 0, or two"),
        ({"rotation": -5}, "rotation="),
        ({"zoom": 1.5}, "zoom="),
        ({"zoom": 1.0}, "zoom= must give factors above 0"),
        ({"translation": 2}, "translation="),
        ({"translation": (0.1, 0.2, 0.3)}, "translation="),
        ({"translation": (0.1,)}, "translation="),
        ({"rotation": None}, "rotation="),
        ({"brightness": (-1, 1)}, "brightness="),
        ({"hue": 0.7}, "hue="),
        ({"cutout": float("nan")}, "cutout="),
        ({"cutout_scale": (0.5, 0.1)}, "cutout_scale="),
        ({"interpolation": "cubic"}, "interpolation"),
        ({"value_range": (1, 0)}, "value_range="),
    ],
)
def test_arguments_that_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(fastpipe.errors.FastpipeError, match=message):
        Augment(**arguments)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (np.zeros((8, 8, 3), np.float32), r"takes batches \(N, H, W, C\); the input has shape \(8, 8, 3\)"),
        (np.zeros((2, 3, 32, 32), np.float32), "channels last"),
        (np.zeros((2, 8, 8, 3), np.int32), "the input is int32"),
        ({"a": np.zeros((2, 3))}, r"there are no images \(N, H, W, C\) among the inputs \['a'\]"),
    ],
    ids=["no batch", "channels first", "int32", "no images"],
)
def test_inputs_that_are_refused(inputs: Any, message: str) -> None:
    with pytest.raises(AugmentError, match=message):
        Augment(horizontal_flip=0.5)(inputs)
    with pytest.raises(AugmentError, match="modalities= names 'b'"):
        Augment(horizontal_flip=0.5, modalities=["b"])({"a": np.zeros((2, 8, 8, 3), np.float32)})


@pytest.mark.parametrize("fill", [300, -1, 0.5])
def test_a_fill_that_bytes_cannot_hold_is_refused(fill: float) -> None:
    layer = Augment(cutout=1.0, fill=fill)
    with pytest.raises(AugmentError, match=r"images of uint8 need a whole number"):
        layer(np.zeros((2, 8, 8, 3), np.uint8))
    assert layer(np.zeros((2, 8, 8, 3), np.float32)).dtype == "float32"


def test_a_seed_is_a_whole_number() -> None:
    with pytest.raises(TypeError):
        Augment(horizontal_flip=0.5, seed=1.75)  # type: ignore[arg-type]
