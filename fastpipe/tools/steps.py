"""Try changes that may make training steps faster: other ways to compute a model, and larger batches.

A change of a model is made in place, to the models that a step calls.  The steps are measured with it, and
then the change is undone.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from fastpipe.core.machine import free_memory
from fastpipe.core.text import in_duration
from fastpipe.errors import OptionError
from fastpipe.tools.batches import Replay, leaves, resized, size_of
from fastpipe.tools.loaders import Watched
from fastpipe.tools.report import Advice

_log = logging.getLogger("fastpipe.profile")
_MODEL_GAIN = 1.1  # a smaller gain does not justify other rounding, or compile time
_BATCH_GAIN = 1.25  # gain in samples per second with twice the batch: a smaller gain does not count
_FACTORS = (2, 4)
_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}  # processor flags in /proc/cpuinfo
_PART = 0.9  # fraction of the free memory
_SELF = Path("/proc/self")
_SHORTAGES = (
    "out of memory", "can't allocate memory", "cublas_status_alloc_failed", "cudnn_status_alloc_failed",
)  # fmt: skip
_SHORTAGE_OF_TENSORFLOW = "ResourceExhaustedError"


def torch_of(batch: Any) -> Any:
    torch = sys.modules.get("torch")  # torch is imported if the batch contains tensors
    has_tensors = torch is not None and any(isinstance(one, torch.Tensor) for one in leaves(batch))
    return torch if has_tensors else None


class SeenModels:
    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}
        self.is_mixed = False
        self._hook = sys.modules["torch"].nn.modules.module.register_module_forward_pre_hook(self._see)

    def _see(self, module: Any, _: Any) -> None:
        if not self._seen:
            self.is_mixed = bool(sys.modules["torch"].is_autocast_enabled(_device_of(module)))
        elif module is next(iter(self._seen.values())):
            self.end()
        self._seen[id(module)] = module

    def end(self) -> None:
        self._hook.remove()

    def outermost(self) -> list[Any]:
        parts = {id(part) for one in self._seen.values() for part in one.modules() if part is not one}
        return [
            one for at, one in self._seen.items()
            if at not in parts and any(parameter.requires_grad for parameter in one.parameters())
        ]  # fmt: skip


class _Change(NamedTuple):
    what: str
    note: str
    begin: Callable[[Sequence[Any]], AbstractContextManager[None]]
    may: Callable[[SeenModels], bool]


class ModelChanges:
    def __init__(self, batch: Any, say: Callable[[str], object] = lambda _: None) -> None:
        self._batch, self._say = batch, say
        self._now: _Change | None = None  # None while the step is unchanged
        self._base_s = 0.0
        self._seconds: list[tuple[_Change, float]] = []

    def phases(self, measured: Callable[[], float]) -> Iterator[Iterator[Any]]:
        """Yield an iterator of batches for steps without a change, then an iterator for each change.

        ``measured`` must return the seconds of a step with the batches of the last iterator.
        """
        seen = SeenModels()
        try:
            yield Replay(self._batch)  # measured again, because the speed may have changed
        finally:
            seen.end()
        self._base_s = measured()
        for change in _CHANGES:
            if not change.may(seen):
                continue
            with ExitStack() as undo:
                try:
                    undo.enter_context(change.begin(seen.outermost()))
                except Exception as error:  # any error is ignored: the script's own model works
                    _log.warning("not tried: %s: %s: %s", change.what, type(error).__name__, error)
                    continue
                self._now = change
                self._say(f"trying in the loop: {change.what}")
                yield Replay(self._batch)
                self._seconds.append((change, measured()))

    def failed(self, error: Exception) -> bool:
        if self._now is not None:
            _log.warning("not tried to the end: %s: %s: %s", self._now.what, type(error).__name__, error)
        return self._now is not None

    def advice(self, watched: Watched, step_s: Callable[[float], float]) -> Iterator[Advice]:
        """Yield advice for the changes that make steps clearly faster.

        ``step_s(seconds)`` predicts the time of a step with the loader, if a step takes ``seconds`` when its
        batch is available at once.
        """
        for change, seconds in self._seconds:
            if self._base_s < _MODEL_GAIN * seconds:
                continue
            before, after = in_duration(self._base_s), in_duration(seconds)
            yield Advice(
                f"{change.what}{watched.used_at.in_parentheses}",
                f"a step with data ready takes {before} unchanged, and {after} with this change; "
                f"{change.note}",
                step_s(seconds),
            )  # fmt: skip


@contextmanager
def _channels_last(models: Sequence[Any]) -> Iterator[None]:
    formats = _formats()
    weights = [
        weight for model in models for weight in model.parameters()
        if weight.dim() in formats and weight.is_contiguous()
    ]  # fmt: skip

    def last(value: Any) -> Any:
        if getattr(value, "is_floating_point", None) is None or value.dim() not in formats:
            return value
        return value.contiguous(memory_format=formats[value.dim()])

    def to_format(module: Any, args: Any, kwargs: Any) -> Any:
        return tuple(map(last, args)), {name: last(value) for name, value in kwargs.items()}

    hooks = [model.register_forward_pre_hook(to_format, with_kwargs=True) for model in models]
    try:
        for weight in weights:
            weight.data = last(weight.data)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for weight in weights:
            weight.data = weight.data.contiguous()


def _formats() -> dict[int, Any]:
    torch = sys.modules["torch"]
    return {4: torch.channels_last, 5: torch.channels_last_3d}


def _may_be_channels_last(seen: SeenModels) -> bool:
    convolution = sys.modules["torch"].nn.modules.conv._ConvNd
    weights = [
        part.weight for model in seen.outermost() for part in model.modules()
        if isinstance(part, convolution) and part.weight.dim() in _formats()
        and part.weight.shape[1] > 1 and max(part.weight.shape[2:]) > 1  # others do not depend on the format
    ]  # fmt: skip
    return bool(weights) and all(weight.is_contiguous() for weight in weights)


@contextmanager
def _mixed(models: Sequence[Any]) -> Iterator[None]:
    torch = sys.modules["torch"]

    def under(forward: Any, device: str) -> Any:
        @functools.wraps(forward)
        def mixed(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device, dtype=torch.bfloat16):
                return forward(*args, **kwargs)

        return mixed

    before = [(model, vars(model).get("forward")) for model in models]
    try:
        for model in models:
            model.forward = under(model.forward, _device_of(model))
        yield
    finally:
        for model, own in before:
            vars(model).pop("forward", None)
            if own is not None:
                model.forward = own


def bfloat16_is_fast(device: str, flags: Iterable[str] | None = None) -> bool:
    if device == "cuda":
        return bool(sys.modules["torch"].cuda.is_bf16_supported(including_emulation=False))
    return not _BFLOAT16.isdisjoint(_processor_flags() if flags is None else flags)


def _processor_flags() -> list[str]:
    return _words(Path("/proc/cpuinfo"), "flags", "Features")


def _words(path: Path, *starts: str) -> list[str]:
    with contextlib.suppress(OSError):
        lines = path.read_text().splitlines()
        return next((line.split() for line in lines if line.startswith(starts)), [])
    return []


@contextmanager
def _compiled(models: Sequence[Any]) -> Iterator[None]:
    """Compile the models in this process, because compiler processes would not end."""
    from torch._inductor import config  # imported here, because the import is slow

    with config.patch(compile_threads=1):
        try:
            for model in models:
                model.compile()
            yield
        finally:
            for model in models:
                vars(model).pop("_compiled_call_impl", None)


def _may_be_compiled(seen: SeenModels) -> bool:
    models = seen.outermost()
    optimized = getattr(getattr(sys.modules["torch"], "_dynamo", None), "OptimizedModule", ())
    parts = [part for model in models for part in model.modules()]
    if any(getattr(part, "_compiled_call_impl", None) or isinstance(part, optimized) for part in parts):
        return False
    if any(_device_of(model) == "cuda" for model in models):
        return find_spec("triton") is not None
    return bool(models) and any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++")))


def _device_of(module: Any) -> str:
    first = next(iter(module.parameters()), None)
    return "cpu" if first is None else str(first.device.type)


_CHANGES = (
    _Change(
        "channels-last: model = model.to(memory_format=torch.channels_last), of volumes channels_last_3d, "
        "and the same of its inputs",
        "results differ by rounding",
        _channels_last, _may_be_channels_last,
    ),
    _Change(
        "mixed precision: with torch.autocast(device_type, dtype=torch.bfloat16): around model and loss",
        "results differ by bfloat16's rounding: compare the trained models",
        _mixed,
        lambda seen: not seen.is_mixed and any(bfloat16_is_fast(_device_of(one)) for one in seen.outermost()),
    ),
    _Change(
        "compile: model.compile(), or torch.compile(model)",
        "results differ by rounding, and the first steps include compilation",
        _compiled, _may_be_compiled,
    ),
)  # fmt: skip


class DeviceMemory:
    def __init__(self, batch: Any, budget: int | None) -> None:
        torch = torch_of(batch)
        self._cuda: Any = torch.cuda if torch is not None and torch.cuda.is_available() else None
        self.limit: int | None = budget
        free, now = free_memory(), _status("VmRSS")
        if budget is None and self._cuda is not None:
            self.limit = int(_PART * (self._cuda.mem_get_info()[0] + self._cuda.memory_reserved()))
        elif budget is None and free is not None and now is not None:
            self.limit = now + int(_PART * free)

    def begin(self) -> None:
        if self._cuda is not None:
            self._cuda.reset_peak_memory_stats()
        else:
            with contextlib.suppress(OSError):
                (_SELF / "clear_refs").write_text("5")

    def peak(self) -> int | None:
        return _status("VmHWM") if self._cuda is None else int(self._cuda.max_memory_reserved())

    def synchronize(self) -> None:
        if self._cuda is not None:
            self._cuda.synchronize()

    def release(self) -> None:
        gc.collect()
        if self._cuda is not None:
            self._cuda.empty_cache()

    @staticmethod
    def is_shortage(error: Exception) -> bool:
        if isinstance(error, MemoryError) or type(error).__name__ == _SHORTAGE_OF_TENSORFLOW:
            return True
        text = str(error).lower()
        return isinstance(error, RuntimeError) and any(words in text for words in _SHORTAGES)


def _status(name: str) -> int | None:
    words = _words(_SELF / "status", f"{name}:")
    return int(words[1]) << 10 if words else None


class Growth:
    def __init__(
        self, batch: Any, instant_s: float, say: Callable[[str], object] = lambda _: None
    ) -> None:  # fmt: skip
        self._batch, self._instant_s, self._size, self._say = batch, instant_s, size_of(batch), say
        self._factor = 0
        self._seconds: dict[int, float] = {}

    def phases(self, measured: Callable[[], float]) -> Iterator[Iterator[Any]]:
        memory, before = DeviceMemory(self._batch, None), self._instant_s
        for factor in _FACTORS:
            peak = memory.peak()
            if peak is None or memory.limit is None or factor * peak > memory.limit:
                return
            try:
                larger = resized(self._batch, factor * self._size)
            except (OptionError, IndexError, TypeError):  # the batch has an unknown kind
                return
            self._factor = factor
            self._say(f"trying in the loop: batches of {factor * self._size}")
            yield Replay(larger)
            now = self._seconds[factor] = measured()
            if 2 * before / now <= _BATCH_GAIN:  # not clearly more samples per second
                return
            before = now

    def failed(self, error: Exception) -> bool:
        if self._factor:
            _log.warning("not tried: a larger batch: %s: %s", type(error).__name__, error)
        return bool(self._factor)

    def advice(self, watched: Watched, step_s: Callable[[float], float]) -> Iterator[Advice]:
        gains = {
            factor: factor * self._instant_s / seconds if seconds else 0.0
            for factor, seconds in self._seconds.items()
        }
        factor = max(gains, key=lambda one: gains[one], default=0)
        if not factor or gains[factor] <= _BATCH_GAIN:
            return
        size, seconds = self._size, self._seconds[factor]
        now, then = in_duration(self._instant_s), in_duration(seconds)
        yield Advice(
            f"batch_size={factor * size} instead of {size}{watched.place}; "
            f"{learning_rate_rule(factor)}",
            f"for the same number of samples; a step with {factor}× as many takes {then} instead of {now}, "
            "both with data ready, and memory was sufficient",
            step_s(seconds / factor),
        )  # fmt: skip


def learning_rate_rule(factor: float) -> str:
    return (
        f"learning rate × {factor:g} for SGD (Goyal et al. 2017, arXiv:1706.02677), "
        f"× {math.sqrt(factor):.3g} for Adam (Malladi et al. 2022, arXiv:2205.10287)"
    )
