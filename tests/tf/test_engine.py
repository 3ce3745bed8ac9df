"""Epochs, caches, faults and the life of the engine "threads"; the engine "graph"; what a dataset knows."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from fastpipe import BadSamples, Cache, Shard
from fastpipe.errors import ClosedError, OptionError, TooManyBadSamplesError
from fastpipe.tf import ImageDataset, image_dataset


def _rows(dataset: Any) -> list[int]:
    """The column "row" of an epoch."""
    return [int(row) for inputs in dataset for row in _inputs(inputs)["row"]]


def _inputs(element: Any) -> Any:
    return element[0] if isinstance(element, tuple) else element


def _numbered(photo_table: Any, count: int | None = None, **arguments: Any) -> Any:
    count = count or len(photo_table)
    table = {
        "file": photo_table.paths[:count],
        "row": list(range(count)),
        "label": photo_table.labels[:count],
    }
    return image_dataset(table, tabular={"row": "row"}, **{"image_size": 16, "batch_size": 4, **arguments})


# ---- order ----------------------------------------------------------------------------------


def test_epochs_differ_and_repeat_by_their_seed(photo_table: Any) -> None:
    made = _numbered(photo_table, seed=5)
    first, second = _rows(made), _rows(made)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(len(photo_table)))
    again = _numbered(photo_table, seed=5)
    assert [_rows(again), _rows(again)] == [first, second]
    again.set_epoch(1)
    assert _rows(again) == second
    assert _rows(again.repeat(2)) == [*_rows_of_epoch(photo_table, 2), *_rows_of_epoch(photo_table, 3)]


def _rows_of_epoch(photo_table: Any, epoch: int) -> list[int]:
    made = _numbered(photo_table, seed=5)
    made.set_epoch(epoch)
    return _rows(made)


def test_ranks_share_an_epoch(photo_table: Any) -> None:
    parts = [_rows(_numbered(photo_table, 23, seed=1, shard=Shard(rank, 3, "eval"))) for rank in range(3)]
    assert sorted(sum(parts, [])) == list(range(23))
    lengths = {len(_numbered(photo_table, 23, seed=1, shard=Shard(rank, 3))) for rank in range(3)}
    assert lengths == {2}


@pytest.mark.parametrize(("drop", "sizes"), [(False, [4, 4, 2]), (True, [4, 4])])
def test_the_last_batch(photo_table: Any, drop: bool, sizes: list[int]) -> None:
    made = _numbered(photo_table, 10, drop_remainder=drop, labels=None)
    assert [len(inputs["row"]) for inputs in made] == sizes
    assert len(made) == len(sizes)
    assert made.element_spec["row"].shape == ((4,) if drop else (None,))


# ---- what is kept ---------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["ram", "disk"])
@pytest.mark.parametrize("parity", ["pil", "tf"])
def test_what_is_kept_is_the_same(photo_table: Any, tmp_path: Path, where: Any, parity: Any) -> None:
    cache = Cache(where, dir=tmp_path) if where == "disk" else Cache(where, max_bytes=1 << 28)
    table = {"file": photo_table.paths, "box": photo_table.boxes.tolist()}
    both = {
        "labels": None,
        "boxes": "box",
        "image_size": 20,
        "shuffle": False,
        "rescale": 0.5,
        "parity": parity,
    }
    expected = [images.numpy() for images in image_dataset(table, cache="off", **both)]
    made = image_dataset(table, cache=cache, **both)
    for epoch in range(3):
        for images, other in zip(made, expected, strict=True):
            np.testing.assert_array_equal(images.numpy(), other, err_msg=f"epoch {epoch}")
    assert "kept in" in made.plan
    seconds = made.stage_seconds["decode"]
    again = image_dataset(table, cache=cache, **both)  # another dataset of the same cache
    for images, other in zip(again, expected, strict=True):
        np.testing.assert_array_equal(images.numpy(), other)
    assert again.stage_seconds.get("decode", 0.0) < seconds


def test_a_file_that_changes_is_read_again(photo_table: Any, settled: Any, tmp_path: Path) -> None:
    path = tmp_path / "one.png"
    Image.new("RGB", (8, 8), (10, 20, 30)).save(path)
    settled(path)
    made = image_dataset([str(path)], None, image_size=8, cache=Cache("ram", max_bytes=1 << 24))
    for _ in range(2):
        assert next(iter(made))[0, 0, 0].numpy().tolist() == [10, 20, 30]
    Image.new("RGB", (8, 8), (90, 80, 70)).save(path)
    assert next(iter(made))[0, 0, 0].numpy().tolist() == [90, 80, 70]


def test_other_options_keep_other_samples(photo_table: Any) -> None:
    cache = Cache("ram", max_bytes=1 << 28)
    both = {"labels": None, "shuffle": False, "cache": cache}
    path = photo_table.paths[:1]
    variants = [
        {"image_size": 16}, {"image_size": (16, 8)}, {"interpolation": "bicubic"}, {"color_mode": "grayscale"},
        {"parity": "tf"}, {"boxes": [[0, 0, 9, 9]]}, {"boxes": [[1, 0, 9, 9]]},
    ]  # fmt: skip
    for _ in range(2):
        for variant in variants:
            made = image_dataset(path, **{**both, "image_size": 16, **variant})
            expected = next(iter(made.reference()))
            np.testing.assert_allclose(next(iter(made)).numpy(), expected.numpy())


# ---- the script's code ----------------------------------------------------------------------


def _brighter(image: Any) -> Any:
    return np.minimum(np.asarray(image).astype(int) + 9, 255).astype(np.uint8)


@pytest.mark.parametrize("thread_safe", [False, True])
@pytest.mark.parametrize("cache", ["off", "ram"])
def test_the_scripts_code_sees_the_box_before_it_is_resized(
    photo_table: Any, rows: Any, thread_safe: bool, cache: Any
) -> None:
    table = {"file": photo_table.paths, "box": photo_table.boxes.tolist()}
    made = image_dataset(
        table, None, boxes="box", image_size=24, shuffle=False, preprocess=_brighter, thread_safe=thread_safe,
        cache=cache,
    )  # fmt: skip
    for _ in range(2):
        for image, path, box in zip(rows(made), photo_table.paths, photo_table.boxes.tolist(), strict=True):
            with Image.open(path) as opened:
                part = opened.convert("RGB").crop(box)
            expected = Image.fromarray(_brighter(part)).resize((24, 24), Image.Resampling.BILINEAR)
            np.testing.assert_array_equal(image, np.asarray(expected, np.float32))


def test_floats_of_the_scripts_code_are_taken_as_they_are(photo_table: Any) -> None:
    def halved(image: Any) -> Any:
        return np.asarray(image.resize((8, 8)), np.float64) / 510

    made = image_dataset(
        photo_table.paths[:3], None, image_size=8, preprocess=halved, rescale=7.0, shuffle=False
    )
    images = next(iter(made)).numpy()
    with Image.open(photo_table.paths[1]) as opened:
        expected = halved(opened.convert("RGB"))
    np.testing.assert_allclose(images[1], expected, rtol=1e-6)


@pytest.mark.parametrize("thread_safe", [False, True])
def test_random_numbers_of_the_scripts_code_follow_seed_epoch_and_row(
    photo_table: Any, thread_safe: bool
) -> None:
    def noisy(image: Any, rng: np.random.Generator) -> Any:
        return np.full((8, 8, 3), rng.random())

    def epochs(threads: int, seed: int) -> list[Any]:
        made = image_dataset(
            photo_table.paths[:9], None, image_size=8, preprocess=noisy, seed=seed, batch_size=4,
            thread_safe=thread_safe, threads=threads,
        )  # fmt: skip
        return [np.concatenate([images.numpy()[:, 0, 0, 0] for images in made]).tolist() for _ in range(2)]

    first, second = epochs(1, 3)
    assert len({*first, *second}) == 18
    assert epochs(4, 3) == [first, second]
    assert epochs(4, 4) != [first, second]


def test_code_that_may_not_be_threaded_is_called_in_order_in_one_thread(photo_table: Any) -> None:
    seen: list[tuple[tuple[int, int], int]] = []

    def watched(image: Any) -> Any:
        seen.append((image.size, threading.get_ident()))
        return image

    made = image_dataset(
        photo_table.paths, None, image_size=8, preprocess=watched, shuffle=False, batch_size=4
    )
    for _ in made:
        pass
    assert [size for size, _ in seen] == photo_table.sizes


@pytest.mark.parametrize("thread_safe", [False, True])
@pytest.mark.parametrize("policy", ["raise", "replace", "skip"])
def test_errors_of_the_scripts_code_are_raised_whatever_the_policy(
    photo_table: Any, thread_safe: bool, policy: Any
) -> None:
    def broken(image: Any) -> Any:
        raise ZeroDivisionError("of the script")

    made = image_dataset(
        photo_table.paths[:3],
        None,
        image_size=8,
        preprocess=broken,
        thread_safe=thread_safe,
        bad_samples=policy,
    )
    with pytest.raises(tf.errors.OpError, match="of the script"):
        list(made)


def test_what_the_scripts_code_must_return_is_said(photo_table: Any) -> None:
    made = image_dataset(
        {"file": photo_table.paths[:3]},
        None,
        modalities={"depth": {"preprocess": lambda image: np.zeros((3, 3))}},
    )
    with pytest.raises(tf.errors.OpError, match=r"row \d: preprocess of 'depth' returned float64 of shape"):
        list(made)


@pytest.mark.parametrize(
    ("output", "value"), [("uint8", 1.75), ("float16", 1e5), ("float32", 1e300), ("float32", None)]
)
def test_floats_of_the_scripts_code_that_do_not_fit_are_an_error(
    photo_table: Any, output: Any, value: float | None
) -> None:
    made = image_dataset(
        photo_table.paths[:3], None, image_size=8, shuffle=False, output=output,
        preprocess=lambda image: np.full((8, 8, 3), 0.1 if value is None else value),
    )  # fmt: skip
    if value is None:
        assert all((batch.numpy() == np.float32(0.1)).all() for batch in made)
        return
    with pytest.raises(tf.errors.OpError, match=rf"row 0: preprocess returned float64.*output='{output}'"):
        list(made)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output": "float16", "rescale": 1000.0}, r"images from 0.0 to 255000.0, which output='float16'"),
        ({"output": "float16", "rescale": (1.0, 1e5)}, "output='float16' cannot hold"),
        ({"rescale": 1e37}, "output='float32' cannot hold"),
        ({"output": "uint8", "modalities": {"a": {"rescale": 0.5}}}, "rescale= makes floats.* of 'a'"),
    ],
    ids=str,
)
def test_a_scale_that_the_type_cannot_hold_is_an_error_at_once(options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        image_dataset({"file": ["a.png"]}, None, **options)


# ---- bad rows -------------------------------------------------------------------------------


@pytest.fixture
def damaged(photo_table: Any, tmp_path: Path) -> dict[str, Any]:
    """A table of two images in each row; row 2 has no second file, row 5 a broken one, row 7 a bad box."""
    second = []
    for n, path in enumerate(photo_table.paths[:10]):
        copy = tmp_path / f"{n}.jpg"
        copy.write_bytes(Path(path).read_bytes() if n != 5 else Path(path).read_bytes()[:300])
        second.append(str(copy))
    (tmp_path / "2.jpg").unlink()
    boxes = [[0, 0, 9, 9]] * 10
    boxes[7] = [5, 5, 10_000, 20]
    return {
        "first": photo_table.paths[:10], "second": second, "box": boxes, "row": list(range(10)),
        "label": ["a", "b"] * 5,
    }  # fmt: skip


_TWO = {"first": {"boxes": "box"}, "second": {}}


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
    made = image_dataset(table, modalities=_TWO, image_size=8, shuffle=False)
    with pytest.raises(tf.errors.OpError) as error:
        list(made)
    for word in words:
        assert word in str(error.value)


def test_a_bad_row_is_replaced_as_a_whole(damaged: Any, tmp_path: Path, caplog: Any) -> None:
    log = tmp_path / "bad.jsonl"
    made = image_dataset(
        damaged, modalities=_TWO, image_size=8, shuffle=False, tabular={"row": "row"}, batch_size=4, seed=1,
        bad_samples=BadSamples("replace", log=log), cache="off",
    )  # fmt: skip
    assert len(made) == 3
    alone = image_dataset(
        {**damaged, "second": damaged["first"], "box": [[0, 0, 9, 9]] * 10}, modalities=_TWO, image_size=8,
        shuffle=False, batch_size=10, labels=None, cache="off",
    )  # fmt: skip
    images = next(iter(alone))
    taken = []
    for inputs, labels in made:
        for n, row in enumerate(inputs["row"].numpy().astype(int)):
            taken.append(row)
            assert labels[n] == row % 2
            np.testing.assert_array_equal(inputs["first"][n], images["first"][row])
            np.testing.assert_array_equal(inputs["second"][n], images["second"][row])
    assert len(taken) == 10
    assert not {2, 5, 7} & set(taken)
    assert [row for row in range(10) if taken[row] == row] == [0, 1, 3, 4, 6, 8, 9]
    assert sorted(json.loads(line)["index"] for line in log.read_text().splitlines()) == [2, 5, 7]
    again = [int(row) for inputs, _ in made for row in inputs["row"]]
    assert not {2, 5, 7} & set(again)


def test_skipped_rows_leave_batches_full(damaged: Any) -> None:
    made = image_dataset(
        damaged, modalities=_TWO, image_size=8, shuffle=False, tabular={"row": "row"}, batch_size=3,
        bad_samples="skip", labels=None,
    )  # fmt: skip
    assert int(made.cardinality()) == tf.data.UNKNOWN_CARDINALITY
    found = [inputs["row"].numpy().astype(int).tolist() for inputs in made]
    assert found == [[0, 1, 3], [4, 6, 8], [9]]
    dropped = image_dataset(
        damaged, modalities=_TWO, image_size=8, shuffle=False, tabular={"row": "row"}, batch_size=3,
        bad_samples="skip", labels=None, drop_remainder=True,
    )  # fmt: skip
    assert [len(inputs["row"]) for inputs in dropped] == [3, 3]


def test_too_many_bad_rows_are_an_error(damaged: Any) -> None:
    made = image_dataset(
        damaged, modalities=_TWO, image_size=8, bad_samples=BadSamples("skip", max_errors=1), shuffle=False
    )
    with pytest.raises(tf.errors.OpError, match=TooManyBadSamplesError.__name__):
        list(made)


# ---- its life -------------------------------------------------------------------------------


def _threads() -> int:
    return sum(thread.name.startswith("fastpipe-decode") for thread in threading.enumerate())


def test_an_epoch_that_is_left_ends_what_was_begun(photo_table: Any) -> None:
    made = _numbered(photo_table)
    for _ in range(3):
        for _ in made:
            break
    iterator = iter(made)
    next(iterator)
    del iterator
    assert len(_rows(made)) == len(photo_table)


def test_threads_and_memory_end_with_the_dataset(photo_table: Any) -> None:
    before = _threads()
    made = _numbered(photo_table, cache=Cache("ram", max_bytes=1 << 26)).map(lambda inputs, label: inputs)
    assert len(_rows(made)) == len(photo_table)
    assert _threads() > before
    del made
    gc.collect()
    deadline = threading.Event()
    for _ in range(100):
        if _threads() == before:
            break
        deadline.wait(0.05)
    assert _threads() == before


def test_an_iterator_keeps_its_dataset(photo_table: Any) -> None:
    iterator = iter(_numbered(photo_table).batch(2, drop_remainder=True))
    gc.collect()
    assert next(iterator)[0]["row"].shape == (2, 4)


def test_a_dataset_that_nobody_has_says_so(photo_table: Any) -> None:
    variant = _numbered(photo_table)._variant_tensor
    gc.collect()
    spec = tf.data.DatasetSpec(_numbered(photo_table).element_spec)
    orphan = tf.experimental.extension_type if False else spec._from_tensor_list([variant])
    with pytest.raises(tf.errors.OpError, match=ClosedError.__name__):
        next(iter(orphan))


def test_batches_that_are_kept_are_never_written_to_again(photo_table: Any) -> None:
    made = _numbered(photo_table, shuffle=False, labels=None, cache="off").prefetch(4)
    batches = [inputs["image"] for inputs in made.repeat(3)]
    third = len(batches) // 3
    for n in range(third):
        np.testing.assert_array_equal(batches[n].numpy(), batches[n + third].numpy())
        np.testing.assert_array_equal(batches[n].numpy(), batches[n + 2 * third].numpy())


def test_batches_reach_tensorflow_without_a_copy(photo_table: Any) -> None:
    made = _numbered(photo_table, shuffle=False, labels=None)
    addresses = {inputs["image"].numpy().ctypes.data for inputs in made.repeat(6)}
    assert len(addresses) < len(made) * 6 / 2  # memory of few batches, used again


def test_keras_trains_on_it(photo_table: Any) -> None:
    made = image_dataset(photo_table.table, image_size=16, rescale=1 / 255, boxes="box", batch_size=8, seed=0)
    model = tf.keras.Sequential([
        tf.keras.Input((16, 16, 3)), tf.keras.layers.Flatten(), tf.keras.layers.Dense(len(made.class_names))
    ])  # fmt: skip
    model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(made, validation_data=made.take(2), epochs=2, verbose=0, shuffle=False)
    assert len(history.history["val_loss"]) == 2


# ---- the engine "graph" ---------------------------------------------------------------------


def test_the_graph_gives_tensorflows_pixels(photo_table: Any) -> None:
    both = {"boxes": "box", "image_size": 24, "shuffle": False, "parity": "tf", "batch_size": 5}
    made = image_dataset(photo_table.table, engine="graph", **both)
    assert "graph" in made.plan
    for (images, labels), (expected, same) in zip(
        made, image_dataset(photo_table.table, **both), strict=True
    ):
        np.testing.assert_allclose(images.numpy(), expected.numpy(), atol=1e-3)
        np.testing.assert_array_equal(labels.numpy(), same.numpy())


@pytest.mark.parametrize("output", ["float32", "uint8", "float16"])
def test_the_graph_is_within_one_of_pillows_pixels(photo_table: Any, output: Any) -> None:
    both = {"boxes": "box", "image_size": 24, "shuffle": False, "batch_size": 5, "output": output}
    made = image_dataset(photo_table.table, engine="graph", **both)
    for (images, _), (expected, _) in zip(made, image_dataset(photo_table.table, **both), strict=True):
        assert images.dtype == expected.dtype
        assert np.abs(images.numpy().astype(float) - expected.numpy()).max() <= 1


def test_the_graph_shuffles_scales_and_can_be_sent_elsewhere(photo_table: Any, photos: Path) -> None:
    made = _numbered(
        photo_table, engine="graph", rescale=(1 / 127.5, -1.0), data_format="channels_first", seed=2,
        drop_remainder=True,
    )  # fmt: skip
    first, second = _rows(made), _rows(made)
    assert first != second
    assert len(first) == len(set(first)) == len(photo_table) // 4 * 4
    inputs, _ = next(iter(made))
    assert inputs["image"].shape == (4, 3, 16, 16)
    assert -1 <= float(tf.reduce_min(inputs["image"])) < 0
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
def test_what_the_graph_cannot_do_is_said(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(OptionError, match=f"engine='graph' cannot .*{why}.*engine='threads' can"):
        image_dataset(**{"source": ["a.jpg"], "labels": None, "engine": "graph", **arguments})


def test_the_graph_names_files_that_are_no_images(tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("no image")
    made = image_dataset([str(tmp_path / "text.jpg")], None, engine="graph")
    with pytest.raises(tf.errors.OpError, match="no JPEG, PNG, BMP or GIF"):
        list(made)
    skipping = image_dataset([str(tmp_path / "text.jpg")], None, engine="graph", bad_samples="skip")
    assert list(skipping) == []


# ---- what a dataset knows -------------------------------------------------------------------


def test_names_and_files_survive_what_is_done_to_a_dataset(photo_table: Any) -> None:
    made = _numbered(photo_table)
    others = [
        made.map(lambda inputs, label: (inputs["image"], label)), made.prefetch(2), made.take(1), made.skip(1),
        made.repeat(2), made.cache(), made.shuffle(4), made.unbatch(), made.unbatch().batch(3), made.enumerate(),
        made.filter(lambda inputs, label: True), made.shard(2, 0), made.with_options(tf.data.Options()),
        made.apply(lambda dataset: dataset.take(1)), made.rebatch(2),
    ]  # fmt: skip
    for other in others:
        assert isinstance(other, ImageDataset)
        assert isinstance(other, tf.data.Dataset)
        assert other.class_names == made.class_names
        assert other.file_paths == made.file_paths
        assert len(list(other.take(1))) == 1


def test_the_engine_is_said(photo_table: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fastpipe.tf"):
        made = _numbered(photo_table)
    assert made.plan in caplog.text
    assert made.plan.startswith("engine  →  threads of this process")
    assert "Pillow" in made.plan


def test_augment_is_applied_to_batches(photo_table: Any) -> None:
    made = _numbered(photo_table, labels=None, augment=lambda inputs: {"image": -inputs["image"]})
    assert float(tf.reduce_max(next(iter(made))["image"])) <= 0


def test_single_samples(photo_table: Any) -> None:
    made = image_dataset(photo_table.paths[:5], None, image_size=8, batch_size=None, shuffle=False)
    assert len(made) == 5
    assert [image.shape for image in made] == [(8, 8, 3)] * 5


_CHILD = """
import {first}
import {second}
import numpy, os, sys
import fastpipe
from fastpipe import FastImageFolder, FastLoader
from torchvision.transforms import v2
made = fastpipe.tf.image_dataset({root!r}, image_size=(32, 32), shuffle=False, verbose=False, parity="pil")
batch = next(iter(made))[0].numpy()
folder = FastImageFolder({root!r}, v2.Compose([v2.Resize((32, 32)), v2.PILToTensor()]))
image, _ = next(iter(FastLoader(folder, batch_size=len(batch))))
assert numpy.array_equal(batch, image.permute(0, 2, 3, 1).numpy())
print("same")
"""


_ENDING = """
import os, signal, sys
import fastpipe
import keras

