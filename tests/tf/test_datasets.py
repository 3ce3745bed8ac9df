"""What all datasets of ``fastpipe.tf`` do alike: orders, ranks, epochs, memory, Keras."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from fastpipe import Shard, Shuffle
from fastpipe.errors import ClosedError
from fastpipe.sampling import Positions
from fastpipe.tf import Dataset, hdf5_dataset, image_dataset, patch_dataset

ROWS, EPOCHS = 23, 4
Make = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same 23 numbers as images, rows and patches."""
    folder = tmp_path_factory.mktemp("numbers")
    (folder / "images").mkdir()
    for row in range(ROWS):
        Image.new("RGB", (4, 4), (row, row, row)).save(folder / "images" / f"{row:02}.png")
    with h5py.File(folder / "rows.h5", "w") as file:
        values = np.repeat(np.arange(ROWS, dtype=np.float32), 6).reshape(ROWS, 6)
        file.create_dataset("x", data=values, chunks=(4, 6), compression="gzip")
    return folder


def _images(folder: Path, **options: Any) -> Any:
    files = sorted(map(str, (folder / "images").iterdir()))
    return image_dataset(files, None, image_size=4, **options)


def _rows(folder: Path, **options: Any) -> Any:
    return hdf5_dataset(folder / "rows.h5", "x", **options)


def _patches(folder: Path, **options: Any) -> Any:
    slices = np.repeat(np.arange(ROWS, dtype=np.float32), 4).reshape(ROWS, 2, 2)
    return patch_dataset(slices, (1, 2, 2), sampling=Positions([(n, 0, 0) for n in range(ROWS)]), **options)


@pytest.fixture(
    params=[(_images, True), (_rows, True), (_rows, Shuffle(3, "group")), (_patches, True)],
    ids=["images", "rows", "groups of rows", "patches"],
)
def make(request: pytest.FixtureRequest, folder: Path) -> Make:
    """Makes a dataset of the 23 numbers."""
    function, shuffle = request.param

    def made(**options: Any) -> Any:
        return function(folder, **{"batch_size": 4, "shuffle": shuffle, "seed": 5, **options})

    return made


def numbers(dataset: Any) -> list[int]:
    """The samples of an epoch."""
    return [int(row) for batch in dataset for row in np.reshape(batch, (len(batch), -1))[:, 0]]


