"""Tools for trainings: profile, watch, autotune, and commands such as doctor, verify and scan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastpipe.core.extras import load_part, load_rich

if TYPE_CHECKING:
    from fastpipe.core.epoch_times import EpochTimes
    from fastpipe.tools.batch_sizes import BatchSizes, autotune_batch_size
    from fastpipe.tools.epochs import WatchedLoader, watch
    from fastpipe.tools.profiler import Profiling, profile
    from fastpipe.tools.report import Advice, Report
    from fastpipe.tools.tuning import Tuning, autotune

__all__ = [
    "Advice", "BatchSizes", "EpochTimes", "Profiling", "Report", "Tuning", "WatchedLoader", "autotune",
    "autotune_batch_size", "profile", "watch",
]  # fmt: skip

_LAZY = {
    "EpochTimes": "fastpipe.core.epoch_times",
    **dict.fromkeys(("Advice", "Report"), "fastpipe.tools.report"),
    **dict.fromkeys(("BatchSizes", "autotune_batch_size"), "fastpipe.tools.batch_sizes"),
    **dict.fromkeys(("Profiling", "profile"), "fastpipe.tools.profiler"),
    **dict.fromkeys(("Tuning", "autotune"), "fastpipe.tools.tuning"),
    **dict.fromkeys(("WatchedLoader", "watch"), "fastpipe.tools.epochs"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'fastpipe.tools' has no attribute {name!r}")
    load_rich()  # before the modules, which need rich: the error names the pip command
    value = getattr(load_part(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
