"""The child process of a peer: ``python -m fastpipe.bench.peer_child dali``.

It reads one line of JSON that names the photos, answers with the form of the first batch,
and then answers each ``{"batches": n}`` with the seconds that n batches took.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import numpy as np

from fastpipe._extras import require
from fastpipe.bench.floor import is_jpeg
from fastpipe.bench.loaders import MEAN, SIDE, STD

__all__ = ["batch_problem", "serve"]

# Both keep at most this many batches ready; so many and a few more are consumed before
# the clock starts, for a measurement not to begin with batches made during the pause.
PREFETCH = 2
LEAD_IN = 2 * PREFETCH

Batches = Iterator[tuple[Any, Any]]


def dali_batches(job: dict[str, Any]) -> Batches:
    """DALI on the CPU: read, decode the crop, resize, mirror and normalise."""
    fn = require("nvidia.dali.fn", extra="dali")
    types = require("nvidia.dali.types", extra="dali")
    pipeline_def = require("nvidia.dali", extra="dali").pipeline_def

    @pipeline_def(  # type: ignore[untyped-decorator, unused-ignore]
        batch_size=job["batch_size"],
        num_threads=job["threads"],
        device_id=None,
        prefetch_queue_depth=PREFETCH,
    )
    def pipeline() -> Any:
        encoded, labels = fn.readers.file(
            files=job["files"], labels=job["labels"], random_shuffle=True, initial_fill=1024
        )
        images = fn.decoders.image_random_crop(
            encoded,
            device="cpu",
            random_area=[0.08, 1.0],
            random_aspect_ratio=[3 / 4, 4 / 3],
            adjust_orientation=False,
        )
        images = fn.resize(images, resize_x=SIDE, resize_y=SIDE)
        images = fn.crop_mirror_normalize(
            images,
            dtype=types.FLOAT,
            output_layout="CHW",
            mirror=fn.random.coin_flip(probability=0.5),
            mean=[255 * value for value in MEAN],
            std=[255 * value for value in STD],
        )
        return images, labels

    built = pipeline()
    built.build()
    while True:
        images, labels = built.run()
        yield images.as_array(), labels.as_array()


def tfdata_batches(job: dict[str, Any]) -> Batches:
    """tf.data: read, decode the crop, resize, mirror and normalise, in parallel map calls."""
    tf = require("tensorflow", extra="tf")
    mean, std = tf.constant(MEAN), tf.constant(STD)

    def load(path: Any, label: Any) -> Any:
        encoded = tf.io.read_file(path)
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            tf.image.extract_jpeg_shape(encoded),
            tf.zeros([1, 0, 4], tf.float32),
            area_range=(0.08, 1.0),
            aspect_ratio_range=(3 / 4, 4 / 3),
            max_attempts=10,
            min_object_covered=0.0,
            use_image_if_no_bounding_boxes=True,
        )
        window = tf.stack([begin[0], begin[1], size[0], size[1]])
        image = tf.image.resize(tf.image.decode_and_crop_jpeg(encoded, window, channels=3), (SIDE, SIDE))
        return (tf.image.random_flip_left_right(image) / 255.0 - mean) / std, label

    dataset = tf.data.Dataset.from_tensor_slices((list(job["files"]), list(job["labels"])))
    dataset = dataset.shuffle(len(job["files"])).repeat().map(load, num_parallel_calls=tf.data.AUTOTUNE)
    dataset = dataset.batch(job["batch_size"], drop_remainder=True).prefetch(PREFETCH)
    for images, labels in dataset:
        yield images.numpy(), labels.numpy()


SOURCES: dict[str, Callable[[dict[str, Any]], Batches]] = {"dali": dali_batches, "tfdata": tfdata_batches}


def batch_problem(key: str, images: Any, batch_size: int) -> str | None:
    """What is wrong with a batch of normalised images, or ``None``.

    Args:
        key: whose batch.
        images: array, float32 (N, 3, H, W), for tf.data (N, H, W, 3).
        batch_size: the N expected.
    """
    shape = (batch_size, SIDE, SIDE, 3) if key == "tfdata" else (batch_size, 3, SIDE, SIDE)
    if images.shape != shape or images.dtype != np.float32:
        return f"the first batch is {images.dtype} {images.shape}, expected float32 {shape}"
    low, high = (0 - max(MEAN)) / min(STD), (1 - min(MEAN)) / min(STD)
    if not (low - 0.01 <= images.min() < images.max() <= high + 0.01):
        return f"values lie in {images.min():.3f}..{images.max():.3f}, expected within {low:.3f}..{high:.3f}"
    return None


def serve(key: str, source: TextIO, answers: TextIO) -> None:
    """Answer the parent until it closes the pipe."""

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    job = json.loads(source.readline())
    if key == "tfdata":
        for file in job["files"]:
            with open(file, "rb") as opened:
                if not is_jpeg(opened.read(3)):
                    answer({"error": "decode_and_crop_jpeg reads JPEG only and some photos are not"})
                    return
    batches = SOURCES[key](job)
    images, _ = next(batches)
    problem = batch_problem(key, images, job["batch_size"])
    answer({"error": problem} if problem else {"shape": list(images.shape), "dtype": str(images.dtype)})
    for line in source:
        for _ in range(LEAD_IN):
            next(batches)
        start = time.perf_counter()
        for _ in range(json.loads(line)["batches"]):
            images, _ = next(batches)
            if images.flat[0] != images.flat[0]:
                raise ValueError("a batch holds a value that is not a number")
        answer({"seconds": time.perf_counter() - start})


def _main() -> None:
    """Keep the pipe to the parent for answers; whatever libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        serve(sys.argv[1], sys.stdin, answers)
    except (KeyboardInterrupt, BrokenPipeError):
        # The parent decides; thread pools of the libraries must not delay the end.
        os._exit(130)
    answers.flush()
    sys.stderr.flush()
    # DALI and TensorFlow may hang or abort while interpreters shut down under running threads.
    os._exit(0)


if __name__ == "__main__":
    _main()
