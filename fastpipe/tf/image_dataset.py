"""``fastpipe.tf.image_dataset``, and the engine that uses only TensorFlow operations."""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import keras
import numpy as np
import numpy.typing as npt
import PIL.Image
import tensorflow as tf

from fastpipe.core.casting import unheld
from fastpipe.core.text import printable
from fastpipe.core.types import Box, Size
from fastpipe.errors import OptionError
from fastpipe.options import BadSamples, Cache, Decode, Shard
from fastpipe.tf.augment import Augment
from fastpipe.tf.dataset import About, ImageDataset, dataset_options, map_function, stream_dataset
from fastpipe.tf.image_stream import ImageOptions, RowStream
from fastpipe.tf.options import Modality, check_choice
from fastpipe.tf.pixels import load
from fastpipe.tf.rows import Column, Form, RowOptions, Rows, rows_of_directory, rows_of_table
from fastpipe.tf.stream import Batching, batching_of

# ----------------------------------------------------------------------------------------------------
# The engine ``"graph"``, which uses only TensorFlow operations, and the reference for tests.

_FORMATS = (".jpg", ".jpeg", ".png", ".bmp", ".gif")
_MAGIC = (b"\x89PNG", b"BM", b"GIF8")  # for all formats except JPEG
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def why_not_graph(rows: Rows, batching: Batching, options: ImageOptions) -> str:
    """Return why TensorFlow operations cannot make these samples; "" if they can."""
    for column in rows.columns:
        why = _why_not(column)
        if why:
            return f"{why} (of {column.name!r})" if column.name else why
    if batching.bad_samples.policy == "replace":
        return "it cannot replace bad samples; it can skip them"
    if batching.bad_samples.log is not None or batching.bad_samples.max_errors is not None:
        return "it cannot count bad samples"
    if options.cache.where in ("ram", "disk"):
        return "it keeps nothing by itself: call .cache() on the dataset, and leave cache= out"
    if options.decode != Decode():
        return f"{options.decode} is for fastpipe's decoders"
    return ""


def _why_not(column: Column) -> str:
    spec = column.spec
    if column.preprocess is not None:
        return "preprocess= is the script's Python"
    if spec.parity == "pil" and (spec.filter != "bilinear" or spec.channels != 3 or spec.aspect):
        return "only a bilinear resize of RGB images is Pillow's within 1/255 there"
    if spec.outside != "error":
        return f"outside={spec.outside!r} needs the size of each image beforehand"
    if column.boxes is not None and column.boxes.is_relative:
        return "boxes in parts of the image need its size beforehand"
    other = next((path for path in column.paths if not path.lower().endswith(_FORMATS)), None)
    return f"TensorFlow does not decode {os.path.splitext(other)[1] or other!r} files" if other else ""


