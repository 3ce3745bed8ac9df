"""Diagnose a watched training loop: measure its loader and its steps, and suggest changes."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import statistics
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from itertools import chain, repeat
from types import CodeType
from typing import Any

from fastpipe.core.machine import available_cpus
from fastpipe.core.text import error_line, in_duration
from fastpipe.errors import OptionError
from fastpipe.tools import costs as loader_costs
from fastpipe.tools.batches import same_form
from fastpipe.tools.candidates import candidates
from fastpipe.tools.costs import Alone, Copies, LoaderCosts, alone, copies_of
from fastpipe.tools.edits import Edit
from fastpipe.tools.loaders import Watch, Watched, is_fast, length_of, processes_of, view_of
from fastpipe.tools.loops import Loop, Phase
from fastpipe.tools.report import Advice, Alternative, LoaderNote, Part, Report
from fastpipe.tools.stacks import DECODE, READ, Boundary
from fastpipe.tools.steps import Growth, ModelChanges, torch_of
from fastpipe.tools.swaps import GAIN, Candidate, hint_of
from fastpipe.tools.tf_loops import FitWitness, missing_stages
from fastpipe.tools.witness import Account, Reads

_log = logging.getLogger("fastpipe.profile")
_FAST = 0.9  # fraction of a step's time: if batches take less, steps do not wait for the average batch
_MOST_TRIED = 2
_HALF = 0.5
_LEAST_GAIN = 1.02  # least predicted gain of a step that is listed
_START_SHARE = 0.03  # fraction of an epoch: a longer start of workers is reported


class Diagnosis:
    def __init__(self, seconds: float, tries: bool, say: Callable[[str], object] = lambda _: None) -> None:
        self._seconds, self._tries, self._say = seconds, tries, say
        self._watched: Watched | None = None
        self._alone: Alone | None = None
        self._accounts: list[Account] = []
        self._costs = LoaderCosts()
        self._measured: list[tuple[Candidate, Alone]] = []
        self._candidates: list[Candidate] = []
        self._tried: dict[int, float] = {}
        self._phases: Generator[Iterator[Any], None, None] | None = None
        self._reads: Reads | None = None
        self._copies: Copies | None = None
        self._changes: list[ModelChanges | Growth] = []
        self._change: ModelChanges | Growth | None = None  # the change that is being tried
        self._later_s = math.inf  # seconds of a step with instant data, measured again at the end
        self.cores, self.is_looking = available_cpus(), False

    @property
    def is_known(self) -> bool:
        return self._watched is not None

    def see(self, watched: Watched) -> None:
        self._watched = watched
        if watched.witness is not None:
            self._accounts = watched.witness.accounts()
            self._costs = loader_costs.costs_of(self._accounts)

    def look(self, watched: Watched) -> None:
        self.is_looking = True
        try:
            self.see(watched)
            self._say("measuring the loader alone")
            self._measure_loader(watched)
            if self._report().is_loader_bound:
                self._measure_candidates(watched)
        finally:
            self.is_looking = False

    def _measure_loader(self, watched: Watched) -> None:
        loader = watched.loader
        serial = not getattr(loader, "num_workers", 1) and watched.witness is not None
        skipped = 0 if serial else max(2, getattr(loader, "num_workers", 0))
        clock = getattr(loader, "clock", None)
        before = clock.totals() if clock is not None else {}
        if watched.is_graph:
            self._measure_inside(loader.__iter__, skipped, {})
            self._costs = self._costs.with_others(self._alone.cpu_s if self._alone is not None else None)
        elif watched.data is not None and watched.data.begin is not None:
            self._measure_inside(watched.data.begin, skipped, watched.data.boundaries)
        elif watched.is_opaque:
            assert isinstance(watched.witness, FitWitness)
            self._reads = watched.witness.reads
        else:
            # A view, because persistent workers of ``loader`` itself would run on after the measurement.
            one = view_of(loader) if watched.view is not None else loader
            try:
                self._alone = alone(one.__iter__, skipped, self._seconds)
            except Exception as error:  # the script's own loop may handle this error
                _log.warning("the loader alone is not measured: %s", _text_of(error))
        if clock is not None and self._alone is not None and not self._costs.batches:
            self._costs = loader_costs.costs_of_clock(before, clock.totals(), self._alone.taken)
        if not watched.is_opaque:
            self._copies = copies_of(watched.loop.batch)

    def _measure_inside(
        self, begin: Callable[[], Iterator[Any]], skipped: int, boundaries: Mapping[CodeType, Boundary]
    ) -> None:
        witness = FitWitness(more=boundaries)
        try:
            self._alone = alone(begin, skipped, self._seconds)
        except Exception as error:
            _log.warning("the dataset is not measured alone: %s", _text_of(error))
        finally:
            witness.close()
        if self._alone is None:
            return
        self._accounts = witness.accounts()
        # The witness has seen the cost of samples.  Only the loader knows the number of batches.
        self._accounts[0].batches = self._alone.taken
        self._costs = loader_costs.costs_of(self._accounts)
        self._reads = witness.reads

    def _measure_candidates(self, watched: Watched) -> None:
        known: dict[Any, Alone | None] = {}
        for candidate in candidates(
            watched, self._costs, self.cores, self._accounts, self._reads, self._uneven()
        ):  # fmt: skip
            self._candidates.append(candidate)
            if candidate.begin not in known:
                self._say(f"measuring instead: {candidate.what}")
                known[candidate.begin] = self._measure(candidate)
            measured = known[candidate.begin]
            if measured is not None:
                self._measured.append(
                    (candidate, measured.with_more(candidate.rest, candidate.is_rest_beside))
                )

    def _measure(self, candidate: Candidate) -> Alone | None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
                return alone(candidate.begin, candidate.skipped, self._seconds)
        except Exception as error:  # any error is ignored: the script's own loader works
            _log.warning("not measured: %s: %s", candidate.what, _text_of(error))
            return None

    def _uneven(self) -> str:
        report = self._report()
        if report.loader is None or not report.loader.workers or self._alone is None:
            return ""
        together = loader_costs.step_with(report.base_s, report.step_cpu_s, self._alone, self.cores)
        waits_little = report.wait_s < (GAIN - 1) * report.step_s  # the rest is lost to busy cores
        if waits_little or self._alone.batch_s > _FAST * report.base_s or report.step_s < GAIN * together:
            return ""
        return (
            f"the loader alone makes a batch in {in_duration(self._alone.batch_s)}, a step with data ready "
            f"takes {in_duration(report.base_s)}, but it waits {in_duration(report.wait_s)}: some batches "
            "take longer than the prefetched ones last"
        )

    def next_phase(self, watch: Watch, loader: Any) -> Iterator[Any] | None:
        if self._phases is None:
            watched = watch.of(loader)
            assert watched is not None  # the loop of ``loader`` calls this method
            self._phases = self._phases_of(watch, watched)
        if (
            inspect.getgeneratorstate(self._phases) == inspect.GEN_RUNNING
        ):  # another thread runs the generator, for another loop
            return None
        with watch.paused():
            return next(self._phases, None)

    def _phases_of(self, watch: Watch, watched: Watched) -> Generator[Iterator[Any], None, None]:
        def measured() -> float:
            return watched.loop.steps[Phase.TRIED].seconds

        self.look(watched)
        # Only candidates whose batches contain everything that the script's step needs can be tried.
        wanted = [at for at in self._predictions() if self._measured[at][0].rest is None][:_MOST_TRIED]
        if watched.is_opaque and self._measured:  # measuring may change later steps, as by malloc's limits
            yield repeat(None)
            self._later_s = measured()
        for at in wanted if self._tries else ():
            self._say(f"trying in the loop: {self._measured[at][0].what}")
            batches = _endless(self._measured[at][0], watch)
            first = next(batches)
            if same_form(watched.loop.batch, first):
                yield chain([first], batches)
                self._tried[at] = measured()
            del batches, first  # this ends the workers before the next candidate
        if self._tries:
            self._changes = list(self._step_changes(watched))
            for change in self._changes:
                self._change = change
                yield from change.phases(measured)

    def _step_changes(self, watched: Watched) -> Iterator[ModelChanges | Growth]:
        report, batch = self._report(), watched.loop.batch
        instant = report.instant_s
        if watched.is_opaque or instant is None or instant < _HALF * report.step_s:
            return
        if torch_of(batch) is not None:
            yield ModelChanges(batch, self._say)
        with contextlib.suppress(OptionError):  # the number of samples in a batch is unknown
            yield Growth(batch, instant, self._say)  # at the end, because it may run out of memory

    def excuses(self, error: Exception) -> bool:
        return self._change is not None and self._change.failed(error)

    def close(self) -> None:
        while self._candidates:
            self._candidates[-1].close()
            self._candidates.pop()
        if self._phases is not None:
            with contextlib.suppress(ValueError):  # it is running: a signal handler left the script
                self._phases.close()

    def report(self) -> Report:
        report = self._report()
        loader, model = (sorted(some, key=_seconds) for some in (self._loader_advice(), self._model_advice()))
        # A change of the step gains only what the loader lets it gain.
        found = [*loader, *model] if report.is_loader_bound else sorted([*loader, *model], key=_seconds)
        advice = [one for one in found if (one.predicted_s or 0.0) * _LEAST_GAIN <= report.step_s]
        return replace(report, advice=tuple(advice), alternatives=tuple(self._alternatives(report)))

    def _alternatives(self, report: Report) -> Iterator[Alternative]:
        places = {id(candidate): at for at, (candidate, _) in enumerate(self._measured)}
        for candidate in self._candidates:
            at = places.get(id(candidate))
            seconds = None if at is None else self._step_with_loader(report, self._measured[at][1])
            yield Alternative(candidate.what, seconds, None if at is None else self._tried.get(at))

    def _report(self) -> Report:
        assert self._watched is not None
        loop = self._watched.loop
        steps = loop.steps[Phase.AS_IT_IS]
        if not len(steps):
            steps = loop.steps[Phase.WARMING]
        instant = loop.steps[Phase.INSTANT]
        starts, device = loop.epoch_starts, loop.device.times()
        found = Report(
            _note_of(self._watched), len(steps), steps.seconds, steps.wait_s, steps.busy_s,
            instant.seconds if len(instant) else None,
            None if loop.step_cpu_ns is None else loop.step_cpu_ns / 1e9,
            None if loop.step_delay_ns is None else loop.step_delay_ns / 1e9,
            starts[-1] if starts and not self._watched.is_opaque else None,
            self._alone, self._costs, cores=self.cores,
            device_wait_s=None if device is None else device.wait_s,
            device_busy_s=None if device is None else device.busy_s,
            copies=self._copies, is_tried=self._tries, is_opaque=self._watched.is_opaque,
            asides=tuple(_asides(loop)), first_step_s=loop.first_step_s, hint=hint_of(self._watched),
            spans=tuple(loop.spans),
            worker_spans=tuple((account.worker, tuple(account.spans)) for account in self._accounts),
        )  # fmt: skip
        shares, lost = self._costs.shares() or {"loader": 1.0}, found.lost_s
        stall = tuple(Part(stage, share * lost) for stage, share in shares.items())
        return replace(found, stall=stall, cases=tuple(self._cases(found)))

    def _cases(self, report: Report) -> Iterator[Part]:
        if report.instant_s is None:
            return
        yield Part("with data ready", report.base_s)
        if self._alone is not None and self._costs.wall_s:
            for name, costs in (
                ("without decoding", self._costs.without(READ, DECODE)),
                ("with files in memory", self._costs.without_waiting()),
            ):
                yield Part(name, min(report.step_s, self._step_with_costs(report, costs)))
        yield Part("as it is", report.step_s)

    def _step_with_costs(self, report: Report, costs: LoaderCosts) -> float:
        assert self._alone is not None
        batch_s, cpu = self._alone.batch_s * costs.wall_s / self._costs.wall_s, self._alone.cpu_s
        cpu = None if cpu is None else cpu * costs.cpu_s / max(self._costs.cpu_s, 1e-9)
        loader = Alone(batch_s, cpu, self._alone.batches)
        if report.loader is not None and not report.loader.ahead:
            return report.base_s + loader.batch_s
        return loader_costs.step_with(report.base_s, report.step_cpu_s, loader, self.cores)

    def _step_beside(self, instant_s: float) -> float:
        report = self._report()
        if report.loader is not None and not report.loader.ahead:
            return instant_s + report.wait_s
        if self._alone is None:
            return instant_s + report.lost_s
        cpu = report.step_cpu_s  # a shorter step uses less CPU time
        if cpu is not None:
            cpu *= instant_s / report.instant_s if report.instant_s else 0.0
        return loader_costs.step_with(instant_s, cpu, self._alone, self.cores)

    def _predictions(self) -> dict[int, float]:
        report, found = self._report(), {}
        for at, (_, measured) in enumerate(self._measured):
            seconds = self._step_with_loader(report, measured)
            if report.step_s > GAIN * seconds:
                found[at] = seconds
        return dict(sorted(found.items(), key=lambda item: self._tried.get(*item)))

    def _step_with_loader(self, report: Report, measured: Alone) -> float:
        base, cpu = min(report.base_s, self._later_s), report.step_cpu_s
        if cpu is not None and base < report.base_s:
            cpu *= base / report.base_s
        return loader_costs.step_with(base, cpu, measured, self.cores)

    def _later(self) -> str:
        before = self._report().base_s
        if before < GAIN * self._later_s:
            return ""
        return (
            f"; a step with data ready takes {in_duration(self._later_s)} in a process with it, and "
            f"{in_duration(before)} before that"
        )

    def _model_advice(self) -> Iterator[Advice]:
        assert self._watched is not None
        for change in self._changes:
            yield from change.advice(self._watched, self._step_beside)

    def _loader_advice(self) -> Iterator[Advice]:
        assert self._watched is not None
        for at, seconds in self._predictions().items():
            candidate, tried = self._measured[at][0], self._tried.get(at)
            if tried is None or self._report().step_s > GAIN * tried:
                edit = candidate.edit or Edit()
                yield Advice(
                    candidate.what, candidate.why + self._later(), seconds, tried,
                    edit.diff(self._watched.made_at),
                )  # fmt: skip
            else:
                _log.info("tried, without effect: %s: %s a step", candidate.what, in_duration(tried))
        yield from self._graph_advice(self._watched)
        yield from _pin_advice(self._watched, self._report().step_s, self._copies)
        yield from _start_advice(self._watched, self._report().step_s)

    def _graph_advice(self, watched: Watched) -> Iterator[Advice]:
        report = self._report()
        if not watched.is_graph or is_fast(watched.loader) or not report.is_loader_bound:
            return
        is_serial, is_alone = missing_stages(watched.loader)
        if is_serial:
            yield Advice(
                f"num_parallel_calls=tf.data.AUTOTUNE in each .map(…) of the dataset{watched.place}",
                f"the dataset maps one element after the other; there are {self.cores} cores; not measured",
            )
        if is_alone and self._alone is not None:
            yield Advice(
                f".prefetch(tf.data.AUTOTUNE) at the end of the dataset{watched.place}",
                "the dataset makes the next batch only when the step asks for it",
                self._step_with_loader(report, self._alone),
            )


def _seconds(advice: Advice) -> float:
    return math.inf if advice.predicted_s is None else advice.predicted_s


def _asides(loop: Loop) -> Iterator[Part]:
    for other, (count, spent) in loop.aside.items():
        passes = f"{count} {'pass' if count == 1 else 'passes'}"
        yield Part(f"{passes} over the loader at {other.place or 'an unknown line'}", spent / 1e9)
    count, spent = loop.steps[Phase.AS_IT_IS].unlike
    if count:
        steps = f"{count} {'step' if count == 1 else 'steps'}"
        yield Part(f"{steps} that took many times as long as the others", spent / 1e9)


def _endless(candidate: Candidate, watch: Watch) -> Iterator[Any]:
    while True:
        with watch.paused():
            batches = candidate.begin()
        yield from batches


def _text_of(error: Exception) -> str:
    errors: list[BaseException | None] = [error]
    while (one := errors[-1]) is not None and one not in errors[:-1]:
        traceback.clear_frames(one.__traceback__)  # otherwise reference cycles keep the workers
        errors.append(one.__context__)
    return error_line(error)


def _note_of(watched: Watched) -> LoaderNote:
    loader = watched.loader
    dataset = getattr(loader, "dataset", None)
    kind = "tf.data.Dataset" if watched.is_graph else type(loader).__name__
    if dataset is not None:
        kind += f" over {type(dataset).__name__}"
    workers = getattr(loader, "num_workers", 0) or 0
    is_stock = watched.witness is not None and not isinstance(watched.witness, FitWitness)
    made_at, used_at = (
        str(line) if line is not None and line.file else "" for line in (watched.made_at, watched.used_at)
    )
    ahead = 0 if is_stock and not workers else watched.loop.ahead
    return LoaderNote(kind, workers, ahead, watched.batch_size, made_at, used_at)


def _pin_advice(watched: Watched, step_s: float, copies: Copies | None) -> Iterator[Advice]:
    if copies is None or getattr(watched.loader, "pin_memory", True):
        return
    left = step_s - (copies.as_it_is_s - copies.pinned_s)
    if step_s > GAIN * left:
        yield Advice(
            f"pin_memory=True{watched.place}, and .to(device, non_blocking=True)",
            f"a batch is copied to the GPU in {in_duration(copies.as_it_is_s)}, from pinned memory in "
            f"{in_duration(copies.pinned_s)}",
            left,
            diff=Edit(arguments={"pin_memory": True}).diff(watched.made_at),
        )  # fmt: skip


def _start_advice(watched: Watched, step_s: float) -> Iterator[Advice]:
    loader, starts = watched.loader, watched.loop.epoch_starts
    steps = length_of(loader)
    if steps is None or getattr(loader, "persistent_workers", True) or not processes_of(loader):
        return
    if len(starts) < 2 or not step_s:
        return
    lost = statistics.median(starts[1:]) - step_s
    share = lost / (lost + steps * step_s)
    if share > _START_SHARE:
        yield Advice(
            f"persistent_workers=True{watched.place}",
            f"an epoch of {steps} steps begins with {in_duration(lost)} in which workers start, "
            f"{share:.0%} of it",
            diff=Edit(arguments={"persistent_workers": True}).diff(watched.made_at),
        )
