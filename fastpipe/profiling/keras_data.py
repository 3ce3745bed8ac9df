"""What ``keras.Model.fit`` can train on that makes its batches in Python, or in graphs of TensorFlow's."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import CodeType, GeneratorType
from typing import Any

from fastpipe.profiling.stacks import Boundary

__all__ = ["FitData", "batches_by_threads", "data_of", "is_parallel"]

_PATIENCE_S = 5.0


class FitData(ABC):
    """What a script gives as ``x``.

    Attributes:
        x: what ``fit`` is to get in its place, which is the same to it.
        begin: makes an iterator over its batches, as they are made for ``fit``; None where others make them,
            or it can be iterated itself.
        boundaries: of the code that makes its batches, besides what TensorFlow calls.
    """

    def __init__(
        self,
        x: Any,
        begin: Callable[[], Iterator[Any]] | None = None,
        boundaries: Mapping[CodeType, Boundary] | None = None,
    ) -> None:
        self.x, self.begin, self.boundaries = x, begin, boundaries or {}

    @abstractmethod
    def once(self) -> Any:
        """A ``tf.data.Dataset`` of one of its batches, again and again."""


def data_of(x: Any, keras: Any) -> FitData | None:
    """What is known of ``x``; None of what is in memory, or comes by other ways."""
    if hasattr(x, "element_spec") and hasattr(x, "take"):
        return _Graph(x)
    if keras.backend.backend() != "tensorflow":  # whose threads take the batches of what follows
        return None
    if isinstance(x, GeneratorType):
        return _Generated(x)
    return _Indexed(x) if isinstance(x, keras.utils.PyDataset) else None


class _Graph(FitData):
    """A ``tf.data.Dataset``."""

    def __init__(self, x: Any) -> None:
        super().__init__(x)

    def once(self) -> Any:
        return self.x.take(1).cache().repeat()


class _Generated(FitData):
    """A generator of batches, of which ``fit`` gets another one that keeps the last."""

    def __init__(self, generator: GeneratorType[Any, Any, Any]) -> None:
        self._generator, self._last = generator, None
        super().__init__(self._keeping(), self._rest, {generator.gi_code: Boundary("dataset")})

    def once(self) -> Any:
        return _repeated(self._last)

    def _keeping(self) -> Iterator[Any]:
        for batch in self._generator:
            self._last = batch
            yield batch

    def _rest(self) -> Iterator[Any]:
        """What is left of it, as soon as the thread of a ``fit`` that has ended lets go of it."""
        deadline = time.monotonic() + _PATIENCE_S
        while self._generator.gi_running and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        return self._generator


class _Indexed(FitData):
    """A ``keras.utils.PyDataset``."""

    def __init__(self, x: Any) -> None:
        code = getattr(type(x).__getitem__, "__code__", None)
        boundaries = {} if code is None else {code: Boundary("dataset")}
        super().__init__(x, None if is_parallel(x) else self._in_turn, boundaries)

    def once(self) -> Any:
        return _repeated(self.x[0])

    def _in_turn(self) -> Iterator[Any]:
        return (self.x[at] for at in _places(self.x))


def is_parallel(x: Any) -> bool:
    """Whether threads or processes of Keras's make the batches of a ``PyDataset``."""
    return bool(x.workers > 1 or (x.workers and x.use_multiprocessing))


def batches_by_threads(x: Any, threads: int) -> Iterator[Any]:
    """Batches of a ``PyDataset`` as Keras makes them with so many workers, in order."""
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


def _places(x: Any) -> Iterator[int]:
    count = x.num_batches
    return iter(itertools.count() if count is None else itertools.cycle(range(count)))


def _repeated(batch: Any) -> Any:
    """A batch in the forms that Keras takes, as a dataset of TensorFlow's."""
    if isinstance(batch, list):
        batch = tuple(batch)
    elif not isinstance(batch, (tuple, dict)):
        batch = (batch,)
    return sys.modules["tensorflow"].data.Dataset.from_tensors(batch).repeat()
