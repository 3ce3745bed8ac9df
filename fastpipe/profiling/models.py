"""Other ways to compute the same model, tried on a loop whose step takes the time, not its data.

Channels-last tensors, bfloat16 where the hardware has it, and ``torch.compile``: each is done to the models
that a step calls, in place, for as long as it is tried, and undone.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from fastpipe.core.text import in_duration
from fastpipe.profiling.candidate import in_parentheses
from fastpipe.profiling.findings import Advice
from fastpipe.profiling.replays import Replay
from fastpipe.profiling.watching import Watched

__all__ = ["ModelChanges", "SeenModels", "bfloat16_is_fast"]

_log = logging.getLogger("fastpipe.profile")
_GAIN = 1.1  # less is not worth other rounding, or the time to compile
_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}  # flags of processors, as Linux has them


class SeenModels:
    """Sees which models of torch's are called, until the first one is called again: that is another step.

    Attributes:
        is_mixed: whether the first one is called under ``torch.autocast``.
    """

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
        """See no more."""
        self._hook.remove()

    def outermost(self) -> list[Any]:
        """Models with something to train that no other one called as a part of itself."""
        parts = {id(part) for one in self._seen.values() for part in one.modules() if part is not one}
        return [
            one for at, one in self._seen.items()
            if at not in parts and any(parameter.requires_grad for parameter in one.parameters())
        ]  # fmt: skip


class _Change(NamedTuple):
    """A way to compute models that may be faster.

    Attributes:
        what: to change, in words.
        note: what else it changes.
        begin: does it to models; what it returns undoes that.
        may: whether it can be of use to them.
    """

    what: str
    note: str
    begin: Callable[[Sequence[Any]], AbstractContextManager[None]]
    may: Callable[[SeenModels], bool]


class ModelChanges:
    """What a step takes when its models are computed in other ways, each of them tried by itself.

    Args:
        batch: that the step gets, again and again.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._seen = SeenModels()
        self._left = list(_CHANGES)
        self._now: _Change | None = None  # None while the step is as it is
        self._undo = ExitStack()
        self._base_s = 0.0
        self._seconds: list[tuple[_Change, float]] = []

    def close(self) -> None:
        """Leave models as they were."""
        self._seen.end()
        self._undo.close()

    def next(self) -> Iterator[Any] | None:
        """The batch, for a step whose models are changed in the next way; None when there is no more."""
        self._undo.close()
        if not self._base_s:
            return Replay(self._batch)  # as it is, once more: what is tried is compared with now
        while self._left:
            self._now = self._left.pop(0)
            if not self._now.may(self._seen):
                continue
            try:
                self._undo.enter_context(self._now.begin(self._seen.outermost()))
            except Exception as error:  # whatever it is: the script's own model works
                _log.warning("not tried: %s: %s: %s", self._now.what, type(error).__name__, error)
                continue
            return Replay(self._batch)
        return None

    def note(self, seconds: float) -> None:
        """A step took so long."""
        if self._now is None:
            self._base_s = seconds
            self._seen.end()
        else:
            self._seconds.append((self._now, seconds))

    def failed(self, error: Exception) -> bool:
        """The step has raised; whether that may be for what was done to its models."""
        if self._now is not None:
            _log.warning("not tried to the end: %s: %s: %s", self._now.what, type(error).__name__, error)
        return self._now is not None

    def advice(self, watched: Watched, step_s: Callable[[float], float]) -> Iterator[Advice]:
        """Those that are worth it.

        Args:
            watched: the loop.
            step_s: of a step that takes so long with data at once, how long one takes with the loader.
        """
        for change, seconds in self._seconds:
            if self._base_s < _GAIN * seconds:
                continue
            before, after = in_duration(self._base_s), in_duration(seconds)
            yield Advice(
                f"{change.what}{in_parentheses(watched.used_at)}",
                f"a step with data at once takes {before} as it is, and {after} so; {change.note}",
                step_s(seconds), seconds,
            )  # fmt: skip


# ---- the ways ---------------------------------------------------------------------------------------


@contextmanager
def _channels_last(models: Sequence[Any]) -> Iterator[None]:
    """Weights of convolutions, and what the models are called with, have their channels last in memory."""
    formats = _formats()
    weights = [
        weight for model in models for weight in model.parameters()
        if weight.dim() in formats and weight.is_contiguous()
    ]  # fmt: skip

    def to_format(module: Any, args: Any, kwargs: Any) -> Any:
        return tuple(map(_last, args)), {name: _last(value) for name, value in kwargs.items()}

    hooks = [model.register_forward_pre_hook(to_format, with_kwargs=True) for model in models]
    try:
        for weight in weights:
            weight.data = _last(weight.data)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for weight in weights:
            weight.data = weight.data.contiguous()


def _last(value: Any) -> Any:
    formats = _formats()
    if getattr(value, "is_floating_point", None) is None or value.dim() not in formats:
        return value
    return value.contiguous(memory_format=formats[value.dim()])


def _formats() -> dict[int, Any]:
    """By dimensions of a tensor: the format that has its channels last."""
    torch = sys.modules["torch"]
    return {4: torch.channels_last, 5: torch.channels_last_3d}


def _may_be_channels_last(seen: SeenModels) -> bool:
    """Whether there are convolutions of images or volumes, all of them with their channels first."""
    convolution = sys.modules["torch"].nn.modules.conv._ConvNd
    weights = [
        part.weight for model in seen.outermost() for part in model.modules()
        if isinstance(part, convolution) and part.weight.dim() in _formats()
        and part.weight.shape[1] > 1 and max(part.weight.shape[2:]) > 1  # others are alike in both
    ]  # fmt: skip
    return bool(weights) and all(weight.is_contiguous() for weight in weights)


@contextmanager
def _mixed(models: Sequence[Any]) -> Iterator[None]:
    """The models run under ``torch.autocast`` with bfloat16."""
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


def _may_be_mixed(seen: SeenModels) -> bool:
    return not seen.is_mixed and any(bfloat16_is_fast(_device_of(model)) for model in seen.outermost())


def bfloat16_is_fast(device: str, flags: Iterable[str] | None = None) -> bool:
    """Whether a device computes bfloat16 itself.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        flags: of the processor; left out, those that Linux tells.

    >>> bfloat16_is_fast("cpu", ["avx2", "avx512_bf16"]), bfloat16_is_fast("cpu", ["avx2"])
    (True, False)
    """
    if device == "cuda":
        return bool(sys.modules["torch"].cuda.is_bf16_supported(including_emulation=False))
    return not _BFLOAT16.isdisjoint(_processor_flags() if flags is None else flags)


def _processor_flags() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return next((line.split() for line in lines if line.startswith(("flags", "Features"))), [])


@contextmanager
def _compiled(models: Sequence[Any]) -> Iterator[None]:
    """The models are compiled, in this process: their compiler's own ones would stay."""
    from torch._inductor import config  # takes seconds, and few get here

    with config.patch(compile_threads=1):
        try:
            for model in models:
                model.compile()
            yield
        finally:
            for model in models:
                vars(model).pop("_compiled_call_impl", None)


def _may_be_compiled(seen: SeenModels) -> bool:
    """Whether there is what compiles them, and they are not compiled yet."""
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
        "results differ by bfloat16's rounding: compare what it learns",
        _mixed, _may_be_mixed,
    ),
    _Change(
        "compile: model.compile(), or torch.compile(model)",
        "results differ by rounding, and the first steps take as long as compiling does",
        _compiled, _may_be_compiled,
    ),
)  # fmt: skip
