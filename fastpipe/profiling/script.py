"""A script of somebody's, run as it is until enough is known of its training loop."""

from __future__ import annotations

import builtins
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter, process_time_ns
from types import CodeType, FrameType, ModuleType
from typing import NoReturn

from fastpipe.errors import OptionError
from fastpipe.profiling.diagnosis import Diagnosis
from fastpipe.profiling.findings import Advice
from fastpipe.profiling.loops import Enough, Loop
from fastpipe.profiling.report import Report
from fastpipe.profiling.tf_loops import WATCHED
from fastpipe.profiling.times import processes_cpu_ns
from fastpipe.profiling.watching import Watch, Watched

__all__ = ["profile_script"]

_LEAST_OUTSIDE_S = 0.5
_GRACE_S = 8.0
_AGAIN_S, _MOST_ENDS = 4.0, 3  # a script that goes on after its end is ended again
_END_S = 5.0  # for a process to end that was told to
_CALLS = 0.9  # of a function's time, in one that it calls


def profile_script(
    path: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    seconds: float = 6.0,
    limit_s: float = 50.0,
    try_advice: bool = False,
    is_module: bool = False,
    leave: Callable[[Report], NoReturn] | None = None,
) -> Report:
    """Run a script and find out whether it waits for data, for what, and what would help.

    It runs as ``python PATH ARGUMENTS`` would, until enough is known of the first loop over a loader that
    lasts long enough; that ends it.  What it trains is not worth keeping: the loop gets one batch again and
    again for a while.

    Args:
        path: of the script.
        arguments: its own.
        seconds: that the loop is measured as it is.
        limit_s: seconds after which the script is ended in any case; what is measured beside it just then
            may take eight more.
        try_advice: whether the best advice is tried in the script's loop.
        is_module: whether ``path`` is the name of a module, which runs as ``python -m NAME`` would.
        leave: called with the report, and has to end the process, where the script does not let itself be
            ended, as it goes on after whatever is raised; None to let it go on.

    Raises:
        OptionError: there is no such script or module; or it is one of several processes that train together.
        Exception: whatever the script raises.
    """
    if not is_module and not os.path.isfile(path):
        raise OptionError(f"there is no script {os.fspath(path)!r}")
    if os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1"):
        raise OptionError(
            f"this is one of {os.environ['WORLD_SIZE']} processes that train together, as WORLD_SIZE says, "
            "and the first to end would leave the others waiting: profile one alone, as by torchrun "
            "--nproc_per_node 1 --no-python fastpipe profile SCRIPT; or have `with fastpipe.profile():` "
            "around the loop"
        )
    diagnosis = Diagnosis(seconds / 4, try_advice)
    watch = Watch(
        lambda one: Loop(seconds, True, lambda: diagnosis.next_phase(watch, one), may_judge=True),
        also=WATCHED,
    )
    run = _Run(diagnosis, watch, leave)
    with (
        closing(diagnosis),
        closing(watch),
        watch,
        _as_main(os.fspath(path), arguments, is_module) as module,
    ):
        run.execute(module, limit_s)
        report = run.report()
        run.end_processes()
        return report


