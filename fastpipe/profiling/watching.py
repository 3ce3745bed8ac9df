"""Sees the loaders that a script iterates, by what ``iter(loader)`` returns; the script is not changed."""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from time import perf_counter_ns
from types import CodeType
from typing import Any, Protocol

from fastpipe.profiling._torch_view import has_workers, view_of
from fastpipe.profiling.frames import stack_of
from fastpipe.profiling.loops import Loop, WatchedIterator
from fastpipe.profiling.recorder import OUTSIDE, Recorder
from fastpipe.profiling.scratch import Scratch
from fastpipe.profiling.stacks import Boundary, Line, Stacks
from fastpipe.profiling.timed import (
    BOUNDARIES,
    Account,
    TimedBatches,
    TimedCollate,
    TimedDataset,
    TimedInit,
    TimedIterable,
    Witness,
)

__all__ = ["Watch", "Watched", "is_fast", "is_map_style", "processes_of"]

Patch = Callable[[Any, "Watch"], Callable[[], None]]
_DATALOADER = "torch.utils.data.dataloader"


class Seer(Protocol):
    """Sees what a loader does."""

    def accounts(self) -> list[Account]:
        """What was seen, of each process."""

    def close(self) -> None:
        """End looking, in this process."""


class Watched:
    """A loader that was iterated.

    Attributes:
        loader: itself; of those that a script makes anew, the last one.
        first: of these, the first one.
        made_at, used_at: lines of the script in which it was made and is iterated.
        loop: its steps.
        witness: what its dataset did; None where that is not looked at.
        view: the loader with a dataset that is witnessed, while it is watched.
        is_opaque: whether its batches are taken where a step's waiting cannot be told from its work.
        begin: of what batches Keras takes in its own way, makes an iterator over them; None where that
            cannot be done.
        boundaries: of the code that makes those.
    """

    def __init__(self, loader: Any, made_at: Line | None, used_at: Line, loop: Loop) -> None:
        self.loader, self.made_at, self.used_at, self.loop = loader, made_at, used_at, loop
        self.first = loader
        # Of workers that stay an epoch's first batch is waited for as long as they take to make it.
        loop.counts_starts = bool(processes_of(loader) and getattr(loader, "persistent_workers", False))
        self.witness: Seer | None = None
        self.view: Any = None
        self.is_opaque = False
        self.begin: Callable[[], Iterator[Any]] | None = None
        self.boundaries: Mapping[CodeType, Boundary] = {}
        loop.ahead = (getattr(loader, "num_workers", 0) or 0) * (
            getattr(loader, "prefetch_factor", 2) or 2
        ) or 2

    @property
    def batch_size(self) -> int | None:
        """Samples of a batch; None if neither the loader nor its batch sampler says."""
        # Accelerate's loaders have the second only.
        for one in (self.loader, getattr(self.loader, "batch_sampler", None)):
            size = getattr(one, "batch_size", None)
            if isinstance(size, int):
                return size
        return None

    @property
    def is_shuffled(self) -> bool:
        """Whether torch draws the order of samples anew for each epoch."""
        sampler = getattr(self.loader.batch_sampler, "sampler", self.loader.sampler)
        return any(kind.__name__ == "RandomSampler" for kind in type(sampler).__mro__)

    @property
    def is_graph(self) -> bool:
        """Whether it is a ``tf.data.Dataset``, of which Python sees only what is done in Python."""
        return hasattr(self.loader, "element_spec")

    def is_made_anew(self, loader: Any, made_at: Line | None, used_at: Line) -> bool:
        """Whether a loader is this one's next: some scripts make one for each epoch, in the same lines."""
        if type(loader) is not type(self.loader) or self.used_at != used_at:
            return False
        if _form_of(loader) != _form_of(self.loader):  # one function may make, and another use, several
            return False
        form = getattr(loader, "element_spec", None)  # of TensorFlow's, whose line nobody notes
        if form is not None:
            return bool(form == self.loader.element_spec)
        return made_at is not None and bool(made_at.file) and made_at == self.made_at


