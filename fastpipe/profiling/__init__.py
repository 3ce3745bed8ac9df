"""Where the time of a training goes, and what would change that."""

from fastpipe._epochs import EpochTimes
from fastpipe.profiling.epochs import WatchedLoader, watch
from fastpipe.profiling.findings import Advice
from fastpipe.profiling.public import Profiling, profile
from fastpipe.profiling.report import Report

__all__ = ["Advice", "EpochTimes", "Profiling", "Report", "WatchedLoader", "profile", "watch"]
