"""Watch the loaders that a script iterates, by patching ``DataLoader``.  The script is not changed.

In this folder, only this module uses private parts of torch's ``DataLoader``.  ``_iterator`` holds the
persistent workers.  ``__dict__`` is changed directly, because ``DataLoader.__setattr__`` rejects another
dataset or number of workers.  ``_workers`` and ``_timeout`` of the loader's iterators are used.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import importlib.abc
import importlib.machinery
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from time import perf_counter_ns
from typing import Any

from fastpipe.errors import OptionError
from fastpipe.tools.folders import Scratch
from fastpipe.tools.loops import LateIterator, Loop, WatchedIterator
from fastpipe.tools.recorder import OUTSIDE, Recorder
from fastpipe.tools.stacks import Boundary, Line, Stacks, stack_of
from fastpipe.tools.witness import BOUNDARIES, Witness, timed_parts

Patch = Callable[[Any, "Watch"], Callable[[], None]]
_DATALOADER = "torch.utils.data.dataloader"


def check_no_path(loader: Any, function: str) -> None:
    """Raise an OptionError if a function gets a path, whose characters could be iterated, for a loader."""
    if isinstance(loader, (str, bytes, os.PathLike)):
        raise OptionError(
            f"{function} takes a loader, got the path {os.fsdecode(loader)!r}: for a folder of images, give "
            "FastLoader(FastImageFolder(path, transform), …)"
        )


def is_fast(loader: Any) -> bool:
    return type(loader).__module__.partition(".")[0] == "fastpipe"


def processes_of(loader: Any) -> int:
    return int(getattr(loader, "num_processes", getattr(loader, "num_workers", 0)) or 0)


def length_of(loader: Any) -> int | None:
    try:
        return len(loader)
    except Exception:  # the loader has no length, or a class of the script raises any error
        return None


def is_map_style(dataset: Any) -> bool:
    return not isinstance(dataset, sys.modules["torch.utils.data"].IterableDataset)


def view_of(loader: Any, **attributes: Any) -> Any:
    view = copy.copy(loader)
    view.__dict__.update(attributes, _iterator=None)
    view.worker_init_fn = _EndsAtOnce(view.worker_init_fn)
    return view


class _EndsAtOnce:
    """A ``worker_init_fn`` that makes workers skip finalization.  During it, 3 % of torch's workers abort."""

    def __init__(self, function: Callable[[int], object] | None) -> None:
        self._function = function

    def __call__(self, worker_id: int) -> None:
        atexit.register(os._exit, 0)
        if self._function is not None:
            self._function(worker_id)


def limit_waiting(iterator: Any, seconds: float) -> None:
    """Set a timeout for an iterator of torch.  A forked worker may inherit a held lock and never respond."""
    if getattr(iterator, "_workers", None) and vars(iterator).get("_timeout") == 0:
        iterator._timeout = seconds