class Watch:
    """While it is open, each loader of torch's that is iterated is watched.

    Args:
        make_loop: of a loader that is seen for the first time.
        also: by names of modules, what has other things watched when these are imported, and returns what
            undoes it.
    """

    def __init__(self, make_loop: Callable[[Any], Loop], also: Mapping[str, Patch] | None = None) -> None:
        self._make_loop, self._also = make_loop, also or {}
        self._found: list[Watched] = []
        self._loops: list[Loop] = []  # theirs
        self._made_at: weakref.WeakKeyDictionary[Any, Line] = weakref.WeakKeyDictionary()
        self._stacks = Stacks({})
        self._closers: list[Callable[[], object]] = []
        self.recorder: Recorder | None = None
        self._is_paused = False
        self._pid = os.getpid()
        self._wrapped: set[int] = set()  # loaders whose iterators are watched from outside

    @property
    def is_paused(self) -> bool:
        """Whether nothing is watched for a while."""
        return self._is_paused

    @property
    def found(self) -> list[Watched]:
        """The loaders that were iterated, in the order in which they first were."""
        return self._found

    def __enter__(self) -> Watch:
        try:
            scratch = Scratch()
            self._folder = scratch.path
            self._closers.append(scratch.close)
            boundaries = {**BOUNDARIES, WatchedIterator.__next__.__code__: Boundary("waiting")}
            self.recorder = Recorder(boundaries, [threading.get_ident()], kind=self._kind)
            self._closers.append(self.recorder.stop)
            self.recorder.start()
            for name, patch in ((_DATALOADER, _watch_loaders), *self._also.items()):
                module = sys.modules.get(name)
                if module is not None:
                    self._closers.append(patch(module, self))
                else:
                    hook = _WhenImported(name, functools.partial(self._patch_later, patch))
                    self._closers.append(functools.partial(_remove, sys.meta_path, hook))
                    sys.meta_path.insert(0, hook)
            self._closers.append(self._close_found)
        except BaseException:
            self.close()
            raise
        return self

    def _patch_later(self, patch: Patch, module: Any) -> None:
        self._closers.append(patch(module, self))

    def __exit__(self, *_: object) -> None:
        # Twice, as what a signal's handler raises ends the first: torch's does, for a worker that was killed.
        try:
            self.close()
        finally:
            self.close()

    def close(self) -> None:
        """End watching, or the rest of it where an earlier call was ended by an exception."""
        while self._closers:
            self._closers[-1]()
            self._closers.pop()

    def _close_found(self) -> None:
        self._make_loop = _no_loop  # what it refers to refers to this
        for one in self._found:
            # Now: when garbage is collected torch cannot tell workers any more that they are to end.
            one.view = one.begin = None
            one.loop.close()
            if one.witness is not None:
                one.witness.close()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Loaders that are iterated meanwhile are not watched."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _kind(self) -> str:
        """What the script is at, where it does not wait for a batch."""
        if self._is_paused:
            return "measuring"  # is nothing of the script's
        return "step" if any(one.loop.is_in_step for one in self._found) else OUTSIDE

    def of(self, loader: Any) -> Watched | None:
        """What is known of a loader; None before it was iterated."""
        return next((one for one in self._found if loader is one.loader or loader is one.first), None)

    @staticmethod
    def sees(loader: Any) -> bool:
        """Whether a loader is watched when it is iterated: one of torch's, that iterates as torch's do."""
        module = sys.modules.get(_DATALOADER)
        if module is None or not isinstance(loader, module.DataLoader):
            return False
        return type(loader).__iter__ is module.DataLoader.__iter__

    def iterate(
        self,
        loader: Iterable[Any],
        begin: Callable[[Any], Iterator[Any]] = iter,
        witness: Callable[[Loop], Seer] | None = None,
    ) -> Iterator[Any]:
        """A watched iterator of a loader.

        Args:
            loader: the script's.
            begin: makes an iterator of it, or of a view of it.
            witness: of what it does; None for what is seen of torch's, and nothing of others.
        """
        if begin is iter:
            self._wrapped.add(id(loader))  # of torch's it may be one whose class iterates in its own way
        elif id(loader) in self._wrapped or any(one.view is loader for one in self._found):
            return begin(loader)
        if self._is_paused or os.getpid() != self._pid:  # a forked child's own training goes on
            return begin(loader)
        known = self.known(loader)
        if known.view is None and hasattr(loader, "collate_fn") and not is_fast(loader):
            self._instrument(known)
        known.loop.end_again()
        if witness is not None and known.witness is None and not known.loop.is_over:
            known.witness = witness(known.loop)
        began = perf_counter_ns()
        inner = begin(loader if known.view is None else known.view)
        took = perf_counter_ns() - began
        return inner if known.loop.is_over else WatchedIterator(inner, known.loop, took)

    def known(self, loader: Any) -> Watched:
        """What is known of a loader, which is iterated from now on if it was not yet."""
        known = self.of(loader)
        if known is None:
            made_at, used_at = self._made_at_of(loader), self._line()
            known = next((one for one in self._found if one.is_made_anew(loader, made_at, used_at)), None)
            if known is None:
                known = Watched(loader, made_at, used_at, self._make_loop(loader))
                self._found.append(known)
                self._loops.append(known.loop)
                known.loop.others = self._loops
            else:
                known.loader, known.view = loader, None
        return known

    def made(self, loader: Any) -> None:
        """A loader was made; the line that did it is on the stack."""
        if not self._is_paused:
            with contextlib.suppress(TypeError):  # one that cannot be referred to weakly
                self._made_at[loader] = self._line()

    def _made_at_of(self, loader: Any) -> Line | None:
        try:
            return self._made_at.get(loader)
        except TypeError:
            return None

    def _line(self) -> Line:
        """The script's innermost line."""
        return self._stacks.look(stack_of(sys._getframe(1)))[2]

    def _instrument(self, known: Watched) -> None:
        """Have the loader's dataset witnessed, in a view of the loader."""
        loader = known.loader
        if has_workers(loader):  # which see nothing of this
            return
        witness = known.witness
        if not isinstance(witness, Witness):
            folder = os.path.join(self._folder, str(len(self._found)))
            os.mkdir(folder, 0o700)
            witness = known.witness = Witness(folder)
        kind: Any = TimedBatches if getattr(loader.dataset, "__getitems__", None) else TimedDataset
        if not is_map_style(loader.dataset):
            kind = TimedIterable
        known.view = view_of(
            loader,
            dataset=kind(loader.dataset, witness),
            collate_fn=TimedCollate(loader.collate_fn, witness),
            worker_init_fn=TimedInit(loader.worker_init_fn, witness) if loader.num_workers else None,
        )


