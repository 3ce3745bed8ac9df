"""Train a Keras net on four images and four numbers of each wound, over three folds: with fastpipe.

    python examples/keras_multimodal/make_data.py FOLDER
    python examples/keras_multimodal/after.py FOLDER [EPOCHS [SEED]] [plain]

Of each fold two random forests learn from the numbers; then one image's branch is trained, then what is
around it, then all at a lower rate, each for EPOCHS.  A second run loads the forests' results and the first
branch from FOLDER/kept.  Replicas are the GPUs, or else two halves of the processor, for which the net is
small: on two cores it computes a step in about 0.1 s, as a GPU does with a real one.  `diff before.py
after.py` shows the whole swap.  With `plain` there is neither augmentation nor shuffling, and the losses of
both scripts are the same.
"""

import functools
import logging
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pandas as pd
import tensorflow as tf
from sklearn.ensemble import RandomForestClassifier

from fastpipe import Cache, memoize
from fastpipe.tf import Augment, EpochTimer, Modality, image_dataset

SIDE, BATCH, FOLDS = 128, 32, 3
MODALITIES = ("depth_rgb", "depth_map", "thermal_rgb", "thermal_map")
TABULAR = ["age", "days", "exudate", "temperature"]
FORESTS = ["after_first", "after_second"]  # how likely the phase is a later one than these
CACHE = Cache("ram")  # of all folds and stages: each image is decoded once


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


def dataset(
    table: pd.DataFrame, folder: str, names: tuple[str, ...], seed: int | None = None
) -> tf.data.Dataset:
    """Batches for training; without a seed in the table's order, and as they are."""
    modalities = {name: Modality(folder=f"{folder}/{name}", boxes=edges(name)) for name in names}
    return image_dataset(
        table, "label", batch_size=BATCH, image_size=SIDE, shuffle=seed is not None, seed=seed,
        drop_remainder=seed is not None, modalities=modalities, tabular={"tabular": TABULAR + FORESTS},
        cache=CACHE,
    )  # fmt: skip


def augmented(image: keras.KerasTensor) -> keras.KerasTensor:
    """On the device, while it trains: of each branch its own numbers; colours change as by ``tf.image``."""
    image = Augment(horizontal_flip=0.5, vertical_flip=0.5, rotation=10)(image)
    # Up to 25 levels: Keras cuts off what leaves the range, which tf.image does not do before the contrast.
    image = keras.layers.RandomBrightness(25 / 765, value_range=(-255, 510))(image)
    # Factors of 0.8 to 1.2; 0.2 alone would mean 1.0 to 1.2.
    return keras.layers.RandomContrast((0.2, 0.2), value_range=(0, 255))(image)


def branch(plain: bool) -> keras.Model:
    """From an image to 64 features."""
    image = keras.Input((SIDE, SIDE, 3))
    x = keras.layers.Rescaling(1 / 127.5, offset=-1)(image if plain else augmented(image))
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
    batches = timer.watch(dataset(rest, folder, names, seed))
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
        trained = branch(plain)
        alone = classifier({first: trained}, rest["label"].nunique())
    _, losses = fit(alone, (first,), 3e-3, rest, held_out, folder, epochs, None if plain else seed)
    return trained.get_weights(), losses


def train(
    table: pd.DataFrame, folder: str, fold: int, epochs: int, seed: int = 0, plain: bool = False
) -> tuple[float, list[float]]:
    """Train without a fold: the accuracy on that, and the mean loss of each epoch so far, after each step."""
    print(f"fold {fold}", flush=True)
    seed += fold
    kept = functools.partial(memoize, dir=f"{folder}/kept")
    table = table.assign(**dict(zip(FORESTS, kept(forests)(table, fold, seed).T, strict=True)))
    rest, held_out = table[table["fold"] != fold], table[table["fold"] == fold]
    weights, losses = kept(pretrained)(rest, held_out, folder, epochs, seed, plain)
    keras.utils.set_random_seed(seed)  # as after pre-training, so without it
    with replicas().scope():
        branches = {name: branch(plain) for name in MODALITIES}
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
    logging.basicConfig(format="%(message)s")
    logging.getLogger("fastpipe.memoize").setLevel(logging.INFO)  # what it loads, and why not
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
