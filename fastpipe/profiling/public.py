"""``profile``: where the time of a training's steps goes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, overload

from fastpipe.errors import OptionError
from fastpipe.profiling.diagnosis import Diagnosis
from fastpipe.profiling.epochs import WatchedLoader
from fastpipe.profiling.loops import Enough, Loop
from fastpipe.profiling.report import Report
from fastpipe.profiling.tf_loops import WATCHED
from fastpipe.profiling.watching import Watch

__all__ = ["Profiling", "profile"]


class Profiling:
    """Watches the loaders that are iterated while it is open; it changes nothing of what they give.

    Attributes:
        report: of the loader that took most of the time; while it is open, of what was seen so far.

    >>> import fastpipe
    >>> from torch.utils.data import DataLoader
    >>> with fastpipe.profile() as profiling:
    ...     for batch in DataLoader(range(64), batch_size=4):
    ...         _ = batch.float().sum()
    >>> profiling.report.steps > 8
    True
    """

    def __init__(self) -> None:
        self._watch = Watch(lambda _: Loop(float("inf"), is_replayed=False), also=WATCHED)
        self._report: Report | None = None

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Profiling watches the loaders of this process, and cannot be copied: copy its report"
        )

    def watch(self, loader: Iterable[Any]) -> Iterable[Any]:
        """A loader that is none of torch's: iterate what this returns in its place."""
        return _Iterable(self._watch, loader)

    @property
    def report(self) -> Report:
        """What was found."""
        return self._report if self._report is not None else _report_of(self._watch)

    def __enter__(self) -> Profiling:
        self._watch.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._report = _report_of(self._watch)
        finally:
            self._watch.__exit__()


@overload
def profile(*, seconds: float = ..., try_advice: bool = ...) -> Profiling: ...
@overload
def profile(
    loader: Iterable[Any], step: Callable[[Any], object] | None = ..., *, seconds: float = ...,
    try_advice: bool = ...,
) -> Report: ...  # fmt: skip
def profile(
    loader: Iterable[Any] | None = None,
    step: Callable[[Any], object] | None = None,
    *,
    seconds: float = 6.0,
    try_advice: bool = False,
) -> Report | Profiling:
    """Find out whether training waits for data, for what, and what would help.

    With a loader it is iterated here, and ``step`` is called with each batch: as it is, then with one batch
    again and again, which shows how long a step takes that has its data at once.  After that the loader is
    measured alone, and so is what might take its place.  What ``step`` trains is not worth keeping.

    Without one, a ``with`` block in which the script's own loops run: what they get is left as it is, and so
    only what can be seen from beside it is told.

    Args:
        loader: any iterable of batches that can be iterated again: a ``DataLoader``, a ``FastLoader``, a
            ``tf.data.Dataset``, a list.  What happens in torch's is looked at, also in its workers.
        step: trains on a batch.  None for nothing: then the loader alone is looked at.
        seconds: that the loop is measured as it is; the other measurements take about as long together.
        try_advice: whether the best advice is tried: ``step`` gets batches of the loader that it names.

    Returns:
        With a loader a :class:`Report`; ``print`` it.  Without one a :class:`Profiling`, which has it as
        ``report``.

    Raises:
        OptionError: the loader has no batch, or an option cannot work.

    >>> import fastpipe
    >>> from torch.utils.data import DataLoader
    >>> report = fastpipe.profile(DataLoader(range(64), batch_size=4), lambda batch: None, seconds=0.05)
    >>> report.loader.kind
    'DataLoader over range'
    """
    if not seconds > 0:
        raise OptionError(f"seconds must be above 0, got {seconds!r}")
    if loader is None:
        if step is not None:
            raise OptionError("profile(step=…) needs a loader; or have your own loop in `with profile():`")
        return Profiling()
    if isinstance(loader, WatchedLoader):
        loader = loader.loader
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise OptionError(f"profile needs something that has batches, such as a DataLoader, got {loader!r}")
    if hasattr(loader, "__next__"):
        raise OptionError(
            f"a {type(loader).__name__} can be iterated once only: give what it was made from, such as a "
            "DataLoader"
        )
    diagnosis = Diagnosis(seconds / 4, try_advice)

    def make_loop(one: Any) -> Loop:
        if one is not loader:
            return Loop(float("inf"), is_replayed=False)
        return Loop(seconds, step is not None, next_phase=lambda: diagnosis.next_phase(watch, one))

    # Closed by both: what a signal's handler raises may end the inner one before it has begun.
    with contextlib.closing(diagnosis), contextlib.closing(Watch(make_loop, also=WATCHED)) as watch, watch:
        try:
            _run(watch, loader, step)
        except Exception as error:
            if not diagnosis.excuses(error):
                raise
        return diagnosis.report()


def _run(watch: Watch, loader: Iterable[Any], step: Callable[[Any], object] | None) -> None:
    """Iterate until enough is known."""
    iterable: Iterable[Any] = loader if watch.sees(loader) else _Iterable(watch, loader)
    try:
        while True:
            is_empty = True
            for batch in iterable:
                is_empty = False
                if step is not None:
                    step(batch)
                del batch
            if is_empty:
                raise OptionError(f"the {type(loader).__name__} has no batch")
    except Enough:
        pass


def _report_of(watch: Watch) -> Report:
    """Of the loader whose loop took most of the time."""
    found = [one for one in watch.found if one.loop.total_s]
    if not found:
        return Report(None)
    diagnosis = Diagnosis(0.0, False)
    diagnosis.see(max(found, key=lambda one: one.loop.total_s))
    return diagnosis.report()


class _Iterable:
    """A loader that is none of torch's, watched."""

    def __init__(self, watch: Watch, loader: Iterable[Any]) -> None:
        self._watch, self._loader = watch, loader

    def __iter__(self) -> Any:
        return self._watch.iterate(self._loader)