class Watched:
    """A loader that a script has iterated.

    If the script creates the same loader repeatedly, ``loader`` is the latest of these objects.  ``view`` is
    a copy of ``loader``, and ``witness`` observes the dataset of this copy.  ``is_opaque`` is True if it is
    unknown which part of a step is the wait for its batch, as in ``keras.Model.fit``.
    """

    def __init__(self, loader: Any, made_at: Line | None, used_at: Line, loop: Loop) -> None:
        self.loader, self.made_at, self.used_at, self.loop = loader, made_at, used_at, loop
        self.first = loader
        # Persistent workers are not started again, so the first step of a later epoch is a normal step.
        loop.counts_starts = bool(processes_of(loader) and getattr(loader, "persistent_workers", False))
        self.witness: Any = None
        self.view: Any = None
        self.is_opaque = False
        self.data: Any = None
        workers, factor = getattr(loader, "num_workers", 0) or 0, getattr(loader, "prefetch_factor", 2) or 2
        loop.ahead = workers * factor or 2
        loop.is_serial = hasattr(loader, "num_workers") and not workers and not is_fast(loader)

    @property
    def place(self) -> str:
        line = self.made_at if self.made_at is not None and self.made_at.file else self.used_at
        return line.in_parentheses

    @property
    def batch_size(self) -> int | None:
        # Accelerate's loaders have a batch size only in their batch sampler.
        holders = (self.loader, getattr(self.loader, "batch_sampler", None))
        sizes = (getattr(one, "batch_size", None) for one in holders)
        return next((size for size in sizes if isinstance(size, int)), None)

    @property
    def is_shuffled(self) -> bool:
        sampler = getattr(self.loader.batch_sampler, "sampler", self.loader.sampler)
        return any(kind.__name__ == "RandomSampler" for kind in type(sampler).__mro__)

    @property
    def is_graph(self) -> bool:
        return hasattr(self.loader, "element_spec")

    def is_made_anew(self, loader: Any, made_at: Line | None, used_at: Line) -> bool:
        # Both lines must be equal, as one line may create, or iterate, several loaders.
        if self.used_at != used_at or _form_of(loader) != _form_of(self.loader):
            return False
        if self.is_graph:  # the line that created the loader is unknown
            return bool(loader.element_spec == self.loader.element_spec)
        return made_at is not None and bool(made_at.file) and made_at == self.made_at


def _form_of(loader: Any) -> tuple[Any, ...]:
    dataset: Any = getattr(loader, "dataset", None)
    try:
        count = len(dataset)
    except Exception:  # the dataset has no length, or is any object
        count = None
    settings = (getattr(loader, name, None) for name in ("batch_size", "num_workers", "drop_last"))
    return type(loader), type(dataset), count, type(getattr(loader, "sampler", None)), *settings


