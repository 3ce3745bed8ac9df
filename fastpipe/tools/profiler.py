"""``profile`` and ``fastpipe profile SCRIPT``: measure how a training spends its time."""

from __future__ import annotations

import argparse
import builtins
import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter, process_time_ns
from types import FrameType, ModuleType, TracebackType
from typing import Any, NoReturn, overload

from rich.console import Console

import fastpipe
from fastpipe.console import Progress, in_any_encoding, positive
from fastpipe.core.files import write_output
from fastpipe.core.text import error_line
from fastpipe.errors import OptionError
from fastpipe.tools.diagnosis import Diagnosis
from fastpipe.tools.epochs import WatchedLoader
from fastpipe.tools.folders import require_folder_of
from fastpipe.tools.loaders import Watch, Watched, check_no_path
from fastpipe.tools.loops import Enough, Loop
from fastpipe.tools.report import Advice, Report
from fastpipe.tools.tf_loops import WATCHED
from fastpipe.tools.thread_times import processes_cpu_ns

_LEAST_OUTSIDE_S = 0.5
_GRACE_S = 8.0
_LEAST_LOOK_S = 0.5  # a script that was ended at its time limit has this time and _GRACE_S for measurements
_AGAIN_S, _MOST_ENDS = 4.0, 3  # a script that ignores its end is ended again after 4 s, up to 3 times
_END_S = 5.0  # seconds that a terminated process has to end
_CALLS = 0.9  # a function that spends a larger fraction of its time in another function is a caller
_RUNNING = (str(Path(fastpipe.__file__).parent), contextlib.__file__)  # files of the code that runs a script


class Profiling:
    """A context that measures the loaders that are iterated in its ``with`` block, without changing batches.

    Attributes:
        report: a report about the loader whose loop took the most time.  Inside the ``with`` block, the
            report covers the time until now.

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
        """Return an iterable of the batches of a loader that is not measured automatically.

        The report then covers this loader, too.
        """
        return _Iterable(self._watch, loader)

    @property
    def report(self) -> Report:
        """The report about the loader whose loop took the most time."""
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
    loader: Iterable[Any] | None = None, step: Callable[[Any], object] | None = None, *,
    seconds: float = 6.0, try_advice: bool = False,
) -> Report | Profiling:  # fmt: skip
    """Find out whether a training waits for data, what takes the time, and which changes would help.

    With ``loader``, ``profile`` iterates the loader and calls ``step`` with each batch.  Then ``step`` is
    called with the same batch repeatedly, to measure the time of a step that does not wait for its batch.
    After that, the loader and possible replacements are measured without ``step``.  Do not keep the model
    that ``step`` trains.

    Without ``loader``, ``profile`` returns a context for a ``with`` block.  The script runs its own loops in
    this block.  Their batches are not changed, so the report has fewer measurements.

    Args:
        loader: an iterable of batches that can be iterated repeatedly: a ``DataLoader``, a ``FastLoader``, a
            ``tf.data.Dataset``, a list.  Torch's loaders are measured in detail, including their workers.
        step: function that trains on a batch.  None measures only the loader.
        seconds: number of seconds for which the unchanged loop is measured.  All other measurements together
            take about as long.
        try_advice: also measure ``step`` with the best suggested changes, such as another loader.

    Returns:
        With ``loader``, a :class:`Report`, which ``print`` shows.  Without ``loader``, a :class:`Profiling`
        with an attribute ``report``.

    Raises:
        OptionError: the loader has no batch, or an argument is invalid.

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
    check_no_path(loader, "profile")
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise OptionError(f"profile needs an iterable of batches, such as a DataLoader, got {loader!r}")
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

    # The watch is closed twice: a signal handler's exception may skip the inner ``with``.
    with closing(diagnosis), closing(Watch(make_loop, also=WATCHED)) as watch, watch:
        try:
            _iterate(watch, loader, step)
        except Exception as error:
            if not diagnosis.excuses(error):
                raise
        return diagnosis.report()


def _iterate(watch: Watch, loader: Iterable[Any], step: Callable[[Any], object] | None) -> None:
    iterable: Iterable[Any] = loader if watch.sees(loader) else _Iterable(watch, loader)
    with suppress(Enough):
        while True:
            is_empty = True
            for batch in iterable:
                is_empty = False
                if step is not None:
                    step(batch)
                del batch
            if is_empty:
                raise OptionError(f"the {type(loader).__name__} has no batch")


def _report_of(watch: Watch) -> Report:
    longest = _longest(watch)
    if longest is None or not longest.loop.total_s:
        return Report(None)
    diagnosis = Diagnosis(0.0, False)
    diagnosis.see(longest)
    return diagnosis.report()


