"""Random changes are distributed as those of TensorFlow and Keras that they replace."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pandas as pd
import tensorflow as tf
from scipy import stats

from fastpipe.tf import Augment

COUNT = 10_000
SURE = 1e-4  # at fixed seeds a smaller p is a real difference
SIDE, BUMP = 24, 30.0  # pixels; where the bump of ``_probe`` is, in degrees from the horizontal


def _probe() -> npt.NDArray[np.float32]:
    """Return an image of which every change can be read off: float32 (24, 24, 3).

    The first channel is round, so that rotations leave it alone: a plateau of 160, a ring of 90, and black.
    The second has a bump beside its centre.
    """
    y, x = np.mgrid[:SIDE, :SIDE] - (SIDE - 1) / 2
    radius = np.hypot(x, y)
    image = np.zeros((SIDE, SIDE, 3), np.float32)
    image[..., 0] = np.select([radius < 4, radius < 9.5], [160, 90], 0)
    angle = np.deg2rad(BUMP)
    from_bump = np.hypot(x - 6 * np.cos(angle), y - 6 * np.sin(angle))
    image[..., 1] = np.where(radius < 9.5, 60 + 120 * np.exp(-((from_bump / 2) ** 2)), 0)
    return image


def _read(images: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
    """Return what was done to each of many copies of ``_probe``."""
    middle, mean = SIDE // 2, _probe()[..., 0].mean()
    inner, ring = images[:, middle, middle, 0].astype(float), images[:, middle, middle + 6, 0].astype(float)
    factor = (inner - ring) / 70
    y, x = np.mgrid[:SIDE, :SIDE] - (SIDE - 1) / 2
    bump = images[..., 1] - images[:, middle : middle + 1, middle, None, 1]
    weights = np.clip(bump / bump.max((1, 2), keepdims=True) - 0.4, 0, None)
    place = np.rad2deg(np.arctan2((weights * y).sum((1, 2)), (weights * x).sum((1, 2))))
    is_mirrored, is_upside_down = abs(place) > 90, place < 0
    home = np.where(is_mirrored, 180 - BUMP, BUMP) * np.where(is_upside_down, -1, 1)
    return {
        "is_mirrored": is_mirrored, "is_upside_down": is_upside_down, "angle": place - home,
        "contrast": factor, "brightness": inner - (160 - mean) * factor - mean,
    }  # fmt: skip


def test_the_example_changes_images_as_the_script_it_replaces(example: Any, monkeypatch: Any) -> None:
    with example("keras_multimodal") as scripts:
        before, after = scripts["before"], scripts["after"]
    before.SIDE = after.SIDE = SIDE
    tf.random.set_seed(0)
    monkeypatch.setattr(tf, "py_function", lambda function, given, dtype: tf.constant(_probe()))
    name = before.MODALITIES[0]
    table = pd.DataFrame({name: ["a.jpg"] * COUNT, "label": 0})
    table[[*before.edges(name), *before.TABULAR, *before.FORESTS]] = 0
    before.BATCH = COUNT
    [(inputs, _)] = before.dataset(table, "", (name,), seed=0)
    theirs = _read(inputs[name].numpy())

    keras.utils.set_random_seed(1)
    image = keras.Input((SIDE, SIDE, 3))
    augmented = keras.Model(image, after.augmented(image))
    changed = augmented(np.broadcast_to(_probe(), (COUNT, SIDE, SIDE, 3)), training=True).numpy()
    ours = _read(changed)
    for found in (ours, theirs):
        assert 9.5 < abs(found["angle"]).max() < 10.5  # a centroid is read to half a degree
        assert 0.799 < found["contrast"].min() < 0.801 and 1.199 < found["contrast"].max() < 1.201
        assert 24.9 < abs(found["brightness"]).max() < 25.1  # not cut off before contrast is changed
        correlations = np.corrcoef([column.astype(float) for column in found.values()])
        assert abs(correlations - np.eye(5)).max() < 0.05  # each is drawn by itself
    assert changed.min() == 0 and changed.max() <= 255
    for kind in ("angle", "contrast", "brightness"):
        assert stats.ks_2samp(ours[kind], theirs[kind], method="asymp").pvalue > SURE
    for kind in ("is_mirrored", "is_upside_down"):
        assert stats.binomtest(int(ours[kind].sum()), COUNT, 0.5).pvalue > SURE


def test_a_rotation_is_keras_s_the_other_way_round_but_for_border_pixels() -> None:
    images = np.random.default_rng(0).uniform(0, 255, (2, SIDE, SIDE, 3)).astype(np.float32)
    for angle in (10.0, 33.0, -33.0):
        part = angle / 360
        theirs = keras.layers.RandomRotation((part, part), fill_mode="constant")(images, training=True)
        ours = Augment(rotation=(-angle, -angle))(images)
        inner = (slice(None), slice(7, -7), slice(7, -7))
        np.testing.assert_allclose(ours[inner], theirs[inner], atol=0.01)


def test_numbers_are_spread_evenly_over_calls_and_within_them() -> None:
    augment = Augment(horizontal_flip=0.3, brightness=(0.5, 1.5), seed=7)
    image = np.tile(np.array([50, 100], np.float32).reshape(1, 1, 2, 1), (100, 1, 1, 1))
    made = np.stack([augment(image).numpy() for _ in range(100)])[:, :, 0, :, 0]
    flips, factors = made[..., 0] > made[..., 1], made.sum(2) / 150
    assert stats.binomtest(int(flips.sum()), COUNT, 0.3).pvalue > SURE
    assert stats.kstest(factors.ravel(), stats.uniform(0.5, 1.0).cdf).pvalue > SURE
    for along in (0, 1):  # neither the next image nor the next call repeats anything
        one, other = np.take(factors, range(99), along), np.take(factors, range(1, 100), along)
        assert stats.spearmanr(one.ravel(), other.ravel()).pvalue > SURE
