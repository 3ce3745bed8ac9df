"""Equal seeds give equal runs, whatever threads do, and what belongs to the script stays as it was."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

import fastpipe.tf.image_stream
from fastpipe.options import BadSamples
from fastpipe.sampling import Grid
from fastpipe.tf import Augment, hdf5_dataset, image_dataset, patch_dataset

RUNS = 30


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("images")
    for number in range(12):
        Image.fromarray(np.full((9, 9, 3), 20 * number, np.uint8)).save(folder / f"{number:02}.png")
    return sorted(str(path) for path in folder.iterdir())


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A busy thread beside, and decoding that takes another time for each file in each run."""
    is_over = threading.Event()
    chance, read = random.SystemRandom(), fastpipe.tf.image_stream.read_file

    def neighbour() -> None:
        while not is_over.is_set():
            hashlib.sha256(bytes(20_000)).digest()

    def throttled(path: str) -> Any:
        for _ in range(chance.choice([0, 0, 3, 60])):
            hashlib.sha256(bytes(50_000)).digest()
        return read(path)

    monkeypatch.setattr(fastpipe.tf.image_stream, "read_file", throttled)
    thread = threading.Thread(target=neighbour)
    thread.start()
    yield
    is_over.set()
    thread.join()


def _outcome(make: Callable[[list[Any]], Any]) -> str:
    """What a run sees: an epoch that is broken off, a whole one, and random numbers of the script's own."""
    keras.utils.set_random_seed(7)
    seen: list[Any] = []
    dataset = make(seen)
    for batches in (dataset.take(2), dataset):
        for batch in batches:
            seen.append(float(tf.reduce_sum(tf.nest.flatten(batch)[0])))
            seen.append(np.random.rand())
            seen.append(random.random())
            seen.append(float(tf.random.uniform(())))
    seen.append(np.random.rand())
    return repr(seen)


def _by_preprocess(files: list[str], seen: list[Any]) -> Any:
    def changed(image: Any) -> Any:
        seen.append((image.getpixel((0, 0)), random.random()))
        return np.asarray(image) // 2 + np.uint8(np.random.randint(99))

    return image_dataset(files, None, image_size=4, batch_size=2, preprocess=changed, cache="off")


def _by_preprocess_and_augment(files: list[str], seen: list[Any]) -> Any:
    def changed(image: Any) -> Any:
        seen.append(random.random())
        return image

    return image_dataset(
        files, None, image_size=4, batch_size=2, preprocess=changed, cache="off", augment=Augment(brightness=0.3)
    )  # fmt: skip


def _by_python(files: list[str], seen: list[Any]) -> Any:
    def python(images: Any) -> Any:
        seen.append(np.random.rand())
        return images * np.float32(np.random.rand())

    def augment(images: Any) -> Any:
        return tf.ensure_shape(tf.py_function(python, [images], tf.float32), (None, 4, 4, 3))

    return image_dataset(files, None, image_size=4, batch_size=2, augment=augment, cache="off")


def _by_variable(files: list[str], seen: list[Any]) -> Any:
    generator = tf.random.Generator.from_seed(5)

    def augment(images: Any) -> Any:
        return images * generator.uniform(())

    return image_dataset(files, None, image_size=4, batch_size=2, augment=augment, cache="off")


def _by_layer(files: list[str], seen: list[Any]) -> Any:
    layer = keras.layers.RandomBrightness(0.5, seed=3)

    def augment(images: Any) -> Any:
        return layer(images, training=True)

    return image_dataset(files, None, image_size=4, batch_size=2, augment=augment, cache="off")


def _by_operations(files: list[str], seen: list[Any]) -> Any:
    def augment(images: Any) -> Any:
        return tf.image.random_brightness(images, 50)

    return image_dataset(files, None, image_size=4, batch_size=2, augment=augment, cache="off")


def _by_the_other_engine(files: list[str], seen: list[Any]) -> Any:
    return image_dataset(
        files, None, image_size=4, batch_size=2, engine="graph", parity="tf", augment=Augment(brightness=0.3)
    )


@pytest.mark.usefixtures("load")
@pytest.mark.parametrize(
    ("make", "runs"),
    [
        (_by_preprocess, 30),
        (_by_python, 10),
        (_by_variable, 6),
        (_by_layer, 6),
        (_by_operations, 6),
        pytest.param(_by_preprocess_and_augment, 12, marks=pytest.mark.slow),
        pytest.param(_by_the_other_engine, 12, marks=pytest.mark.slow),
    ],
)
def test_equal_seeds_give_equal_runs(
    files: list[str], make: Callable[[list[str], list[Any]], Any], runs: int
) -> None:
    outcomes = {_outcome(lambda seen: make(files, seen)) for _ in range(runs)}
    assert len(outcomes) == 1


