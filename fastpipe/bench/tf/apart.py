"""Datasets without fastpipe, in a process of their own.

The first dataset of a Python generator in a process, as fastpipe's are, lets TensorFlow fix malloc's limit
above which memory is mapped anew each time: scripts without one, which allocate for each image, would be
slower beside it than they are.
"""

from __future__ import annotations

import gc
import multiprocessing
from typing import Any

from fastpipe.bench.runner import ContenderError
from fastpipe.bench.stall import Timeline
from fastpipe.bench.tf.data import Setting
from fastpipe.bench.tf.rows import EpochRow, Spec, specs

__all__ = ["Apart", "ApartRow"]

_PATIENCE_S = 10.0


class Apart:
    """A process that goes through epochs of datasets when it is told to, and rests otherwise.

    Args:
        setting: what the datasets are made of.
    """

    def __init__(self, setting: Setting) -> None:
        # Not forked: TensorFlow, whose threads a fork does not have, is used here already.
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, setting), daemon=True)
        self._process.start()
        other.close()

    def measure(self, key: str, count: int) -> float:
        """Consume so many samples of a row; return the seconds it took.

        Raises:
            ContenderError: it cannot go on.
        """
        return float(self._asked(key, count, None))

    def timeline(self, key: str, steps: int, busy_s: float) -> Timeline:
        """Steps that take so long each, with a row's batches.

        Raises:
            ContenderError: it cannot go on.
        """
        found: Timeline = self._asked(key, steps, busy_s)
        return found

    def _asked(self, *question: Any) -> Any:
        try:
            self._connection.send(question)
            answer = self._connection.recv()
        except (EOFError, OSError):
            raise ContenderError("its process ended") from None
        if isinstance(answer, str):
            raise ContenderError(answer)
        return answer

    def close(self) -> None:
        """End the process.  May be called twice."""
        self._connection.close()
        self._process.join(_PATIENCE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class ApartRow:
    """A `Contender` that goes through whole epochs of a dataset in another process.

    Args:
        spec: which dataset.
        setting: what it is made of.
        apart: the process.
    """

    workers = 0

    def __init__(self, spec: Spec, setting: Setting, apart: Apart) -> None:
        self.key, self.chunk = spec.key, spec.samples(setting.lengths, setting.batch_size)
        self._apart = apart

    def measure(self, count: int) -> float:
        """Consume so many samples; return the seconds it took."""
        return self._apart.measure(self.key, count)

    def timeline(self, steps: int, busy_s: float) -> Timeline:
        """Steps that take so long each."""
        return self._apart.timeline(self.key, steps, busy_s)

    def close(self) -> None:
        """Nothing: the process is that of all rows."""


def _serve(connection: Any, setting: Setting) -> None:
    """Answer until the other end is closed."""
    by_key, rows = {spec.key: spec for spec in specs()}, dict[str, EpochRow]()
    try:
        while True:
            key, count, busy_s = connection.recv()
            try:
                if key not in rows:
                    rows[key] = EpochRow(by_key[key], setting)
                    gc.collect()
                    gc.freeze()  # as where the other rows are
                row = rows[key]
                connection.send(row.measure(count) if busy_s is None else row.timeline(count, busy_s))
            except ContenderError as error:
                connection.send(str(error))
    except (EOFError, KeyboardInterrupt):  # Ctrl-C comes here too
        return
