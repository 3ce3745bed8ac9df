"""``fit`` of a Keras model that is profiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

import fastpipe
from fastpipe.bench.synthetic import photo_tree as make_tree
from fastpipe.tools.loaders import Watched
from fastpipe.tools.loops import Loop
from fastpipe.tools.profiler import profile_script
from fastpipe.tools.stacks import Line
from fastpipe.tools.swaps import hint_of
from fastpipe.tools.tf_loops import missing_stages

_HEAD = """
import sys
from pathlib import Path
from threading import Event

import keras
import numpy as np
import tensorflow as tf
from PIL import Image

FILES = sorted(map(str, Path(sys.argv[1]).rglob("*.jpg"))) * 8


def load(path, box=(0, 0, 64, 64)):
    Event().wait(0.05)  # as for a slow disk: many times what fastpipe takes, however busy the machine is
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB").crop(box).resize((32, 32)), np.float32)


def sample(path):
    loaded = tf.py_function(lambda one: load(one.numpy().decode()), [path], tf.float32)
    return tf.ensure_shape(loaded, (32, 32, 3)), 0


def made(kind=keras.Sequential, **options):
    model = kind([keras.Input((32, 32, 3)), keras.layers.Flatten(), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    return model

"""


@pytest.fixture
def profiled(tmp_path: Path) -> Callable[..., Any]:
    """The report of a script, which gets a folder of so many photographs and further arguments."""

    def run(script: str, per_class: int, *arguments: str, **options: Any) -> Any:
        tree = make_tree(tmp_path / "tree", classes=2, per_class=per_class, sizes=(700, 710))
        path = tmp_path / "train.py"
        path.write_text(_HEAD + script)
        fit, opened, begin = keras.Model.fit, Image.open, tf.data.Dataset.__iter__
        report = profile_script(path, [str(tree), *arguments], **options)
        assert (keras.Model.fit, Image.open, tf.data.Dataset.__iter__) == (fit, opened, begin)
        return report

    return run


# What trains, by the script's argument.
IN_PYTHON = """
def batch(at):
    images = [load(path, (-40, -40, 100, 100)) for path in FILES[4 * at : 4 * at + 4]]
    return np.stack(images), np.zeros(4)


def generate():
    for at in range(10_000):
        yield batch(at % (len(FILES) // 4))


class Photos(keras.utils.PyDataset):
    def __len__(self):
        return len(FILES) // 4

    def __getitem__(self, at):
        return batch(at)


def loop(model):
    data = tf.data.Dataset.from_tensor_slices(FILES).map(sample).batch(4).prefetch(2).repeat()
    for images, _ in data if sys.argv[2] == "loop" else data.as_numpy_iterator():
        model(images)


def train():
    model = made()
    endless = {"epochs": 1000, "shuffle": False, "verbose": 0}
    if sys.argv[2] == "dataset":
        model.fit(tf.data.Dataset.from_tensor_slices(FILES).map(sample).batch(4), **endless)
    elif sys.argv[2] == "generator":
        model.fit(generate(), steps_per_epoch=100, **endless)
    elif sys.argv[2] in ("PyDataset", "threads"):
        model.fit(Photos(workers=2 if sys.argv[2] == "threads" else 1), **endless)
    else:
        loop(model)


train()
"""
_LEFT = pytest.mark.leaks("Keras does not end the threads of a PyDataset where a fit is interrupted")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "way",
    ["dataset", "generator", "PyDataset", pytest.param("threads", marks=_LEFT), "loop", "as_numpy_iterator"],
)
def test_batches_that_python_makes_are_seen(profiled: Callable[..., Any], way: str) -> None:
    report = profiled(IN_PYTHON, 3, way, seconds=2.0)
    assert report.is_opaque is (way not in ("loop", "as_numpy_iterator"))
    assert report.instant_s is not None and report.instant_s < report.step_s and report.is_cut_short
    assert {"decode", "transform"} & set(report.costs.stages)
    assert report.costs.lines[0][0].function == "load"
    assert report.loader is not None and report.loader.used_at.endswith((" train", " loop"))
    outside = "" if way in ("dataset", "loop", "as_numpy_iterator") else ' outside="pad",'
    what = f"fastpipe.tf.image_dataset(table, boxes=…,{outside} image_size=(32, 32))"
    assert any(what in one.what and one.predicted_s < report.step_s for one in report.advice)
    assert (report.alone is None) is (way == "threads")


# Until fastpipe's dataset was used, a step waits longer: as with what a measurement changes of the process.
SHORT = """
from fastpipe.tf import dataset

dataset._is_done = False


class Model(keras.Sequential):
    def train_step(self, data):
        if not dataset._is_done:
            Event().wait(0.1)
        return super().train_step(data)


data = tf.data.Dataset.from_tensor_slices(FILES).map(sample).batch(4)
made(Model, run_eagerly=True).fit(data, epochs=1, shuffle=False, verbose=0)
print("trained")
"""


@pytest.mark.slow
def test_a_fit_of_few_steps_is_measured_before_it_ends_and_again(profiled: Any, capsys: Any) -> None:
    report = profiled(SHORT, 3, seconds=4)
    assert "trained" not in capsys.readouterr().out
    assert 5 <= report.steps < 12 and report.instant_s is not None
    assert report.advice, str(report)
    first = report.advice[0]
    assert "fastpipe.tf.image_dataset" in first.what and "in a process with it, and" in first.why
    assert first.predicted_s is not None and first.predicted_s < report.instant_s


def test_a_fit_of_fewer_steps_acquits_no_loader(profiled: Callable[..., Any], capsys: Any) -> None:
    report = profiled(SHORT, 1, seconds=4)
    assert "trained" in capsys.readouterr().out
    assert report.instant_s is None
    assert "your loader is not the problem" not in report.verdict
    if not report.is_outside_bound:  # as it is where TensorFlow takes long to begin
        assert report.verdict.startswith("not known: 2 steps of ") and "--limit" in report.verdict
        assert not report.advice


def test_a_fit_of_a_loader_of_torchs_is_seen_in_tensorflows_threads(profiled: Callable[..., Any]) -> None:
    script = """
from torch.utils.data import DataLoader, Dataset

class Photos(Dataset):
    def __len__(self):
        return len(FILES)

    def __getitem__(self, at):
        with Image.open(FILES[at]) as image:
            return np.asarray(image.convert("RGB"), np.float32)[:32, :32], 0  # nearly all is decoding

made().fit(DataLoader(Photos(), batch_size=4), epochs=1000, shuffle=False, verbose=0)
"""
    report = profiled(script, 6, seconds=1.0)
    assert report.loader is not None and report.loader.kind == "DataLoader over Photos"
    assert report.is_cut_short and report.instant_s is not None and report.stall_share > 0.3
    decode = report.costs.stages["decode"]
    assert decode.cpu > 0 and decode.cpu + decode.delay > 0.2e9 * report.costs.wall_s  # running, or about to
    assert report.costs.lines[0][0].function in ("__getitem__", "Photos.__getitem__")


def test_a_batch_that_only_keras_takes_ends_the_profile_all_the_same(profiled: Callable[..., Any]) -> None:
    script = """
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
"""
    report = profiled(script, 1, seconds=0.5, limit_s=30)
    assert report.loader is not None and report.steps >= 5


def _model(optimizer: Any = "sgd") -> Any:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile(optimizer, "mse")
    return model


@pytest.mark.parametrize("kind", ["none", "list", "one", "by place", "CallbackList"])
def test_callbacks_are_taken_in_each_way_that_keras_takes_them(kind: str) -> None:
    seen: list[int] = []
    own = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    model = _model()
    data = tf.data.Dataset.from_tensors((np.ones((2, 4), "f4"), np.zeros((2, 2), "f4"))).repeat(6)
    with fastpipe.profile() as profiling:
        if kind == "by place":
            model.fit(data, None, None, 1, 0, [own], shuffle=False)
        else:
            both = keras.callbacks.CallbackList([own], model=model)
            given = {"none": None, "list": [own], "one": own, "CallbackList": both}[kind]
            model.fit(data, verbose=0, shuffle=False, callbacks=given)
    assert seen == ([] if kind == "none" else list(range(6)))
    assert profiling.report.loader is not None


def test_a_tf_dataset_is_profiled_with_a_step() -> None:
    data = tf.data.Dataset.range(4000).batch(4)
    # A batch of 40 µs for a step of 40 ms; where others have the cores, the step waits for more than that.
    report = fastpipe.profile(data, lambda batch: Event().wait(0.04), seconds=0.5)
    assert report.stall_share < 0.5 and report.steps >= 5


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


class Numbers(keras.utils.PyDataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> Any:
        return np.full((4, 4), at, "f4"), np.zeros((4, 2), "f4")


@pytest.mark.parametrize("kind", ["dataset", "generator", "PyDataset"])
def test_a_fit_that_is_watched_trains_as_ever(kind: str) -> None:
    def weights() -> list[Any]:
        keras.utils.set_random_seed(3)
        model, batches = _model(keras.optimizers.SGD(1e-4)), [Numbers()[at] for at in range(8)]
        stacked = tuple(map(np.stack, zip(*batches, strict=True)))
        data = {
            "dataset": tf.data.Dataset.from_tensor_slices(stacked),
            "generator": (batch for _ in range(3) for batch in batches), "PyDataset": Numbers(),
        }[kind]  # fmt: skip
        steps = 8 if kind == "generator" else None
        model.fit(data, shuffle=False, epochs=3, steps_per_epoch=steps, verbose=0)
        return list(model.get_weights())

    plain = weights()
    with fastpipe.profile() as profiling:
        watched = weights()
    assert profiling.report.steps > 10 and profiling.report.is_opaque
    for one, other in zip(plain, watched, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda data: data.map(lambda x: x).batch(2), (True, True)),
        (lambda data: data.map(lambda x: x, num_parallel_calls=2).batch(2).prefetch(1), (False, False)),
        (lambda data: data.batch(2).prefetch(1).with_options(tf.data.Options()), (False, False)),
        (lambda data: data.batch(2).prefetch(1).repeat(3).take(5), (False, False)),
        (lambda data: data.prefetch(1).map(lambda x: x), (True, True)),
    ],
    ids=["neither", "both", "options after it", "repeated after it", "a map after it"],
)  # fmt: skip
def test_stages_that_a_dataset_lacks_are_found(make: Any, found: tuple[bool, bool]) -> None:
    assert missing_stages(make(tf.data.Dataset.range(8))) == found


def test_images_of_a_dataset_of_tensorflow_may_be_read_by_fastpipe() -> None:
    line = Line("train.py", 3, "main")
    data = tf.data.Dataset.from_tensors((tf.zeros((96, 64, 3)), 1)).batch(2)
    assert "image_size=(96, 64)" in hint_of(Watched(data, line, line, Loop(1.0, True)))
    assert hint_of(Watched(data.map(lambda image, label: label), line, line, Loop(1.0, True))) == ""
