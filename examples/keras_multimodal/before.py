"""Train a Keras net on four images and four numbers of each wound, over three folds: the script as it was.

    python examples/keras_multimodal/make_data.py FOLDER
    python examples/keras_multimodal/before.py FOLDER [EPOCHS [SEED]] [plain]

Of each fold two random forests learn from the numbers; then one image's branch is trained, then what is
around it, then all at a lower rate, each for EPOCHS.  Replicas are the GPUs, or else two halves of the
processor, for which the net is small: on two cores it computes a step in about 0.1 s, as a GPU does with a
real one.  `diff before.py after.py` shows the whole swap.  With `plain` there is neither augmentation nor
shuffling, and the losses of both scripts are the same.
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
from sklearn.ensemble import RandomForestClassifier

SIDE, BATCH, FOLDS = 128, 32, 3
MODALITIES = ("depth_rgb", "depth_map", "thermal_rgb", "thermal_map")
TABULAR = ["age", "days", "exudate", "temperature"]
FORESTS = ["after_first", "after_second"]  # how likely the phase is a later one than these


def read_table(folder: str) -> pd.DataFrame:
    table = pd.read_csv(f"{folder}/table.csv")
    table["label"] = table["phase"].astype("category").cat.codes.astype("int32")
    table["fold"] = table.groupby("phase").cumcount() % FOLDS  # each has its share of every phase
    return table


def forests(table: pd.DataFrame, fold: int, seed: int) -> np.ndarray:
    """Return two forests' probabilities for each row, from its numbers: (rows, 2)."""
    numbers, is_known = table[TABULAR].to_numpy(), (table["fold"] != fold).to_numpy()
    found = []
    for phase in range(len(FORESTS)):
        forest = RandomForestClassifier(300, oob_score=True, n_jobs=-1, random_state=seed)
        forest.fit(numbers[is_known], table["label"][is_known] > phase)
        found.append(forest.predict_proba(numbers)[:, 1])
        found[-1][is_known] = forest.oob_decision_function_[:, 1]  # by trees that were grown without the row
    return np.stack(found, 1)


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
    numbers, labels = table[TABULAR + FORESTS].to_numpy(np.float32), table["label"].to_numpy(np.int32)
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
    """A callback that records the time of each epoch, without validation."""

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
    numbers = keras.Input((len(TABULAR + FORESTS),), name="tabular")
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


def fit(
    model: keras.Model, names: tuple[str, ...], rate: float, rest: pd.DataFrame, held_out: pd.DataFrame,
    folder: str, epochs: int, seed: int | None
) -> tuple[float, list[float]]:  # fmt: skip
    """Train on some of the images: the accuracy, and the mean loss of each epoch so far, after each step."""
    losses = []
    keep = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: losses.append(logs["loss"]))
    with replicas().scope():
        optimizer = keras.optimizers.Adam(rate)
        model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    timer = EpochTimer()
    batches = dataset(rest, folder, names, seed)
    judge = dataset(held_out, folder, names)
    history = model.fit(
        batches, validation_data=judge, epochs=epochs, shuffle=False, verbose=0, callbacks=[timer, keep]
    )
    accuracy = history.history["val_accuracy"][-1]
    print(f"{', '.join(names)}: {accuracy:.1%}", *timer.epochs, sep="\n  ", flush=True)
    return accuracy, losses


def pretrained(
    rest: pd.DataFrame, held_out: pd.DataFrame, folder: str, epochs: int, seed: int, plain: bool
) -> tuple[list[np.ndarray], list[float]]:
    """The weights of the first image's branch, trained alone, and the losses of that."""
    keras.utils.set_random_seed(seed)
    first = MODALITIES[0]
    with replicas().scope():
        trained = branch()
        alone = classifier({first: trained}, rest["label"].nunique())
    _, losses = fit(alone, (first,), 3e-3, rest, held_out, folder, epochs, None if plain else seed)
    return trained.get_weights(), losses


def train(
    table: pd.DataFrame, folder: str, fold: int, epochs: int, seed: int = 0, plain: bool = False
) -> tuple[float, list[float]]:
    """Train without a fold: the accuracy on that, and the mean loss of each epoch so far, after each step."""
    print(f"fold {fold}", flush=True)
    seed += fold
    table = table.assign(**dict(zip(FORESTS, forests(table, fold, seed).T, strict=True)))
    rest, held_out = table[table["fold"] != fold], table[table["fold"] == fold]
    weights, losses = pretrained(rest, held_out, folder, epochs, seed, plain)
    keras.utils.set_random_seed(seed)  # as after pre-training, so without it
    with replicas().scope():
        branches = {name: branch() for name in MODALITIES}
        fusion = classifier(branches, table["label"].nunique())
    first = branches[MODALITIES[0]]
    first.set_weights(weights)
    for is_frozen, rate in ((True, 3e-3), (False, 1e-3)):
        first.trainable = not is_frozen
        accuracy, more = fit(
            fusion, MODALITIES, rate, rest, held_out, folder, epochs, None if plain else seed
        )
        losses = [*losses, *more]
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
