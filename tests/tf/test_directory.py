"""Against ``keras.utils.image_dataset_from_directory``, which is replaced."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fastpipe.core.native import native
from fastpipe.errors import OptionError
from fastpipe.tf import image_dataset

stock = keras.utils.image_dataset_from_directory


@pytest.fixture
def check(same: Callable[..., None]) -> Callable[..., Any]:
    """Compares the datasets of both for these arguments; fastpipe's."""

    def compare(folder: Path, **arguments: Any) -> Any:
        both = {"shuffle": False, "verbose": False, **arguments}
        fast, slow = image_dataset(folder, **both), stock(folder, **both)
        same(fast, slow)
        assert len(fast) == len(slow)
        assert (fast.class_names, fast.file_paths) == (slow.class_names, slow.file_paths)
        return fast

    return compare


def test_the_defaults_are_those_of_keras(photos: Path, check: Callable[..., Any]) -> None:
    check(photos)


@pytest.mark.few(8)
@pytest.mark.parametrize(
    "arguments",
    [
        {"image_size": 40, "label_mode": "categorical"}, {"label_mode": None}, {"labels": None}, {"batch_size": None},
        {"batch_size": 7}, {"color_mode": "grayscale"}, {"data_format": "channels_first"},
        {"interpolation": "nearest"}, {"interpolation": "nearest", "crop_to_aspect_ratio": True},
        {"interpolation": "nearest", "pad_to_aspect_ratio": True}, {"interpolation": "bicubic"},
        {"interpolation": "area"}, {"interpolation": "lanczos3"}, {"interpolation": "gaussian"},
        {"image_size": (64, 96), "crop_to_aspect_ratio": True},
        {"image_size": (64, 96), "pad_to_aspect_ratio": True},
    ],
    ids=str,
)  # fmt: skip
def test_each_argument_does_what_it_does_in_keras(
    photo_tree: Path, arguments: dict[str, Any], check: Callable[..., Any]
) -> None:
    check(photo_tree, **{"image_size": (50, 60), **arguments})


@pytest.mark.parametrize("mode", ["int", "binary", "categorical"])
def test_class_names_choose_and_order_the_classes(photo_tree: Path, mode: str, check: Any) -> None:
    names = sorted(one.name for one in photo_tree.iterdir())[2:0:-1]
    assert check(photo_tree, class_names=names, label_mode=mode, image_size=(16, 16)).class_names == names


