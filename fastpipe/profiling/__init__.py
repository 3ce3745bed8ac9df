"""Where the time of a training goes, what would change that, and which settings are best here."""

from fastpipe.profiling.findings import Advice
from fastpipe.profiling.public import Profiling, profile
from fastpipe.profiling.report import Report
from fastpipe.profiling.tuning import autotune, autotune_batch_size

__all__ = ["Advice", "Profiling", "Report", "autotune", "autotune_batch_size", "profile"]
