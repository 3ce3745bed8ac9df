"""``fit`` of a Keras model that is profiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

import fastpipe
from fastpipe.bench.synthetic import photo_tree as make_tree
from fastpipe.tools.profiler import profile_script

SCRIPT = """
import keras
import numpy as np
import tensorflow as tf
from pathlib import Path
from PIL import Image
import sys

FILES = sorted(map(str, Path(sys.argv[1]).rglob("*.jpg"))) * 8


def load(path):
    with Image.open(path.numpy().decode()) as image:
        return np.asarray(image.convert("RGB").crop((0, 0, 64, 64)).resize((32, 32)), np.float32)


def sample(path):
    return tf.ensure_shape(tf.py_function(load, [path], tf.float32), (32, 32, 3)), 0


def train():
    data = tf.data.Dataset.from_tensor_slices(FILES).map(sample).batch(4)
    model = keras.Sequential([keras.Input((32, 32, 3)), keras.layers.Flatten(), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(data, epochs=1000, shuffle=False, verbose=0)


train()
"""


def test_a_script_that_fits_is_told_what_its_dataset_does_in_python(tmp_path: Path) -> None:
    photo_tree = make_tree(tmp_path / "tree", classes=2, per_class=3, sizes=(1400, 1410))
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    fit, opened = keras.Model.fit, Image.open
    report = profile_script(path, [str(photo_tree)], seconds=1.5)
    assert keras.Model.fit is fit and Image.open is opened
    assert report.is_opaque and report.instant_s is not None and report.instant_s < report.step_s
    assert {"decode", "transform"} & set(report.costs.stages)
    assert report.costs.lines[0][0].function == "load"
    assert report.loader is not None and report.loader.used_at == "train.py:25 train"
    first = report.advice[0]
    assert "fastpipe.tf.image_dataset(table, boxes=…, image_size=(32, 32))" in first.what
    assert first.predicted_s is not None and first.predicted_s < report.step_s


def test_a_fit_that_is_watched_trains_as_ever() -> None:
    def weights(watched: bool) -> list[Any]:
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        data = tf.data.Dataset.from_tensor_slices((np.ones((32, 4), "f4"), np.zeros((32, 2), "f4"))).batch(4)
        if watched:
            with fastpipe.profile() as profiling:
                model.fit(data, epochs=3, shuffle=False, verbose=0)
            assert profiling.report.steps > 10 and profiling.report.is_opaque
        else:
            model.fit(data, epochs=3, shuffle=False, verbose=0)
        return list(model.get_weights())

    for one, other in zip(weights(False), weights(True), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", ["none", "list", "one", "by place", "CallbackList"])
def test_callbacks_are_taken_in_each_way_that_keras_takes_them(kind: str) -> None:
    seen: list[int] = []
    own = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((np.ones((2, 4), "f4"), np.zeros((2, 2), "f4"))).repeat(6)
    with fastpipe.profile() as profiling:
        if kind == "by place":
            model.fit(data, None, None, 1, 0, [own], shuffle=False)
        else:
            given = {
                "none": None, "list": [own], "one": own,
                "CallbackList": keras.callbacks.CallbackList([own], model=model),
            }[kind]  # fmt: skip
            model.fit(data, verbose=0, shuffle=False, callbacks=given)
    assert seen == ([] if kind == "none" else list(range(6)))
    assert profiling.report.loader is not None


def test_a_tf_dataset_is_profiled_with_a_step() -> None:
    data = tf.data.Dataset.range(4000).batch(4)
    report = fastpipe.profile(data, lambda batch: np.sin(np.arange(4_000_000.0)).sum(), seconds=0.5)
    # A batch of 40 µs for a step of 40 ms; where others have the cores, the step waits for more than that.
    assert report.stall_share < 0.5 and report.steps >= 5


IN_PYTHON = """
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from PIL import Image

FILES = sorted(map(str, Path(sys.argv[1]).rglob("*.jpg"))) * 20


def load(path):
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB").crop((-40, -40, 100, 100)).resize((32, 32)), np.float32)


def batch(at):
    return np.stack([load(path) for path in FILES[4 * at : 4 * at + 4]]), np.zeros(4)


def generate():
    for at in range(10_000):
        yield batch(at % (len(FILES) // 4))


class Photos(keras.utils.PyDataset):
    def __len__(self):
        return len(FILES) // 4

    def __getitem__(self, at):
        return batch(at)


def loop(model):
    data = tf.data.Dataset.from_tensor_slices(FILES)
    data = data.map(lambda path: tf.py_function(lambda one: load(one.numpy().decode()), [path], tf.float32))
    data = data.map(lambda image: tf.ensure_shape(image, (32, 32, 3))).batch(4).prefetch(2).repeat()
    for images in data if sys.argv[2] == "loop" else data.as_numpy_iterator():
        model(images)


def train():
    model = keras.Sequential([keras.Input((32, 32, 3)), keras.layers.Flatten(), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    if sys.argv[2] == "generator":
        model.fit(generate(), epochs=1000, steps_per_epoch=100, shuffle=False, verbose=0)
    elif sys.argv[2] == "PyDataset":
        model.fit(Photos(), epochs=1000, verbose=0)
    elif sys.argv[2] == "threads":
        model.fit(Photos(workers=2), epochs=1000, verbose=0)
    else:
        loop(model)


train()
"""


_LEFT = pytest.mark.leaks("Keras does not end the threads of a PyDataset where a fit is interrupted")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "way", ["generator", "PyDataset", pytest.param("threads", marks=_LEFT), "loop", "as_numpy_iterator"]
)
def test_batches_that_python_makes_are_seen(tmp_path: Path, way: str) -> None:
    tree = make_tree(tmp_path / "tree", classes=2, per_class=3, sizes=(1400, 1410))
    path = tmp_path / "train.py"
    path.write_text(IN_PYTHON)
    fit, begin = keras.Model.fit, tf.data.Dataset.__iter__
    report = profile_script(path, [str(tree), way], seconds=1.0)
    assert keras.Model.fit is fit and tf.data.Dataset.__iter__ is begin
    assert report.is_opaque is (way not in ("loop", "as_numpy_iterator"))
    assert report.instant_s is not None and report.instant_s < report.step_s and report.is_cut_short
    assert {"decode", "transform"} & set(report.costs.stages)
    assert report.costs.lines[0][0].function == "load"
    assert report.loader is not None and report.loader.used_at.endswith((" train", " loop"))
    what = 'fastpipe.tf.image_dataset(table, boxes=…, outside="pad", image_size=(32, 32))'
    assert any(what in one.what for one in report.advice)
    assert (report.alone is None) is (way == "threads")


def test_a_fit_of_a_loader_of_torchs_is_seen_in_tensorflows_threads(tmp_path: Path) -> None:
    make_tree(tmp_path / "tree", classes=2, per_class=6, sizes=(700, 760))
    path = tmp_path / "train.py"
    path.write_text("""
import keras
import numpy as np
from pathlib import Path
from PIL import Image
from torch.utils.data import DataLoader, Dataset

class Photos(Dataset):
    files = sorted(Path(__file__).with_name("tree").rglob("*.jpg"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, at):
        with Image.open(self.files[at]) as image:
            return np.asarray(image.convert("RGB").resize((32, 32)), np.float32), 0

model = keras.Sequential([keras.Input((32, 32, 3)), keras.layers.Flatten(), keras.layers.Dense(2)])
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(DataLoader(Photos(), batch_size=4), epochs=1000, shuffle=False, verbose=0)
""")
    report = profile_script(path, seconds=1.0)
    assert report.loader is not None and report.loader.kind == "DataLoader over Photos"
    assert report.is_cut_short and report.instant_s is not None and report.stall_share > 0.3
    decode = report.costs.stages["decode"]
    assert decode.cpu > 0 and decode.cpu + decode.delay > 0.2e9 * report.costs.wall_s  # running, or about to
    assert report.costs.lines[0][0].function in ("__getitem__", "Photos.__getitem__")


def test_loops_that_are_watched_get_the_same() -> None:
    data = tf.data.Dataset.range(12).batch(2)

    @tf.function
    def total(iterator: Any) -> Any:
        found = tf.constant(0, tf.int64)
        for _ in range(3):
            found += tf.reduce_sum(next(iterator))
        return found

    @tf.function
    def whole(dataset: Any) -> Any:
        found = tf.constant(0, tf.int64)
        for one in dataset:
            found += tf.reduce_sum(one)
        return found

    def run() -> list[Any]:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
        pairs = data.map(lambda one: tf.cast(one, tf.float32)[:, None])
        return [
            [one.numpy().tolist() for one in data], [one.tolist() for one in data.as_numpy_iterator()],
            next(iter(data)).numpy().tolist(), int(whole(data)), int(total(iter(data))),
            model.predict(pairs, verbose=0).tolist(),
        ]  # fmt: skip

    plain = run()
    with fastpipe.profile() as profiling:
        assert run() == plain
    assert profiling.report.loader is not None


@pytest.mark.parametrize("kind", ["generator", "PyDataset"])
def test_a_fit_of_what_python_makes_trains_as_ever(kind: str) -> None:
    def generate() -> Any:
        for at in range(24):
            yield np.full((4, 4), at, "f4"), np.zeros((4, 2), "f4")

    class Numbers(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 8

        def __getitem__(self, at: int) -> Any:
            return np.full((4, 4), at, "f4"), np.zeros((4, 2), "f4")

    def weights(watched: bool) -> list[Any]:
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(1e-4), "mse")
        data = generate() if kind == "generator" else Numbers()
        steps = 8 if kind == "generator" else None
        if not watched:
            model.fit(data, epochs=3, steps_per_epoch=steps, shuffle=False, verbose=0)
            return list(model.get_weights())
        with fastpipe.profile() as profiling:
            model.fit(data, epochs=3, steps_per_epoch=steps, shuffle=False, verbose=0)
        assert profiling.report.steps > 10
        return list(model.get_weights())

    for one, other in zip(weights(False), weights(True), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_batch_that_only_keras_takes_ends_the_profile_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("""
import keras
import numpy as np

class Odd(keras.utils.PyDataset):
    calls = 0
    def __len__(self):
        return 50
    def __getitem__(self, at):
        if at == 0 and Odd.calls > 100:
            return "none"
        Odd.calls += 1
        return np.sin(np.ones((4, 400_000)))[:, :4], np.zeros((4, 2))

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
model.compile("sgd", "mse")
model.fit(Odd(), epochs=1000, shuffle=False, verbose=0, callbacks=[])
""")
    report = profile_script(path, seconds=0.5, limit_s=30)
    assert report.loader is not None and report.steps >= 5


def test_an_error_in_a_fit_is_its_own() -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((np.ones((2, 5), "f4"), np.zeros((2, 2), "f4")))
    with fastpipe.profile(), pytest.raises(ValueError, match="incompatible"):
        model.fit(data, shuffle=False, verbose=0)


SHORT = """
import sys
import time

import keras
import numpy as np
import tensorflow as tf
from pathlib import Path
from PIL import Image

from fastpipe.tf import dataset

FILES = sorted(map(str, Path(sys.argv[1]).rglob("*.jpg"))) * 8
dataset._is_done = False


class Model(keras.Sequential):
    def train_step(self, data):
        time.sleep(0 if dataset._is_done else 0.02)
        return super().train_step(data)


def load(path):
    with Image.open(path.numpy().decode()) as image:
        return np.asarray(image.convert("RGB").crop((0, 0, 400, 400)).resize((32, 32)), np.float32)


def sample(path):
    return tf.ensure_shape(tf.py_function(load, [path], tf.float32), (32, 32, 3)), 0


data = tf.data.Dataset.from_tensor_slices(FILES).map(sample).batch(4)
model = Model([keras.Input((32, 32, 3)), keras.layers.Flatten(), keras.layers.Dense(2)])
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=True)
model.fit(data, epochs=int(sys.argv[2]), shuffle=False, verbose=0)
print("trained")
"""


def test_a_fit_of_few_steps_is_measured_before_it_ends_and_again_after_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photo_tree = make_tree(tmp_path / "tree", classes=2, per_class=3, sizes=(1400, 1410))
    path = tmp_path / "train.py"
    path.write_text(SHORT)
    report = profile_script(path, [str(photo_tree), "1"], seconds=4)
    assert "trained" not in capsys.readouterr().out
    assert 5 <= report.steps < 12 and report.instant_s is not None
    assert report.advice, str(report)
    first = report.advice[0]
    assert "fastpipe.tf.image_dataset" in first.what and "in a process with it, and" in first.why
    assert first.predicted_s is not None and first.predicted_s < report.instant_s


def test_a_fit_of_fewer_steps_acquits_no_loader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photo_tree = make_tree(tmp_path / "tree", classes=2, per_class=1, sizes=(1400, 1410))
    path = tmp_path / "train.py"
    path.write_text(SHORT)
    report = profile_script(path, [str(photo_tree), "1"], seconds=4)
    assert "trained" in capsys.readouterr().out
    assert report.instant_s is None
    assert "your loader is not the problem" not in report.verdict
    if not report.is_outside_bound:  # as it is where TensorFlow takes long to begin
        assert report.verdict.startswith("not known: 2 steps of ") and "--limit" in report.verdict
        assert not report.advice