def test_the_batch_that_spends_the_budget_of_bad_samples_is_the_same(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    early, late, log = tmp_path / "early.png", tmp_path / "late.png", tmp_path / "log"
    for path in (early, late):
        path.write_bytes(b"no image")
    is_late_read, read = threading.Event(), fastpipe.tf.image_stream.read_file

    def late_first(path: str) -> Any:
        if path == str(early):
            assert is_late_read.wait(60)
        found = read(path)
        if path == str(late):
            is_late_read.set()
        return found

    monkeypatch.setattr(fastpipe.tf.image_stream, "read_file", late_first)
    paths = [str(early), *files[:4], str(late)]
    made = image_dataset(
        paths, None, image_size=4, batch_size=2, shuffle=False, threads=2, cache="off",
        bad_samples=BadSamples("replace", max_errors=1, log=log),
    )  # fmt: skip
    batches = iter(made)
    assert [len(next(batches)), len(next(batches))] == [2, 2]
    with pytest.raises(tf.errors.OpError, match="2 samples were bad"):
        next(batches)
    assert [json.loads(line)["index"] for line in log.read_text().splitlines()] == [0, 5]


# ---- what belongs to the script -----------------------------------------------------------------


def _generators() -> dict[str, Any]:
    from tensorflow.python.eager import context

    numbers = getattr(context.context(), "_rng", None)
    return {
        "random": random.getstate(),
        "numpy": repr(np.random.get_state(legacy=False)),
        "tf.random": tf.random.get_global_generator().state.numpy().tolist(),
        "operations' seeds": None if numbers is None else numbers.getstate(),
    }


# In a process of its own too, where the package is imported.
_SETTINGS = """
import gc, logging, os, random, signal, sys, threading, warnings
import numpy as np, PIL.Image, PIL.ImageFile, keras, tensorflow as tf
def settings():
    loggers = {
        name: [one.level, one.propagate, one.disabled, len(one.handlers), len(one.filters)]
        for name, one in [("", logging.root), *logging.root.manager.loggerDict.items()]
        if isinstance(one, logging.Logger) and not name.startswith("fastpipe")
    }
    threads = tf.config.threading
    return {
        "environment": dict(os.environ), "path": list(sys.path), "folder": os.getcwd(),
        "filters": list(map(repr, warnings.filters)), "loggers": loggers,
        "signals": {int(one): repr(signal.getsignal(one)) for one in signal.valid_signals()},
        "hooks": [repr(sys.excepthook), repr(threading.excepthook), repr(sys.meta_path), repr(sys.path_hooks)],
        "threads": [
            threads.get_intra_op_parallelism_threads(), threads.get_inter_op_parallelism_threads(),
            sorted(os.sched_getaffinity(0)), sys.getswitchinterval(),
        ],
        "interpreter": [gc.isenabled(), gc.get_threshold(), sys.getrecursionlimit()],
        "numpy": [repr(np.get_printoptions()), np.geterr()],
        "pillow": [PIL.Image.MAX_IMAGE_PIXELS, PIL.ImageFile.LOAD_TRUNCATED_IMAGES],
        "keras": [keras.config.floatx(), keras.config.image_data_format(), keras.config.dtype_policy().name],
        "eager": tf.config.functions_run_eagerly(), "random": random.getstate(),
        "numbers": repr(np.random.get_state(legacy=False)),
    }
"""


def test_importing_changes_nothing(tmp_path: Path) -> None:
    code = _SETTINGS + (
        "import json\nbefore = settings()\nimport fastpipe.tf\n"
        "fastpipe.tf.image_dataset, fastpipe.tf.hdf5_dataset, fastpipe.tf.patch_dataset\n"
        "after = settings()\nprint(json.dumps([name for name in before if before[name] != after[name]]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert json.loads(done.stdout.splitlines()[-1]) == []


def _hdf5(files: list[str], **options: Any) -> Any:
    path = Path(files[0]).parent.parent / f"rows-{os.getpid()}.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.arange(40.0).reshape(20, 2), chunks=(4, 2), compression="gzip")
    return hdf5_dataset(path, "x", **options)


def _folder(files: list[str], **options: Any) -> Any:
    return image_dataset(Path(files[0]).parent, None, image_size=4, verbose=False, **options)


_VOLUME = np.zeros((9, 9, 9), np.uint8)


@pytest.mark.parametrize(
    "make",
    [
        lambda files: image_dataset(files, None, image_size=4, shuffle=False),
        lambda files: image_dataset(files, None, image_size=4, seed=3, augment=Augment(rotation=9, seed=1)),
        lambda files: image_dataset(files, None, image_size=4, seed=3, preprocess=lambda image, rng: image),
        lambda files: image_dataset(files, None, image_size=4, seed=3, engine="graph", parity="tf"),
        lambda files: _folder(files, seed=3),
        lambda files: _hdf5(files, shuffle=False),
        lambda files: _hdf5(files, seed=3),
        lambda files: patch_dataset(_VOLUME, (2, 2, 2), seed=3),
        lambda files: patch_dataset(_VOLUME, (2, 2, 2), sampling=Grid(), shuffle=False),
    ],
)
def test_use_changes_nothing(files: list[str], make: Callable[[list[str]], Any]) -> None:
    found: dict[str, Any] = {}
    exec(_SETTINGS, found)
    keras.utils.set_random_seed(11)
    before = {**found["settings"](), **_generators()}
    dataset = make(files)
    for _ in range(2):
        list(dataset)
    list(dataset.take(1))
    assert dataset.plan
    after = {**found["settings"](), **_generators()}
    assert {name for name in before if before[name] != after[name]} == set()


def test_without_a_seed_a_folder_takes_the_numbers_that_keras_takes(files: list[str]) -> None:
    for shuffle in (False, True):
        states = []
        for make in (image_dataset, keras.utils.image_dataset_from_directory):
            keras.utils.set_random_seed(11)
            dataset = make(
                Path(files[0]).parent, labels=None, image_size=(4, 4), shuffle=shuffle, verbose=False
            )
            list(dataset)
            states.append(repr([np.random.get_state(legacy=False), random.getstate()]))
        assert states[0] == states[1]
