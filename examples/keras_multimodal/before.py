"""Train a Keras net on four images and four numbers of each wound, over three folds: the script as it was.

    python examples/keras_multimodal/make_data.py FOLDER
    python examples/keras_multimodal/before.py FOLDER [EPOCHS [SEED]] [plain]

Of each fold one image's branch is trained first, then what is around it, then all at a lower rate, each for
EPOCHS.  Replicas are the GPUs, or else two halves of the processor, for which the net is small: on two cores
it computes a step in about 0.1 s, as a GPU does with a real one.  `diff before.py after.py` shows the whole
swap.  With `plain` there is neither augmentation nor shuffling, and the losses of both scripts are the same.
"""

import functools
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pandas as pd
import tensorflow as tf
from PIL import Image

SIDE, BATCH, FOLDS = 128, 32, 3
MODALITIES = ("depth_rgb", "depth_map", "thermal_rgb", "thermal_map")
TABULAR = ["age", "days", "exudate", "temperature"]


def read_table(folder: str) -> pd.DataFrame:
    table = pd.read_csv(f"{folder}/table.csv")
    table["label"] = table["phase"].astype("category").cat.codes
    table["fold"] = table.groupby("phase").cumcount() % FOLDS  # each has its share of every phase
    return table


def edges(name: str) -> list[str]:
    """The columns with an image's box, which both images of a camera have."""
    return [f"{name.split('_')[0]}_{edge}" for edge in ("left", "top", "right", "bottom")]


def load(path: tf.Tensor, box: tf.Tensor) -> np.ndarray:
    with Image.open(path.numpy()) as opened:
        image = opened.convert("RGB").crop(tuple(box.numpy()))
    return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR), np.float32)


def dataset(
    table: pd.DataFrame, folder: str, names: tuple[str, ...], seed: int | None = None
) -> tf.data.Dataset:
    """Batches for training; without a seed in the table's order, and as they are."""
    paths = {name: [f"{folder}/{name}/{file}" for file in table[name]] for name in names}
    boxes = {name: table[edges(name)].to_numpy(np.int32) for name in names}
    numbers, labels = table[TABULAR].to_numpy(np.float32), table["label"].to_numpy(np.int32)
    rotate = keras.layers.RandomRotation(10 / 360, fill_mode="constant")

    def sample(path: dict, box: dict, numbers: tf.Tensor, label: tf.Tensor) -> tuple[dict, tf.Tensor]:
        inputs = {"tabular": numbers}
        for name in names:
            image = tf.py_function(load, [path[name], box[name]], tf.float32)
            inputs[name] = tf.ensure_shape(image, (SIDE, SIDE, 3))
        return inputs, label

    def augment(inputs: dict, label: tf.Tensor) -> tuple[dict, tf.Tensor]:
        for name in names:
            image = tf.image.random_flip_left_right(inputs[name])
            image = rotate(tf.image.random_flip_up_down(image), training=True)
            image = tf.image.random_contrast(tf.image.random_brightness(image, 25), 0.8, 1.2)
            inputs[name] = tf.clip_by_value(image, 0, 255)
        return inputs, label

    made = tf.data.Dataset.from_tensor_slices((paths, boxes, numbers, labels))
    if seed is not None:
        made = made.shuffle(len(table), seed=seed)
    made = made.map(sample, num_parallel_calls=tf.data.AUTOTUNE)
    if seed is not None:
        made = made.map(augment, num_parallel_calls=tf.data.AUTOTUNE)
    return made.batch(BATCH, drop_remainder=seed is not None).prefetch(tf.data.AUTOTUNE)


class EpochTimer(keras.callbacks.Callback):
    """How long each epoch took, validation excepted."""

    def on_train_begin(self, logs: dict | None = None) -> None:
        self.epochs = []

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self.begin = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self.seconds, self.steps = time.perf_counter() - self.begin, batch + 1

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        step = self.seconds / self.steps * 1e3
        self.epochs.append(f"epoch {epoch}: {self.seconds:.2f} s, {self.steps} steps of {step:.1f} ms")


