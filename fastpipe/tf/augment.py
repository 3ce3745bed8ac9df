"""``Augment``: augmentation of batches, as a Keras layer or as a function for ``dataset.map``."""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, Literal

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from fastpipe.augment.distributions import affine_table, erasing_table, jitter_table
from fastpipe.augment.matrices import inverse_affine
from fastpipe.augment.parameters import Float64Array, increasing, probability, two_numbers, uniform_rows
from fastpipe.augment.steps import Step, plan_of, run_plan
from fastpipe.core.machine import default_threads
from fastpipe.core.slots import KEPT_SLOTS, SlotPool
from fastpipe.core.types import Key
from fastpipe.errors import AugmentError
from fastpipe.tf.augment_ops import STREAM, change, uniforms
from fastpipe.tf.options import check_choice

_DRAWS = {"horizontal_flip": 1, "vertical_flip": 1, "affine": 6, "colour": 8, "cutout": 24}
_COLOURS = ("brightness", "contrast", "saturation", "hue")
_UNCHANGED = ((1, 1), (1, 1), (1, 1), (0, 0))
_REPLICA = 1 << 40  # the distance between the positions of two replicas


@keras.saving.register_keras_serializable(package="fastpipe")
class Augment(keras.layers.Layer):  # type: ignore[misc]  # Keras ships no types
    """A Keras layer that changes each image of a batch with the image's own random numbers.

    In a model, the layer changes images only during training.  ``dataset.map(augment)`` and
    ``augment(inputs, labels)`` change the inputs and return the labels unchanged.  With
    ``image_dataset(augment=…)``, the random numbers depend only on the dataset's seed, the epoch and the
    sample's position, for any number of threads or ranks.

    Args:
        horizontal_flip, vertical_flip: the probability that an image is mirrored, from 0 to 1.
        rotation: angles in degrees, clockwise, are drawn from [-rotation, rotation], or between the two given
            numbers.
        translation: the greatest shifts along x and y, as fractions of the width and the height, or one
            number for both.
        zoom: the least and the greatest factor. One number means factors from 1 - zoom to 1 + zoom.
        brightness, contrast, saturation: factors are drawn from [max(0, 1 - value), 1 + value], or between
            the two given numbers.
        hue: fractions of a full turn are drawn from [-value, value], or between two numbers; at most 0.5.
        cutout: the probability that a box in an image is filled with ``fill``.
        cutout_scale, cutout_ratio: the least and the greatest area of the box as a fraction of the image's
            area, and the least and the greatest height / width of the box.
        interpolation: ``"bilinear"`` or ``"nearest"``.
        fill: the value outside images and in boxes that are cut out, within ``value_range``.
        value_range: the range of floats, as for Keras's layers.  Bytes are 0 to 255.
        modalities: the names of the images in dict inputs.  Default: all inputs with four dimensions.  All
            images of a sample are moved in the same way, even if their sizes differ.
        colours: the names of the images whose colours are changed.  Default: all images with 1 or 3 channels.
        seed: the seed of the random numbers.  Default: a number from NumPy's global generator.
        jit_compile: whether to compile the TensorFlow operations with XLA, which fuses them into few loops.
            Compilation happens once for each size of a batch.
        name: the layer's name.

    On the CPU, fastpipe's native core changes a batch, in as many threads as TensorFlow's operations use. The
    native core is used in ``dataset.map(augment)``, in fastpipe's own datasets, and in calls of
    ``augment(inputs)`` if the inputs are not on a GPU.  Models, and every other ``tf.function``, use
    TensorFlow operations on any device.  TensorFlow operations can be compiled by XLA, saved, and sent to
    other processes.  ``dataset.map(tf.function(augment))`` uses TensorFlow operations in a dataset, which
    ``tf.data``'s service requires.  The native core and the TensorFlow operations draw the same random
    numbers. Their results differ by rounding.

    A layer has a weight, so creating a layer initialises TensorFlow. Configure TensorFlow's devices before
    you create a layer. Each layer draws its own random numbers, and one layer moves all images of a sample in
    the same way.

    Images are (N, H, W, C), uint8, float16, bfloat16 or float32, and keep their dtype.  The changes, the
    order of the changes and the random numbers are the same as in a ``Compose`` of ``fastpipe.augment``'s
    ``RandomHorizontalFlip``, ``RandomVerticalFlip``, ``RandomAffine``, ``ColorJitter`` and ``RandomErasing``,
    where unused changes are left out.  The formulas are torchvision's.

    Keras's layers draw some numbers differently.  ``RandomFlip()`` mirrors an image both ways or not at all.
    ``RandomRotation`` counts angles counter-clockwise.  ``RandomZoom`` draws the inverse of the factor.
    ``RandomTranslation`` shifts by fractions of pixels.  ``RandomBrightness`` adds a number instead of
    multiplying by a factor.  ``RandomContrast(0.2)`` means factors from 1.0 to 1.2, and
    ``RandomContrast((0.2, 0.2))`` means factors from 0.8 to 1.2.

    >>> augment = Augment(horizontal_flip=0.5, rotation=10, brightness=0.2, value_range=(0, 1), seed=1)
    >>> augment(tf.ones((2, 8, 8, 3))).shape
    TensorShape([2, 8, 8, 3])
    """

    def __init__(
        self,
        *,
        horizontal_flip: float = 0.0,
        vertical_flip: float = 0.0,
        rotation: float | Sequence[float] = 0.0,
        translation: float | Sequence[float] = 0.0,
        zoom: float | Sequence[float] = 0.0,
        brightness: float | Sequence[float] = 0.0,
        contrast: float | Sequence[float] = 0.0,
        saturation: float | Sequence[float] = 0.0,
        hue: float | Sequence[float] = 0.0,
        cutout: float = 0.0,
        cutout_scale: Sequence[float] = (0.02, 0.33),
        cutout_ratio: Sequence[float] = (0.3, 3.3),
        interpolation: Literal["bilinear", "nearest"] = "bilinear",
        fill: float = 0.0,
        value_range: Sequence[float] = (0.0, 255.0),
        modalities: Sequence[str] | None = None,
        colours: Sequence[str] | None = None,
        seed: int | None = None,
        jit_compile: bool = True,
        name: str | None = None,
        **layer: Any,
    ) -> None:
        super().__init__(name=name, **{"autocast": False, **layer})
        shifts = translation if isinstance(translation, Sequence) else (translation, translation)
        along_x, along_y = two_numbers(shifts)
        self._arguments: dict[str, Any] = {
            "horizontal_flip": probability(horizontal_flip, "horizontal_flip"),
            "vertical_flip": probability(vertical_flip, "vertical_flip"),
            "rotation": _range(rotation, "rotation", 0.0),
            "translation": (probability(along_x, "translation"), probability(along_y, "translation")),
            "zoom": _range(zoom, "zoom", 1.0, low=0.0),
            "brightness": _range(brightness, "brightness", 1.0, low=0.0),
            "contrast": _range(contrast, "contrast", 1.0, low=0.0),
            "saturation": _range(saturation, "saturation", 1.0, low=0.0),
            "hue": _range(hue, "hue", 0.0, low=-0.5, high=0.5),
            "cutout": probability(cutout, "cutout"),
            "cutout_scale": increasing(cutout_scale, "cutout_scale", 1.0),
            "cutout_ratio": increasing(cutout_ratio, "cutout_ratio"),
            "interpolation": interpolation,
            "fill": float(fill),
            "value_range": two_numbers(value_range),
            "modalities": None if modalities is None else tuple(modalities),
            "colours": None if colours is None else tuple(colours),
            "seed": int(np.random.randint(2**31)) if seed is None else operator.index(seed),
            "jit_compile": bool(jit_compile),
        }
        check_choice("interpolation", interpolation, ("bilinear", "nearest"))
        if self._arguments["zoom"][0] <= 0:
            raise AugmentError(f"zoom= must give factors above 0, got {zoom!r}")
        if not -np.inf < self._arguments["value_range"][0] < self._arguments["value_range"][1] < np.inf:
            raise AugmentError(f"value_range= must be two numbers that increase, got {value_range!r}")
        self._steps = self._used()
        self.supports_jit = True
        # The number of calls is part of the layer's state, so that a loaded model continues with new random
        # numbers.
        self.calls = self.add_weight(
            name="calls", shape=(), dtype="int64", initializer="zeros", trainable=False,
            aggregation="only_first_replica",
        )  # fmt: skip
        self._memory = SlotPool(KEPT_SLOTS)
        self._change = tf.function(self._change_by_operations)
        # Compile each step separately. If steps are compiled together, XLA repeats a step for each pixel of
        # the next step.
        compiled = partial(tf.function, jit_compile=self._arguments["jit_compile"] or None, autograph=False)
        self._uniforms = compiled(uniforms)
        self._by_step = {step: compiled(partial(self._step, step)) for step in self._steps}

    def call(self, inputs: Any, labels: Any = None, training: bool | None = None, key: Any = None) -> Any:
        """Change the images of a batch.

        Args:
            inputs: images (N, H, W, C), or a dict that contains images and other inputs.
            labels: returned unchanged.
            training: whether to change anything; set by a model.  Default: True.
            key: (seed, epoch, draws), as in ``fastpipe.core.types.Key``. ``draws`` are int64 (N,), the
                samples' positions in the epoch.  Default: the layer's seed and its number of calls.

        Returns:
            The changed inputs. If labels are given, a pair (inputs, labels).

        Raises:
            AugmentError: there are no images, or the images have an unsupported shape or dtype.
        """
        if training is not None and not training:
            return inputs if labels is None else (inputs, labels)
        named = dict(inputs) if isinstance(inputs, Mapping) else {"": inputs}
        images = {name: tf.convert_to_tensor(named[name]) for name in self._images(named)}
        for name, image in images.items():
            _check(name, image)
            fill = self._arguments["fill"]
            if image.dtype == tf.uint8 and not (fill.is_integer() and 0 <= fill <= 255):
                raise AugmentError(f"fill={fill} is for floats: images of uint8 need a whole number to 255")
        first = next(iter(images.values()))
        seed, epoch, draws = self._key(tf.shape(first)[0]) if key is None else key
        key = tuple(_word(one) for one in (seed, epoch, draws))
        change_all = self._natively if _is_on_cpu(list(images.values())) else self._change
        changed = change_all(images, *key)
        made = {**named, **changed} if isinstance(inputs, Mapping) else changed[""]
        return made if labels is None else (made, labels)

    def __call__(self, inputs: Any, labels: Any = None, **options: Any) -> Any:
        """See ``call``."""
        if options.get("key") is not None:
            options["key"] = tuple(_word(one) for one in options["key"])  # Keras requires tensors
        return super().__call__(inputs, labels=labels, **options)

    def compute_output_shape(self, input_shape: Any, *others: Any, **more: Any) -> Any:
        """Return the shape of the inputs, which does not change."""
        return input_shape

    def compute_output_spec(self, inputs: Any, labels: Any = None, **options: Any) -> Any:
        """Return the type of the inputs, which does not change."""
        same = keras.tree.map_structure(lambda one: keras.KerasTensor(one.shape, one.dtype), inputs)
        return same if labels is None else (same, labels)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {**super().get_config(), **self._arguments}

    def _key(self, count: Any) -> tuple[Any, Any, Any]:
        """Return the key of this call (seed, epoch, draws). Keys of different replicas differ."""
        call = tf.convert_to_tensor(self.calls.value)
        self.calls.assign(self.calls + 1)
        replica = tf.distribute.get_replica_context()
        number = 0 if replica is None else replica.replica_id_in_sync_group
        first = tf.cast(number, tf.int64) * _REPLICA
        return self._arguments["seed"], call, first + tf.range(tf.cast(count, tf.int64))

    def _used(self) -> dict[str, slice]:
        """Return the steps in use, and the columns of each step's random numbers."""
        arguments = self._arguments
        is_still = arguments["rotation"] == (0, 0) and arguments["translation"] == (0, 0)
        used = {
            "horizontal_flip": arguments["horizontal_flip"] > 0,
            "vertical_flip": arguments["vertical_flip"] > 0,
            "affine": not (is_still and arguments["zoom"] == (1, 1)),
            "colour": [arguments[kind] for kind in _COLOURS] != list(_UNCHANGED),
            "cutout": arguments["cutout"] > 0,
        }
        steps, end = {}, 0
        for name, is_used in used.items():
            if is_used:
                steps[name] = slice(end, end + _DRAWS[name])
                end += _DRAWS[name]
        self._count = end
        return steps

    def _natively(self, images: dict[str, Any], seed: Any, epoch: Any, draws: Any) -> dict[str, Any]:
        """Change images with the native core: now, or when the graph runs that TensorFlow traces now."""
        names, given = list(images), list(images.values())

        def changed(seed: Any, epoch: Any, draws: Any, *images: Any) -> list[Any]:
            u = uniform_rows(len(draws), self._count, key=Key(int(seed), int(epoch), draws))
            made = []
            for name, image in zip(names, images, strict=True):
                # Grey images have no saturation and no hue.
                is_coloured = bool(self._ranges(image.shape[3], name))
                colours = [self._arguments[kind] for kind in _COLOURS] if is_coloured else []
                made.append(change_natively(image, u, self._steps, self._arguments, colours, self._memory))
            return made

        if not tf.executing_eagerly():
            dtypes = [one.dtype for one in given]
            made = tf.numpy_function(changed, [seed, epoch, draws, *given], dtypes, stateful=False)
            made = [tf.ensure_shape(one, like.shape) for one, like in zip(made, given, strict=True)]
            return dict(zip(names, made, strict=True))

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def recorded(*given: Any) -> Any:
            def gradient(*upstream: Any) -> Any:
                with tf.GradientTape() as tape:
                    tape.watch(given)
                    named = dict(zip(names, given, strict=True))
                    made = list(self._change(named, seed, epoch, draws).values())
                return tape.gradient(made, given, list(upstream))

            arrays = changed(*(np.asarray(one) for one in (seed, epoch, draws, *given)))
            return tuple(tf.convert_to_tensor(one) for one in arrays), gradient

        return dict(zip(names, recorded(*given), strict=True))

    def _change_by_operations(
        self, images: dict[str, Any], seed: Any, epoch: Any, draws: Any
    ) -> dict[str, Any]:
        stream = tf.constant(STREAM, tf.int64)
        u = self._uniforms(tf.bitwise.bitwise_xor(seed, stream), epoch, draws, self._count)
        made = {}
        for name, image in images.items():
            values, of_bytes = tf.cast(image, tf.float32), image.dtype == tf.uint8
            for step, columns in self._steps.items():
                values = self._by_step[step](values, u[:, columns], of_bytes, name)
            made[name] = tf.ensure_shape(tf.cast(values, image.dtype), image.shape)
        return made

    def _step(self, step: str, values: Any, u: Any, of_bytes: bool, name: str) -> Any:
        return change(step, self._arguments, self._ranges(values.shape[3], name), values, u, of_bytes)

    def _ranges(self, channels: int, name: str) -> dict[int, tuple[float, float]]:
        """Return the ranges of brightness, contrast, saturation and hue, without unused ranges."""
        colours = self._arguments["colours"]
        if channels not in (1, 3) or (colours is not None and name and name not in colours):
            return {}
        # Grey images have no saturation and no hue.
        kinds = _COLOURS if channels == 3 else _COLOURS[:2]
        every = enumerate(self._arguments[kind] for kind in kinds)
        return {kind: limits for kind, limits in every if limits != _UNCHANGED[kind]}

    def _images(self, named: Mapping[str, Any]) -> list[str]:
        """Return the names of the inputs that are images."""
        wanted = self._arguments["modalities"]
        if "" in named and len(named) == 1:
            return [""]
        found = [name for name, value in named.items() if len(value.shape) == 4] if wanted is None else wanted
        missing = [name for name in found if name not in named]
        if missing or not found:
            what = f"modalities= names {missing[0]!r}" if missing else "there are no images (N, H, W, C)"
            raise AugmentError(f"{what} among the inputs {sorted(named)}")
        return list(found)