class _Iterable:
    def __init__(self, watch: Watch, loader: Iterable[Any]) -> None:
        self._watch, self._loader = watch, loader

    def __iter__(self) -> Any:
        return self._watch.iterate(self._loader)


def profile_script(
    path: str | os.PathLike[str], arguments: Sequence[str] = (), *, seconds: float = 6.0,
    limit_s: float = 50.0, try_advice: bool = False, is_module: bool = False,
    leave: Callable[[Report], NoReturn] | None = None, say: Callable[[str], object] = lambda _: None,
) -> Report:  # fmt: skip
    """Run a script until its training loop has been measured, and return the report.

    If the script cannot be ended, ``leave`` gets the report and ends the process.  If the script fails or is
    interrupted in a loop or later, ``ScriptError`` has the report until then, and the error as its cause.
    """
    if not is_module and not os.path.isfile(path):
        if os.path.isdir(path):
            raise OptionError(f"{os.fspath(path)!r} is a folder: name a Python file, or a module by -m")
        raise OptionError(f"there is no script {os.fspath(path)!r}")
    if os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1"):
        raise OptionError(
            f"this is one of {os.environ['WORLD_SIZE']} processes that train together, as WORLD_SIZE says, "
            "and the first to end would leave the others waiting: profile one alone, as by torchrun "
            "--nproc_per_node 1 --no-python fastpipe profile SCRIPT; or have `with fastpipe.profile():` "
            "around the loop"
        )
    diagnosis = Diagnosis(seconds / 4, try_advice, say)
    watch = Watch(
        lambda one: Loop(seconds, True, lambda: diagnosis.next_phase(watch, one), may_judge=True, say=say),
        also=WATCHED,
    )
    run = _Run(os.path.basename(path), diagnosis, watch, leave)
    with closing(diagnosis), closing(watch), watch, _as_main(os.fspath(path), arguments, is_module) as module:
        run.execute(module, limit_s)
        report = run.report()
        run.end_processes()
    if run.error is None:
        return report
    if report.loader is not None:
        raise ScriptError(report) from run.error
    if isinstance(run.error, SystemExit):
        why = f"{os.path.basename(path)} ended before it iterated a loader: {run.error.code}"
        raise OptionError(why) from run.error
    raise run.error


class ScriptError(Exception):
    """A script's own error, which is the cause of this error, with the report until then."""

    def __init__(self, report: Report) -> None:
        super().__init__(report.ended_by)
        self.report = report


class _Run:
    def __init__(
        self, script: str, diagnosis: Diagnosis, watch: Watch, leave: Callable[[Report], NoReturn] | None
    ) -> None:
        self._script = script
        self._diagnosis, self._watch, self._leave = diagnosis, watch, leave
        self._began, self._elsewhere_ns = perf_counter(), _elsewhere_ns()
        self._took: float | None = None  # duration of the script; None until the script ends by itself
        self._children = set(multiprocessing.active_children())
        self.is_cut_short = False  # whether the script was ended early
        self.error: BaseException | None = None  # the script's own error

    @property
    def was_ended(self) -> bool:
        return any(one.loop.has_ended for one in self._watch.found)

    @property
    def is_ending(self) -> bool:
        return self._diagnosis.is_looking or self.was_ended

    def execute(self, module: ModuleType, limit_s: float) -> None:
        """Run the script until it ends, or until it is ended.  ``error`` keeps an error of the script."""
        path = str(module.__file__)
        source = Path(path).read_bytes()
        try:
            with _limited(limit_s, self):
                exec(compile(source, path, "exec", dont_inherit=True), vars(module))
            self._took = perf_counter() - self._began
        except Enough:
            self.is_cut_short = True
        except SystemExit as error:
            self._took = perf_counter() - self._began
            if error.code not in (None, 0) and not self.was_ended:
                self.error = error
        except KeyboardInterrupt as error:
            self.error = error
        except Exception as error:
            # If TensorFlow requested the batch, it turns ``Enough`` into an error of its own.
            if self._diagnosis.excuses(error) or self.was_ended:
                self.is_cut_short = True
            else:
                self.error = error
        if self.error is None:
            self._look_late(limit_s)

    def _look_late(self, limit_s: float) -> None:
        """Measure the loader alone and its replacements, if the script ended before that."""
        longest = None if self._diagnosis.is_known else _longest(self._watch)
        if longest is None or not longest.loop.total_s or longest.is_opaque:
            return
        try:
            left = max(_LEAST_LOOK_S, limit_s - (perf_counter() - self._began))
            with suppress(Enough), _limited(left, self), self._watch.paused():
                self._diagnosis.look(longest)
        except KeyboardInterrupt as error:
            self.error = error

    def report(self) -> Report:
        diagnosis, watch = self._diagnosis, self._watch
        longest = _longest(watch)
        if not diagnosis.is_known and longest is not None:  # the script ended before all measurements
            diagnosis.see(longest)
        found = replace(
            diagnosis.report() if diagnosis.is_known else Report(None),
            seconds=perf_counter() - self._began if self._took is None else self._took,
            is_cut_short=self.is_cut_short or self.was_ended,
            ended_by="" if self.error is None else error_line(self.error),
            script=self._script,
            outside=_outside(watch),
            elsewhere_s=(_elsewhere_ns() - self._elsewhere_ns) / 1e9,
        )
        return replace(found, advice=(*_script_advice(found), *found.advice))

    def end_processes(self) -> None:
        if not (self.is_cut_short or self.was_ended):
            return
        children = [one for one in multiprocessing.active_children() if not one.daemon]
        left = [one for one in children if one not in self._children]
        for one in left:
            one.terminate()
        for one in left:
            one.join(_END_S)
            if one.is_alive():
                one.kill()
                one.join()

    def leave_script(self) -> None:
        if self._leave is None:
            return
        self.is_cut_short = True
        report = self.report()
        self._diagnosis.close()
        self._watch.close()
        self.end_processes()
        self._leave(report)


