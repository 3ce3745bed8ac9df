"""Keras's ways to go on with a training, by ``initial_epoch=`` and ``BackupAndRestore``: the samples of a
training that was never stopped, where a callback tells the dataset each epoch's number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest

from fastpipe.tf import Dataset, hdf5_dataset

EPOCHS, ROWS = 4, 11


class Seeing(keras.Model):  # type: ignore[misc]  # Keras ships no types
    """Takes down what it is trained with."""

    def __init__(self, stop: tuple[int, int] | None) -> None:
        super().__init__()
        self.dense, self.stop = keras.layers.Dense(1), stop
        self.seen: list[list[int]] = []

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        _, rows = data
        self.seen.append(rows.numpy().tolist())
        if self.stop is not None and len(self.seen) == self.stop[0] * 3 + self.stop[1]:
            raise KeyboardInterrupt
        return {"loss": keras.ops.zeros(())}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["x"] = np.zeros((ROWS, 2), np.float32)
        file["row"] = np.arange(ROWS)
    return tmp_path / "rows.h5"


def rows(path: Path) -> Dataset:
    return hdf5_dataset(path, "x", "row", batch_size=4, shuffle=True, seed=3)


def fit(dataset: Dataset, stop: Any = None, *callbacks: Any, epochs: int = EPOCHS, **options: Any) -> Any:
    model = Seeing(stop)
    model(np.zeros((1, 2), np.float32))
    model.compile(optimizer="sgd", run_eagerly=True)
    numbers = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: dataset.set_epoch(epoch))
    try:
        model.fit(
            dataset, epochs=epochs, callbacks=[numbers, *callbacks], shuffle=False, verbose=0, **options
        )
    except KeyboardInterrupt:
        assert stop is not None
    return model.seen


def test_initial_epoch(path: Path) -> None:
    whole = fit(rows(path))
    assert len({str(whole[at : at + 3]) for at in range(0, len(whole), 3)}) == EPOCHS
    for first in range(1, EPOCHS):
        before = fit(rows(path), epochs=first)
        assert before + fit(rows(path), initial_epoch=first) == whole
        assert fit(rows(path).prefetch(1), initial_epoch=first) == whole[3 * first :]


# Keras's use of NumPy.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn:DeprecationWarning")
@pytest.mark.parametrize("frequency", ["epoch", 2])
def test_backup_and_restore(path: Path, tmp_path: Path, frequency: Any) -> None:
    """Keras begins the epoch in which it was stopped anew."""
    whole = fit(rows(path))
    for stop in [(1, 1), (2, 2), (2, 3)]:

        def backup() -> Any:
            return keras.callbacks.BackupAndRestore(tmp_path / "backup", frequency)

        seen = fit(rows(path), stop, backup())
        assert seen == whole[: len(seen)]
        again = fit(rows(path), None, backup())
        assert again == whole[-len(again) :]
        assert len(again) % 3 == 0
        assert len(again) == 3 * (EPOCHS - stop[0]) or frequency != "epoch"
