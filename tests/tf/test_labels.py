"""Labels of every type, against Keras's loader and against tf.data, which are replaced."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas as pd
import polars as pl
import pytest
import tensorflow as tf
from PIL import Image

from fastpipe.errors import OptionError
from fastpipe.tf import image_dataset

HOW: dict[str, Any] = {"image_size": (4, 4), "verbose": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six images, whose pixels are their numbers."""
    made = tmp_path_factory.mktemp("labels")
    (made / "images").mkdir()
    for number in range(6):
        Image.new("RGB", (4, 4), (number,) * 3).save(made / "images" / f"{number}.png")
    return made


@pytest.fixture
def files(folder: Path) -> list[str]:
    return [str(folder / "images" / f"{number}.png") for number in range(6)]


def _by_image(dataset: Any) -> tuple[dict[int, Any], tf.DType]:
    """The label of each image, and their type."""
    found = {}
    for images, labels in dataset:
        for image, label in zip(images.numpy(), labels.numpy(), strict=True):
            found[int(image[0, 0, 0])] = label.tolist() if hasattr(label, "tolist") else label
    return found, dataset.element_spec[1].dtype


def _compare(dataset: Any, column: Any) -> None:
    """Compare the labels of a dataset of one batch with what TensorFlow makes of a column."""
    expected = next(iter(tf.data.Dataset.from_tensor_slices(column).batch(6)))
    (found,) = (labels for _, labels in dataset)
    assert found.dtype == expected.dtype == dataset.element_spec[1].dtype
    np.testing.assert_array_equal(found.numpy(), expected.numpy())


_GIVEN: list[list[Any]] = [
    [0.5, 1.75, 2.25, 40.6, -0.1, 7.0], [(0.5, 1.5), (2.5, 3.5), (4.5, 5.5), (6.5, 7.5), (0, 1), (2, 3)],
    [2**40, 2**40 + 1, 5, 6, -(2**33), 0], list("ababéa"), [b"a", b"b", b"a", b"a", b"b", b""],
    [True, False, True, True, False, True], [1, 2.5, 3, 4, 5, 6], [float("nan"), 1.5, 2.0, 3.0, 4.0, 5.0],
    [np.float64(0.1)] * 6, [np.float32(0.1), *[np.float32(2)] * 5], [np.int64(2**40), *[np.int64(3)] * 5],
    [1j, *[1j] * 5], [3, 7, 3, 7, 3, 7], [0, 1, 1, 0, 1, 0], [(0, 1), (1, 0), (0, 1), (1, 0), (1, 0), (0, 1)],
    [(1, 2), (3,), (1, 2), (3, 4), (1, 2), (3, 4)], [2**70, 1, 2, 3, 4, 5], [2**63, 1, 2, 3, 4, 5], [None] * 6,
]  # fmt: skip


@pytest.mark.few(10)
@pytest.mark.filterwarnings("ignore:unclosed running multiprocessing pool")
@pytest.mark.leaks("Keras ends the threads that list folders only where it does not raise")
@pytest.mark.parametrize(("label_mode", "shuffle"), [("int", True), ("binary", False), ("categorical", True)])
@pytest.mark.parametrize("labels", _GIVEN, ids=lambda labels: str(labels)[:30])
def test_labels_that_are_given_for_a_folder_are_those_of_keras(
    folder: Path, labels: list[Any], label_mode: Any, shuffle: bool
) -> None:
    how = {**HOW, "label_mode": label_mode, "shuffle": shuffle, "seed": 3}
    mine = list(labels)
    try:
        stock = keras.utils.image_dataset_from_directory(folder, labels=list(labels), **how)
        expected = _by_image(stock)
    except (TypeError, ValueError, tf.errors.OpError):
        with pytest.raises((TypeError, ValueError)):  # before anything is read
            image_dataset(folder, labels=mine, **how)
        return
    made = image_dataset(folder, labels=mine, **how)
    found = _by_image(made)
    assert found[1] == expected[1]
    assert made.element_spec == stock.element_spec
    assert repr(found[0]) == repr({key: expected[0][key] for key in found[0]})  # NaN is NaN
    assert made.class_names == stock.class_names
    assert mine == labels or labels[0] != labels[0]


