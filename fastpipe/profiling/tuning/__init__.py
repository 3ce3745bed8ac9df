"""Settings of a loader, and batch sizes, found by measuring."""

from fastpipe.profiling.tuning.batch_sizes import autotune_batch_size
from fastpipe.profiling.tuning.tuning import autotune

__all__ = ["autotune", "autotune_batch_size"]