class Watch:
    """A context in which torch's loaders are watched.

    ``also`` maps the names of other modules to functions that patch these modules.
    """

    def __init__(self, make_loop: Callable[[Any], Loop], also: Mapping[str, Patch] | None = None) -> None:
        self._make_loop, self._also = make_loop, also or {}
        self.found: list[Watched] = []  # in the order of their first iteration
        self._loops: list[Loop] = []  # the loop of each of ``found``
        self._made_at: weakref.WeakKeyDictionary[Any, Line] = weakref.WeakKeyDictionary()
        self._stacks = Stacks({})
        self._closers: list[Callable[[], object]] = []
        self.recorder: Recorder | None = None
        self.is_paused = False  # True while watching is suspended
        self._pid = os.getpid()
        self._wrapped: set[int] = set()  # loaders whose iterators are wrapped by the caller

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
                if name in sys.modules:
                    self._patch(patch, sys.modules[name])
                else:
                    hook = _WhenImported(name, functools.partial(self._patch, patch))
                    self._closers.append(functools.partial(_remove, sys.meta_path, hook))
                    sys.meta_path.insert(0, hook)
            self._closers.append(self._close_found)
        except BaseException:
            self.close()
            raise
        return self

    def _patch(self, patch: Patch, module: Any) -> None:
        self._closers.append(patch(module, self))

    def __exit__(self, *_: object) -> None:
        # A signal handler may raise in the first call: torch raises an error for a killed worker.
        try:
            self.close()
        finally:
            self.close()

    def close(self) -> None:
        while self._closers:
            self._closers[-1]()
            self._closers.pop()

    def _close_found(self) -> None:
        self._make_loop = _no_loop  # the function refers to this object
        for one in self.found:
            # Workers end now, because torch cannot stop them during garbage collection.
            one.view = one.data = None
            one.loop.close()
            if one.witness is not None:
                one.witness.close()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def _kind(self) -> str:
        if self.is_paused:
            return "measuring"  # this work is not part of the script
        return "step" if any(one.loop.is_in_step for one in self.found) else OUTSIDE

    def of(self, loader: Any) -> Watched | None:
        return next((one for one in self.found if loader is one.loader or loader is one.first), None)

    @staticmethod
    def sees(loader: Any) -> bool:
        kind = getattr(sys.modules.get(_DATALOADER), "DataLoader", None)
        return kind is not None and isinstance(loader, kind) and type(loader).__iter__ is kind.__iter__

    def iterate(
        self, loader: Iterable[Any], begin: Callable[[Any], Iterator[Any]] = iter,
        witness: Callable[[Loop], Any] | None = None,
    ) -> Iterator[Any]:  # fmt: skip
        if begin is iter:
            self._wrapped.add(id(loader))  # this includes subclasses of DataLoader with an own __iter__
        elif id(loader) in self._wrapped or any(one.view is loader for one in self.found):
            return begin(loader)
        if self.is_paused or os.getpid() != self._pid:  # a forked child is not watched
            return begin(loader)
        known = self.known(loader)
        if known.view is None and hasattr(loader, "collate_fn") and not is_fast(loader):
            self._instrument(known)
        known.loop.end_again()
        if witness is not None and known.witness is None and not known.loop.is_over:
            known.witness = witness(known.loop)
        started = functools.partial(begin, loader if known.view is None else known.view)
        began = perf_counter_ns()
        # While the loop gets other batches, a loader without persistent workers makes none.
        is_late = known.loop.is_replaying and not known.loop.counts_starts
        inner = LateIterator(started) if is_late else started()
        took = perf_counter_ns() - began
        if known.loop.is_over:
            return inner
        return WatchedIterator(inner, known.loop, took, functools.partial(length_of, loader))

    def known(self, loader: Any) -> Watched:
        known = self.of(loader)
        if known is not None:
            return known
        used_at = self._line()
        try:
            made_at = self._made_at.get(loader)
        except TypeError:  # the loader does not support weak references
            made_at = None
        for one in self.found:
            if one.is_made_anew(loader, made_at, used_at):
                one.loader, one.view = loader, None
                return one
        known = Watched(loader, made_at, used_at, self._make_loop(loader))
        known.loop.place = str(used_at) if used_at.file else ""
        self.found.append(known)
        self._loops.append(known.loop)
        known.loop.others = self._loops
        return known

    def made(self, loader: Any) -> None:
        if not self.is_paused:
            with contextlib.suppress(TypeError):  # the loader does not support weak references
                self._made_at[loader] = self._line()

    def _line(self) -> Line:
        return self._stacks.look(stack_of(sys._getframe(1)))[2]

    def _instrument(self, known: Watched) -> None:
        loader = known.loader
        if getattr(loader, "_iterator", None) is not None:  # persistent workers run already
            return
        witness = known.witness
        if not isinstance(witness, Witness):
            folder = os.path.join(self._folder, str(len(self.found)))
            os.mkdir(folder, 0o700)
            witness = known.witness = Witness(folder)
        known.view = view_of(loader, **timed_parts(loader, witness, is_map_style(loader.dataset)))


def _no_loop(loader: Any) -> Loop:
    raise RuntimeError("no loader is watched any more")


def patched(owner: Any, **functions: Any) -> Callable[[], None]:
    before = {name: vars(owner).get(name) for name in functions}
    for name, function in functions.items():
        setattr(owner, name, function)

    def undo() -> None:
        for name, own in before.items():
            if own is not None:
                setattr(owner, name, own)
            elif name in vars(owner):
                delattr(owner, name)

    return undo


def _watch_loaders(module: Any, watch: Watch) -> Callable[[], None]:
    kind = module.DataLoader
    begin, init = kind.__iter__, kind.__init__

    def watched_iter(self: Any) -> Any:
        return watch.iterate(self, begin)

    def watched_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        watch.made(self)

    return patched(kind, __iter__=watched_iter, __init__=watched_init)


class _WhenImported(importlib.abc.MetaPathFinder):
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