@pytest.mark.parametrize("subset", ["training", "validation"])
def test_a_subset_has_the_types_of_its_own_labels_as_in_keras(folder: Path, subset: Any) -> None:
    how = {**HOW, "validation_split": 0.5, "subset": subset, "shuffle": False}
    labels = [1, 2, 3, 2**40, 5, 6]
    made = image_dataset(folder, labels=labels, **how)
    assert _by_image(made) == _by_image(
        keras.utils.image_dataset_from_directory(folder, labels=list(labels), **how)
    )


_COLUMNS: list[Any] = [
    *[labels for labels in _GIVEN if not isinstance(labels[0], (str, bytes)) and labels[0] == labels[0]],
    np.arange(6), np.arange(6, dtype=np.uint8) + 250, np.arange(6, dtype=np.uint64) + 2**63, np.arange(6) / 3,
    np.arange(6, dtype=np.float16), np.array([True, False] * 3), np.array([[0.5, np.nan]] * 6),
    np.arange(36, dtype=np.int64).reshape(6, 2, 3) * 2**35, pd.Series([10_000_000_001, 2, 3, 4, 5, 6]),
    pd.Series([0.25, 1.5, 2.0, 3.0, 4.0, 5.0]), pl.Series([2**50, 2, 3, 4, 5, 6]),
]  # fmt: skip


@pytest.mark.few(12)
@pytest.mark.parametrize("column", _COLUMNS, ids=lambda column: str(column)[:30])
def test_numbers_of_a_table_are_those_of_from_tensor_slices(files: list[str], column: Any) -> None:
    try:
        tf.data.Dataset.from_tensor_slices(column)
    except (TypeError, ValueError):
        with pytest.raises(OptionError, match=r"row \d|rows differ"):
            image_dataset({"file": files, "y": column}, "y", image_size=4)
        return
    made = image_dataset({"file": files, "y": column}, "y", image_size=4, shuffle=False)
    _compare(made, column)
    assert image_dataset(files, column, image_size=4).element_spec == made.element_spec


@pytest.mark.parametrize("column", [[2**40, 1], [[0.5, 1.5], [2.5, 3.5]], [True, False]], ids=str)
def test_numbers_are_the_same_by_the_other_engine_and_by_the_reference(files: list[str], column: Any) -> None:
    made = image_dataset(files[:2], column, image_size=4, shuffle=False, engine="graph")
    _compare(made, column)
    _compare(made.reference(), column)


@pytest.mark.parametrize("kind", ["pandas", "polars", "dict of arrays", "dict of lists", "array", "lists"])
def test_several_columns_are_several_numbers_of_each_image(files: list[str], kind: str) -> None:
    table = {"file": files, "x": [0.5, 1.25, 2.5, 3.5, 4.5, 5.5], "y": [2**40, 2, 3, 4, 5, 6]}
    frame, both = pd.DataFrame(table)[["x", "y"]], list(zip(table["x"], table["y"], strict=True))
    given: dict[str, tuple[Any, Any, Any]] = {  # the source, its labels, and the same for TensorFlow
        "pandas": (pd.DataFrame(table), ["x", "y"], frame), "polars": (pl.DataFrame(table), ["x", "y"], frame),
        "dict of arrays": ({**table, "x": frame.x.to_numpy(), "y": frame.y.to_numpy()}, ["x", "y"], frame),
        "dict of lists": (table, ["x", "y"], [list(row) for row in both]), "array": (table, frame, frame),
        "lists": (pd.DataFrame({"file": files, "both": both}), "both", both),
    }  # fmt: skip
    source, labels, stock = given[kind]
    _compare(image_dataset(source, labels, image_size=4, shuffle=False), stock)


def test_a_split_table_keeps_labels_with_their_images(files: list[str]) -> None:
    labels = np.arange(12).reshape(6, 2) / 7
    how: dict[str, Any] = {"image_size": 4, "validation_split": 0.5, "subset": "both", "seed": 1}
    for part in image_dataset(files, labels, **how):
        for number, label in _by_image(part)[0].items():
            assert label == labels[number].tolist()


