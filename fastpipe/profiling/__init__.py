"""Where the time of a training goes, what would change that, and which settings are best here."""

from fastpipe._epochs import EpochTimes
from fastpipe.profiling.epochs import WatchedLoader, watch
from fastpipe.profiling.findings import Advice
from fastpipe.profiling.public import Profiling, profile
from fastpipe.profiling.report import Report
from fastpipe.profiling.tuning import autotune, autotune_batch_size

__all__ = [
    "Advice", "EpochTimes", "Profiling", "Report", "WatchedLoader", "autotune", "autotune_batch_size",
    "profile", "watch",
]  # fmt: skip
