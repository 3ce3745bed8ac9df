"""Common code of the peers that augment: one process does several tasks, chosen by the request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.peers.children.protocol import AugmentJob, Batches, PeerError, Stream, augment_problem

__all__ = ["Make", "Work", "labels_of", "photos_of", "spectrograms_of", "stream_of", "volume_stream"]


Work = Callable[[], Any]
# Of a recipe's name and the dtype before it.
Make = Callable[[str, str], Work]
# Of a volume and its labels, to those afterwards.
Change = Callable[[Any, Any], tuple[Any, Any]]


class _Chosen:
    """Does the task that was chosen last."""

    def __init__(self, job: AugmentJob, make: Make) -> None:
        self._job, self._make = job, make
        self._made: dict[str, Work] = {}
        self.choose(job.tasks[0])

    def choose(self, task: str) -> None:
        if task not in self._made:
            try:
                work = self._make(*task.rsplit("-", 1))
                problem = augment_problem(self._job, task, on_host(work()))
            except Exception as error:  # whatever it stumbles over
                raise PeerError(f"{task}: {type(error).__name__}: {error}") from None
            if problem:
                raise PeerError(problem)
            self._made[task] = work
        self._work = self._made[task]

    def batches(self) -> Batches:
        while True:
            yield self._work(), None


def stream_of(
    job: AugmentJob, make: Make, packages: Sequence[str], wait: Callable[[], None] | None = None
) -> Stream:
    """A stream of the batches of whichever task was chosen.

    Args:
        job: what is asked for.
        make: makes of a recipe's name and a dtype what augments the batch once.
        packages, wait: as of `Stream`.

    Raises:
        PeerError: it cannot do the first task.
    """
    chosen = _Chosen(job, make)
    return Stream(chosen.batches(), 0, packages, choose=chosen.choose, wait=wait)


def on_host(batch: Any) -> Any:
    """The images of a batch as an array, wherever they are."""
    images = batch[0] if isinstance(batch, (list, tuple)) else batch
    return images if isinstance(images, np.ndarray) else images.cpu().numpy()


def photos_of(job: AugmentJob) -> Any:
    """The photos, uint8 (N, 3, H, W), as a tensor on the job's device."""
    import torch

    return torch.from_numpy(np.load(job.photos)).to(job.device)


def spectrograms_of(job: AugmentJob) -> Any:
    """The spectrograms, float32 (N, F, T), as a tensor on the job's device."""
    import torch

    return torch.from_numpy(np.load(job.spectrograms)).to(job.device)


def volume_stream(job: AugmentJob, make: Callable[[Any], Change], packages: Sequence[str]) -> Stream:
    """A stream of batches of volumes and labels, changed pair by pair.

    Args:
        job: what is asked for; ``options["one_thread"]`` as workers of a loader have it.
        make: of the volumes' size, (D, H, W), what changes a volume, float32 (1, D, H, W), which it may
            change, and its labels, int16 (1, D, H, W).
        packages: as of `Stream`.

    Raises:
        PeerError: it cannot do that.
    """
    import torch

    torch.set_num_threads(1 if job.options.get("one_thread") else job.threads)
    torch.set_grad_enabled(False)
    volumes = torch.from_numpy(np.load(job.volumes))
    labels = torch.from_numpy(np.load(job.labels_of_volumes))[:, None].short()  # which it is in nnU-Net

    def of_recipe(recipe: str, dtype: str) -> Work:
        change = make(volumes.shape[2:])

        def work() -> Any:
            pairs = [change(volume.clone(), label) for volume, label in zip(volumes, labels, strict=True)]
            return tuple(torch.stack(column) for column in zip(*pairs, strict=True))

        return work

    return stream_of(job, of_recipe, packages)


def labels_of(job: AugmentJob) -> Any:
    """Numbers of classes, one for each sample."""
    import torch

    return torch.arange(job.batch_size, device=job.device) % job.classes