class _Run:
    """A script that runs, and what is known of it.

    Attributes:
        is_cut_short: whether it was ended by the limit.
    """

    def __init__(
        self, diagnosis: Diagnosis, watch: Watch, leave: Callable[[Report], NoReturn] | None
    ) -> None:
        self._diagnosis, self._watch, self._leave = diagnosis, watch, leave
        self._began, self._elsewhere_ns = perf_counter(), _elsewhere_ns()
        self._took: float | None = None  # until its own end
        self._children = set(multiprocessing.active_children())
        self.is_cut_short = False

    @property
    def was_ended(self) -> bool:
        """Whether one of its loops has ended it."""
        return any(one.loop.has_ended for one in self._watch.found)

    @property
    def is_ending(self) -> bool:
        """Whether a loop has been measured, which is worth a few seconds more, or is being left."""
        return self._diagnosis.is_looking or self.was_ended

    def execute(self, module: ModuleType, limit_s: float) -> None:
        """Run it until it is over, or enough is known of it, or so many seconds are over.

        Args:
            module: as which it runs; its file is the script.
            limit_s: as of `profile_script`.

        Raises:
            OptionError: it has ended with an exit code before it iterated a loader.
            Exception: whatever the script raises.
        """
        path = str(module.__file__)
        code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
        try:
            with _limited(limit_s, self):
                _until_its_end(code, module)
                self._took = perf_counter() - self._began
                self._look_at_the_end()
        except Enough:
            self.is_cut_short = True
        except Exception as error:
            # Whoever asked for the batch may make an error of its own of the end, as TensorFlow does.
            if not (self._diagnosis.excuses(error) or self.was_ended):
                raise
            self.is_cut_short = True
        except SystemExit as error:
            if not self._watch.found:
                raise OptionError(
                    f"{os.path.basename(path)} ended before it iterated a loader: {error.code}"
                ) from error

    def _look_at_the_end(self) -> None:
        """Look beside a loop that was over before enough was known of it, as far as can still be done."""
        if self._diagnosis.is_known:
            return
        longest = _longest(self._watch)
        if longest is not None and longest.loop.total_s and not longest.is_opaque:
            with self._watch.paused(), contextlib.suppress(Enough):  # which the limit raises, not the script
                self._diagnosis.look(longest)

    def report(self) -> Report:
        """What was found."""
        diagnosis, watch = self._diagnosis, self._watch
        longest = _longest(watch)
        if not diagnosis.is_known and longest is not None:  # over before enough was known of it
            diagnosis.see(longest)
        found = replace(
            diagnosis.report() if diagnosis.is_known else Report(None),
            seconds=perf_counter() - self._began if self._took is None else self._took,
            is_cut_short=self.is_cut_short or self.was_ended,
            outside=_outside(watch),
            elsewhere_s=(_elsewhere_ns() - self._elsewhere_ns) / 1e9,
        )
        return replace(found, advice=(*_script_advice(found), *found.advice))

    def end_processes(self) -> None:
        """End the processes of a script that was ended, for which the interpreter would wait at its end."""
        if not (self.is_cut_short or self.was_ended):
            return
        left = [
            one for one in multiprocessing.active_children() if one not in self._children and not one.daemon
        ]
        for one in left:
            one.terminate()
        for one in left:
            one.join(_END_S)
            if one.is_alive():
                one.kill()
                one.join()

    def leave_script(self) -> None:
        """Tell what was found, and end the process."""
        if self._leave is None:
            return
        self.is_cut_short = True
        report = self.report()
        self._diagnosis.close()
        self._watch.close()
        self.end_processes()
        self._leave(report)


def _until_its_end(code: CodeType, module: ModuleType) -> None:
    """Run code; to exit and say that all is well is no other end than to come to it."""
    try:
        exec(code, vars(module))
    except SystemExit as error:
        if error.code not in (None, 0):
            raise


def _longest(watch: Watch) -> Watched | None:
    """The loader whose loop took most of the time."""
    return max(watch.found, key=lambda one: one.loop.total_s, default=None)


def _elsewhere_ns() -> int:
    """In which processes have run that this one has started."""
    return (processes_cpu_ns() or 0) - process_time_ns()


def _script_advice(report: Report) -> Iterator[Advice]:
    """For a script most of whose time goes before and between its loops, or into other processes."""
    if report.is_elsewhere:
        yield Advice(
            "profile one of its processes: let the script train in its own, as with one of torchrun's by "
            "torchrun --nproc_per_node 1 --no-python fastpipe profile SCRIPT",
            "what multiprocessing or subprocess starts runs beside this",
        )
    elif report.is_outside_bound:
        name, seconds = report.outside[0]
        unseen = "" if report.loader else (
            ". If it trains, its loop was not seen: that has to be over a DataLoader or a tf.data.Dataset, "
            "or model.fit of a dataset or generator; or use report = fastpipe.profile(batches, step)"
        )  # fmt: skip
        yield Advice(
            f"if {name} makes samples, make them once, by all cores, with fastpipe.generate; or keep what it "
            f"makes with fastpipe.memoize{unseen}",
            f"{seconds:.1f} of the script's {report.seconds:.1f} s go there, outside of loops over loaders",
        )


