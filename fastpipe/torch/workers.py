"""What happens in a worker process before and beside torch's own loop."""

from __future__ import annotations

from collections.abc import Callable

from torch.utils.data import get_worker_info

from fastpipe.torch.fetching import UsersDataset

__all__ = ["WorkerInit"]


class WorkerInit:
    """Worker init: ``WorkerInfo.dataset`` is the user's dataset before their function runs."""

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self._function = function

    def __call__(self, worker_id: int) -> None:
        worker = get_worker_info()
        if worker is not None and isinstance(worker.dataset, UsersDataset):
            object.__setattr__(worker, "dataset", worker.dataset.dataset)
        if self._function is not None:
            self._function(worker_id)
