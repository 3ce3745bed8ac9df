"""Changes of batches of images (N, H, W, C) by the native core, which needs neither XLA nor Python's lock.

Numbers are drawn in NumPy, by the functions of ``fastpipe.augment``, so that results are the same bit for bit
as those of its chains.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from fastpipe.augment.distributions import affine_table, erasing_table, jitter_table
from fastpipe.augment.draws import uniform_rows
from fastpipe.augment.matrices import inverse_affine
from fastpipe.augment.parameters import Float64Array
from fastpipe.augment.steps import Step, plan_of, run_plan
from fastpipe.core.machine import default_threads
from fastpipe.core.slots import SlotPool
from fastpipe.core.types import Key

__all__ = ["changed", "is_of_processor", "uniform_rows_of"]

Array = npt.NDArray[Any]


def is_of_processor(images: Sequence[Any]) -> bool:
    """Return whether the native core changes these images.

    They are where they have values that lie in the processor's memory, and while TensorFlow traces a function
    of ``tf.data``, whose Python functions run on the processor when an element is made.  Of other functions
    that are being traced nobody knows whether XLA compiles them, on which device they run, or whether they
    are saved: a trace is used again wherever the function is called.
    """
    if tf.executing_eagerly():
        return all(tf.DeviceSpec.from_string(one.backing_device).device_type == "CPU" for one in images)
    frame: Any = sys._getframe()
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if module == "tensorflow.python.data.ops.structured_function":
            return True
        if module == "tensorflow.python.framework.func_graph":  # traces functions
            return False
        frame = frame.f_back
    return False


def uniform_rows_of(seed: Any, epoch: Any, draws: Array, count: int) -> Float64Array:
    """Uniform numbers of a key, (N, count), as batches of ``fastpipe.augment`` have them."""
    return uniform_rows(len(draws), count, key=Key(int(seed), int(epoch), draws))


def changed(
    images: Array,
    u: Float64Array,
    used: Mapping[str, slice],
    arguments: Mapping[str, Any],
    colours: Sequence[tuple[float, float]],
    memory: SlotPool,
) -> Array:
    """Changed images.

    Args:
        images: (N, H, W, C): uint8, float16, bfloat16 or float32, in any order of memory.
        u: uniform numbers, a row for each image.
        used: the steps that change anything, in their order, and their columns of ``u``.
        arguments: of ``Augment``.
        colours: the ranges of brightness, contrast, saturation and hue; none of them where colours stay.
        memory: where the new images are.

    Returns:
        (N, H, W, C), C-contiguous.
    """
    out: Array = memory.take(images.shape, images.dtype)
    chain = _Chain(len(images), images.shape[1:3])
    low, high = (0.0, 1.0) if images.dtype == np.uint8 else arguments["value_range"]
    for step, columns in used.items():
        chain.add(step, u[:, columns], arguments, colours, low, high)
    if not chain.steps or not images.size:
        np.copyto(out, images)
        return out
    rows = np.concatenate(chain.tables, axis=1)
    element = images.dtype.name
    is_half = element in ("float16", "bfloat16")
    # NumPy and the native core know halves as words.
    source, target = (one.view(np.uint16) if is_half else one for one in (images, out))
    run_plan(
        plan_of(tuple(chain.steps), rows.shape[1]), rows, source.transpose(0, 3, 1, 2),
        target.transpose(0, 3, 1, 2), (element, element), _threads(),
    )  # fmt: skip
    return out


class _Chain:
    """Steps of the native core, and their numbers.

    Args:
        count: of the images.
        size: their height and width.
    """

    def __init__(self, count: int, size: Sequence[int]) -> None:
        self._count, self._size = count, size
        self._columns = 0
        self.steps: list[Step] = []
        self.tables: list[Float64Array] = [np.zeros((count, 0))]

    def add(
        self, step: str, u: Float64Array, arguments: Mapping[str, Any],
        colours: Sequence[tuple[float, float]], low: float, high: float,
    ) -> None:  # fmt: skip
        """Add a step of ``Augment``; ``low`` and ``high`` are the ends of the range of values."""
        fill = arguments["fill"]
        if step in ("horizontal_flip", "vertical_flip"):
            self._append("flip", u < arguments[step], (int(step == "vertical_flip"),))
        elif step == "affine":
            scale = None if arguments["zoom"] == (1, 1) else arguments["zoom"]
            drawn = affine_table(u, self._size, arguments["rotation"], arguments["translation"], scale)
            matrices = inverse_affine(drawn[:, 0], drawn[:, 1:3], drawn[:, 3], drawn[:, 4:6], np.zeros(2))
            is_nearest = arguments["interpolation"] == "nearest"
            self._shift(-low)  # the least value is 0, as in torchvision
            self._append("warp", matrices, (is_nearest, False, *self._size), (fill - low,))
            self._shift(low)
        elif step == "cutout":
            part = (arguments[name] for name in ("cutout", "cutout_scale", "cutout_ratio"))
            self._append("erase", erasing_table(u, self._size, *part), (), (fill,))
        elif colours:
            is_scaled = (low, high) != (0.0, 1.0)
            if is_scaled:
                self._append("normalize", None, (), (low, high - low))
            self._append("jitter", jitter_table(u, colours))
            if is_scaled:
                self._append("gain", np.full((self._count, 1), high - low), (False,))
                self._shift(low)

    def _shift(self, by: float) -> None:
        """Add a number to all values."""
        if by:
            self._append("gain", np.full((self._count, 1), by), (True,))

    def _append(
        self, kind: str, table: Any, options: tuple[int, ...] = (), numbers: tuple[float, ...] = ()
    ) -> None:
        self.steps.append(Step(kind, self._columns, options, numbers))
        if table is not None:
            self.tables.append(table.astype(np.float64))
            self._columns += table.shape[1]


def _threads() -> int:
    """As many as TensorFlow uses for an operation."""
    return tf.config.threading.get_intra_op_parallelism_threads() or _cores()


_cores = cache(default_threads)