def _outside(watch: Watch) -> tuple[tuple[str, float], ...]:
    """Functions of the script that took long between its loops over loaders, with all that they call.

    Of those that call each other and nothing else, the innermost; first where most of the time goes.
    """
    assert watch.recorder is not None
    found = sorted(watch.recorder.outside.items(), key=lambda item: item[1])
    kept: list[tuple[str, float]] = []
    for at, ((file, function), spent) in enumerate(found):
        # A function that took hardly longer than another one has called that.
        inner = [other for _, other in found[:at] if other > _CALLS * spent]
        if spent > _LEAST_OUTSIDE_S * 1e9 and not inner:
            kept.append((f"{os.path.basename(file)} {function}", spent / 1e9))
    return tuple(sorted(kept, key=lambda item: -item[1]))


@contextmanager
def _as_main(name: str, arguments: Sequence[str], is_module: bool) -> Iterator[ModuleType]:
    """What a script finds in ``sys`` when Python runs it, and the folder that is the current one as it was.

    Processes that it spawns name its classes as those of ``__mp_main__``, which ``multiprocessing`` has set
    to whatever was the main module when it was imported.
    """
    argv, path, folder = sys.argv, list(sys.path), os.getcwd()
    names = ("__main__", "__mp_main__")
    before = {one: sys.modules.get(one) for one in names}
    module = ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    try:
        if is_module:
            sys.path.insert(0, folder)
            spec = _spec_of(name)
            module.__spec__, module.__package__, module.__file__ = spec, spec.parent, spec.origin
        else:
            module.__file__ = os.path.abspath(name)  # also where the script goes to another folder
            sys.path.insert(0, os.path.dirname(os.path.realpath(name)))
        sys.argv = [str(module.__file__) if is_module else name, *arguments]
        sys.modules.update(dict.fromkeys(names, module))
        yield module
    finally:
        sys.argv, sys.path[:] = argv, path
        for one, main in before.items():
            if main is None:
                sys.modules.pop(one, None)
            else:
                sys.modules[one] = main
        with contextlib.suppress(OSError):
            os.chdir(folder)


def _spec_of(name: str) -> ModuleSpec:
    """Of a module, or of a package's ``__main__``, that is in a file of Python's."""
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a package of the script's does not find what it imports
        spec = None
    if spec is None or not spec.has_location:
        raise OptionError(f"there is no module {name!r} to run: -m takes a name such as package.train")
    return spec


@contextmanager
def _limited(seconds: float, run: _Run) -> Iterator[None]:
    """End what runs in the main thread after so many seconds; leave it where it goes on after that."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    is_late, ends = False, 0

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal is_late, ends
        if not is_late and run.is_ending:
            is_late = True
            signal.setitimer(signal.ITIMER_REAL, _GRACE_S)
            return
        if ends == _MOST_ENDS:
            run.leave_script()
        ends += 1
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        raise Enough

    def told(args: threading.ExceptHookArgs) -> None:
        if not issubclass(args.exc_type, Enough):
            hook(args)
            return
        with lock:  # a thread that takes batches has ended, for which the main one may wait for ever
            if threading.excepthook is told and not ends:
                signal.pthread_kill(main, signal.SIGALRM)

    main, hook, lock = threading.get_ident(), threading.excepthook, threading.Lock()
    before = signal.signal(signal.SIGALRM, end)
    threading.excepthook = told
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # one that comes now is to end nothing
        signal.setitimer(signal.ITIMER_REAL, 0)
        with lock:
            threading.excepthook = hook
        signal.signal(signal.SIGALRM, before)
