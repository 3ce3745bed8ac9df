"""Sees what ``keras.Model.fit`` trains on, of whose batches the script's thread sees nothing.

So a step's time is taken from one batch's begin to the next one's, and how long it takes with data at once
from a second ``fit``, of one batch that is kept.  What the dataset does in Python (``tf.py_function``) is
seen in TensorFlow's threads, and so is what generators and datasets of Keras's do.
"""

from __future__ import annotations

import gc
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

from fastpipe.profiling.images_read import ImageReads
from fastpipe.profiling.keras_data import data_of
from fastpipe.profiling.loops import Loop, Phase
from fastpipe.profiling.recorder import Recorder
from fastpipe.profiling.stacks import Boundary
from fastpipe.profiling.timed import Account
from fastpipe.profiling.watching import Watch, Watched

__all__ = ["FitWitness", "watch_fit"]

_log = logging.getLogger("fastpipe.profile")


class _Replay(BaseException):
    """Ends a ``fit``, for one of a single batch."""


class FitWitness:
    """Sees what datasets of TensorFlow do in Python, in threads of TensorFlow's.

    Args:
        loop: whose steps are the batches; None where somebody else counts them.
        more: boundaries of code that makes batches in other threads.
    """

    def __init__(self, loop: Loop | None = None, more: Mapping[CodeType, Boundary] | None = None) -> None:
        script_ops = sys.modules["tensorflow.python.ops.script_ops"]
        function: Any = script_ops.FuncRegistry.__call__
        self.images = ImageReads()
        self.images.begin()
        self._loop, self._account = loop, Account(-1)
        self._recorder = Recorder({function.__code__: Boundary("dataset"), **(more or {})})
        self._recorder.tally = self._account.tally
        self._recorder.start()
        self._is_open = True

    def accounts(self) -> list[Account]:
        """What was seen."""
        self.close()
        if self._loop is not None:
            steps = self._loop.steps
            self._account.batches = len(steps[Phase.WARMING]) + len(steps[Phase.AS_IT_IS]) + 1
        return [self._account]

    def close(self) -> None:
        """End looking."""
        if self._is_open:
            self.images.end()
            self._recorder.stop()
            self._is_open = False


def watch_fit(keras: Any, watch: Watch) -> Callable[[], None]:
    """Have ``keras.Model.fit`` watched; returns what undoes it."""
    fit = keras.Model.fit
    signature = inspect.signature(fit)

    def watched_fit(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        model: Any = given.args[0]
        x: Any = given.arguments.get("x")
        data = None if watch.is_paused else data_of(x, keras)
        if data is None:
            return fit(*args, **kwargs)
        known = watch.known(x)
        known.loop.end_again()
        if known.loop.is_over:
            return fit(*args, **kwargs)
        known.is_opaque, known.begin, known.boundaries = True, data.begin, data.boundaries
        if known.witness is None:
            known.witness = FitWitness(known.loop, data.boundaries)
        given.arguments["x"] = data.x
        given.arguments["callbacks"] = _with_steps(given.arguments.get("callbacks"), keras, known)
        try:
            return fit(*given.args, **given.kwargs)
        except _Replay:
            if known.witness is not None:
                known.witness.close()
        gc.collect()  # iterators of the fit that has ended: they go on to make batches ahead
        # The script's other arguments are about an end that this has not: validation, epochs, callbacks.
        try:
            once = data.once()
        except Exception as error:  # a batch that only Keras can take
            _log.warning("steps with data at once: not measured: %s: %s", type(error).__name__, error)
            known.loop.finish()
            raise
        return fit(model, once, epochs=1, shuffle=False, verbose=0, callbacks=[_steps(keras, known)])

    own = "fit" in vars(keras.Model)
    keras.Model.fit = watched_fit

    def undo() -> None:
        if own:
            keras.Model.fit = fit
        elif "fit" in vars(keras.Model):
            del keras.Model.fit

    return undo


def _with_steps(callbacks: Any, keras: Any, known: Watched) -> list[Any]:
    """What a script gives as ``callbacks``, in each of the ways that Keras takes, and one more."""
    # A list made by the script may call its callbacks in another thread, where they could not end the fit.
    given = getattr(callbacks, "callbacks", callbacks)
    given = [] if given is None else given if isinstance(given, (list, tuple)) else [given]
    return [*given, _steps(keras, known)]


def _steps(keras: Any, known: Watched) -> Any:
    """A callback that tells a loop of its steps."""
    loop = known.loop

    class Steps(keras.callbacks.Callback):  # type: ignore[misc]
        """Ends the ``fit`` where another one goes on."""

        _is_last_epoch = False

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            loop.begin_epoch()
            self._is_last_epoch = epoch + 1 == self.params.get("epochs")

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            before = loop.phase
            if self._is_last_epoch and batch + 1 == self.params.get("steps"):
                loop.ends_soon()
            loop.next(_nothing)
            if before is Phase.AS_IT_IS and loop.phase is Phase.SETTLING:
                raise _Replay

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            loop.end_epoch()

    return Steps()


def _nothing() -> None:
    """Python has no batch in its hands."""
