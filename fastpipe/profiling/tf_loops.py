"""Sees loops in Python over a ``tf.data.Dataset``, as of who trains with ``tf.GradientTape``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from fastpipe.profiling.keras_fit import FitWitness, watch_fit
from fastpipe.profiling.watching import Watch

__all__ = ["WATCHED", "watch_datasets"]

# They iterate for a graph that they make, or for a script whose iterator is watched.
_LIBRARIES = {"tensorflow", "keras", "tf_keras"}


def watch_datasets(module: Any, watch: Watch) -> Callable[[], None]:
    """Have datasets of TensorFlow watched where a script iterates them; returns what undoes it."""
    kind = module.DatasetV2
    ways = {name: getattr(kind, name) for name in ("__iter__", "as_numpy_iterator")}

    def watched(begin: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
        def iterate(self: Any) -> Iterator[Any]:
            if _is_library(sys._getframe(1)) or not module.context.executing_eagerly():
                return begin(self)
            return watch.iterate(self, begin, witness=FitWitness)

        return iterate

    for name, begin in ways.items():
        setattr(kind, name, watched(begin))

    def undo() -> None:
        for name, begin in ways.items():
            setattr(kind, name, begin)

    return undo


# As ``Watch`` has it, besides torch's loaders.
WATCHED = {"keras": watch_fit, "tensorflow.python.data.ops.dataset_ops": watch_datasets}


def _is_library(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _LIBRARIES
