"""Threads that regularly record what other threads and the GPU do."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from statistics import fmean
from types import CodeType, FrameType
from typing import Any, NamedTuple

from fastpipe.tools.stacks import Boundary, Line, Stacks, current_stacks, native_ids
from fastpipe.tools.thread_times import NOTHING, Spent, ThreadClock

OUTSIDE = "outside"  # kind of the samples that are taken outside of loops over loaders

_INTERVAL_S = 0.005  # a sample costs about 30 µs
_GPU_INTERVAL_S = 0.5
_TELL_S = 0.5
_END_S = 1.0


class SamplingThread:
    def __init__(
        self, name: str, interval_s: float, sample: Callable[[bool], object], close: Callable[[], object]
    ) -> None:
        self._interval_s = interval_s
        self._sample: Callable[[bool], object] | None = sample
        self._close: Callable[[], object] | None = close
        # A signal handler may raise anywhere in `stop`.  A queue stays usable then, unlike an event.
        self._ending: SimpleQueue[None] = SimpleQueue()
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Take a last sample and end the thread.

        If ``stop`` was interrupted, call it again.  A call from the thread itself does not wait for the end.
        """
        self._ending.put(None)
        if self._thread.ident is None or self._thread is threading.current_thread():
            return
        if not self._is_over:
            self._ended.get()
        # A thread that runs at the interpreter's exit may abort the process.  The thread ends soon.  The
        # timeout is for the case that a signal handler's exception has left the thread's lock held.
        self._thread.join(_END_S)
        self._sample = self._close = None  # they refer to the owner of this object

    def _run(self) -> None:
        sample, close = self._sample, self._close
        assert sample is not None and close is not None
        try:
            is_last = False
            while not is_last:
                with contextlib.suppress(Empty):
                    self._ending.get(timeout=self._interval_s)
                    is_last = True
                sample(is_last)
        finally:
            close()
            self._is_over = True
            self._ended.put(None)


class Tally(dict[tuple[str, str, Line], Spent]):
    def add(self, kind: str, stage: str, line: Line, spent: Spent) -> None:
        self[kind, stage, line] = self.get((kind, stage, line), NOTHING).plus(spent)

    def stages(self, kind: str) -> dict[str, Spent]:
        found: dict[str, Spent] = {}
        for (one, stage, _), spent in list(self.items()):
            if one == kind:
                found[stage] = found.get(stage, NOTHING).plus(spent)
        return found

    def lines(self, *kinds: str) -> list[tuple[Line, str, Spent]]:
        found: dict[tuple[Line, str], Spent] = {}
        for (kind, stage, line), spent in list(self.items()):
            if kind in kinds:
                found[line, stage] = found.get((line, stage), NOTHING).plus(spent)
        return sorted(((*key, spent) for key, spent in found.items()), key=lambda one: -one[2].wall)


