"""Tables, boxes and several images of each row, against the scripts that are replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import tensorflow as tf
from odd_images import odd_images
from PIL import Image

from fastpipe.errors import OptionError
from fastpipe.tf import Modality, image_dataset


@pytest.mark.parametrize("how", ["bilinear", "nearest", "bicubic", "area", "hamming", "lanczos"])
def test_boxes_are_cut_and_resized_as_pillow_does(
    photo_table: Any, by_pillow: Any, rows: Any, how: str
) -> None:
    made = image_dataset(
        photo_table.table, boxes="box", image_size=48, interpolation=how, shuffle=False, batch_size=10
    )
    name = {"area": "BOX"}.get(how, how.upper())
    found = rows(made)
    assert len(found) == len(photo_table)
    for (image, _), path, box in zip(found, photo_table.paths, photo_table.boxes, strict=True):
        np.testing.assert_array_equal(image, by_pillow(path, box, 48, how=name))


@pytest.mark.parametrize(("color_mode", "mode"), [("grayscale", "L"), ("rgba", "RGBA"), ("rgb", "RGB")])
@pytest.mark.parametrize("engine_cache", ["off", "ram"])
def test_colours_are_those_of_pillow(
    photo_table: Any, by_pillow: Any, rows: Any, color_mode: Any, mode: str, engine_cache: Any
) -> None:
    made = image_dataset(
        photo_table.table,
        boxes="box",
        image_size=40,
        color_mode=color_mode,
        shuffle=False,
        cache=engine_cache,
    )
    for _ in range(2):
        for (image, _), path, box in zip(rows(made), photo_table.paths, photo_table.boxes, strict=True):
            np.testing.assert_array_equal(image, by_pillow(path, box, 40, mode))


def test_scaling_is_that_of_keras(photo_table: Any, rows: Any) -> None:
    plain = image_dataset(photo_table.table, image_size=24, shuffle=False, cache="off")
    for cache in ("off", "ram"):
        made = image_dataset(
            photo_table.table, image_size=24, shuffle=False, rescale=(1 / 127.5, -1), cache=cache
        )
        layer = tf.keras.layers.Rescaling(1 / 127.5, -1)
        for _ in range(2):
            for (image, _), (bytes_, _) in zip(rows(made), rows(plain), strict=True):
                np.testing.assert_allclose(image, layer(bytes_).numpy(), atol=1e-6)


@pytest.mark.parametrize("output", ["uint8", "float16", "float32"])
@pytest.mark.parametrize("parity", ["pil", "tf"])
def test_types_of_output(photo_table: Any, output: Any, parity: Any) -> None:
    made = image_dataset(photo_table.table, image_size=24, output=output, shuffle=False, parity=parity)
    assert made.element_spec[0].dtype == output
    for (image, labels), (expected, same) in zip(made, made.reference(), strict=True):
        np.testing.assert_array_equal(image.numpy(), expected.numpy())
        np.testing.assert_array_equal(labels.numpy(), same.numpy())


_AS_XYXY = {
    "xyxy": lambda x0, y0, x1, y1, w, h: (x0, y0, x1, y1),
    "yxyx": lambda x0, y0, x1, y1, w, h: (y0, x0, y1, x1),
    "xywh": lambda x0, y0, x1, y1, w, h: (x0, y0, x1 - x0, y1 - y0),
    "center_xywh": lambda x0, y0, x1, y1, w, h: ((x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0),
    "rel_xyxy": lambda x0, y0, x1, y1, w, h: (x0 / w, y0 / h, x1 / w, y1 / h),
    "rel_yxyx": lambda x0, y0, x1, y1, w, h: (y0 / h, x0 / w, y1 / h, x1 / w),
    "rel_xywh": lambda x0, y0, x1, y1, w, h: (x0 / w, y0 / h, (x1 - x0) / w, (y1 - y0) / h),
}


@pytest.mark.parametrize("box_format", list(_AS_XYXY))
def test_every_box_format_names_the_same_pixels(photo_table: Any, rows: Any, box_format: str) -> None:
    boxes = [
        _AS_XYXY[box_format](*box, *size)
        for box, size in zip(photo_table.boxes.tolist(), photo_table.sizes, strict=True)
    ]
    both = {"labels": None, "image_size": 16, "shuffle": False}
    made = image_dataset(photo_table.paths, boxes=boxes, box_format=box_format, **both)
    expected = image_dataset(photo_table.paths, boxes=photo_table.boxes, **both)
    for image, other in zip(rows(made), rows(expected), strict=True):
        np.testing.assert_array_equal(image, other)


def test_every_kind_of_table(photo_table: Any, rows: Any) -> None:
    table = photo_table.table
    corners = ("x0", "y0", "x1", "y1")
    both = {"image_size": 16, "shuffle": False, "boxes": corners}
    expected = rows(image_dataset(table, **both))
    for source in (
        pd.DataFrame(table),
        pd.DataFrame(table).sample(frac=1, random_state=1).sort_index(),
        pl.DataFrame(table),
    ):
        made = image_dataset(source, **both)
        assert made.class_names == sorted(set(photo_table.labels))
        assert made.file_paths == photo_table.paths
        for (image, label), (other, same) in zip(rows(made), expected, strict=True):
            np.testing.assert_array_equal(image, other)
            assert label == same
    listed = image_dataset(photo_table.paths, photo_table.labels, **{**both, "boxes": photo_table.boxes})
    for (image, label), (other, same) in zip(rows(listed), expected, strict=True):
        np.testing.assert_array_equal(image, other)
        assert label == same


def test_modalities_have_files_boxes_and_sizes_of_their_own(
    photo_table: Any, by_pillow: Any, tmp_path: Path
) -> None:
    names = [f"{n}.png" for n in range(len(photo_table))]
    for name, path in zip(names, photo_table.paths, strict=True):
        with Image.open(path) as image:
            image.convert("L").resize((31, 30)).save(tmp_path / name)
    table = {**photo_table.table, "thermal": names, "age": range(len(names)), "weight": [0.5] * len(names)}
    made = image_dataset(
        pd.DataFrame(table),
        modalities={
            "photo": {"files": "file", "boxes": "box", "image_size": 32},
            "thermal": Modality(folder=tmp_path, color_mode="grayscale", boxes=np.tile([1, 2, 20, 21], (len(names), 1))),
        },
        tabular={"age": "age", "body": ["age", "weight"]},
        image_size=20, rescale=1 / 255, shuffle=True, seed=3, batch_size=5,
    )  # fmt: skip
    assert made.element_spec[0]["thermal"].shape == (None, 20, 20, 1)
    assert made.file_paths["thermal"][3] == str(tmp_path / "3.png")
    assert "photo  →  its box at 32 × 32, bilinear as Pillow does" in made.plan
    seen = []
    for inputs, labels in made:
        assert set(inputs) == {"photo", "thermal", "age", "body"}
        for n, label in enumerate(labels.numpy()):
            row = int(inputs["age"][n])
            seen.append(row)
            assert made.class_names[label] == photo_table.labels[row]
            assert inputs["body"][n].numpy().tolist() == [row, 0.5]
            photo = by_pillow(photo_table.paths[row], photo_table.boxes[row], 32) / 255
            np.testing.assert_allclose(inputs["photo"][n], photo, atol=1e-6)
            thermal = by_pillow(str(tmp_path / names[row]), (1, 2, 20, 21), 20, "L") / 255
            np.testing.assert_allclose(inputs["thermal"][n], thermal, atol=1e-6)
    assert sorted(seen) == list(range(len(names)))
    assert seen != sorted(seen)


def test_one_image_beside_numbers_is_called_image(photo_table: Any) -> None:
    made = image_dataset(photo_table.table, image_size=8, tabular={"left": "x0"}, batch_size=4, shuffle=False)
    inputs, _ = next(iter(made))
    assert inputs["image"].shape == (4, 8, 8, 3)
    assert inputs["left"].numpy().tolist() == photo_table.boxes[:4, 0].tolist()


@pytest.mark.parametrize("engine", ["threads", "graph"])
def test_tensorflows_pixels_of_a_box_are_those_of_the_whole_image(
    photo_table: Any, rows: Any, engine: Any
) -> None:
    made = image_dataset(
        photo_table.table, None, boxes="box", image_size=24, shuffle=False, parity="tf", engine=engine
    )
    for image, path, (left, top, right, bottom) in zip(
        rows(made), photo_table.paths, photo_table.boxes.tolist(), strict=True
    ):
        whole = tf.image.decode_image(tf.io.read_file(path), channels=3, expand_animations=False)
        part = tf.image.crop_to_bounding_box(whole, top, left, bottom - top, right - left)
        np.testing.assert_allclose(image, tf.image.resize(part, (24, 24)).numpy(), atol=1e-3)


def test_planes(photo_table: Any) -> None:
    both = {"image_size": (12, 10), "shuffle": False}
    planes = image_dataset(photo_table.table, data_format="channels_first", **both)
    pixels = image_dataset(photo_table.table, **both)
    for (made, _), (expected, _) in zip(planes, pixels, strict=True):
        np.testing.assert_array_equal(made.numpy(), np.moveaxis(expected.numpy(), -1, 1))


def test_outside_is_clipped_or_black_where_that_is_said(photo_table: Any, by_pillow: Any, rows: Any) -> None:
    path = photo_table.paths[0]
    with Image.open(path) as image:
        width, height = image.size
    box = (-7, 5, width - 3, height + 11)
    both = {"labels": None, "boxes": [box], "image_size": 32}
    (black,) = rows(image_dataset([path], outside="pad", **both))
    np.testing.assert_array_equal(black, by_pillow(path, box, 32))
    (clipped,) = rows(image_dataset([path], outside="clip", **both))
    np.testing.assert_array_equal(clipped, by_pillow(path, (0, 5, width - 3, height), 32))


def test_proportions_are_kept_around_a_box(photo_table: Any, rows: Any) -> None:
    path = photo_table.paths[0]
    both = {"labels": None, "boxes": [(10, 20, 110, 70)], "image_size": (40, 40)}
    (made,) = rows(image_dataset([path], crop_to_aspect_ratio=True, **both))
    with Image.open(path) as opened:
        image = opened.convert("RGB")
    expected = image.crop((35, 20, 85, 70)).resize((40, 40), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(made, np.asarray(expected, np.float32))


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("parity", ["pil", "tf"])
def test_odd_files_are_read_as_the_stock_reads_them(tmp_path: Path, rows: Any, parity: Any) -> None:
    compared = 0
    for case in odd_images(tmp_path):
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
    assert compared > 15


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": ["a", None, "b"]}, r"row 1 has the label None"),
        ({"label": ["a", float("nan"), "b"]}, r"row 1 has the label nan"),
        ({"file": ["x.jpg", "", "y.jpg"]}, r"row 1 has no file name in column 'file'"),
        ({"file": ["x.jpg", float("nan"), "y.jpg"]}, r"row 1 has no file name"),
        ({"box": [[0, 0, 1, 1], [5, 5, 5, 9], [0, 0, 1, 1]]}, r"row 1: the box \[5.0, 5.0, 5.0, 9.0\] .* is empty"),
        ({"box": [[0, 0, 1, 1], [0, 0, float("nan"), 9], [0, 0, 1, 1]]}, r"row 1: the box"),
        ({"box": [[0, 0, 1], [0, 0, 1], [0, 0, 1]]}, r"four numbers"),
        ({"box": ["a", "b", "c"]}, r"must be numbers"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_at_once(change: dict[str, Any], message: str) -> None:
    table = {
        "file": ["x.jpg", "y.jpg", "z.jpg"],
        "label": ["a", "b", "a"],
        "box": [[0, 0, 1, 1]] * 3,
        **change,
    }
    with pytest.raises(OptionError, match=message):
        image_dataset(table, boxes="box")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"files": "name"}, r"files= names the column 'name', but there are only \['file', 'label'\]"),
        ({"labels": "kind"}, r"labels= names the column 'kind'"),
        ({"labels": [1]}, r"labels has shape \(1,\), the source has 2 rows"),
        ({"boxes": "nothing"}, r"boxes= names the column 'nothing'"),
        ({"boxes": [[0, 0, 1, 1]]}, r"boxes= has 1 rows, the source has 2"),
        ({"class_names": ["cat"]}, r"row 1 has the label 'dog', which is none of class_names"),
        ({"modalities": {}}, r"name at least one image"),
        ({"modalities": {"a": 3}}, r"must be a dict of options"),
        ({"modalities": {"a": {"size": 3}}}, r"has no option 'size'"),
        ({"modalities": {"a": {"box_format": "polar"}}}, r"modalities=.*box_format must be one of"),
        ({"modalities": {"a": {"files": "no"}}}, r"names the column 'no'"),
        ({"tabular": {"n": "label"}}, r"tabular=.*must be numbers"),
        ({"modalities": {"a": {"files": "file"}}, "tabular": {"a": [1, 2]}}, r"both of a modality"),
        ({"label_mode": "what"}, r"label_mode must be one of"),
        ({"subset": "training"}, r"needs validation_split"),
        ({"validation_split": 0.1, "subset": "both"}, r"leaves none for validation"),
        ({"box_format": "polar"}, r"box_format must be one of"),
        ({"boxes": [[10, 10, 300, 300]] * 2, "box_format": "rel_xyxy"}, r"is in pixels"),
        ({"preprocess": 3}, r"preprocess must be a function"),
        ({"rescale": "half"}, r"rescale must be a factor"),
    ],
    ids=str,
)
def test_what_cannot_be_is_said(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        image_dataset({"file": ["a.jpg", "b.jpg"], "label": ["cat", "dog"]}, **arguments)


@pytest.mark.parametrize("source", [3, None, [], {}, {"file": ["a"], "label": []}])
def test_what_is_no_table_is_said(source: Any) -> None:
    with pytest.raises(OptionError):
        image_dataset(source)


def test_whole_numbers_stay_what_they_are() -> None:
    files = ["a.jpg", "b.jpg", "c.jpg"]
    made = image_dataset(files, [3, 7, 3])
    assert made.class_names == ["3", "7"]
    chosen = image_dataset(files, [3, 7, 3], class_names=[7, 3], label_mode="categorical")
    assert chosen.class_names == ["7", "3"]
    assert chosen.element_spec[1].shape == (None, 2)


def test_a_table_is_split_as_keras_splits(photo_table: Any, photos: Path) -> None:
    both = {"validation_split": 0.3, "subset": "both", "seed": 11, "image_size": 8}
    of_folder = image_dataset(photos, **both)
    listed = image_dataset(photos, shuffle=False, image_size=8)
    of_table = image_dataset(
        listed.file_paths, [Path(path).parent.name for path in listed.file_paths], **both
    )
    for one, other in zip(of_table, of_folder, strict=True):
        assert one.file_paths == other.file_paths