def _longest(watch: Watch) -> Watched | None:
    return max(watch.found, key=lambda one: one.loop.total_s, default=None)


def _elsewhere_ns() -> int:
    return (processes_cpu_ns() or 0) - process_time_ns()


def _script_advice(report: Report) -> Iterator[Advice]:
    if report.is_elsewhere:
        yield Advice(
            "profile one of its processes: let the script train in its own, as with one of torchrun's by "
            "torchrun --nproc_per_node 1 --no-python fastpipe profile SCRIPT",
            "processes started by multiprocessing or subprocess are not observed",
        )
    elif report.is_outside_bound:
        name, seconds = report.outside[0]
        unseen = "" if report.loader else (
            ". If it trains, its loop was not recognised: it has to iterate over a DataLoader or a "
            "tf.data.Dataset, "
            "or model.fit of a dataset or generator; or use report = fastpipe.profile(batches, step)"
        )  # fmt: skip
        yield Advice(
            f"if {name} makes samples, make them once, on all cores, with fastpipe.generate; or cache its "
            f"results with fastpipe.memoize{unseen}",
            f"{seconds:.1f} of the script's {report.seconds:.1f} s are spent there, outside of loops over "
            "loaders",
        )


def _outside(watch: Watch) -> tuple[tuple[str, float], ...]:
    assert watch.recorder is not None
    found = sorted(watch.recorder.outside.items(), key=lambda item: item[1])
    kept: list[tuple[str, float]] = []
    for at, ((file, function), spent) in enumerate(found):
        # A function that takes only slightly longer than another function is the caller of that function.
        inner = [other for _, other in found[:at] if other > _CALLS * spent]
        if spent > _LEAST_OUTSIDE_S * 1e9 and not inner:
            kept.append((f"{os.path.basename(file)} {function}", spent / 1e9))
    return tuple(sorted(kept, key=lambda item: -item[1]))


@contextmanager
def _as_main(name: str, arguments: Sequence[str], is_module: bool) -> Iterator[ModuleType]:
    """Set up ``sys`` for a script, and ``__mp_main__`` for its spawned processes; restore both afterwards."""
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
            module.__file__ = os.path.abspath(name)  # valid also in other working folders
            sys.path.insert(0, os.path.dirname(os.path.realpath(name)))
        sys.argv = [str(module.__file__) if is_module else name, *arguments]
        sys.modules.update(dict.fromkeys(names, module))
        yield module
    finally:
        sys.argv, sys.path[:] = argv, path
        for one in names:
            sys.modules.pop(one, None)
        sys.modules.update({one: main for one, main in before.items() if main is not None})
        with suppress(OSError):
            os.chdir(folder)


def _spec_of(name: str) -> ModuleSpec:
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the script's package exists, but an import in it fails
        spec = None
    if spec is None or not spec.has_location:
        raise OptionError(f"there is no module {name!r} to run: -m takes a name such as package.train")
    return spec


@contextmanager
def _limited(seconds: float, run: _Run) -> Iterator[None]:
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

    def on_thread_error(args: threading.ExceptHookArgs) -> None:
        if not issubclass(args.exc_type, Enough):
            hook(args)
            return
        with lock:  # the thread of a loop has ended, and the main thread may wait for it forever
            if threading.excepthook is on_thread_error and not ends:
                signal.pthread_kill(main, signal.SIGALRM)

    main, hook, lock = threading.get_ident(), threading.excepthook, threading.Lock()
    before = signal.signal(signal.SIGALRM, end)
    threading.excepthook = on_thread_error
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # a late alarm must not end anything
        signal.setitimer(signal.ITIMER_REAL, 0)
        with lock:
            threading.excepthook = hook
        signal.signal(signal.SIGALRM, before)


