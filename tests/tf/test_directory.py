"""Against ``keras.utils.image_dataset_from_directory``, which is replaced."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fastpipe.core.native import native
from fastpipe.errors import OptionError
from fastpipe.tf import image_dataset

stock = keras.utils.image_dataset_from_directory


def _same(fast: Any, slow: Any) -> None:
    assert fast.element_spec == slow.element_spec
    assert len(fast) == len(slow)
    for made, expected in zip(fast, slow, strict=True):
        for one, other in zip(tf.nest.flatten(made), tf.nest.flatten(expected), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_the_defaults_are_those_of_keras(photos: Path) -> None:
    fast, slow = image_dataset(photos, shuffle=False), stock(photos, shuffle=False)
    _same(fast, slow)
    assert fast.class_names == slow.class_names
    assert fast.file_paths == slow.file_paths


@pytest.mark.parametrize(
    "arguments",
    [
        {"image_size": (64, 48)},
        {"image_size": 40, "label_mode": "categorical"},
        {"label_mode": None},
        {"labels": None},
        {"color_mode": "grayscale"},
        {"batch_size": None},
        {"batch_size": 7},
        {"interpolation": "nearest"},
        {"interpolation": "nearest", "crop_to_aspect_ratio": True},
        {"interpolation": "nearest", "pad_to_aspect_ratio": True},
        {"interpolation": "bicubic"},
        {"interpolation": "area"},
        {"interpolation": "lanczos3"},
        {"interpolation": "gaussian"},
        {"crop_to_aspect_ratio": True, "image_size": (64, 96)},
        {"pad_to_aspect_ratio": True, "image_size": (64, 96)},
        {"data_format": "channels_first"},
        {"verbose": False},
    ],
    ids=str,
)
def test_each_argument_does_what_it_does_in_keras(photo_tree: Path, arguments: dict[str, Any]) -> None:
    both = {"image_size": (50, 60), "shuffle": False, **arguments}
    _same(image_dataset(photo_tree, **both), stock(photo_tree, **both))


@pytest.mark.parametrize("subset", ["training", "validation", "both"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_split_is_that_of_keras(photo_tree: Path, subset: Any, shuffle: bool) -> None:
    both = {"validation_split": 0.3, "subset": subset, "seed": 3, "shuffle": shuffle, "image_size": (20, 20)}
    fast, slow = image_dataset(photo_tree, **both), stock(photo_tree, **both)
    for one, other in zip(*((made if subset == "both" else [made]) for made in (fast, slow)), strict=True):
        assert one.file_paths == other.file_paths
        assert one.class_names == other.class_names
        assert sorted(_labels(one)) == sorted(_labels(other))
    if not shuffle or subset == "both":
        validation = (fast[1], slow[1]) if subset == "both" else (fast, slow)
        _same(*validation)


def _labels(dataset: Any) -> list[int]:
    return [int(label) for _, labels in dataset for label in labels]


@pytest.mark.parametrize("subset", ["training", "validation", "both"])
def test_labels_that_are_given_stay_with_their_files(photo_tree: Path, subset: Any) -> None:
    count = len(stock(photo_tree, labels=None, shuffle=False, verbose=False).file_paths)
    listed = stock(photo_tree, labels=None, shuffle=False, verbose=False).file_paths
    labels = list(range(count))
    made = image_dataset(
        photo_tree, labels, validation_split=0.25, subset=subset, seed=5, image_size=(8, 8), verbose=False
    )  # fmt: skip
    for one in made if subset == "both" else [made]:
        found = {tuple(np.round(image.numpy().ravel(), 3)): int(label) for image, label in one.unbatch()}
        # Which file an image is of shows in its pixels.
        plain = image_dataset(one.file_paths, None, shuffle=False, image_size=(8, 8), parity="tf")
        for path, image in zip(one.file_paths, plain.unbatch(), strict=True):
            assert listed[found[tuple(np.round(image.numpy().ravel(), 3))]] == path
    assert list(made[0].class_names if subset == "both" else made.class_names) == [str(n) for n in labels]


def test_class_names_choose_and_order_the_classes(photo_tree: Path) -> None:
    names = sorted(one.name for one in photo_tree.iterdir())[2:0:-1]
    both = {"class_names": names, "shuffle": False, "image_size": (16, 16)}
    fast, slow = image_dataset(photo_tree, **both), stock(photo_tree, **both)
    _same(fast, slow)
    assert fast.class_names == names


def test_two_classes_can_be_binary(photo_tree: Path) -> None:
    names = sorted(one.name for one in photo_tree.iterdir())[:2]
    both = {"class_names": names, "label_mode": "binary", "shuffle": False, "image_size": (16, 16)}
    _same(image_dataset(photo_tree, **both), stock(photo_tree, **both))


def test_images_of_all_kinds_of_keras(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for number, name in enumerate(["1.png", "2.bmp", "3.gif", "4.jpg", "5.PNG", "6.jpeg"]):
        pixels = rng.integers(0, 256, (30 + number, 40, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / ("a" if number % 2 else "b") / name)
    Image.fromarray(pixels[:, :, 0]).save(tmp_path / "a" / "grey.png")
    Image.fromarray(np.dstack([pixels, pixels[:, :, :1]])).save(tmp_path / "a" / "alpha.png")
    Image.fromarray(pixels[:, :, 0]).save(tmp_path / "b" / "grey.jpg")
    (tmp_path / "a" / "notes.txt").write_text("no image")
    for mode in ("rgb", "grayscale"):
        both = {"shuffle": False, "image_size": (24, 24), "color_mode": mode}
        if mode == "grayscale":  # TensorFlow does not make colours of these formats grey
            (tmp_path / "a" / "2.bmp").unlink()
            (tmp_path / "b" / "3.gif").unlink()
        _same(image_dataset(tmp_path, **both), stock(tmp_path, **both))


def test_four_channels(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 40, 4), np.uint8)
    for name in "ab":
        (tmp_path / name).mkdir()
        Image.fromarray(pixels).save(tmp_path / name / "1.png")
    both = {"shuffle": False, "image_size": (24, 24), "color_mode": "rgba"}
    _same(image_dataset(tmp_path, **both), stock(tmp_path, **both))


@pytest.mark.filterwarnings("ignore:unclosed running multiprocessing pool")
@pytest.mark.leaks("Keras ends the threads that list folders only where it does not raise")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"label_mode": "what"}, "label_mode"),
        ({"class_names": ["nothing"]}, "class_names"),
        ({"validation_split": 0.2}, "subset"),
        ({"validation_split": 2.0, "subset": "training"}, "validation_split"),
        ({"labels": [1, 2]}, "labels"),
        ({"label_mode": "binary"}, "binary"),
    ],
    ids=str,
)
def test_what_keras_refuses_is_refused_in_its_words(
    photo_tree: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as expected:
        stock(photo_tree, **arguments)
    with pytest.raises(ValueError) as error:
        image_dataset(photo_tree, **arguments)
    assert str(error.value) == str(expected.value)
    del error, expected
    gc.collect()  # of what Keras has not closed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"boxes": "box"}, "boxes= is for"),
        ({"files": "file"}, "files= is for"),
        ({"modalities": {"a": {}}}, "modalities= and tabular= are for tables"),
        ({"format": "grain"}, "Keras's own loader"),
        ({"output": "float64"}, "output must be one of"),
        ({"parity": "numpy"}, "parity must be one of"),
        ({"engine": "magic"}, "engine must be one of"),
        ({"output": "uint8", "rescale": 0.5}, "rescale= makes floats"),
        ({"threads": 0}, "threads must be"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"image_size": (0, 3)}, "image_size must be"),
        ({"parity": "pil", "antialias": False}, "Pillow always antialiases"),
        ({"parity": "pil", "interpolation": "gaussian"}, "none of Pillow's"),
        ({"interpolation": "hamming"}, "none of TensorFlow's"),
        ({"crop_to_aspect_ratio": True, "pad_to_aspect_ratio": True}, "only one of"),
    ],
    ids=str,
)
def test_what_cannot_go_together_is_said(photo_tree: Path, arguments: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        image_dataset(photo_tree, **arguments)


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="there is no folder"):
        image_dataset(tmp_path / "nothing")


def test_the_same_global_seed_gives_the_same_order(photo_tree: Path) -> None:
    orders = []
    for _ in range(2):
        keras.utils.set_random_seed(4)
        made = image_dataset(photo_tree, image_size=(8, 8), verbose=False)
        slow_first = np.random.rand()
        orders.append(([labels.numpy().tolist() for _, labels in made], slow_first))
    keras.utils.set_random_seed(4)
    stock(photo_tree, image_size=(8, 8), verbose=False)
    assert orders[0] == orders[1]
    assert np.random.rand() == slow_first  # the generator is where Keras leaves it


@given(
    st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 3]),
    st.integers(0, 2**32 - 1), st.sampled_from([(1, "bilinear"), (2, "nearest")]),
)  # fmt: skip
def test_the_native_resizes_are_tensorflows(
    height: int, width: int, to_height: int, to_width: int, channels: int, seed: int, how: tuple[int, str]
) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)
    made = np.empty((to_height, to_width, channels), np.float32)
    native.resize_as_tensorflow(pixels, how[0], made)
    expected = tf.image.resize(pixels, (to_height, to_width), method=how[1]).numpy()
    np.testing.assert_array_equal(made, expected.astype(np.float32))
