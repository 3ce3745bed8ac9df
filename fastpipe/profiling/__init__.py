"""Where the time of a training goes, what would change that, and which settings are best here."""

from fastpipe.core.epoch_times import EpochTimes
from fastpipe.core.extras import load_rich

load_rich()  # before the modules below, which show tables

from fastpipe.profiling.epochs import WatchedLoader, watch  # noqa: E402
from fastpipe.profiling.findings import Advice  # noqa: E402
from fastpipe.profiling.public import Profiling, profile  # noqa: E402
from fastpipe.profiling.report import Report  # noqa: E402
from fastpipe.profiling.tuning import autotune, autotune_batch_size  # noqa: E402

__all__ = [
    "Advice", "EpochTimes", "Profiling", "Report", "WatchedLoader", "autotune", "autotune_batch_size",
    "profile", "watch",
]  # fmt: skip