def graph_dataset(rows: Rows, batching: Batching, form: Form) -> Any:
    """Return a dataset of batches that uses only TensorFlow operations. TensorFlow can serialise it."""
    slices: dict[str, Any] = {f"tabular {name}": values for name, values in rows.tabular.items()}
    for number, column in enumerate(rows.columns):
        slices[f"path {number}"] = list(map(os.fsencode, column.paths))
        if column.boxes is not None:
            edges = np.rint(column.boxes.edges).astype(np.int32)
            slices[f"box {number}"] = np.hstack([edges[:, [1, 0]], (edges[:, 2:] - edges[:, :2])[:, ::-1]])
    if rows.labels is not None:
        slices["labels"] = rows.labels
    made = tf.data.Dataset.from_tensor_slices(slices)
    if batching.shuffle:
        made = made.shuffle(len(rows), seed=batching.seed, reshuffle_each_iteration=True)
    if batching.shard is not None:
        made = made.shard(batching.shard.world, batching.shard.rank)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def sample(row: Any) -> Any:
        images = [
            _image(column, row[f"path {number}"], row.get(f"box {number}"), form)
            for number, column in enumerate(rows.columns)
        ]
        tabular = {name: row[f"tabular {name}"] for name in form.tabular}
        return form.element(images, tabular, row.get("labels"))

    made = made.map(sample, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    if batching.bad_samples.policy == "skip":
        made = made.ignore_errors(log_warning=True)
    return made.batch(
        batching.batch_size, drop_remainder=batching.drop_remainder, num_parallel_calls=tf.data.AUTOTUNE
    )


def _image(column: Column, path: Any, box: Any, form: Form) -> Any:
    raw = tf.io.read_file(path)
    kinds = [tf.io.is_jpeg(raw), *(tf.strings.substr(raw, 0, len(start)) == start for start in _MAGIC)]
    name = f" ({column.name})" if column.name else ""
    known = tf.debugging.Assert(
        tf.reduce_any(tf.stack(kinds)), [f"this file{name} is no JPEG, PNG, BMP or GIF image:", path]
    )
    with tf.control_dependencies([known] if known is not None else []):
        raw = tf.identity(raw)
    image = load(raw, box, column.spec)
    if column.rescale is not None:
        image = image * tf.constant(column.rescale[0], tf.float32)
        if column.rescale[1]:
            image += tf.constant(column.rescale[1], tf.float32)
    return _finished(image, form)


def _finished(image: Any, form: Form) -> Any:
    """Return an image, float32 (H, W, C), in the dtype and memory order of the elements."""
    if form.output == "uint8":
        image = tf.clip_by_value(tf.round(image), 0, 255)
    return form.arrange(tf.cast(image, form.output))


# ---- the reference -------------------------------------------------------------------------------


def reference_dataset(rows: Rows, form: Form, batch_size: int, drop_remainder: bool) -> Any:
    """Return batches of the rows in their order. Each row is made by ``tf.py_function``."""

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def sample(row: Any) -> Any:
        images = []
        for column in rows.columns:
            image = tf.py_function(partial(_reference_image, column), [row], tf.float32)
            image.set_shape((*column.spec.size, column.spec.channels))
            images.append(_finished(image, form))
        tabular = {name: tf.gather(rows.tabular[name], row) for name in form.tabular}
        return form.element(images, tabular, None if rows.labels is None else tf.gather(rows.labels, row))

    made = tf.data.Dataset.range(len(rows)).map(sample, num_parallel_calls=tf.data.AUTOTUNE)
    return made.batch(batch_size, drop_remainder=drop_remainder)


def _reference_image(column: Column, number: Any) -> npt.NDArray[np.float32]:
    row = int(number)
    spec, path = column.spec, column.paths[row]
    made: npt.NDArray[np.float32]
    if spec.parity == "pil":
        with PIL.Image.open(path) as opened:
            image = opened.convert(_MODES[spec.channels])
        size = Size(image.height, image.width)
        box = Box(0, 0, *size) if column.boxes is None else column.boxes.box(row, size, spec.outside)
        part = image.crop((box.left, box.top, box.left + box.width, box.top + box.height))
        part = part.resize(spec.size[::-1], PIL.Image.Resampling[spec.filter.upper()])
        made = np.asarray(part, np.float32).reshape(*spec.size, spec.channels)
    else:
        raw, region = tf.io.read_file(path), None
        if column.boxes is not None:
            whole = tf.image.decode_image(raw, expand_animations=False)
            region = tf.constant(column.boxes.box(row, Size(*whole.shape[:2]), spec.outside), tf.int32)
        made = load(raw, region, spec).numpy()
    if column.rescale is not None:
        made = made * np.float32(column.rescale[0]) + np.float32(column.rescale[1])
    return made


# ----------------------------------------------------------------------------------------------------
# ``image_dataset`` is Keras's ``image_dataset_from_directory``, extended to tables and several images.

_log = logging.getLogger("fastpipe.tf")


def image_dataset(
    source: Any,
    labels: Any = "inferred",
    label_mode: Literal["int", "categorical", "binary"] | None = "int",
    class_names: Sequence[Any] | None = None,
    color_mode: Literal["rgb", "grayscale", "rgba"] = "rgb",
    batch_size: int | None = 32,
    image_size: int | tuple[int, int] = (256, 256),
    shuffle: bool = True,
    seed: int | None = None,
    validation_split: float | None = None,
    subset: Literal["training", "validation", "both"] | None = None,
    interpolation: str = "bilinear",
    follow_links: bool = False,
    crop_to_aspect_ratio: bool = False,
    pad_to_aspect_ratio: bool = False,
    data_format: Literal["channels_last", "channels_first"] | None = None,
    format: Literal["tf"] = "tf",
    verbose: bool = True,
    *,
    files: str | None = None,
    folder: str | os.PathLike[str] | None = None,
    boxes: Any = None,
    box_format: str = "xyxy",
    outside: Literal["error", "clip", "pad"] = "error",
    modalities: Mapping[str, Modality | Mapping[str, Any]] | None = None,
    tabular: Mapping[str, Any] | None = None,
    preprocess: Callable[..., Any] | None = None,
    thread_safe: bool = False,
    antialias: bool | None = None,
    rescale: float | tuple[float, float] | None = None,
    output: Literal["float32", "uint8", "float16"] | None = None,
    drop_remainder: bool = False,
    augment: Callable[..., Any] | None = None,
    parity: Literal["auto", "pil", "tf"] = "auto",
    engine: Literal["auto", "threads", "graph"] = "auto",
    cache: Cache | Literal["auto", "ram", "disk", "off"] = "auto",
    shard: Shard | Literal["auto"] | tf.distribute.InputContext | None = None,
    bad_samples: BadSamples | Literal["raise", "replace", "skip"] = "raise",
    decode: Decode = Decode(),  # noqa: B008 - immutable
    threads: int | Literal["auto"] = "auto",
) -> Any:
    """Create a ``tf.data.Dataset`` of images, from a folder, a list of files or a table.

    A table may have several images (modalities) per row, and boxes.  For a folder, the result equals the
    result of ``keras.utils.image_dataset_from_directory`` with the same arguments; the first eighteen
    arguments are Keras's.  For a table, the result equals the result of ``tf.py_function`` with Pillow.

    Args:
        source: a folder with one folder per class, a list of files, or a table.  A table is a pandas or
            Polars data frame, or a dict of columns.
        labels: as in Keras.  For a table, the name of a column, the names of several columns, or the labels
            themselves as an array or a list.  Names become class numbers. Numbers, one or several per row,
            are converted as ``tf.data.Dataset.from_tensor_slices`` converts them.
        label_mode, class_names, color_mode, batch_size, image_size, validation_split, subset, follow_links,
            crop_to_aspect_ratio, pad_to_aspect_ratio, data_format, verbose: as in Keras.
        interpolation: as in Keras. For Pillow's pixels, "bilinear", "nearest", "bicubic", "area" (Pillow's
            box filter), "hamming" or "lanczos".
        shuffle: whether to draw a new order of all rows for each epoch (Keras mixes eight batches at a time).
        seed: orders and ``rng`` depend only on the seed and the epoch.  Default: a number from NumPy's global
            generator, as in Keras. For a table, the number is drawn only if something is random.
        files: the column with the file names.  Default: "files", "file", "filename" or "path".
        folder: the folder that contains a table's files.
        boxes, box_format, outside: the part of each image to use. ``boxes`` is an array (N, 4), a column with
            four numbers per row, or the names of four columns.  ``box_format`` is ``"xyxy"`` (left, top,
            right, bottom in pixels, the last two exclusive), ``"yxyx"``, ``"xywh"`` or ``"center_xywh"``. The
            prefix ``"rel_"`` before the first three formats means fractions of the image.  By default, a box
            that reaches outside its image is an error.  ``outside="clip"`` cuts off this part of the box, and
            ``outside="pad"`` fills it with black.
        modalities: several images per row, given as a mapping from names to :class:`fastpipe.tf.Modality` or
            to a dict of its arguments.  The inputs are then a dict of images.
        tabular: further inputs, given as a mapping from their names to one or several columns.  The columns
            become float32 (n,) or (n, k). An integer that float32 cannot hold exactly is an error.
        preprocess: a function of the user, called with the used part of the image (a PIL image) before the
            part is resized.  The function returns an image or uint8 (h, w, C), which is then resized, or
            floats (H, W, C), which are not changed.  If the function has an argument ``rng``, this argument
            receives a NumPy generator that depends on the seed, the epoch and the row.
        thread_safe: a promise that several threads may call ``preprocess`` at once, in any order. Without
            this promise, one thread calls ``preprocess`` when a batch is requested, and batches wait for the
            call.
        antialias: whether filters become wider when images are shrunk.  Default: as in the library that
            ``parity`` selects.
        rescale: a factor such as ``1/255``, or (factor, offset): ``image * factor + offset``.
        output: the dtype of the images.  Default: "float32", but "uint8" for a folder with
            ``interpolation="nearest"``, as in Keras.
        drop_remainder: whether to leave out the last batch if it is smaller.
        augment: a :class:`fastpipe.tf.Augment`, or a function that is called for each batch with (inputs,
            labels), or with inputs.  The random numbers of an ``Augment`` depend only on the seed, the epoch
            and a sample's position.  A function that draws random numbers is called for one batch after the
            other. A function that changes variables or calls Python is called only when a batch is requested.
        parity: ``"pil"`` gives, bit for bit, the pixels of
            ``Image.open(f).convert("RGB").crop(box).resize(size)``. ``"tf"`` gives the pixels of
            ``tf.image.decode_image`` and ``tf.image.resize``.  ``"auto"`` is ``"tf"`` for a folder and
            ``"pil"`` for a table.
        engine: ``"threads"`` uses fastpipe's decoders in threads of this process. ``"graph"`` uses TensorFlow
            operations, which can be sent to other processes (tf.data service).  ``"auto"`` is ``"threads"``.
        cache: where samples are stored before they are scaled, given as a :class:`fastpipe.Cache` or its
            ``where``.  Datasets with the same ``Cache`` object share samples.  ``"auto"`` stores samples in
            memory if all samples fit, and otherwise stores nothing.
        shard: this process's part of each epoch.  ``"auto"`` selects the part of this worker in
            ``TF_CONFIG``, and a ``tf.distribute.InputContext`` selects the part of its pipeline. Each sample
            of an epoch then comes once.  The ``mode`` of a :class:`fastpipe.Shard` applies if the ranks
            cannot have equally many samples.  None also works under a ``MultiWorkerMirroredStrategy``, but
            then each worker decodes all samples, and TensorFlow drops the samples of the other workers.  As
            for any dataset, ``batch_size`` is the batch size of all replicas together for
            ``experimental_distribute_dataset``, and of one worker for ``distribute_datasets_from_function``.
        bad_samples: how to handle rows whose files or boxes cannot be read, given as a
            :class:`fastpipe.BadSamples` or its policy's name.
        decode: decoding options, a :class:`fastpipe.Decode`.  With ``backend="dali"``, one call decodes the
            JPEGs of a batch, for all modalities, to the same pixels. ``engine="graph"`` does not support this
            back end.
        threads: the number of decoding threads; ``"auto"`` is the number of cores.

    Returns:
        A :class:`fastpipe.tf.ImageDataset` of ``(images, labels)``, or of ``images`` if there are no labels.
        With ``subset="both"``, a list of two datasets.  Images have the dtype ``output``, the shape (n, H, W,
        C) and, without ``rescale``, values from 0 to 255.  Class labels are int32 (n,). Labels given as
        numbers are (n,) or (n, …), in the dtype that TensorFlow gives them. "binary" makes labels float32 (n,
        1), and "categorical" makes labels float32 (n, classes).

    Raises:
        OptionError: arguments contradict each other, a label is missing or is no class, a number does not fit
            its dtype, a box is empty, or a row has no file name.
        ValueError: Keras rejects one of its arguments.

    Errors during iteration name the row, the modality and the file.

    >>> train = image_dataset({"file": ["a.jpg", "b.jpg"], "label": ["cat", "dog"]}, image_size=(64, 64))
    >>> train.class_names, train.element_spec[0].shape
    (['cat', 'dog'], TensorShape([None, 64, 64, 3]))
    """
    if format != "tf":
        raise OptionError(f"format={format!r}: this is a tf.data.Dataset; for Grain use Keras's own loader")
    check_choice("output", output, (None, "float32", "uint8", "float16"))
    check_choice("parity", parity, ("auto", "pil", "tf"))
    check_choice("engine", engine, ("auto", "threads", "graph"))
    if crop_to_aspect_ratio and pad_to_aspect_ratio:
        raise OptionError("only one of crop_to_aspect_ratio and pad_to_aspect_ratio can be True")
    if threads != "auto" and operator.index(threads) < 1:
        raise OptionError(f"threads must be 'auto' or a number from 1, got {threads!r}")
    is_folder = isinstance(source, (str, os.PathLike))
    several = [Modality.of(str(name), one) for name, one in (modalities or {}).items()]
    has_code = preprocess is not None or any(one.preprocess is not None for one in several)
    # For a folder, Keras draws a number even if nothing is random.
    draws = is_folder or has_code or isinstance(augment, Augment)
    batching = batching_of(batch_size, drop_remainder, bool(shuffle), seed, shard, bad_samples, draws=draws)
    if output is None:
        is_exact = is_folder and parity != "pil" and interpolation == "nearest" and rescale is None
        output = "uint8" if is_exact else "float32"
    modality = Modality(
        files, folder, boxes, box_format, outside, image_size, color_mode, interpolation, antialias, rescale,
        preprocess, thread_safe,
    )  # fmt: skip
    options = RowOptions(
        labels, label_mode, class_names, shuffle, batching.seed, validation_split, subset,
        "crop" if crop_to_aspect_ratio else "pad" if pad_to_aspect_ratio else None,
        ("tf" if is_folder else "pil") if parity == "auto" else parity, modality, modalities, tabular,
    )  # fmt: skip
    if is_folder:
        more = {
            "color_mode": color_mode, "batch_size": batch_size, "interpolation": interpolation,
            "follow_links": follow_links, "crop_to_aspect_ratio": crop_to_aspect_ratio,
            "pad_to_aspect_ratio": pad_to_aspect_ratio, "data_format": data_format, "verbose": verbose,
        }  # fmt: skip
        subsets = rows_of_directory(source, options, more)
    else:
        subsets = rows_of_table(source, options)
    if data_format is None:
        data_format = keras.config.image_data_format()
    check_choice("data_format", data_format, ("channels_last", "channels_first"))
    images = ImageOptions(output, Cache.without_form(cache, "finished samples"), decode, threads)
    made = [
        _rows_dataset(
            rows, batching if number == 0 else batching._replace(shuffle=False), images, engine,
            batch_size is None, data_format, augment,
        )
        for number, rows in enumerate(subsets)
    ]  # fmt: skip
    return made if subset == "both" else made[0]


def _rows_dataset(
    rows: Rows,
    batching: Batching,
    options: ImageOptions,
    engine: str,
    is_single: bool,
    data_format: str,
    augment: Callable[..., Any] | None,
) -> ImageDataset:
    for column in rows.columns:
        _check_scale(column, options.output)
    form = Form.of(rows, data_format, options.output)
    why_not = why_not_graph(rows, batching, options)
    if engine == "graph" and why_not:
        raise OptionError(f"engine='graph' cannot make these samples: {why_not}. engine='threads' can")
    stream = None if engine == "graph" else RowStream(rows, batching, options, form)
    if stream is None:
        made = graph_dataset(rows, batching, form)
        made = (made.unbatch() if is_single else made).prefetch(tf.data.AUTOTUNE)
        made = made if augment is None else map_function(made, augment)
        made = made.with_options(dataset_options(batching, is_streamed=False))
    else:
        made = stream_dataset(stream, is_single, augment)
    plan = _plan(rows, stream, why_not)
    _log.info(plan)  # lines, which are printable
    names = rows.class_names
    paths: Any = {column.name: list(column.paths) for column in rows.columns}
    about = About(
        lambda: plan, partial(reference_dataset, rows, form, batching.batch_size, batching.drop_remainder),
        stream, None if names is None else list(names), paths.get("", paths),
    )  # fmt: skip
    return ImageDataset(made, about)


def _check_scale(column: Column, output: str) -> None:
    """Raise an error if ``rescale`` does not fit the images' dtype or exceeds the dtype's largest number."""
    of = f" of {column.name!r}" if column.name else ""
    if column.rescale is not None and output == "uint8":
        raise OptionError(f"rescale= gives floats and cannot be combined with output='uint8'{of}")
    scale, offset = column.rescale or (1.0, 0.0)
    ends = np.array([offset, 255 * scale + offset])
    if output != "uint8" and unheld(ends, np.dtype(output)).any():
        raise OptionError(
            f"rescale={column.rescale}{of} makes images from {ends.min()} to {ends.max()}, which "
            f"output={output!r} cannot hold: take a smaller factor, or output='float32'"
        )


def _plan(rows: Rows, stream: RowStream | None, why_not: str) -> str:
    """Return lines that say how the samples are made."""
    if stream is None:
        lines = ["engine  →  graph: TensorFlow's operations"]
    else:
        lines = ["engine  →  threads of this process" + (f"; not graph: {why_not}" if why_not else "")]
        lines += stream.describe()
        if stream.has_code:
            lines.append("preprocess  →  when a batch is asked for; thread_safe=True: ahead, in threads")
    for column in rows.columns:
        spec = column.spec
        whose = "Pillow" if spec.parity == "pil" else "TensorFlow"
        box = "whole image" if column.boxes is None else "its box"
        lines.append(
            f"{column.name or 'image'}  →  {box} at {spec.size.height} × {spec.size.width}, {spec.filter} as "
            f"{whose} does"
        )
    return "\n".join(map(printable, lines))