class Recorder:
    """A thread that regularly records the stack and the times of all other threads, or only of ``threads``.

    Each record has a kind of work, such as "dataset".  ``boundaries`` contains functions with their kinds: a
    record has a function's kind if the function is in the recorded stack.  ``kind`` returns the kind of all
    other records.  A record counts only if ``counts`` returns True at that time.
    """

    def __init__(
        self, boundaries: dict[CodeType, Boundary], threads: list[int] | None = None,
        tell: Callable[[], None] | None = None, *, kind: Callable[[], str] = str,
        counts: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        self.tally = Tally()
        self.outside: dict[tuple[str, str], int] = {}
        self.own_cpu_ns = 0
        self._stacks = Stacks(boundaries)
        self._threads, self._tell, self._kind, self._counts = threads, tell, kind, counts
        self._clocks: dict[int, tuple[ThreadClock, Spent]] = {}
        self._told_s = time.monotonic()
        self._thread = SamplingThread("fastpipe-profile", _INTERVAL_S, self._tell_now, self._close)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._thread.stop()
        self._kind, self._tell, self._counts = str, None, bool  # they refer to the owner of this recorder

    def _tell_now(self, is_last: bool) -> None:
        self._sample()
        self.own_cpu_ns = time.thread_time_ns()
        now = time.monotonic()  # by time, because samples are rare if all cores are busy
        if self._tell is not None and (is_last or now >= self._told_s + _TELL_S):
            self._told_s = now
            self._tell()

    def _close(self) -> None:
        for clock, _ in self._clocks.values():
            clock.close()

    def _sample(self) -> None:
        # All stacks are read first, because the threads continue while clocks are read.
        stacks = current_stacks(self._threads)
        try:
            self._count(stacks)
        finally:
            # Two recorders may see each other's frames.  This reference cycle would keep the iterators of
            # loaders alive.  If the garbage collector then frees one, each of its workers ends after 5 s.
            for stack in stacks.values():
                stack.clear()

    def _count(self, stacks: Mapping[int, Sequence[FrameType]]) -> None:
        natives = native_ids()
        for ident, stack in stacks.items():
            if ident not in natives:  # the thread has ended
                continue
            clock, before = self._clock(ident, natives[ident])
            now = clock.read()
            self._clocks[ident] = clock, now
            if not self._counts():
                continue
            below, stage, line = self._stacks.look(stack)
            kind = below or self._kind()
            self.tally.add(kind, stage, line, now - before)
            if kind == OUTSIDE:
                for function in self._stacks.functions(stack):
                    self.outside[function] = self.outside.get(function, 0) + (now - before).wall

    def _clock(self, ident: int, native: int) -> tuple[ThreadClock, Spent]:
        found = self._clocks.get(ident)
        if found is not None and found[0].native_id != native:  # a new thread reuses the ident
            found[0].close()
            found = None
        if found is None:
            clock = ThreadClock(native)
            found = self._clocks[ident] = clock, clock.read()
        return found


class GPUUse(NamedTuple):
    gpu_utilisation: float
    gpu_memory_utilisation: float
    pcie_bytes_per_second: float | None


class GPUSampler:
    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._rates: list[tuple[float, float]] = []
        self._received: list[float] = []
        self._thread = SamplingThread("fastpipe-gpu", _GPU_INTERVAL_S, self._sample, self._close)

    @classmethod
    def begin(cls) -> GPUSampler | None:
        try:
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
        except Exception:  # there is no package or no driver
            return None
        with contextlib.ExitStack() as undo:
            undo.callback(nvml.nvmlShutdown)
            try:
                sampler = cls(nvml, _handle(nvml))
            except nvml.NVMLError:
                return None
            sampler._thread.start()
            undo.pop_all()
        return sampler

    def stop(self) -> GPUUse | None:
        self._thread.stop()
        if not self._rates:
            return None
        gpu, memory = (fmean(values) for values in zip(*self._rates, strict=True))
        return GPUUse(gpu, memory, fmean(self._received) if self._received else None)

    def _close(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _sample(self, is_last: bool) -> None:
        # NVML's figures are about the time before the call, so the last sample counts, too.
        nvml = self._nvml
        with contextlib.suppress(nvml.NVMLError):  # the device does not support it
            rates = nvml.nvmlDeviceGetUtilizationRates(self._handle)
            self._rates.append((rates.gpu / 100, rates.memory / 100))
        with contextlib.suppress(nvml.NVMLError):
            # The unit is KB/s.  The call measures for 20 ms.
            received = nvml.nvmlDeviceGetPcieThroughput(self._handle, nvml.NVML_PCIE_UTIL_RX_BYTES)
            self._received.append(received * 1024.0)


def _handle(nvml: Any) -> Any:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    current = 0
    if cuda is not None and cuda.is_initialized():
        current = cuda.current_device()
        identity = getattr(cuda.get_device_properties(current), "uuid", None)
        if identity is not None:
            return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{identity}")
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    name = visible[current] if current < len(visible) and visible[current] else str(current)
    if name.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)