def test_epochs_differ_and_repeat_by_their_seed(make: Make) -> None:
    made = make()
    epochs = [numbers(made) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    again = make()
    assert numbers(again.repeat(2)) == epochs[0] + epochs[1]
    again.set_epoch(1)
    assert numbers(again) == epochs[1]
    assert numbers(make(seed=6)) != epochs[0]
    assert numbers(make(shuffle=False)) == list(range(ROWS))


def test_ranks_share_an_epoch(make: Make) -> None:
    parts = [numbers(make(shard=Shard(rank, 3, "eval"))) for rank in range(3)]
    assert sorted(sum(parts, [])) == list(range(ROWS))
    assert {len(make(shard=Shard(rank, 3))) for rank in range(3)} == {2}


def test_the_last_batch_is_short_or_dropped_and_single_samples_come_without_a_batch(make: Make) -> None:
    for drop, sizes in ((False, [10, 10, 3]), (True, [10, 10])):
        made = make(batch_size=10, drop_remainder=drop)
        assert [len(batch) for batch in made] == sizes
        assert len(made) == len(sizes)
        assert made.element_spec.shape[0] == (10 if drop else None)
    assert isinstance(made, Dataset) and isinstance(made.map(lambda batch: batch).prefetch(1), Dataset)
    made = make(batch_size=None, shuffle=False)
    assert [int(np.ravel(sample)[0]) for sample in made] == list(range(ROWS)) and len(made) == ROWS


def test_kept_batches_are_never_written_to_again(make: Make) -> None:
    batches = list(make(shuffle=False, cache="off").prefetch(4).repeat(3))
    assert numbers(batches) == list(range(ROWS)) * 3


def test_an_epoch_may_be_left_and_an_iterator_keeps_its_dataset(make: Make) -> None:
    made = make()
    for _ in range(3):
        for _ in made:
            break
    iterator = iter(made)
    next(iterator)
    del iterator
    assert sorted(numbers(made)) == list(range(ROWS))
    iterator = iter(make().batch(2, drop_remainder=True))
    gc.collect()
    assert next(iterator).shape[:2] == (2, 4)


def test_a_dataset_without_any_reference_says_so(make: Make) -> None:
    made = make()
    variant, spec = made._variant_tensor, tf.data.DatasetSpec(made.element_spec)
    del made
    gc.collect()
    with pytest.raises(tf.errors.OpError, match=ClosedError.__name__):
        next(iter(spec._from_tensor_list([variant])))


def test_an_array_is_freed_with_its_dataset() -> None:
    """As its threads are, which ``no_leaks`` looks for after each test."""
    array = np.zeros((9, 9, 9), np.uint8)
    reference = weakref.ref(array)
    made = patch_dataset(array, (4, 5, 6), sampling=Positions([(0, 1, 2)]))
    assert len(list(made)) == len(list(made.reference())) == 1
    del array, made
    for _ in range(600):  # TensorFlow's threads free what they hold when they like
        gc.collect()
        if reference() is None:
            return
        threading.Event().wait(0.05)
    raise AssertionError("it is still there")


class Recording(keras.Model):  # type: ignore[misc]  # Keras ships no types
    """Notes the batches that it is trained with; a training is interrupted after so many."""

    def __init__(self, most: int | None = None) -> None:
        super().__init__()
        self.dense, self.most = keras.layers.Dense(1), most
        self.seen: list[list[int]] = []

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        self.seen.append(numbers([data]))
        if len(self.seen) == self.most:
            raise KeyboardInterrupt
        return {"loss": keras.ops.zeros(())}


def fitted(dataset: Any, most: int | None = None, *callbacks: Any, **options: Any) -> list[list[int]]:
    """The batches of a training of four epochs, whose callback tells the dataset each epoch's number."""
    model = Recording(most)
    model(np.zeros((1, 2), np.float32))
    model.compile(optimizer="sgd", run_eagerly=True)
    number = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: dataset.set_epoch(epoch))
    options = {"epochs": EPOCHS, "shuffle": False, "verbose": 0, **options}
    try:
        model.fit(dataset, callbacks=[number, *callbacks], **options)
    except KeyboardInterrupt:
        assert most is not None
    return model.seen


def test_keras_trains_on_and_continues_with_any_epoch(make: Make) -> None:
    whole, steps = fitted(make()), len(make())
    assert len({str(whole[at : at + steps]) for at in range(0, len(whole), steps)}) == EPOCHS
    for first in range(1, EPOCHS):
        assert fitted(make().prefetch(1), initial_epoch=first) == whole[steps * first :]


@pytest.mark.few(3)
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn:DeprecationWarning")  # of Keras
@pytest.mark.parametrize("frequency", ["epoch", 2])
@pytest.mark.parametrize(("epoch", "step"), [(1, 1), (2, 2), (2, 6)])
def test_backup_and_restore_begins_the_epoch_anew(
    folder: Path, tmp_path: Path, frequency: Any, epoch: int, step: int
) -> None:
    def fit(*arguments: Any) -> list[list[int]]:
        return fitted(_rows(folder, batch_size=4, shuffle=True, seed=3), *arguments)

    whole, steps, backup = fit(), 6, keras.callbacks.BackupAndRestore
    seen = fit(epoch * steps + step, backup(tmp_path / "backup", frequency))
    assert seen == whole[: len(seen)]
    again = fit(None, backup(tmp_path / "backup", frequency))
    assert again == whole[-len(again) :] and len(again) % steps == 0
    assert len(again) == steps * (EPOCHS - epoch) or frequency != "epoch"