def _is_on_cpu(images: Sequence[Any]) -> bool:
    """Return whether the native core changes these images.

    The native core changes images in host memory, and images in a function that ``tf.data`` traces.  A
    function traced by other code may be compiled by XLA, run on any device or saved, so it uses TensorFlow
    operations.
    """
    if tf.executing_eagerly():
        return all(tf.DeviceSpec.from_string(one.backing_device).device_type == "CPU" for one in images)
    frame: Any = sys._getframe()
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if module == "tensorflow.python.data.ops.structured_function":
            return True
        if module == "tensorflow.python.framework.func_graph":  # this module traces functions
            return False
        frame = frame.f_back
    return False


def _check(name: str, image: Any) -> None:
    what = ""
    if len(image.shape) != 4:
        what = f"batches (N, H, W, C); the input{{}} has shape {tuple(image.shape)}"
    elif image.shape[3] is None or image.shape[3] > 16:
        what = f"images with channels last; the input{{}} has shape {tuple(image.shape)}"
    elif image.dtype not in (tf.uint8, tf.float16, tf.bfloat16, tf.float32):
        what = f"uint8, float16, bfloat16 or float32; the input{{}} is {image.dtype.name}"
    if what:
        raise AugmentError("Augment takes " + what.format(f" of {name!r}" if name else ""))


