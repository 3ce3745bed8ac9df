"""fastpipe's dataset in the place of one of the script's own that opens an image for each sample."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import fastpipe
from fastpipe.profiling.candidate import Candidate, place_of
from fastpipe.profiling.costs import LoaderCosts
from fastpipe.profiling.forms import same_form
from fastpipe.profiling.replays import rebuilt
from fastpipe.profiling.stages import DECODE, OTHER, READ, TRANSFORM
from fastpipe.profiling.timed import Account
from fastpipe.profiling.times import NOTHING, Spent
from fastpipe.profiling.watching import Watched, is_map_style

__all__ = ["of_images"]

_log = logging.getLogger("fastpipe.profile")
_MOST_SAMPLES = 1 << 16  # of which a measurement takes a few thousand
_MUCH = 0.1  # of a batch's time
_FEW, _MANY = 0.9, 1.1  # images for a sample, where each has one


def of_images(watched: Watched, costs: LoaderCosts, accounts: Sequence[Account]) -> Iterator[Candidate]:
    """``FastImageFolder.from_samples``, where the script's dataset opens an image for each sample with
    Pillow, and has a transform of torchvision's that makes what is in the batch of it."""
    dataset, size = watched.loader.dataset, watched.batch_size
    files = list(dict.fromkeys(file for account in accounts for file in account.images))
    opened = sum(account.opened for account in accounts) / max(1, sum(one.samples for one in accounts))
    transform = _transform_of(dataset)
    if (
        transform is None or not files or not _FEW < opened < _MANY
        or size is None or not is_map_style(dataset)
    ):  # fmt: skip
        return
    count = max(size, min(len(dataset), _MOST_SAMPLES))
    try:
        ours = fastpipe.FastImageFolder.from_samples(
            [(file, 0) for file in itertools.islice(itertools.cycle(files), count)], transform, cache="off"
        )
        fast: Any = fastpipe.FastLoader(ours, size, shuffle=True, drop_last=True)
        batch = watched.loop.batch
        theirs = _images_in(batch, ours[0][0])
    except Exception as error:  # the transform is the script's, and may want what its dataset alone gives
        _log.info("not measured: FastImageFolder.from_samples: %s: %s", type(error).__name__, error)
        return
    if theirs is None:
        return

    def begin() -> Iterator[Any]:
        for images, _ in fast:
            yield rebuilt(batch, lambda leaf, images=images: images if leaf is theirs else leaf)  # type: ignore[misc]

    shares = costs.shares()
    share = sum(shares.get(stage, 0.0) for stage in (READ, DECODE, TRANSFORM))
    yield Candidate(
        "read images by fastpipe: FastImageFolder.from_samples([(file, target), …], transform) and FastLoader"
        f"{place_of(watched)}",
        f"reading, decoding and transforming them takes {share:.0%} of a batch's time; measured on "
        f"{len(files)} of your images, with your transform, without a cache",
        begin, rest=_rest(costs), close=ours.close,
    )  # fmt: skip


def _transform_of(dataset: Any) -> Any:
    """The transform of torchvision's among a dataset's attributes; None where it is not clear which."""
    if isinstance(dataset, sys.modules["torch.utils.data"].Subset):
        return _transform_of(dataset.dataset)
    found = {
        name: value
        for name, value in getattr(dataset, "__dict__", {}).items()
        if type(value).__module__.startswith("torchvision.transforms")
    }
    if "transform" in found or len(found) != 1:
        return found.get("transform")
    return next(iter(found.values()))


def _images_in(batch: Any, sample: Any) -> Any:
    """What of a batch has been made of such samples, the first of several; None where nothing has."""
    found: list[Any] = []

    def look(leaf: Any) -> Any:
        if not found and hasattr(leaf, "shape") and len(leaf.shape) and same_form(leaf, sample[None]):
            found.append(leaf)
        return leaf

    if hasattr(sample, "shape"):
        rebuilt(batch, look)
    return found[0] if found else None


def _rest(costs: LoaderCosts) -> Spent | None:
    """What the dataset does besides, and its waiting for storage, as these images are in memory by now; if
    that is much."""
    other = costs.stages.get(OTHER, NOTHING)
    rest = other.plus(Spent(int(costs.read_idle_s * 1e9), 0, 0))
    return rest if rest.wall > _MUCH * costs.wall_s * 1e9 else None