EPILOG = """\
SCRIPT runs as python SCRIPT ARGUMENTS would, and is ended when its training loop has been
measured, after a minute at most. For a while the loop gets the same batch again and again,
which shows how long a step takes without waiting: do not keep the trained weights.
Then other settings and fastpipe's loaders are measured on the same data.

exit codes: 0 done, 1 an error of the script's own, 2 bad input, 130 interrupted
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seconds", type=positive(float), default=6.0, metavar="S",
        help="seconds for which the unchanged loop is measured (default: 6)")  # fmt: skip
    add("--limit", type=positive(float), default=50.0, metavar="S",
        help="seconds until the script is ended, after the running measurement (default: 50)")  # fmt: skip
    add("--try", dest="try_advice", action="store_true",
        help="try the best advice: the script's loop gets batches of the loader that it names")  # fmt: skip
    add("--json", type=Path, default=None, metavar="FILE", help="write everything there, as JSON")
    add("--html", type=Path, default=None, metavar="FILE", help="write a page with pictures there")
    add("--trace", type=Path, default=None, metavar="FILE",
        help="write a timeline there, to be opened in https://ui.perfetto.dev")  # fmt: skip
    add("-m", dest="is_module", action="store_true",
        help="SCRIPT is the name of a module, which runs as by python -m")  # fmt: skip
    add("script", metavar="SCRIPT", help="a Python file")
    add("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="the script's own")


def run(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    progress.stop()
    require_folder_of(args.json, args.html, args.trace)
    for word in _misplaced(args):
        progress.done(
            f"fastpipe profile: {word} is after {args.script}, and goes to the script; did you mean: "
            f"fastpipe profile {word} … {args.script}"
        )
    try:
        return _profile_and_show(args, console, progress)
    finally:
        # Free the script's objects, also in reference cycles, while the interpreter runs.  TensorFlow's
        # threads may need Python to end.  At the interpreter's exit, freeing their data would wait forever.
        gc.collect()


def _misplaced(args: argparse.Namespace) -> Iterator[str]:
    """Yield the options of this command that are after the script's name, unless the script mentions them."""
    own = argparse.ArgumentParser(add_help=False)
    add_arguments(own)
    options = {name for action in own._actions for name in action.option_strings if name.startswith("--")}
    try:
        script = "" if args.is_module else Path(args.script).read_text(encoding="utf-8", errors="replace")
    except OSError:  # an error about the script follows
        return
    for word in args.arguments:
        if (name := word.partition("=")[0]) in options and name not in script:
            yield word


def _profile_and_show(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    try:
        report = profile_script(
            args.script, args.arguments, seconds=args.seconds, limit_s=args.limit, try_advice=args.try_advice,
            is_module=args.is_module, leave=partial(_leave, args, console, progress),
            say=lambda text: progress.done(f"fastpipe profile: {text}"),
        )  # fmt: skip
    except ScriptError as ended:
        error = ended.__cause__
        assert error is not None
        if isinstance(error, Exception):
            _show_error(error)
        elif isinstance(error, SystemExit) and not isinstance(error.code, int):
            progress.done(str(error.code))
        _tell(ended.report, args, console, progress)
        if isinstance(error, KeyboardInterrupt):
            raise error from None
        return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    except Exception as error:
        if _within_script(error.__traceback__) is None and not isinstance(error, SyntaxError):
            raise
        _show_error(error)
        return 1
    _tell(report, args, console, progress)
    return 0


def _show_error(error: Exception) -> None:
    trace = _within_script(error.__traceback__)
    sys.excepthook(type(error), error.with_traceback(trace), trace)  # print the error as Python does
    # Frames refer to the error and to the loader's iterator.  If the garbage collector freed the iterator,
    # each of its workers would end after 5 s.
    traceback.clear_frames(trace)


def _tell(report: Report, args: argparse.Namespace, console: Console, progress: Progress) -> None:
    with in_any_encoding():
        report.show(console)
    for path, content in ((args.json, report.json), (args.html, report.html), (args.trace, report.trace)):
        if path is not None:
            write_output(path, content())
            progress.done(f"wrote {path}")


def _leave(args: argparse.Namespace, console: Console, progress: Progress, report: Report) -> NoReturn:
    try:
        _tell(report, args, console, progress)
        progress.done(
            f"{args.script} catches every exception, for example with 'except:', and was left running"
        )
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


def _within_script(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_RUNNING):
        trace = trace.tb_next
    return trace