def branch() -> keras.Model:
    """From an image to 64 features."""
    image = keras.Input((SIDE, SIDE, 3))
    x = keras.layers.Rescaling(1 / 127.5, offset=-1)(image)
    for filters in (16, 32, 64):
        x = keras.layers.Conv2D(filters, 3, strides=2, padding="same", use_bias=False)(x)
        x = keras.layers.BatchNormalization(momentum=0.9)(x)
        x = keras.layers.ReLU()(x)
    return keras.Model(image, keras.layers.GlobalAveragePooling2D()(x))


def classifier(branches: dict[str, keras.Model], classes: int) -> keras.Model:
    images = {name: keras.Input((SIDE, SIDE, 3), name=name) for name in branches}
    numbers = keras.Input((len(TABULAR),), name="tabular")
    inputs = {**images, "tabular": numbers}
    x = [branches[name](image) for name, image in images.items()]
    x = keras.layers.Concatenate()([*x, keras.layers.Dense(16, activation="relu")(numbers)])
    x = keras.layers.Dense(64, activation="relu")(x)
    return keras.Model(inputs, keras.layers.Dense(classes, activation="softmax")(x))


@functools.cache
def replicas() -> tf.distribute.Strategy:
    """The GPUs, or two halves of the processor."""
    if tf.config.list_physical_devices("GPU"):
        return tf.distribute.MirroredStrategy()
    [processor] = tf.config.list_physical_devices("CPU")
    halves = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(processor, halves)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def train(
    table: pd.DataFrame, folder: str, fold: int, epochs: int, seed: int = 0, plain: bool = False
) -> tuple[float, list[float]]:
    """Train without a fold: the accuracy on that, and the mean loss of each epoch so far, after each step."""
    keras.utils.set_random_seed(seed + fold)
    rest, held_out = table[table["fold"] != fold], table[table["fold"] == fold]
    classes, first = table["label"].nunique(), MODALITIES[0]
    with replicas().scope():
        branches = {name: branch() for name in MODALITIES}
        alone = classifier({first: branches[first]}, classes)
        fusion = classifier(branches, classes)
    losses = []
    keep = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: losses.append(logs["loss"]))
    for model, names, is_frozen, rate in (
        (alone, (first,), False, 3e-3),
        (fusion, MODALITIES, True, 3e-3),
        (fusion, MODALITIES, False, 1e-3),
    ):
        branches[first].trainable = not is_frozen
        with replicas().scope():
            optimizer = keras.optimizers.Adam(rate)
            model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
        timer = EpochTimer()
        batches = dataset(rest, folder, names, seed=None if plain else seed)
        judge = dataset(held_out, folder, names)
        history = model.fit(
            batches, validation_data=judge, epochs=epochs, shuffle=False, verbose=0, callbacks=[timer, keep]
        )
        accuracy = history.history["val_accuracy"][-1]
        print(f"fold {fold}, {', '.join(names)}: {accuracy:.1%}", *timer.epochs, sep="\n  ", flush=True)
    return accuracy, losses


def main(folder: str, epochs: int = 2, seed: int = 0, plain: bool = False) -> float:
    begin, table = time.perf_counter(), read_table(folder)
    found = [train(table, folder, fold, epochs, seed, plain)[0] for fold in range(FOLDS)]
    accuracy = sum(found) / FOLDS
    print(f"accuracy {accuracy:.1%}, mean of {FOLDS} folds; {time.perf_counter() - begin:.1f} s")
    return accuracy


if __name__ == "__main__":
    given = [one for one in sys.argv[1:] if one != "plain"]
    if len(given) not in (1, 2, 3):
        sys.exit(__doc__)
    main(given[0], *map(int, given[1:]), plain="plain" in sys.argv)