def _form_of(loader: Any) -> tuple[Any, ...]:
    """In what loaders of one script differ, by which it trains and by which it judges."""
    dataset: Any = getattr(loader, "dataset", None)
    try:
        count = len(dataset)
    except Exception:  # of a stream, or of whatever the script has made
        count = None
    names = ("batch_size", "num_workers", "drop_last")
    return (
        type(dataset), count, type(getattr(loader, "sampler", None)),
        *(getattr(loader, name, None) for name in names),
    )  # fmt: skip


def _no_loop(loader: Any) -> Loop:
    raise RuntimeError("nothing is watched any more")


def is_fast(loader: Any) -> bool:
    """Whether a loader is one of fastpipe's own."""
    return type(loader).__module__.partition(".")[0] == "fastpipe"


def processes_of(loader: Any) -> int:
    """Return how many worker processes make a loader's batches: in fastpipe's loaders threads may."""
    return int(getattr(loader, "num_processes", getattr(loader, "num_workers", 0)) or 0)


def is_map_style(dataset: Any) -> bool:
    """Whether a dataset gives samples by index, so that any number of workers makes the same, as torch's
    documents call it."""
    return not isinstance(dataset, sys.modules["torch.utils.data"].IterableDataset)


def _watch_loaders(module: Any, watch: Watch) -> Callable[[], None]:
    """Have torch's loaders watched; returns what undoes it."""
    kind = module.DataLoader
    begin, init = kind.__iter__, kind.__init__

    def watched_iter(self: Any) -> Any:
        return watch.iterate(self, begin)

    def watched_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        watch.made(self)

    kind.__iter__, kind.__init__ = watched_iter, watched_init

    def undo() -> None:
        kind.__iter__, kind.__init__ = begin, init

    return undo


class _WhenImported(importlib.abc.MetaPathFinder):
    """Calls a function with a module when it has been imported."""

    def __init__(self, name: str, then: Callable[[Any], object]) -> None:
        self._name, self._then, self._is_busy = name, then, False

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._name or self._is_busy:
            return None
        self._is_busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_busy = False
        if spec is not None and spec.loader is not None:
            run, then = spec.loader.exec_module, self._then

            def exec_module(module: Any) -> None:
                run(module)
                then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _remove(finders: list[Any], finder: Any) -> None:
    with contextlib.suppress(ValueError):
        finders.remove(finder)
