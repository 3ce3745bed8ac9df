"""Images of the engines "threads" and "graph": caches, the script's code, bad rows, what a dataset knows."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageFile

from fastpipe import BadSamples, Cache, Decode, Shard
from fastpipe.errors import OptionError, TooManyBadSamplesError
from fastpipe.tf import ImageDataset, image_dataset, image_stream


def _rows(dataset: Any) -> list[int]:
    """The column "row" of an epoch."""
    return [int(row) for element in dataset for row in element["row"]]


def _numbered(photo_table: Any, **arguments: Any) -> Any:
    table = {"file": photo_table.paths, "row": range(len(photo_table)), "label": photo_table.labels}
    options = {"image_size": 16, "batch_size": 4, "labels": None, **arguments}
    return image_dataset(table, tabular={"row": "row"}, **options)


@pytest.mark.few(2)
@pytest.mark.parametrize("where", ["ram", "disk"])
@pytest.mark.parametrize("parity", ["pil", "tf"])
def test_kept_samples_are_the_same(
    photo_table: Any, tmp_path: Path, where: Any, parity: Any, same: Callable[..., None]
) -> None:
    cache = Cache(where, dir=tmp_path) if where == "disk" else Cache(where, max_bytes=1 << 28)
    table = {"file": photo_table.paths, "box": photo_table.boxes.tolist()}
    both = {"labels": None, "boxes": "box", "image_size": 20, "shuffle": False, "rescale": 0.5}
    expected, made, again = (
        image_dataset(table, cache=one, parity=parity, **both) for one in ("off", cache, cache)
    )
    for _ in range(3):
        same(made, expected)
    assert "kept in" in made.plan
    same(again, expected)
    assert again.stage_seconds.get("decode", 0.0) < made.stage_seconds["decode"]


def test_a_file_that_changes_is_read_again(settled: Any, tmp_path: Path) -> None:
    path, cache = tmp_path / "one.png", Cache("ram", max_bytes=1 << 24)
    made = image_dataset([str(path)], None, image_size=8, cache=cache)
    for colour in ([10, 20, 30], [90, 80, 70]):
        Image.new("RGB", (8, 8), tuple(colour)).save(path)
        if colour[0] == 10:
            settled(path)  # only then is it kept
        for _ in range(2):
            assert next(iter(made))[0, 0, 0].numpy().tolist() == colour


def test_other_options_keep_other_samples(photo_table: Any) -> None:
    both: dict[str, Any] = {"labels": None, "shuffle": False, "cache": Cache("ram", max_bytes=1 << 28)}
    variants: list[dict[str, Any]] = [
        {"image_size": 16}, {"image_size": (16, 8)}, {"interpolation": "bicubic"}, {"color_mode": "grayscale"},
        {"parity": "tf"}, {"boxes": [[0, 0, 9, 9]]}, {"boxes": [[1, 0, 9, 9]]},
    ]  # fmt: skip
    for variant in variants * 2:
        made = image_dataset(photo_table.paths[:1], **{**both, "image_size": 16, **variant})
        np.testing.assert_allclose(next(iter(made)).numpy(), next(iter(made.reference())).numpy())


@pytest.fixture
def files(tmp_path: Path, settled: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three images, one of them cut off, which is allowed."""
    rng = np.random.default_rng(0)
    for number, end in enumerate(["png", "jpg", "png"]):
        image = Image.fromarray(rng.integers(0, 255, (40, 44, 3), dtype=np.uint8))
        image.save(tmp_path / f"{number}.{end}")
    whole = (tmp_path / "2.png").read_bytes()
    (tmp_path / "2.png").write_bytes(whole[: len(whole) // 2])
    settled(tmp_path)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
    return [str(path) for path in sorted(tmp_path.iterdir())]


def _epoch(dataset: Any) -> Any:
    """An epoch's images and whether Pillow warned of one, or the words of an error."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            found = np.concatenate([images.numpy() for images in dataset]).tolist()
        except tf.errors.OpError:
            return "an error"
    return found, any(issubclass(one.category, Image.DecompressionBombWarning) for one in seen)


@pytest.mark.parametrize("code", [None, lambda image: image.rotate(90)], ids=["made", "cut"])
def test_limits_of_pillow_hold_for_kept_samples(files: list[str], code: Any) -> None:
    both: dict[str, Any] = {"image_size": 8, "shuffle": False, "parity": "pil", "preprocess": code}
    off = image_dataset(files, None, cache="off", **both)
    kept = image_dataset(files, None, cache=Cache("ram", max_bytes=1 << 26), **both)
    usual, seen = Image.MAX_IMAGE_PIXELS, []
    for allowed, limit in (
        (True, usual), (False, usual), (True, 1700), (True, 500), (True, None), (True, usual),
    ):  # fmt: skip
        ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS = allowed, limit
        for _ in range(2):
            seen.append(_epoch(off))
            assert _epoch(kept) == seen[-1], (allowed, limit)
    outcomes = [one if isinstance(one, str) else one[1] for one in seen[::2]]
    assert outcomes == [False, "an error", True, "an error", False, False]
    assert all(one[0] == seen[0][0] for one in seen if not isinstance(one, str))


def test_a_dataset_with_a_limit_of_its_own_is_not_given_what_another_keeps(files: list[str]) -> None:
    both: dict[str, Any] = {"image_size": 8, "shuffle": False, "cache": Cache("ram", max_bytes=1 << 26)}
    for _ in range(2):
        assert not isinstance(_epoch(image_dataset(files[:2], None, parity="tf", **both)), str)
    limited = image_dataset(files[:2], None, parity="tf", decode=Decode(max_pixels=500), **both)
    assert _epoch(limited) == "an error"


def _brighter(image: Any) -> Any:
    return np.minimum(np.asarray(image).astype(int) + 9, 255).astype(np.uint8)


@pytest.mark.few(2)
@pytest.mark.parametrize("thread_safe", [False, True])
@pytest.mark.parametrize("cache", ["off", "ram"])
def test_preprocess_sees_the_box_before_it_is_resized_and_its_floats_are_taken_as_they_are(
    photo_table: Any, rows: Any, thread_safe: bool, cache: Any
) -> None:
    def halved(image: Any) -> Any:
        return np.asarray(image.resize((24, 24)), np.float64) / 510

    both = {"boxes": "box", "image_size": 24, "shuffle": False, "thread_safe": thread_safe, "cache": cache}
    made = image_dataset(photo_table.table, None, preprocess=_brighter, **both)
    floats = image_dataset(photo_table.table, None, preprocess=halved, rescale=7.0, **both)
    for _ in range(2):
        found = zip(rows(made), rows(floats), photo_table.paths, photo_table.boxes.tolist(), strict=True)
        for image, other, path, box in found:
            with Image.open(path) as opened:
                part = opened.convert("RGB").crop(box)
            expected = Image.fromarray(_brighter(part)).resize((24, 24), Image.Resampling.BILINEAR)
            np.testing.assert_array_equal(image, np.asarray(expected, np.float32))
            np.testing.assert_allclose(other, halved(part), rtol=1e-6)


@pytest.mark.parametrize("thread_safe", [False, True])
def test_random_numbers_of_preprocess_follow_seed_epoch_and_row(photo_table: Any, thread_safe: bool) -> None:
    def noisy(image: Any, rng: np.random.Generator) -> Any:
        return np.full((8, 8, 3), rng.random())

    def epochs(threads: int, seed: int) -> list[Any]:
        both = {"image_size": 8, "preprocess": noisy, "batch_size": 4, "thread_safe": thread_safe}
        made = image_dataset(photo_table.paths[:9], None, seed=seed, threads=threads, **both)
        return [np.concatenate([images.numpy()[:, 0, 0, 0] for images in made]).tolist() for _ in range(2)]

    first, second = epochs(1, 3)
    assert len({*first, *second}) == 18
    assert epochs(4, 3) == [first, second]
    assert epochs(4, 4) != [first, second]


@pytest.mark.parametrize("thread_safe", [False, True])
@pytest.mark.parametrize("policy", ["raise", "replace", "skip"])
def test_errors_of_preprocess_are_always_raised(photo_table: Any, thread_safe: bool, policy: Any) -> None:
    def broken(image: Any) -> Any:
        raise ZeroDivisionError("of the script")

    options = {"preprocess": broken, "thread_safe": thread_safe, "bad_samples": policy}
    with pytest.raises(tf.errors.OpError, match="of the script"):
        list(image_dataset(photo_table.paths[:3], None, image_size=8, **options))


@pytest.mark.parametrize(
    ("output", "value"), [("uint8", 1.75), ("float16", 1e5), ("float32", 1e300), ("float32", "shape")]
)
def test_a_result_of_preprocess_that_does_not_fit_is_an_error(
    photo_table: Any, output: Any, value: float | str
) -> None:
    made = np.zeros((3, 3)) if value == "shape" else np.full((8, 8, 3), value)
    words = "float64 of shape" if value == "shape" else f"float64.*output='{output}'"
    dataset = image_dataset(
        photo_table.paths[:3], None, image_size=8, shuffle=False, output=output,
        modalities={"depth": {"preprocess": lambda image: made}},
    )  # fmt: skip
    with pytest.raises(tf.errors.OpError, match=rf"row 0: preprocess of 'depth' returned {words}"):
        list(dataset)


_TWO = {"first": {"boxes": "box"}, "second": {}}


@pytest.fixture
def damaged(photo_table: Any, tmp_path: Path) -> dict[str, Any]:
    """A table of two images in each row; row 2 has no second file, row 5 a broken one, row 7 a bad box."""
    for n, path in enumerate(photo_table.paths[:10]):
        if n != 2:
            (tmp_path / f"{n}.jpg").write_bytes(Path(path).read_bytes()[: 300 if n == 5 else None])
    boxes = [[0, 0, 9, 9]] * 10
    boxes[7] = [5, 5, 10_000, 20]
    return {
        "first": photo_table.paths[:10], "second": [str(tmp_path / f"{n}.jpg") for n in range(10)], "box": boxes,
        "row": range(10), "label": ["a", "b"] * 5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([2], ["sample 0 (second) could not be read", "2.jpg", "FileNotFoundError"]),
        ([0, 5], ["sample 1 (second) could not be read", "5.jpg", "300 bytes"]),
        ([0, 1, 7], ["sample 2 (first) could not be read", "(5, 5) to (10000, 20)", "outside"]),
    ],
)
def test_a_bad_row_is_named(damaged: Any, rows: list[int], words: list[str]) -> None:
    table = {name: [values[row] for row in rows] for name, values in damaged.items()}
    with pytest.raises(tf.errors.OpError) as error:
        list(image_dataset(table, modalities=_TWO, image_size=8, shuffle=False))
    for word in words:
        assert word in str(error.value)


def test_a_bad_row_is_replaced_as_a_whole(damaged: Any, tmp_path: Path) -> None:
    log = tmp_path / "bad.jsonl"
    both: dict[str, Any] = {"modalities": _TWO, "image_size": 8, "shuffle": False, "cache": "off"}
    policy = BadSamples("replace", log=log)
    made = image_dataset(damaged, tabular={"row": "row"}, batch_size=4, seed=1, bad_samples=policy, **both)
    assert len(made) == 3
    alone = {**damaged, "second": damaged["first"], "box": [[0, 0, 9, 9]] * 10}
    images = next(iter(image_dataset(alone, batch_size=10, labels=None, **both)))
    taken = []
    for inputs, label in made.unbatch():
        taken.append(int(inputs["row"]))
        assert label == taken[-1] % 2
        for name in _TWO:
            np.testing.assert_array_equal(inputs[name], images[name][taken[-1]])
    assert len(taken) == 10 and not {2, 5, 7} & set(taken)
    assert [row for row in range(10) if taken[row] == row] == [0, 1, 3, 4, 6, 8, 9]
    assert sorted(json.loads(line)["index"] for line in log.read_text().splitlines()) == [2, 5, 7]
    assert not {2, 5, 7} & {int(row) for inputs, _ in made for row in inputs["row"]}


def test_skipped_rows_leave_batches_full(damaged: Any) -> None:
    both: dict[str, Any] = {"modalities": _TWO, "image_size": 8, "shuffle": False, "labels": None}
    for drop, expected in ((False, [[0, 1, 3], [4, 6, 8], [9]]), (True, [[0, 1, 3], [4, 6, 8]])):
        made = image_dataset(
            damaged, tabular={"row": "row"}, batch_size=3, bad_samples="skip", drop_remainder=drop, **both
        )
        assert int(made.cardinality()) == tf.data.UNKNOWN_CARDINALITY
        assert [inputs["row"].numpy().astype(int).tolist() for inputs in made] == expected
    few = image_dataset(damaged, bad_samples=BadSamples("skip", max_errors=1), **both)
    with pytest.raises(tf.errors.OpError, match=TooManyBadSamplesError.__name__):
        list(few)


def test_the_batch_that_spends_the_budget_of_bad_samples_is_the_same(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    early, late, log = tmp_path / "early.png", tmp_path / "late.png", tmp_path / "log"
    for path in (early, late):
        path.write_bytes(b"no image")
    is_late_read, read_file = threading.Event(), image_stream.read_file

    def late_first(path: str) -> Any:
        if path == str(early):
            assert is_late_read.wait(60)
        found = read_file(path)
        if path == str(late):
            is_late_read.set()
        return found

    monkeypatch.setattr(image_stream, "read_file", late_first)
    made = image_dataset(
        [str(early), *files[:2] * 2, str(late)], None, image_size=4, batch_size=2, shuffle=False, threads=2,
        cache="off", bad_samples=BadSamples("replace", max_errors=1, log=log),
    )  # fmt: skip
    batches = iter(made)
    assert [len(next(batches)), len(next(batches))] == [2, 2]
    with pytest.raises(tf.errors.OpError, match="2 samples were bad"):
        next(batches)
    assert [json.loads(line)["index"] for line in log.read_text().splitlines()] == [0, 5]


def test_batches_reach_tensorflow_without_a_copy(photo_table: Any) -> None:
    made = _numbered(photo_table, shuffle=False)
    addresses = {inputs["image"].numpy().ctypes.data for inputs in made.repeat(6)}
    assert len(addresses) < len(made) * 6 / 2  # memory of few batches, used again


@pytest.mark.parametrize(
    ("options", "apart"),
    [({"parity": "tf"}, 1e-3), ({}, 1), ({"output": "uint8"}, 1), ({"output": "float16"}, 1)],
    ids=str,
)
def test_the_graph_gives_nearly_the_same_pixels(photo_table: Any, options: Any, apart: float) -> None:
    both = {"boxes": "box", "image_size": 24, "shuffle": False, "batch_size": 5, **options}
    made = image_dataset(photo_table.table, engine="graph", **both)
    assert "graph" in made.plan
    for (images, labels), (others, same) in zip(made, image_dataset(photo_table.table, **both), strict=True):
        assert images.dtype == others.dtype
        assert np.abs(images.numpy().astype(float) - others.numpy()).max() <= apart
        np.testing.assert_array_equal(labels.numpy(), same.numpy())


def test_the_graph_shuffles_scales_and_can_be_sent_elsewhere(photo_table: Any) -> None:
    options = {"rescale": (1 / 127.5, -1.0), "data_format": "channels_first", "drop_remainder": True}
    made = _numbered(photo_table, engine="graph", seed=2, **options)
    first, second = _rows(made), _rows(made)
    assert first != second and len(first) == len(set(first)) == len(photo_table) // 4 * 4
    image = next(iter(made))["image"]
    assert image.shape == (4, 3, 16, 16) and -1 <= float(tf.reduce_min(image)) < 0
    graph = made._as_serialized_graph(external_state_policy=tf.data.experimental.ExternalStatePolicy.FAIL)
    assert len(graph.numpy()) > 1000
    with pytest.raises(OptionError, match="set_epoch needs"):
        made.set_epoch(1)
    ranks = [_rows(_numbered(photo_table, engine="graph", seed=2, shard=Shard(n, 2))) for n in range(2)]
    assert sorted(sum(ranks, [])) == list(range(len(photo_table)))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"preprocess": _brighter}, "the script's Python"),
        ({"interpolation": "bicubic"}, "only a bilinear resize"),
        ({"outside": "clip"}, "needs the size of each image"),
        ({"boxes": [[0, 0, 1, 1]], "box_format": "rel_xyxy"}, "parts of the image"),
        ({"bad_samples": "replace"}, "cannot replace"),
        ({"cache": "ram"}, "keeps nothing by itself"),
        ({"source": ["a.tiff"]}, "does not decode '.tiff'"),
        ({"modalities": {"a": {"files": "files", "color_mode": "grayscale"}}}, r"\(of 'a'\)"),
    ],
    ids=range(8),
)
def test_the_graph_refuses_options_that_only_threads_have(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(OptionError, match=f"engine='graph' cannot .*{why}.*engine='threads' can"):
        image_dataset(**{"source": ["a.jpg"], "labels": None, "engine": "graph", **arguments})


def test_the_graph_names_files_that_are_no_images(tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("no image")
    made = image_dataset([str(tmp_path / "text.jpg")], None, engine="graph")
    with pytest.raises(tf.errors.OpError, match="no JPEG, PNG, BMP or GIF"):
        list(made)
    assert list(image_dataset(made.file_paths, None, engine="graph", bad_samples="skip")) == []


@pytest.mark.parametrize("engine", ["threads", "graph"])
def test_augment_is_applied_to_batches_and_samples(photo_table: Any, engine: Any) -> None:
    both = {"image_size": 8, "augment": lambda images: -images, "engine": engine, "parity": "tf"}
    for batch_size, shape in ((4, (4, 8, 8, 3)), (None, (8, 8, 3))):
        first = next(iter(image_dataset(photo_table.paths, None, batch_size=batch_size, **both)))
        assert first.shape == shape and float(tf.reduce_max(first)) <= 0


def test_names_and_files_survive_what_is_done_to_a_dataset(photo_table: Any) -> None:
    made = _numbered(photo_table, labels="label")
    others = [
        made.map(lambda inputs, label: (inputs["image"], label)), made.prefetch(2), made.take(1), made.skip(1),
        made.repeat(2), made.cache(), made.shuffle(4), made.unbatch(), made.unbatch().batch(3), made.enumerate(),
        made.filter(lambda inputs, label: True), made.shard(2, 0), made.with_options(tf.data.Options()),
        made.apply(lambda dataset: dataset.take(1)), made.rebatch(2),
    ]  # fmt: skip
    for other in others:
        assert isinstance(other, ImageDataset) and isinstance(other, tf.data.Dataset)
        assert (other.class_names, other.file_paths) == (made.class_names, made.file_paths)
        assert len(list(other.take(1))) == 1
