"""``image_dataset``: Keras's ``image_dataset_from_directory``, for tables and several images as well."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import tensorflow as tf

from fastpipe.errors import OptionError
from fastpipe.options import BadSamples, Cache, Decode, Shard
from fastpipe.tf.assembling import dataset_of_rows
from fastpipe.tf.augment import Augment
from fastpipe.tf.batching import batching_of
from fastpipe.tf.building import Arguments, data_format_of, rows_of_directory, rows_of_table
from fastpipe.tf.options import Modality, check_choice
from fastpipe.tf.stream import Making

__all__ = ["image_dataset"]


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
    """A ``tf.data.Dataset`` of images: from one line to several modalities with boxes.

    Of a folder it gives what ``keras.utils.image_dataset_from_directory`` gives, for the same arguments; the
    first eighteen are Keras's.  Of a table it gives what ``tf.py_function`` with Pillow gives.

    Args:
        source: a folder with a folder for each class; a list of files; or a table: a pandas or Polars data
            frame, or a dict of columns.
        labels: as in Keras.  For a table: the name of a column, the names of several, or the labels
            themselves, an array or a list.  Names become the numbers of their classes; numbers, one or
            several in each row, stay what ``tf.data.Dataset.from_tensor_slices`` makes of them.
        label_mode, class_names, color_mode, batch_size, image_size, validation_split, subset, follow_links,
            crop_to_aspect_ratio, pad_to_aspect_ratio, data_format, verbose: as in Keras.
        interpolation: as in Keras; with Pillow's pixels "bilinear", "nearest", "bicubic", "area" (Pillow's
            box), "hamming" or "lanczos".
        shuffle: each epoch has an order of its own, of all rows (Keras mixes eight batches at a time).
        seed: makes orders and ``rng`` a function of (seed, epoch).  Without one, a number of NumPy's global
            generator is taken, as Keras does; for a table only where something is random.
        files: the column of the file names.  Default: "files", "file", "filename" or "path".
        folder: in which the files of a table are.
        boxes, box_format, outside: the part of each image that is used: an array (N, 4), a column of four
            numbers each, or the names of four columns; ``box_format`` is ``"xyxy"`` (left, top, right, bottom
            in pixels, the last two excluded), ``"yxyx"``, ``"xywh"``, ``"center_xywh"``, or with ``"rel_"``
            before the first three in parts of the image.  A box that reaches outside its image is an error,
            unless ``outside`` is ``"clip"``, or ``"pad"`` for black there.
        modalities: several images of each row: their names to :class:`fastpipe.tf.Modality` or a dict of its
            arguments.  The inputs are then a dict of them.
        tabular: further inputs: their names to a column, or several.  float32 (n,) or (n, k); a whole number
            that float32 cannot hold exactly is an error.
        preprocess: a function of the script's, called with the part of the image that is used (a PIL image)
            before it is resized.  It returns an image, or uint8 (h, w, C), which is resized then; or floats
            (H, W, C), which are taken as they are.  An argument ``rng`` gets a NumPy generator that depends
            on (seed, epoch, row).
        thread_safe: promise that it may be called from several threads at once, in any order.  Else it is
            called in one, when a batch is asked for, and batches wait for it.
        antialias: whether filters widen where images are made smaller.  Default: as ``parity`` does.
        rescale: a factor such as ``1/255``, or (factor, offset): ``image * factor + offset``.
        output: type of the images; default "float32", but "uint8" where the loader that is replaced gives
            that: of a folder with ``interpolation="nearest"``.
        drop_remainder: leave out the last batch if it is smaller.
        augment: a :class:`fastpipe.tf.Augment`, whose numbers are then a function of (seed, epoch, position);
            or a function of (inputs, labels), or of inputs, for each batch.  One that draws random numbers
            is called for one batch after the other; one that changes variables, or calls Python, only when
            a batch is asked for.
        parity: whose pixels: ``"pil"`` gives, bit for bit, those of
            ``Image.open(f).convert("RGB").crop(box).resize(size)``; ``"tf"`` those of
            ``tf.image.decode_image`` and ``tf.image.resize``.  ``"auto"``: those of the loader that is
            replaced, TensorFlow's for a folder, Pillow's for a table.
        engine: ``"threads"`` makes batches by fastpipe's decoders, in threads of this process; ``"graph"`` by
            TensorFlow's operations, which can be sent to other processes (tf.data service).  ``"auto"`` is
            ``"threads"``.
        cache: where samples are kept as they are before they are scaled: a :class:`fastpipe.Cache` or its
            ``where``.  Datasets that are made with one ``Cache`` object share them.  ``"auto"`` keeps them in
            memory, if all fit there.
        shard: this process's part of each epoch.  ``"auto"`` is that of this worker of ``TF_CONFIG``, a
            ``tf.distribute.InputContext`` that of its pipeline: each sample comes once.  The ``mode`` of a
            :class:`fastpipe.Shard` says what is done where ranks cannot have equally many.  None is right
            under a ``MultiWorkerMirroredStrategy`` too, but each worker decodes all samples, of which
            TensorFlow drops the others'.  ``batch_size`` is as of any dataset there: of all replicas for
            ``experimental_distribute_dataset``, of a worker for ``distribute_datasets_from_function``.
        bad_samples: what happens to rows whose files or boxes cannot be read, a
            :class:`fastpipe.BadSamples` or its policy's name.
        decode: options of decoding, a :class:`fastpipe.Decode`.  With ``backend="dali"`` the JPEGs of a
            batch, of all modalities, are decoded by one call, to the same pixels; not by ``engine="graph"``.
        threads: decoding threads; ``"auto"`` is the number of cores.

    Returns:
        :class:`fastpipe.tf.ImageDataset` of ``(images, labels)``, or of ``images`` without labels; with
        ``subset="both"`` a list of two.  Images are ``output`` (n, H, W, C), 0 to 255.  Labels of classes are
        int32 (n,), given numbers (n,) or (n, …) in the type that TensorFlow gives them; "binary" makes them
        float32 (n, 1), "categorical" float32 (n, classes).

    Raises:
        OptionError: arguments that do not go together, a label that is missing or no class, a number that its
            type cannot hold, an empty box, a row without a file name.
        ValueError: Keras's own, for its arguments.

    While it is iterated over, an error names row, modality and file.

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
    # For a folder Keras takes a number whether or not something is random.
    draws = is_folder or has_code or isinstance(augment, Augment)
    batching = batching_of(
        batch_size, drop_remainder, bool(shuffle), seed, shard, bad_samples, draws=draws
    )  # fmt: skip
    if output is None:
        is_exact = is_folder and parity != "pil" and interpolation == "nearest" and rescale is None
        output = "uint8" if is_exact else "float32"
    modality = Modality(
        files, folder, boxes, box_format, outside, image_size, color_mode, interpolation, antialias, rescale,
        preprocess, thread_safe,
    )  # fmt: skip
    arguments = Arguments(
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
        subsets = rows_of_directory(source, arguments, more)
    else:
        subsets = rows_of_table(source, arguments)
    make = partial(
        dataset_of_rows, making=Making(output, Cache.of(cache), decode, threads), engine=engine,
        is_single=batch_size is None, data_format=data_format_of(data_format), augment=augment,
    )  # fmt: skip
    made = [
        make(one, batching if number == 0 else batching._replace(shuffle=False))
        for number, one in enumerate(subsets)
    ]
    return made if subset == "both" else made[0]
