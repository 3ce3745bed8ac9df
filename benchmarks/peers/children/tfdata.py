"""tf.data: read, decode the crop, resize, mirror and normalise, in parallel map calls."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.children.protocol import Batches, Job, Stream, without_non_jpegs

__all__ = ["stream"]


PREFETCH = 2


def stream(job: Job) -> Stream:
    """An endless ``tf.data.Dataset``."""
    without_non_jpegs(job, "decode_and_crop_jpeg")
    return Stream(_batches(job), PREFETCH, ("tensorflow", "tensorflow-cpu", "numpy"), layout="NHWC")


def _batches(job: Job) -> Batches:
    import tensorflow as tf

    mean, std = tf.constant(list(job.mean)), tf.constant(list(job.std))

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
        crop = tf.image.decode_and_crop_jpeg(encoded, window, channels=3)
        image = tf.image.resize(crop, (job.side, job.side))
        return (tf.image.random_flip_left_right(image) / 255.0 - mean) / std, label

    dataset = tf.data.Dataset.from_tensor_slices((list(job.files), list(job.labels)))
    dataset = dataset.shuffle(len(job.files)).repeat().map(load, num_parallel_calls=tf.data.AUTOTUNE)
    dataset = dataset.batch(job.batch_size, drop_remainder=True).prefetch(PREFETCH)
    for images, labels in dataset:
        yield images.numpy(), labels.numpy()