@pytest.mark.few(4)
@pytest.mark.parametrize("subset", ["training", "validation", "both"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_split_is_that_of_keras(photo_tree: Path, subset: Any, shuffle: bool, same: Any) -> None:
    both = {"validation_split": 0.3, "subset": subset, "seed": 3, "shuffle": shuffle, "image_size": (20, 20)}
    fast, slow = image_dataset(photo_tree, **both), stock(photo_tree, **both)
    pairs = [(fast, slow)] if subset != "both" else list(zip(fast, slow, strict=True))
    for one, other in pairs:
        assert (one.file_paths, one.class_names) == (other.file_paths, other.class_names)
        labels = [sorted(int(label) for _, label in made.unbatch()) for made in (one, other)]
        assert labels[0] == labels[1]
    if not shuffle or subset == "both":
        same(*pairs[-1])


@pytest.mark.parametrize("subset", ["training", "validation", "both"])
def test_given_labels_stay_with_their_files(photo_tree: Path, subset: Any) -> None:
    listed = stock(photo_tree, labels=None, shuffle=False, verbose=False).file_paths
    labels = list(range(len(listed)))
    how = {"validation_split": 0.25, "subset": subset, "seed": 5, "image_size": (8, 8), "verbose": False}
    made = image_dataset(photo_tree, labels, **how)
    for one in made if subset == "both" else [made]:
        # Which file an image is of shows in its pixels.
        found = {tuple(np.round(image.numpy().ravel(), 3)): int(label) for image, label in one.unbatch()}
        plain = image_dataset(one.file_paths, None, shuffle=False, image_size=(8, 8), parity="tf")
        for path, image in zip(one.file_paths, plain.unbatch(), strict=True):
            assert listed[found[tuple(np.round(image.numpy().ravel(), 3))]] == path
        assert one.class_names == [str(n) for n in labels]


@pytest.mark.parametrize("mode", ["rgb", "grayscale", "rgba"])
def test_images_of_all_kinds_are_those_of_keras(tmp_path: Path, mode: str, check: Callable[..., Any]) -> None:
    rng = np.random.default_rng(0)
    # TensorFlow does not make colours of some formats grey, and knows four channels of PNG only.
    names = {"rgb": ["png", "bmp", "gif", "jpg", "PNG", "jpeg"], "grayscale": ["png", "jpg"], "rgba": []}
    for name in "ab":
        (tmp_path / name).mkdir()
        for number, end in enumerate(names[mode]):
            pixels = rng.integers(0, 256, (30 + number, 40, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.{end}")
        pixels = rng.integers(0, 256, (30, 40, 4), np.uint8)
        Image.fromarray(pixels).save(tmp_path / name / "alpha.png")
        if mode != "rgba":
            Image.fromarray(pixels[:, :, 0]).save(tmp_path / name / "grey.jpg")
            Image.fromarray(pixels[:, :, 0]).save(tmp_path / name / "grey.png")
    (tmp_path / "a" / "notes.txt").write_text("no image")
    check(tmp_path, color_mode=mode, image_size=(24, 24))


@pytest.mark.filterwarnings("ignore:unclosed running multiprocessing pool")
@pytest.mark.leaks("Keras ends the threads that list folders only where it does not raise")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"label_mode": "what"}, "label_mode"), ({"class_names": ["nothing"]}, "class_names"),
        ({"validation_split": 0.2}, "subset"), ({"labels": [1, 2]}, "labels"), ({"label_mode": "binary"}, "binary"),
        ({"validation_split": 2.0, "subset": "training"}, "validation_split"),
    ],
    ids=str,
)  # fmt: skip
def test_what_keras_refuses_is_refused_in_its_words(
    photo_tree: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as expected:
        stock(photo_tree, **arguments)
    with pytest.raises(ValueError, match=f"^{re.escape(str(expected.value))}$"):
        image_dataset(photo_tree, **arguments)
    del expected
    gc.collect()  # of what Keras has not closed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"boxes": "box"}, "boxes= is for"), ({"files": "file"}, "files= is for"),
        ({"modalities": {"a": {}}}, "modalities= and tabular= are for tables"),
        ({"format": "grain"}, "Keras's own loader"), ({"output": "float64"}, "output must be one of"),
        ({"parity": "numpy"}, "parity must be one of"), ({"engine": "magic"}, "engine must be one of"),
        ({"output": "uint8", "rescale": 0.5}, "rescale= gives floats"), ({"threads": 0}, "threads must be"),
        ({"batch_size": 0}, "batch_size must be"), ({"image_size": (0, 3)}, "image_size must be"),
        ({"parity": "pil", "antialias": False}, "Pillow always antialiases"),
        ({"parity": "pil", "interpolation": "gaussian"}, "none of Pillow's"),
        ({"interpolation": "hamming"}, "none of TensorFlow's"), ({"source": "nothing"}, "there is no folder"),
        ({"source": __file__}, "is a file, and no folder of images: pass a table"),
        ({"crop_to_aspect_ratio": True, "pad_to_aspect_ratio": True}, "only one of"),
    ],
    ids=str,
)  # fmt: skip
def test_arguments_that_contradict_are_refused(photo_tree: Path, arguments: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        image_dataset(**{"source": photo_tree, **arguments})


@settings(max_examples=60)
@given(
    st.tuples(*[st.integers(1, 40)] * 4), st.sampled_from([1, 3]), st.integers(0, 2**32 - 1),
    st.sampled_from([(1, "bilinear"), (2, "nearest")]),
)  # fmt: skip
def test_native_resizes_are_tensorflows(sizes: Any, channels: int, seed: int, how: tuple[int, str]) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (*sizes[:2], channels), np.uint8)
    made = np.empty((*sizes[2:], channels), np.float32)
    native.resize_as_tensorflow(pixels, how[0], made)
    expected = tf.image.resize(pixels, sizes[2:], method=how[1]).numpy()
    np.testing.assert_array_equal(made, expected.astype(np.float32))
