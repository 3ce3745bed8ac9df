"""``fit`` of a Keras model that is profiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

import fastpipe
from fastpipe.profiling.script import profile_script

SCRIPT = """
import keras
import numpy as np
import tensorflow as tf
from pathlib import Path
from PIL import Image
import sys

FILES = sorted(map(str, Path(sys.argv[1]).rglob("*.jpg"))) * 8


def load(path):
    with Image.open(path.numpy().decode()) as image:
        return np.asarray(image.convert("RGB").crop((0, 0, 64, 64)).resize((32, 32)), np.float32)


def sample(path):
    return tf.ensure_shape(tf.py_function(load, [path], tf.float32), (32, 32, 3)), 0


def train():
    data = tf.data.Dataset.from_tensor_slices(FILES).map(sample).batch(4)
    model = keras.Sequential([keras.Input((32, 32, 3)), keras.layers.Flatten(), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(data, epochs=1000, shuffle=False, verbose=0)


train()
"""


def test_a_script_that_fits_is_told_what_its_dataset_does_in_python(photo_tree: Path, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    fit, opened = keras.Model.fit, Image.open
    report = profile_script(path, [str(photo_tree)], seconds=1.5)
    assert keras.Model.fit is fit and Image.open is opened
    assert report.is_opaque and report.instant_s is not None and report.instant_s < report.step_s
    assert {"decode", "transform"} & set(report.costs.stages)
    assert report.costs.lines[0][0].function == "load"
    assert report.loader is not None and report.loader.used_at == "train.py:25 train"
    first = report.advice[0]
    assert "fastpipe.tf.image_dataset(table, boxes=…, image_size=(32, 32))" in first.what
    assert first.predicted_s is not None and first.predicted_s < report.step_s


def test_a_fit_that_is_watched_trains_as_ever() -> None:
    def weights(watched: bool) -> list[Any]:
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        data = tf.data.Dataset.from_tensor_slices((np.ones((32, 4), "f4"), np.zeros((32, 2), "f4"))).batch(4)
        if watched:
            with fastpipe.profile() as profiling:
                model.fit(data, epochs=3, shuffle=False, verbose=0)
            assert profiling.report.steps > 10 and profiling.report.is_opaque
        else:
            model.fit(data, epochs=3, shuffle=False, verbose=0)
        return list(model.get_weights())

    for one, other in zip(weights(False), weights(True), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", ["none", "list", "one", "by place", "CallbackList"])
def test_callbacks_are_taken_in_each_way_that_keras_takes_them(kind: str) -> None:
    seen: list[int] = []
    own = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((np.ones((2, 4), "f4"), np.zeros((2, 2), "f4"))).repeat(6)
    with fastpipe.profile() as profiling:
        if kind == "by place":
            model.fit(data, None, None, 1, 0, [own], shuffle=False)
        else:
            given = {
                "none": None, "list": [own], "one": own,
                "CallbackList": keras.callbacks.CallbackList([own], model=model),
            }[kind]  # fmt: skip
            model.fit(data, verbose=0, shuffle=False, callbacks=given)
    assert seen == ([] if kind == "none" else list(range(6)))
    assert profiling.report.loader is not None


def test_a_tf_dataset_is_profiled_with_a_step() -> None:
    data = tf.data.Dataset.range(4000).batch(4)
    report = fastpipe.profile(data, lambda batch: np.sin(np.arange(4_000_000.0)).sum(), seconds=0.5)
    # A batch of 40 µs for a step of 40 ms; where others have the cores, the step waits for more than that.
    assert report.stall_share < 0.5 and report.steps >= 5


def test_an_error_in_a_fit_is_its_own() -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((np.ones((2, 5), "f4"), np.zeros((2, 2), "f4")))
    with fastpipe.profile(), pytest.raises(ValueError, match="incompatible"):
        model.fit(data, shuffle=False, verbose=0)
