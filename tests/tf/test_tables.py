"""Tables, boxes and several images of each row, against the scripts that are replaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas as pd
import polars as pl
import pytest
import tensorflow as tf
from odd_images import odd_images
from PIL import Image

from fastpipe import Decode
from fastpipe.errors import OptionError
from fastpipe.tf import Modality, image_dataset

Rows = Callable[[Any], list[Any]]


def equal(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        for value, like in zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True):
            np.testing.assert_array_equal(value, like)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("options", "pillow"),
    [
        ({"interpolation": "bilinear"}, {}), ({"interpolation": "nearest"}, {"how": "NEAREST"}),
        ({"interpolation": "bicubic"}, {"how": "BICUBIC"}), ({"interpolation": "area"}, {"how": "BOX"}),
        ({"interpolation": "hamming"}, {"how": "HAMMING"}), ({"interpolation": "lanczos"}, {"how": "LANCZOS"}),
        ({"color_mode": "grayscale"}, {"mode": "L"}), ({"color_mode": "grayscale", "cache": "ram"}, {"mode": "L"}),
        ({"color_mode": "rgba", "cache": "ram"}, {"mode": "RGBA"}),
    ],
    ids=str,
)  # fmt: skip
def test_boxes_are_cut_coloured_and_resized_as_pillow_does(
    photo_table: Any, by_pillow: Any, rows: Rows, options: dict[str, Any], pillow: dict[str, str]
) -> None:
    both = {"boxes": "box", "image_size": 40, "shuffle": False, "batch_size": 10}
    made = image_dataset(photo_table.table, None, **both, **options)
    pairs = zip(photo_table.paths, photo_table.boxes, strict=True)
    expected = [by_pillow(path, box, 40, **pillow) for path, box in pairs]
    for _ in range(2):
        equal(rows(made), expected)


def test_scaling_is_that_of_keras_and_channels_first_gives_planes(photo_table: Any, rows: Rows) -> None:
    both = {"labels": None, "image_size": (12, 10), "shuffle": False}
    plain = np.stack(rows(image_dataset(photo_table.table, cache="off", **both)))
    for cache in ("off", "ram"):
        made = image_dataset(photo_table.table, rescale=(1 / 127.5, -1), cache=cache, **both)
        for _ in range(2):
            np.testing.assert_allclose(rows(made), keras.layers.Rescaling(1 / 127.5, -1)(plain), atol=1e-6)
    planes = rows(image_dataset(photo_table.table, data_format="channels_first", **both))
    np.testing.assert_array_equal(planes, np.moveaxis(plain, -1, 1))


@pytest.mark.few(2)
@pytest.mark.parametrize("output", ["uint8", "float16", "float32"])
@pytest.mark.parametrize("parity", ["pil", "tf"])
def test_outputs_are_those_of_the_reference(photo_table: Any, output: Any, parity: Any, same: Any) -> None:
    made = image_dataset(photo_table.table, image_size=24, output=output, shuffle=False, parity=parity)
    assert made.element_spec[0].dtype == output
    same(made, made.reference())


_AS_XYXY = {
    "xyxy": lambda x0, y0, x1, y1, w, h: (x0, y0, x1, y1),
    "yxyx": lambda x0, y0, x1, y1, w, h: (y0, x0, y1, x1),
    "xywh": lambda x0, y0, x1, y1, w, h: (x0, y0, x1 - x0, y1 - y0),
    "center_xywh": lambda x0, y0, x1, y1, w, h: ((x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0),
    "rel_xyxy": lambda x0, y0, x1, y1, w, h: (x0 / w, y0 / h, x1 / w, y1 / h),
    "rel_yxyx": lambda x0, y0, x1, y1, w, h: (y0 / h, x0 / w, y1 / h, x1 / w),
    "rel_xywh": lambda x0, y0, x1, y1, w, h: (x0 / w, y0 / h, (x1 - x0) / w, (y1 - y0) / h),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("box_format", list(_AS_XYXY))
def test_every_box_format_names_the_same_pixels(photo_table: Any, rows: Rows, box_format: str) -> None:
    pairs = zip(photo_table.boxes.tolist(), photo_table.sizes, strict=True)
    boxes = [_AS_XYXY[box_format](*box, *size) for box, size in pairs]
    both = {"labels": None, "image_size": 16, "shuffle": False}
    made = image_dataset(photo_table.paths, boxes=boxes, box_format=box_format, **both)
    equal(rows(made), rows(image_dataset(photo_table.paths, boxes=photo_table.boxes, **both)))


def test_every_kind_of_table_gives_the_same(photo_table: Any, rows: Rows) -> None:
    table = photo_table.table
    both = {"image_size": 16, "shuffle": False, "boxes": ("x0", "y0", "x1", "y1")}
    expected = rows(image_dataset(table, **both))
    shuffled = pd.DataFrame(table).sample(frac=1, random_state=1).sort_index()
    listed = image_dataset(photo_table.paths, photo_table.labels, **{**both, "boxes": photo_table.boxes})
    frames = [image_dataset(one, **both) for one in (pd.DataFrame(table), shuffled, pl.DataFrame(table))]
    for made in (*frames, listed):
        assert made.class_names == sorted(set(photo_table.labels))
        assert made.file_paths == photo_table.paths
        equal(rows(made), expected)
    for other in (3, None, [], {}, {"file": ["a"], "label": []}):
        with pytest.raises(OptionError):
            image_dataset(other)


def test_modalities_have_files_boxes_and_sizes(photo_table: Any, by_pillow: Any, tmp_path: Path) -> None:
    names = [f"{n}.png" for n in range(len(photo_table))]
    for name, path in zip(names, photo_table.paths, strict=True):
        with Image.open(path) as image:
            image.convert("L").resize((31, 30)).save(tmp_path / name)
    table = {**photo_table.table, "thermal": names, "age": range(len(names)), "weight": [0.5] * len(names)}
    boxes = np.tile([1, 2, 20, 21], (len(names), 1))
    made = image_dataset(
        pd.DataFrame(table),
        modalities={
            "photo": {"files": "file", "boxes": "box", "image_size": 32},
            "thermal": Modality(folder=tmp_path, color_mode="grayscale", boxes=boxes),
        },
        tabular={"age": "age", "body": ["age", "weight"]},
        image_size=20, rescale=1 / 255, shuffle=True, seed=3, batch_size=5,
    )  # fmt: skip
    assert made.element_spec[0]["thermal"].shape == (None, 20, 20, 1)
    assert made.file_paths["thermal"][3] == str(tmp_path / "3.png")
    assert "photo  →  its box at 32 × 32, bilinear as Pillow does" in made.plan
    seen = []
    for inputs, label in made.unbatch():
        assert set(inputs) == {"photo", "thermal", "age", "body"}
        row = int(inputs["age"])
        seen.append(row)
        assert made.class_names[int(label)] == photo_table.labels[row]
        assert inputs["body"].numpy().tolist() == [row, 0.5]
        photo = by_pillow(photo_table.paths[row], photo_table.boxes[row], 32) / 255
        np.testing.assert_allclose(inputs["photo"], photo, atol=1e-6)
        thermal = by_pillow(str(tmp_path / names[row]), boxes[0], 20, "L") / 255
        np.testing.assert_allclose(inputs["thermal"], thermal, atol=1e-6)
    assert sorted(seen) == list(range(len(names))) != seen


@pytest.mark.parametrize("engine", ["threads", "graph"])
def test_pixels_of_a_box_are_those_of_the_whole_image(photo_table: Any, rows: Rows, engine: Any) -> None:
    options: Any = {"boxes": "box", "image_size": 24, "shuffle": False, "parity": "tf", "engine": engine}
    found = rows(image_dataset(photo_table.table, None, **options))
    for image, path, box in zip(found, photo_table.paths, photo_table.boxes.tolist(), strict=True):
        left, top, right, bottom = box
        whole = tf.image.decode_image(tf.io.read_file(path), channels=3, expand_animations=False)
        part = tf.image.crop_to_bounding_box(whole, top, left, bottom - top, right - left)
        np.testing.assert_allclose(image, tf.image.resize(part, (24, 24)).numpy(), atol=1e-3)


def test_a_box_may_reach_outside_or_keep_proportions(photo_table: Any, by_pillow: Any, rows: Rows) -> None:
    path, (width, height) = photo_table.paths[0], photo_table.sizes[0]
    box = (-7, 5, width - 3, height + 11)
    for outside, seen in (("pad", box), ("clip", (0, 5, width - 3, height))):
        (made,) = rows(image_dataset([path], None, boxes=[box], image_size=32, outside=outside))
        np.testing.assert_array_equal(made, by_pillow(path, seen, 32))
    for backend in ("auto", "pillow", "dali"):  # a box beside the image is black, as for PIL.Image.crop
        options: dict[str, Any] = {"outside": "pad", "image_size": 32, "decode": Decode(backend)}
        (made,) = rows(image_dataset([path], None, boxes=[(-9, 5, -1, 25)], **options))
        assert not made.any()
        options["pad_to_aspect_ratio"] = True  # which makes the box larger: it reaches into the image
        (made,) = rows(image_dataset([path], None, boxes=[(-9, 5, -1, 45)], **options))
        np.testing.assert_array_equal(made, by_pillow(path, (-25, 5, 15, 45), 32))
    options = {"boxes": [(10, 20, 110, 70)], "image_size": 40, "crop_to_aspect_ratio": True}
    (made,) = rows(image_dataset([path], None, **options))
    np.testing.assert_array_equal(made, by_pillow(path, (35, 20, 85, 70), 40))


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("part", range(6))
@pytest.mark.parametrize("parity", ["pil", "tf"])
def test_odd_files_are_read_as_by_the_stock(tmp_path: Path, rows: Rows, parity: Any, part: int) -> None:
    compared = 0
    for case in odd_images(tmp_path)[part::6]:
        made = image_dataset([str(case.path)], None, image_size=(33, 29), parity=parity, cache="off")
        try:
            (expected,) = rows(made.reference())
        except (tf.errors.OpError, OSError):
            with pytest.raises(tf.errors.OpError, match=r"sample 0 could not be read") as error:
                rows(made)
            assert case.path.name in str(error.value)
            continue
        (image,) = rows(made)
        np.testing.assert_array_equal(image, expected, err_msg=f"{case.name}: {case.note}")
        compared += 1
    assert compared > 2


def test_a_table_is_split_as_keras_splits(photo_table: Any, photos: Path) -> None:
    both = {"validation_split": 0.3, "subset": "both", "seed": 11, "image_size": 8}
    listed = image_dataset(photos, shuffle=False, image_size=8).file_paths
    of_table = image_dataset(listed, [Path(path).parent.name for path in listed], **both)
    for one, other in zip(of_table, image_dataset(photos, **both), strict=True):
        assert one.file_paths == other.file_paths


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"label": ["a", None, "b"]}, r"row 1 has the label None"),
        ({"label": ["a", float("nan"), "b"]}, r"row 1 has the label nan"),
        ({"file": ["x.jpg", "", "y.jpg"]}, r"row 1 has no file name in column 'file'"),
        ({"file": ["x.jpg", float("nan"), "y.jpg"]}, r"row 1 has no file name"),
        ({"box": [[0, 0, 1, 1], [5, 5, 5, 9], [0, 0, 1, 1]]}, r"row 1: the box \[5.0, 5.0, 5.0, 9.0\] .* is empty"),
        ({"box": [[0, 0, 1, 1], [0, 0, float("nan"), 9], [0, 0, 1, 1]]}, r"row 1: the box"),
        ({"box": [[0, 0, 1], [0, 0, 1], [0, 0, 1]]}, r"four numbers"),
        ({"box": ["a", "b", "c"]}, r"must be numbers"),
        ({"files": "name"}, r"files= names the column 'name', but there are only \['file', 'label', 'box'\]"),
        ({"labels": "kind"}, r"labels= names the column 'kind'"),
        ({"labels": [1]}, r"labels has shape \(1,\), the source has 3 rows"),
        ({"boxes": "nothing"}, r"boxes= names the column 'nothing'"),
        ({"boxes": [[0, 0, 1, 1]]}, r"boxes= has 1 rows, the source has 3"),
        ({"boxes": [[0, 0, 2**32 + 10, 10]] * 3, "engine": "graph", "parity": "tf"}, r"row 0: the box .* endless"),
        ({"boxes": [[0, 0, float("inf"), 5]] * 3}, r"row 0: the box .* endless"),
        ({"class_names": ["cat"]}, r"row 1 has the label 'dog', which is none of class_names"),
        ({"modalities": {}}, r"name at least one image"), ({"modalities": {"a": 3}}, r"must be a dict of options"),
        ({"modalities": {"a": {"size": 3}}}, r"has no option 'size'"),
        ({"modalities": {"a": {"box_format": "polar"}}}, r"modalities=.*box_format must be one of"),
        ({"modalities": {"a": {"files": "no"}}}, r"names the column 'no'"),
        ({"tabular": {"n": "label"}}, r"tabular=.*must be numbers"),
        ({"modalities": {"a": {"files": "file"}}, "tabular": {"a": [1, 2, 3]}}, r"both of a modality"),
        ({"label_mode": "what"}, r"label_mode must be one of"), ({"subset": "training"}, r"needs validation_split"),
        ({"validation_split": 0.1, "subset": "both"}, r"leaves none for validation"),
        ({"box_format": "polar"}, r"box_format must be one of"),
        ({"boxes": [[10, 10, 300, 300]] * 3, "box_format": "rel_xyxy"}, r"is in pixels"),
        ({"preprocess": 3}, r"preprocess must be a function"), ({"rescale": "half"}, r"rescale must be a factor"),
        ({"output": "float16", "rescale": 1000.0}, r"images from 0.0 to 255000.0, which output='float16'"),
        ({"output": "float16", "rescale": (1.0, 1e5)}, "output='float16' cannot hold"),
        ({"rescale": 1e37}, "output='float32' cannot hold"),
        ({"output": "uint8", "modalities": {"a": {"rescale": 0.5}}}, "rescale= gives floats.* of 'a'"),
    ],
    ids=str,
)  # fmt: skip
def test_tables_and_options_that_do_not_fit_are_refused_at_once(
    arguments: dict[str, Any], message: str
) -> None:
    table = {"file": ["a.jpg", "b.jpg", "c.jpg"], "label": ["cat", "dog", "cat"], "box": [[0, 0, 1, 1]] * 3}
    columns = {name: arguments[name] for name in table if name in arguments}
    options = {name: value for name, value in arguments.items() if name not in table}
    if not {"modalities", "boxes"} & set(options):
        options["boxes"] = table["box"] if "box_format" in options else "box"
    with pytest.raises(OptionError, match=message):
        image_dataset({**table, **columns}, **options)


def test_whole_numbers_name_their_classes() -> None:
    files = ["a.jpg", "b.jpg", "c.jpg"]
    assert image_dataset(files, [3, 7, 3]).class_names == ["3", "7"]
    chosen = image_dataset(files, [3, 7, 3], class_names=[7, 3], label_mode="categorical")
    assert chosen.class_names == ["7", "3"] and chosen.element_spec[1].shape == (None, 2)