@pytest.mark.parametrize(
    ("labels", "label_mode", "message"),
    [
        ([0, 1, 2**70], "int", r"row 2 has 1180591620717411303424, for which TensorFlow has no type"),
        ([0.5, float("nan"), 1.5], "int", r"row 1 has the label nan"),
        ([0, None, 2], "int", r"row 1 has the label None"),
        (pd.Series([1, None, 2], dtype="Int64"), "int", r"row 1 has the label"),
        (np.array(["2020", "2021", "2022"], "M8[D]"), "int", r"row 0 has the label datetime"),
        ([[1, 2], [3], [4, 5]], "int", "rows differ in shape"),
        ([True, 2, 3], "int", "rows differ in shape or type"),
        ([1, 2, 3], "categorical", r"row 2 has the label 3, which is not an index of the 3 classes"),
        ([0, -1, 2], "categorical", r"row 1 has the label -1"),
        ([0.5, 1.0, 2.0], "categorical", r"row 0 has the label 0.5"),
        ([[1, 0], [0, 1], [1, 0]], "categorical", r"row 0 has the label \[1, 0\].*one real number"),
        ([0.5, 0.75, 0.25], "binary", r"is for two classes"),
        ([2**40 + 1, 0, 0], "binary", r"row 0 of labels= has 1099511627777, which float32 cannot hold"),
        (["a", 0.5, "b"], "int", r"row 1 has the label 0.5: labels of classes"),
        (["x", "y", "x"], "int", r"are column names, but as many as there are rows"),
        (["x", "name"], "int", r"texts and numbers"),
        (3, "int", r"a column must have a value for each row, got 3"),
    ],
    ids=str,
)  # fmt: skip
def test_a_label_that_does_not_fit_is_an_error_at_once(labels: Any, label_mode: Any, message: str) -> None:
    columns = {"x": np.arange(3), "y": np.arange(3), "name": np.array(["u", "v", "w"])}
    table = {"file": ["a.png", "b.png", "c.png"], **columns}
    with pytest.raises(OptionError, match=message):
        image_dataset(table, labels, label_mode=label_mode)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, 2**24 + 1, 3], r"row 1 of tabular=.* has 16777217, which float32 cannot hold"),
        (np.array([1, 2, 2**63], np.uint64) + 1, r"row 2 of .* has 9223372036854775809"),
        ([1.0, 2.0, 1e300], r"row 2 of .* has 1e\+300"),
        (["1", "2", "3"], r"must be numbers, as many in each row, got '1'"),
        ([1, None, 3], r"got None"),
        ([1j, 2, 3], r"got 1j"),
        (np.array(["2020"] * 3, "M8[D]"), "must be numbers"),
        ([[1, 2], [3], [4, 5]], "as many in each row"),
    ],
    ids=str,
)
def test_a_further_input_that_float32_cannot_hold_is_an_error_at_once(values: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        image_dataset({"file": ["a.png", "b.png", "c.png"], "n": values}, None, tabular={"n": "n"})


def test_further_inputs_are_exact_where_float32_holds_them(files: list[str]) -> None:
    values = [2**24, -(2**24), 2**40, True, 0.1, np.nan]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = image_dataset(files, None, tabular={"n": np.array(values)}, image_size=4, shuffle=False)
    ((inputs),) = made
    np.testing.assert_array_equal(inputs["n"].numpy(), np.array(values, np.float32))


@pytest.mark.parametrize("labels", [[0.5, 1.5, 2.5, 3.5, 4.5], [[0, 1]] * 5])
def test_any_image_replaces_one_whose_label_is_a_measurement(
    files: list[str], tmp_path: Path, labels: Any
) -> None:
    (tmp_path / "bad.png").write_bytes(b"no image")
    made = image_dataset(
        [str(tmp_path / "bad.png"), *files[1:5]], labels, image_size=4, shuffle=False, bad_samples="replace"
    )
    for number, label in _by_image(made)[0].items():
        assert label == labels[number]
