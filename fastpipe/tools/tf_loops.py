"""Watch training loops of TensorFlow and Keras.

Python does not see the batches of ``keras.Model.fit``, so the time of a step is measured from the beginning
of a batch to the beginning of the next batch.  A second ``fit`` with one repeated batch gives the time of a
step that does not wait for data.  The stacks of TensorFlow's threads are recorded regularly, to see what the
Python code of a dataset does (``tf.py_function``, generators, datasets of Keras).
"""

from __future__ import annotations

import gc
import inspect
import itertools
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import CodeType, GeneratorType
from typing import Any, NamedTuple

from fastpipe.tools.loaders import Watch, Watched, patched
from fastpipe.tools.loops import Loop, Phase
from fastpipe.tools.recorder import Recorder
from fastpipe.tools.stacks import Boundary
from fastpipe.tools.witness import Account, Reads

_log = logging.getLogger("fastpipe.profile")
_PATIENCE_S = 5.0
# Iterations by these libraries are not watched: they build a graph, or their caller is watched.
_LIBRARIES = {"tensorflow", "keras", "tf_keras"}


class FitData(NamedTuple):
    x: Any
    once: Callable[[], Any]
    begin: Callable[[], Iterator[Any]] | None = None
    boundaries: Mapping[CodeType, Boundary] = {}


def data_of(x: Any, keras: Any) -> FitData | None:
    if hasattr(x, "element_spec") and hasattr(x, "take"):
        return FitData(x, lambda: x.take(1).cache().repeat())
    if keras.backend.backend() != "tensorflow":  # the threads of other back ends prefetch batches
        return None
    if isinstance(x, GeneratorType):
        return _generated(x)
    if not isinstance(x, keras.utils.PyDataset):
        return None
    code = getattr(type(x).__getitem__, "__code__", None)
    return FitData(
        x, lambda: _repeated(x[0]),
        None if is_parallel(x) else lambda: (x[at] for at in _places(x)),
        {} if code is None else {code: Boundary("dataset")},
    )  # fmt: skip


def _generated(generator: GeneratorType[Any, Any, Any]) -> FitData:
    last: Any = None

    def keeping() -> Iterator[Any]:
        nonlocal last
        for batch in generator:
            last = batch
            yield batch

    def rest() -> Iterator[Any]:
        deadline = time.monotonic() + _PATIENCE_S
        while generator.gi_running and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        return generator

    boundaries = {generator.gi_code: Boundary("dataset")}
    return FitData(keeping(), lambda: _repeated(last), rest, boundaries)


def is_parallel(x: Any) -> bool:
    return bool(x.workers > 1 or (x.workers and x.use_multiprocessing))


def batches_by_threads(x: Any, threads: int) -> Iterator[Any]:
    ahead: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for at in _places(x):
                ahead.append(pool.submit(x.__getitem__, at))
                if len(ahead) > threads:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for one in ahead:
                one.cancel()


def missing_stages(data: Any) -> tuple[bool, bool]:
    """Return whether a ``tf.data.Dataset`` maps its elements one by one, and whether it does not prefetch."""
    names = []
    while data is not None:
        names.append(type(data).__name__)
        data = getattr(data, "_input_dataset", None)
    is_serial = any(name.lstrip("_") == "MapDataset" for name in names)
    # Options add no stage of their own, and the others only count or repeat what was prefetched.
    passed = ("Options", "Repeat", "Take", "Skip")
    last = next((name for name in names if not any(one in name for one in passed)), "")
    return is_serial, "Prefetch" not in last


def _places(x: Any) -> Iterator[int]:
    count = x.num_batches
    return iter(itertools.count() if count is None else itertools.cycle(range(count)))


def _repeated(batch: Any) -> Any:
    if isinstance(batch, list):
        batch = tuple(batch)
    elif not isinstance(batch, (tuple, dict)):
        batch = (batch,)
    return sys.modules["tensorflow"].data.Dataset.from_tensors(batch).repeat()


class FitWitness:
    def __init__(self, loop: Loop | None = None, more: Mapping[CodeType, Boundary] | None = None) -> None:
        script_ops = sys.modules["tensorflow.python.ops.script_ops"]
        function: Any = script_ops.FuncRegistry.__call__
        self.reads = Reads().begin()
        self._loop, self._account = loop, Account(-1)
        self._recorder = Recorder({function.__code__: Boundary("dataset"), **(more or {})})
        self._recorder.tally = self._account.tally
        self._recorder.start()
        self._is_open = True

    def accounts(self) -> list[Account]:
        self.close()
        if self._loop is not None:
            steps = self._loop.steps
            self._account.batches = len(steps[Phase.WARMING]) + len(steps[Phase.AS_IT_IS]) + 1
        return [self._account]

    def close(self) -> None:
        if self._is_open:
            self.reads.close()
            self._recorder.stop()
            self._is_open = False


class _Replay(BaseException):
    pass


def _watch_fit(keras: Any, watch: Watch) -> Callable[[], None]:
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
        known.is_opaque, known.data = True, data
        if known.witness is None:
            known.witness = FitWitness(known.loop, data.boundaries)
        given.arguments["x"] = data.x
        # A list, because the script's CallbackList may use another thread, which cannot end the fit.
        callbacks = given.arguments.get("callbacks")
        own = getattr(callbacks, "callbacks", callbacks)
        own = [] if own is None else own if isinstance(own, (list, tuple)) else [own]
        given.arguments["callbacks"] = [*own, _steps(keras, known)]
        try:
            return fit(*given.args, **given.kwargs)
        except _Replay:
            if known.witness is not None:
                known.witness.close()
        gc.collect()  # free the iterators of the ended fit, which still prefetch batches
        # The script's other arguments (validation, epochs, callbacks) are for a fit that ends by itself.
        try:
            once = data.once()
        except Exception as error:  # the batch has a form that only Keras accepts
            _log.warning("steps with data ready: not measured: %s: %s", type(error).__name__, error)
            known.loop.finish()
            raise
        return fit(model, once, epochs=1, shuffle=False, verbose=0, callbacks=[_steps(keras, known)])

    return patched(keras.Model, fit=watched_fit)


def _steps(keras: Any, known: Watched) -> Any:
    loop = known.loop

    class Steps(keras.callbacks.Callback):  # type: ignore[misc]
        _is_last_epoch = False

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            loop.begin_epoch()
            self._is_last_epoch = epoch + 1 == self.params.get("epochs")

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            before = loop.phase
            if self._is_last_epoch and batch + 1 == self.params.get("steps"):
                loop.ends_soon()
            loop.next(lambda: None)  # Python does not see the batch
            if before is Phase.AS_IT_IS and loop.phase is Phase.SETTLING:
                raise _Replay

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            loop.end_epoch()

    return Steps()


def _watch_datasets(module: Any, watch: Watch) -> Callable[[], None]:
    kind = module.DatasetV2
    ways = {name: getattr(kind, name) for name in ("__iter__", "as_numpy_iterator")}

    def watched(begin: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
        def iterate(self: Any) -> Iterator[Any]:
            caller = str(sys._getframe(1).f_globals.get("__name__", ""))
            if caller.partition(".")[0] in _LIBRARIES or not module.context.executing_eagerly():
                return begin(self)
            return watch.iterate(self, begin, witness=FitWitness)

        return iterate

    return patched(kind, **{name: watched(begin) for name, begin in ways.items()})


# The argument ``also`` of ``Watch``: the watched parts of Keras and TensorFlow.
WATCHED = {"keras": _watch_fit, "tensorflow.python.data.ops.dataset_ops": _watch_datasets}