def _word(value: Any) -> Any:
    """Return whole numbers modulo 2**64, as int64."""
    if isinstance(value, int):
        value = (value + (1 << 63)) % (1 << 64) - (1 << 63)
    return tf.cast(tf.convert_to_tensor(value, tf.int64 if isinstance(value, int) else None), tf.int64)


# ---- the native core -----------------------------------------------------------------------------


def change_natively(
    images: npt.NDArray[Any], u: Float64Array, used: Mapping[str, slice], arguments: Mapping[str, Any],
    colours: Sequence[tuple[float, float]], memory: SlotPool,
) -> npt.NDArray[Any]:  # fmt: skip
    """Change images with the native core, with the same results, bit for bit, as in ``fastpipe.augment``.

    The GIL is released during the change.  Images are (N, H, W, C), in any memory order.  ``u`` has one row
    for each image, and ``used`` gives the columns of each step in ``u``.  ``colours`` has the ranges of
    brightness, contrast, saturation and hue, or is empty.
    """
    out: npt.NDArray[Any] = memory.take(images.shape, images.dtype)
    count, size = len(images), images.shape[1:3]
    low, high = (0.0, 1.0) if images.dtype == np.uint8 else arguments["value_range"]
    fill = arguments["fill"]
    steps: list[Step] = []
    tables: list[Float64Array] = [np.zeros((count, 0))]

    def add(kind: str, table: Any, options: tuple[int, ...] = (), numbers: tuple[float, ...] = ()) -> None:
        steps.append(Step(kind, sum(one.shape[1] for one in tables), options, numbers))
        if table is not None:
            tables.append(table.astype(np.float64))

    def shift(by: float) -> None:
        if by:
            add("gain", np.full((count, 1), by), (True,))

    for step, columns in used.items():
        drawn = u[:, columns]
        if step in ("horizontal_flip", "vertical_flip"):
            add("flip", drawn < arguments[step], (int(step == "vertical_flip"),))
        elif step == "affine":
            scale = None if arguments["zoom"] == (1, 1) else arguments["zoom"]
            table = affine_table(drawn, size, arguments["rotation"], arguments["translation"], scale)
            matrices = inverse_affine(table[:, 0], table[:, 1:3], table[:, 3], table[:, 4:6], np.zeros(2))
            is_nearest = arguments["interpolation"] == "nearest"
            shift(-low)  # the least value becomes 0, as in torchvision
            add("warp", matrices, (is_nearest, False, *size), (fill - low,))
            shift(low)
        elif step == "cutout":
            part = (arguments[name] for name in ("cutout", "cutout_scale", "cutout_ratio"))
            add("erase", erasing_table(drawn, size, *part), (), (fill,))
        elif colours:
            is_scaled = (low, high) != (0.0, 1.0)
            if is_scaled:
                add("normalize", None, (), (low, high - low))
            add("jitter", jitter_table(drawn, colours))
            if is_scaled:
                add("gain", np.full((count, 1), high - low), (False,))
                shift(low)
    if not steps or not images.size:
        np.copyto(out, images)
        return out
    rows = np.concatenate(tables, axis=1)
    element = images.dtype.name
    is_half = element in ("float16", "bfloat16")
    # NumPy and the native core store 16-bit floats as integers.
    source, target = (one.view(np.uint16) if is_half else one for one in (images, out))
    threads = tf.config.threading.get_intra_op_parallelism_threads() or _cores()  # as TensorFlow's operations
    run_plan(
        plan_of(tuple(steps), rows.shape[1]), rows, source.transpose(0, 3, 1, 2),
        target.transpose(0, 3, 1, 2), (element, element), threads,
    )  # fmt: skip
    return out


_cores = cache(default_threads)


# ---- arguments -----------------------------------------------------------------------------------


def _range(
    value: float | Sequence[float], name: str, centre: float, low: float = -np.inf, high: float = np.inf
) -> tuple[float, float]:
    try:
        pair: Any = value
        if not isinstance(value, Sequence):
            pair = max(centre - float(value), low), centre + float(value)
    except (TypeError, ValueError):
        pair = ()
    first, last = two_numbers(pair)
    if not low <= first <= last <= high:  # false for NaN
        raise AugmentError(
            f"{name}= must be a number of at least 0, or two numbers in increasing order, from {low} to "
            f"{high}, got {value!r}"
        )
    return first, last
