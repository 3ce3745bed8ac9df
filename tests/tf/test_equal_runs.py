"""Equal seeds give equal runs, whatever threads do, and what belongs to the script stays as it was."""

from __future__ import annotations

import hashlib
import json
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
from tensorflow.python.eager import context

import fastpipe.tf.image_stream
from fastpipe.sampling import Grid
from fastpipe.tf import Augment, hdf5_dataset, image_dataset, patch_dataset


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve images, and rows of HDF5 beside them."""
    folder = tmp_path_factory.mktemp("data") / "images"
    folder.mkdir()
    for number in range(12):
        Image.fromarray(np.full((9, 9, 3), 20 * number, np.uint8)).save(folder / f"{number:02}.png")
    with h5py.File(folder.parent / "rows.h5", "w") as file:
        file.create_dataset("x", data=np.arange(40.0).reshape(20, 2), chunks=(4, 2), compression="gzip")
    return folder


@pytest.fixture
def files(folder: Path) -> list[str]:
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


def _outcome(files: list[str], by: str) -> str:
    """What a run sees: an epoch that is broken off, a whole one, and random numbers of the script's own."""
    keras.utils.set_random_seed(7)
    seen: list[Any] = []
    dataset = image_dataset(files, None, image_size=4, batch_size=2, cache="off", **_options(by, seen))
    for batches in (dataset.take(2), dataset):
        for batch in batches:
            seen.append(float(tf.reduce_sum(tf.nest.flatten(batch)[0])))
            seen.extend((np.random.rand(), random.random(), float(tf.random.uniform(()))))
    seen.append(np.random.rand())
    return repr(seen)


def _options(by: str, seen: list[Any]) -> dict[str, Any]:
    """Options of a dataset whose images are changed at random, and which notes what Python does."""

    def changed(image: Any) -> Any:
        seen.append((image.getpixel((0, 0)), random.random()))
        return np.asarray(image) // 2 + np.uint8(np.random.randint(99))

    def python(images: Any) -> Any:
        seen.append(np.random.rand())
        return images * np.float32(np.random.rand())

    generator, layer = tf.random.Generator.from_seed(5), keras.layers.RandomBrightness(0.5, seed=3)
    augment: dict[str, Callable[[Any], Any]] = {
        "Python": lambda images: tf.ensure_shape(
            tf.py_function(python, [images], tf.float32), (None, 4, 4, 3)
        ),
        "a variable": lambda images: images * generator.uniform(()),
        "a layer": lambda images: layer(images, training=True),
        "operations": lambda images: tf.image.random_brightness(images, 50),
    }
    return {"preprocess": changed} if by == "preprocess" else {"augment": augment[by]}


@pytest.mark.few(2)
@pytest.mark.usefixtures("load")
@pytest.mark.parametrize(
    ("by", "runs"),
    [
        ("preprocess", 10), ("Python", 5), ("a variable", 4), ("a layer", 4), ("operations", 4),
        pytest.param("preprocess", 30, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_equal_seeds_give_equal_runs(files: list[str], by: str, runs: int) -> None:
    assert len({_outcome(files, by) for _ in range(runs)}) == 1


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

# As where torch is not installed: SciPy takes a None among the modules for torch.
_WITHOUT_TORCH = """
class NoTorch:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, NoTorch())
import json
before = settings()
import fastpipe.tf
fastpipe.tf.image_dataset, fastpipe.tf.hdf5_dataset, fastpipe.tf.patch_dataset
after = settings()
changed = [name for name in before if before[name] != after[name]]
rows = fastpipe.tf.hdf5_dataset(sys.argv[1], "x", batch_size=20)
assert next(iter(rows)).shape == (20, 2)
from fastpipe.sampling import Uniform
patches = fastpipe.tf.patch_dataset(np.zeros((8, 8, 8)), (2, 2, 2), sampling=Uniform(5), batch_size=5)
assert next(iter(patches)).shape == (5, 2, 2, 2)
everything = {name: 0.3 for name in ("horizontal_flip", "translation", "brightness", "contrast", "hue", "cutout")}
fastpipe.tf.Augment(rotation=20, **everything)(np.zeros((2, 8, 8, 3), np.float32))
print(json.dumps([changed, sorted({"torch", "numba", "llvmlite"} & set(sys.modules))]))
"""


def test_importing_changes_nothing_and_neither_torch_nor_numba_is_needed(folder: Path) -> None:
    command = [sys.executable, "-c", _SETTINGS + _WITHOUT_TORCH, str(folder.parent / "rows.h5")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [[], []]


_VOLUME = np.zeros((9, 9, 9), np.uint8)


@pytest.mark.parametrize(
    "make",
    [
        lambda files, folder: image_dataset(files, None, image_size=4, shuffle=False),
        lambda files, folder: image_dataset(files, None, image_size=4, seed=3, augment=Augment(rotation=9, seed=1)),
        lambda files, folder: image_dataset(folder, None, image_size=4, seed=3, preprocess=lambda image, rng: image),
        lambda files, folder: image_dataset(folder, None, image_size=4, seed=3, engine="graph", parity="tf"),
        lambda files, folder: image_dataset(folder, None, image_size=4, seed=3, verbose=False),
        lambda files, folder: hdf5_dataset(folder.parent / "rows.h5", "x", shuffle=False),
        lambda files, folder: hdf5_dataset(folder.parent / "rows.h5", "x", seed=3),
        lambda files, folder: patch_dataset(_VOLUME, (2, 2, 2), seed=3),
        lambda files, folder: patch_dataset(_VOLUME, (2, 2, 2), sampling=Grid(), shuffle=False),
    ],
)  # fmt: skip
def test_use_changes_nothing(files: list[str], folder: Path, make: Callable[..., Any]) -> None:
    def settings() -> dict[str, Any]:
        numbers = getattr(context.context(), "_rng", None)
        return {
            **found["settings"](), "numpy": repr(np.random.get_state(legacy=False)),
            "tf.random": tf.random.get_global_generator().state.numpy().tolist(),
            "operations' seeds": None if numbers is None else numbers.getstate(),
        }  # fmt: skip

    found: dict[str, Any] = {}
    exec(_SETTINGS, found)
    keras.utils.set_random_seed(11)
    before = settings()
    dataset = make(files, folder)
    for _ in range(2):
        list(dataset)
    list(dataset.take(1))
    assert dataset.plan
    after = settings()
    assert {name for name in before if before[name] != after[name]} == set()


@pytest.mark.parametrize("shuffle", [False, True])
def test_without_a_seed_a_folder_takes_the_numbers_that_keras_takes(folder: Path, shuffle: bool) -> None:
    states = []
    for make in (image_dataset, keras.utils.image_dataset_from_directory):
        keras.utils.set_random_seed(11)
        list(make(folder, labels=None, image_size=(4, 4), shuffle=shuffle, verbose=False))
        states.append(repr([np.random.get_state(legacy=False), random.getstate()]))
    assert states[0] == states[1]
