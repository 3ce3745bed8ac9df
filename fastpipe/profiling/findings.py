"""What a profile finds: the step, the loader, what is waited for, and what would help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fastpipe.core.text import in_bytes, in_duration
from fastpipe.profiling.copying import Copies
from fastpipe.profiling.costs import Alone, LoaderCosts

__all__ = ["Advice", "Findings", "LoaderNote", "Part"]

_MOST = 0.5  # of a script's time
_TOLD = 0.1  # of a script's time, from which on it is told that it goes outside of loops
_LEAST_S = 0.5  # of processors, in other processes
_SMALL = 0.05  # of a step: waiting for data that nobody would notice


@dataclass(frozen=True)
class LoaderNote:
    """The loader that was looked at.

    Attributes:
        kind: its class, and that of its dataset.
        workers, ahead: worker processes; batches that are made ahead.
        batch_size: samples of a batch; None if nobody says.
        made_at, used_at: lines of the script, ``file:line function``; empty where they are unknown.
    """

    kind: str
    workers: int = 0
    ahead: int = 0
    batch_size: int | None = None
    made_at: str = ""
    used_at: str = ""


@dataclass(frozen=True)
class Part:
    """A part of the time that a step waits, or of what it would take.

    Attributes:
        name: of a stage, or of a case.
        seconds: of a step.
    """

    name: str
    seconds: float


@dataclass(frozen=True)
class Advice:
    """Something to change.

    Attributes:
        what: in words, with the line.
        why: the measurement that it comes from.
        predicted_s: seconds of a step with it; None where no time is predicted.
        tried_s: the same, measured with the script's own step; None where it was not tried.
    """

    what: str
    why: str
    predicted_s: float | None = None
    tried_s: float | None = None


@dataclass(frozen=True)
class Findings:
    """What a profile has found.

    Attributes:
        loader: that was looked at.
        steps: that were measured.
        step_s, wait_s, busy_s: seconds of a step, of those until its batch was there, and with the batch.
        instant_s: of a step whose batch is there at once; None where that was not measured.
        step_cpu_s: seconds of processors of such a step.
        step_delay_s: seconds for which threads of a step as it is, all together, wait longer for cores than
            those of such a step; None where that was not measured.
        epoch_start_s: until the first batch of an epoch.
        alone: the loader without a training that uses its batches; None where that was not measured.
        costs: of a batch, by stage.
        stall: of what is waited for, the largest part first; their sum is what a step loses.
        cases: seconds of a step: with instant data, without decoding, without waiting for storage, as it is.
        advice: the most useful first.
        cores: that this process may use.
        device_wait_s, device_busy_s: seconds that a GPU has nothing to do before a step, and takes for one;
            None where there is no GPU.
        copies: of a batch to the GPU; None where there is none.
        is_tried: whether advice was tried on the script's own step.
        is_opaque: whether what a step waits is not known apart from what it is busy.
        outside: lines of the script between its loops that took long: the line, and seconds.
        elsewhere_s: seconds of processors that processes which the script has started have used.
        seconds: that the script ran.
        is_cut_short: whether it was ended before its own end.
        spans: of steps: phase, and nanoseconds when a batch was asked for, came, and was done with.
        worker_spans: of batches, by worker: when the first sample was asked for, the last came, it was whole.
    """

    loader: LoaderNote | None
    steps: int = 0
    step_s: float = 0.0
    wait_s: float = 0.0
    busy_s: float = 0.0
    instant_s: float | None = None
    step_cpu_s: float | None = None
    step_delay_s: float | None = None
    epoch_start_s: float | None = None
    alone: Alone | None = None
    costs: LoaderCosts = field(default_factory=LoaderCosts)
    stall: tuple[Part, ...] = ()
    cases: tuple[Part, ...] = ()
    advice: tuple[Advice, ...] = ()
    cores: int = 1
    device_wait_s: float | None = None
    device_busy_s: float | None = None
    copies: Copies | None = None
    is_tried: bool = False
    is_opaque: bool = False
    outside: tuple[tuple[str, float], ...] = ()
    elsewhere_s: float = 0.0
    seconds: float = 0.0
    is_cut_short: bool = False
    spans: tuple[tuple[str, int, int, int], ...] = field(default=(), repr=False)
    worker_spans: tuple[tuple[int, tuple[tuple[int, int, int], ...]], ...] = field(default=(), repr=False)

    @property
    def lost_s(self) -> float:
        """Seconds of a step that are lost for want of data.

        It waits for its batch, and is slower with that than with data at once where others make the next
        batches on the same cores: by what these take of them, or, where its threads wait for each other and
        so for the one that has lost its core, for as long as threads wait for cores; the others hold up
        nothing while they do not run.  More than that has other causes.
        """
        if self.is_opaque:
            return 0.0 if self.instant_s is None else max(0.0, self.step_s - self.instant_s)
        if self.instant_s is None or self.alone is None or not self.loader or not self.loader.ahead:
            return self.wait_s
        taken, cpu_s = self.busy_s, self.alone.cpu_s
        if cpu_s is not None:
            taken = max(cpu_s / self.cores, min(self.step_delay_s or 0.0, cpu_s))
        return self.wait_s + min(max(0.0, self.busy_s - self.instant_s), taken)

    @property
    def base_s(self) -> float:
        """Seconds of a step whose batch is there at once."""
        return max(0.0, self.step_s - self.lost_s)

    @property
    def stall_share(self) -> float:
        """Which part of a step is lost for want of data, from 0 to 1."""
        return self.lost_s / self.step_s if self.step_s else 0.0

    @property
    def is_loader_bound(self) -> bool:
        """Whether another loader would make a difference."""
        return self.stall_share > _SMALL

    @property
    def is_outside_bound(self) -> bool:
        """Whether most of a script's time goes where no loader is iterated."""
        return bool(self.outside) and self.outside[0][1] > _MOST * self.seconds

    @property
    def is_elsewhere(self) -> bool:
        """Whether a script of which no loop was seen does its work in processes that it starts."""
        return self.loader is None and self.elsewhere_s > max(_LEAST_S, _MOST * self.seconds)

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.is_elsewhere:
            return (
                f"no loop was seen: in {self.seconds:.1f} s processes that the script starts have used "
                f"{self.elsewhere_s:.1f} s of processor, and nothing is looked at in them"
            )
        if self.is_outside_bound:
            name, seconds = self.outside[0]
            share = f"{seconds / self.seconds:.0%} of {self.seconds:.1f} s"
            return f"{share} go into {name}, outside of any loop over a loader"
        if self.loader is None:
            return "no loader was iterated"
        if not self.steps:
            ran = f" in {self.seconds:.1f} s" if self.seconds else ""
            return f"no step was measured{ran}: {self.loader.kind} gave too few batches"
        if self.is_opaque and self.instant_s is None:
            return (
                f"not known: {self.steps} steps of {in_duration(self.step_s)} were seen, and none with data "
                "at once; fastpipe profile SCRIPT measures that, in more steps or with --limit for longer"
            )
        if not self.is_loader_bound:
            return (
                f"stall {self.stall_share:.0%}: your loader is not the problem. With data at once a step "
                f"takes {in_duration(self.base_s)} of {in_duration(self.step_s)}"
            )
        parts = ", ".join(f"{part.seconds / self.step_s:.0%} {part.name}" for part in self.stall[:4])
        return f"stall {self.stall_share:.0%}{': ' if parts else ''}{parts}"

    @property
    def without_advice(self) -> str:
        """What is said in the place of advice, where a loop loses time and there is none."""
        if self.advice or self.alone is None or not self.is_loader_bound:
            return ""
        return (
            "no advice: nothing that fastpipe could measure in its place is faster; where a batch's "
            "time goes, is above"
        )

    def effect(self, advice: Advice) -> str:
        """What a change will do to a step, and did when it was tried; empty where that is not known."""
        if advice.predicted_s is None or not self.step_s:
            return ""
        now, then = self.step_s, advice.predicted_s
        text = f"{in_duration(now)} → {in_duration(then)} a step, {now / then:.2f}×"
        if advice.tried_s is not None:
            text += f" (tried: {in_duration(advice.tried_s)}, {now / advice.tried_s:.2f}×)"
        return text

    def lines(self) -> Iterator[str]:
        """The figures of the step, in words, and what a script does outside of its loops."""
        if self.loader is not None:
            yield from self._loop_lines(self.loader)
        for name, seconds in self.outside:
            if seconds > _TOLD * self.seconds:
                yield f"{seconds:.1f} s outside of loops over loaders: {name}"
        if self.is_cut_short:
            yield f"the script was ended after {self.seconds:.0f} s; what it has trained is not worth keeping"

    def _loop_lines(self, loader: LoaderNote) -> Iterator[str]:
        who = f"num_workers={loader.workers}"
        size = "" if loader.batch_size is None else f", batches of {loader.batch_size}"
        place = f", {loader.used_at}" if loader.used_at else ""
        yield f"{loader.kind}, {who}{size}{place}: {self.steps} steps"
        if not self.steps:
            return
        split = f": waits {in_duration(self.wait_s)}, is busy {in_duration(self.busy_s)}"
        yield f"a step takes {in_duration(self.step_s)}{'' if self.is_opaque else split}"
        if self.device_wait_s is not None and self.device_busy_s is not None:
            busy, wait = in_duration(self.device_busy_s), in_duration(self.device_wait_s)
            yield f"the GPU takes {busy} for a step, and has nothing to do for {wait} before it"
        if self.copies is not None:
            took, pinned = in_duration(self.copies.as_it_is_s), in_duration(self.copies.pinned_s)
            size = in_bytes(self.copies.nbytes)
            yield f"a batch of {size} is copied to the GPU in {took}, from pinned memory in {pinned}"
        if self.cases:
            yield "; ".join(f"{case.name} {in_duration(case.seconds)}" for case in self.cases)
        if self.alone is not None:
            alone, cpu_s = in_duration(self.alone.batch_s), self.alone.cpu_s
            cpu = "" if cpu_s is None else f", of {in_duration(cpu_s)} of processor"
            yield f"the loader alone makes a batch in {alone}{cpu}; {self.cores} cores"
        if self.epoch_start_s is not None:
            yield f"an epoch's first batch comes after {in_duration(self.epoch_start_s)}"
        if self.instant_s is None and self.seconds and not (self.is_cut_short or self.is_opaque):
            yield (
                "the script was over before a step with data at once was measured: more epochs, or a smaller "
                "--seconds, show that too"
            )
        if self.instant_s is not None and not (self.is_loader_bound or self.is_tried or self.is_opaque):
            yield (
                "--try (try_advice=True) measures what may make the step itself faster: larger batches, "
                "channels-last, bfloat16, torch.compile"
            )