def slow(image):
    sum(range(1 << 20))  # the epoch's thread is in Python nearly all the time
    return image

made = fastpipe.tf.image_dataset(
    [{path!r}] * 400, [0] * 400, image_size=8, batch_size=2, preprocess=slow if {slow} else None, cache="off"
)
if {how!r} == "exit":
    iterator = iter(made)
    next(iterator)
    sys.exit(7)
if {how!r} == "error":
    for _ in made:
        raise ValueError("in the middle of an epoch")
class Interrupted(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        os.kill(os.getpid(), signal.SIGINT)
model = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(made, verbose=0, callbacks=[Interrupted()])
"""


@pytest.mark.few(2)
@pytest.mark.parametrize("slow", [False, True], ids=["kernels", "the script's code"])
@pytest.mark.parametrize(("how", "code"), [("exit", 7), ("error", 1), ("interrupt", -signal.SIGINT)])
def test_the_interpreter_ends_in_the_middle_of_an_epoch(
    photo_table: Any, how: str, code: int, slow: bool
) -> None:
    script = _ENDING.format(path=photo_table.paths[0], how=how, slow=slow)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=90,
    )  # fmt: skip
    assert done.returncode == code, done.stderr[-2000:]


_FAULTS = """
import ctypes, resource, sys
import fastpipe
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
made = fastpipe.tf.image_dataset([{path!r}], None, image_size=8, cache="off")
for _ in range(2):
    for _ in made:
        pass
piece = 1 << 24  # larger than anything that is free by chance
libc.free(libc.malloc(piece))
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    memory = libc.malloc(piece)
    ctypes.memset(memory, 1, piece)
    libc.free(memory)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.few(1)
@pytest.mark.skipif(sys.platform != "linux", reason="what is asked for is glibc's; run it on Linux")
@pytest.mark.parametrize("is_told", [False, True], ids=["as it is", "told otherwise"])
def test_freed_memory_is_used_again(photo_table: Any, is_told: bool) -> None:
    """Each of the 4,096 pages of 20 pieces of memory is mapped anew after TensorFlow's generators, unless."""
    more = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"} if is_told else {}
    done = subprocess.run(
        [sys.executable, "-c", _FAULTS.format(path=photo_table.paths[0])],
        capture_output=True, text=True, check=True, env={**os.environ, **more},
    )  # fmt: skip
    faults = int(done.stdout.splitlines()[-1])
    assert faults > 20 * 4000 if is_told else faults < 2 * 4096


@pytest.mark.few(1)
@pytest.mark.parametrize(("first", "second"), [("torch", "tensorflow"), ("tensorflow", "torch")])
def test_torch_and_tensorflow_in_one_process(photo_tree: Path, first: str, second: str) -> None:
    code = _CHILD.format(first=first, second=second, root=str(photo_tree))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "same"


def test_without_tensorflow_the_extra_is_named() -> None:
    code = "import sys; sys.modules['tensorflow'] = None; import fastpipe; fastpipe.tf"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'fastpipe[tf]'" in done.stderr
