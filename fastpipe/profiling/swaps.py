"""fastpipe's datasets and loaders in the place of a script's own."""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import fastpipe
from fastpipe.errors import FastpipeError
from fastpipe.profiling.arrays_read import ArrayRead
from fastpipe.profiling.candidate import Candidate, place_of
from fastpipe.profiling.costs import LoaderCosts
from fastpipe.profiling.images_read import ImageRead, ImageReads
from fastpipe.profiling.stacks import Line
from fastpipe.profiling.stages import DECODE, GRAPH, OTHER, READ, TRANSFORM
from fastpipe.profiling.times import NOTHING, Spent
from fastpipe.profiling.volumes_open import OpenVolume
from fastpipe.profiling.watching import Watched

__all__ = ["accelerated", "of_folders", "of_rows", "of_tables", "of_volumes"]

_MUCH = 0.1  # of a batch's time
_MOST_OF_VOLUME = 0.25  # that a patch is: of more, reading parts is not the point


def of_folders(watched: Watched, costs: LoaderCosts) -> Iterator[Candidate]:
    """fastpipe's loader over the same dataset, where it makes the batches itself."""
    place, dataset = place_of(watched), type(watched.loader.dataset).__name__
    shares = ", ".join(f"{stage} {share:.0%}" for stage, share in list(costs.shares().items())[:3])
    ways: list[tuple[str, str, dict[str, Any]]] = [
        ("fastpipe.accelerate(loader), or FastImageFolder and FastLoader", "", {}),
        (
            'fastpipe.accelerate(loader, augment="auto")',
            "; other draws of the same augmentation",
            {"augment": "split"},
        ),
    ]
    if _uses_cuda():
        ways.append((
            'fastpipe.accelerate(loader, augment="auto", device="cuda")',
            "; other draws of the same augmentation, made on the GPU",
            {"augment": "split", "device": "cuda"},
        ))  # fmt: skip
    for way, note, options in ways:
        fast = accelerated(watched.loader, options)
        if fast is None or not hasattr(fast, "clock"):  # which it has where fastpipe makes the batches
            return
        yield Candidate(
            f"let fastpipe make the batches of {dataset}: {way}{place}",
            f"measured on batches of yours, of whose time goes now: {shares}{note}",
            fast.__iter__,
        )


def accelerated(loader: Any, options: dict[str, Any]) -> Any:
    """fastpipe's loader in a loader's place; None where there can be none with such options."""
    try:
        return fastpipe.accelerate(loader, **options)
    except (FastpipeError, TypeError):
        return None


def of_rows(watched: Watched, costs: LoaderCosts, arrays: Sequence[ArrayRead]) -> Iterator[Candidate]:
    """fastpipe's dataset of HDF5 rows, where the script's reads a row of each array for a sample."""
    files, size = sorted({read.file for read in arrays}), watched.batch_size
    dims = {read.sample_dims for read in arrays}
    if len(files) != 1 or len(dims) != 1 or size is None or (dim := dims.pop()) is None:
        return
    names = list(dict.fromkeys(read.name.lstrip("/") for read in arrays))
    try:
        dataset = fastpipe.FastHDF5Dataset(files[0], names, sample_dims=dim)
        fast: Any = fastpipe.FastLoader(dataset, size, shuffle=watched.is_shuffled)
    except (FastpipeError, OSError, KeyError):
        return
    more = "" if dim == 1 else f", sample_dims={dim}"
    told = (
        f"FastHDF5Dataset({os.path.basename(files[0])!r}, {names!r}{more}) and FastLoader{place_of(watched)}"
    )
    yield from _with_rest(costs, f"read rows by fastpipe: {told}", "file", fast)


def of_volumes(watched: Watched, costs: LoaderCosts, volumes: Sequence[OpenVolume]) -> Iterator[Candidate]:
    """fastpipe's dataset of patches, where the script's cuts them out of volumes, open or loaded."""
    batch, size = watched.loop.batch, watched.batch_size
    values = batch if isinstance(batch, (list, tuple)) else [batch]
    shape = tuple(getattr(values[0], "shape", ()))[1:] if values else ()
    if not volumes or size is None:
        return
    while len(shape) > len(volumes[0].shape) and shape[0] == 1:  # a channel that the script has put in front
        shape = shape[1:]
    if (
        not shape
        or len(shape) > len(volumes[0].shape)
        or _MOST_OF_VOLUME * math.prod(volumes[0].shape) < math.prod(shape)
    ):
        return
    what, options, told = _patches_of(volumes, has_labels=len(values) > 1)
    try:
        dataset = fastpipe.FastPatchDataset(
            what, shape, sampling=fastpipe.sampling.Uniform(max(len(watched.loader.dataset), 1)), **options
        )
        order = fastpipe.Shuffle(unit="group") if watched.is_shuffled or len(values) > 1 else None
        fast: Any = fastpipe.FastLoader(dataset, size, shuffle=order)
    except (FastpipeError, OSError, TypeError, ValueError):
        return
    name, more = told
    text = f'FastPatchDataset({name}, {shape}{more}) and FastLoader(shuffle=Shuffle(unit="group"))'
    yield from _with_rest(costs, f"read patches by fastpipe: {text}{place_of(watched)}", "volume", fast)


def _patches_of(
    volumes: Sequence[OpenVolume], has_labels: bool
) -> tuple[Any, dict[str, Any], tuple[str, str]]:
    """What fastpipe's dataset is given, its options, and both as they are told."""
    first, name = volumes[0], repr(os.path.basename(volumes[0].path))
    if not first.is_loaded:
        labels = next((one.path for one in volumes[1:] if one.shape == first.shape and has_labels), None)
        more = "" if labels is None else f", labels={os.path.basename(labels)!r}"
        return first.path, {"labels": labels}, (name, more)
    pairs = list(zip(volumes[::2], volumes[1::2], strict=False))
    if has_labels and pairs and all(one.shape == other.shape for one, other in pairs):
        table = [(one.path, other.path) for one, other in pairs]
        return table, {}, (f"[({name}, {os.path.basename(pairs[0][1].path)!r}), …]", "")
    same = [one.path for one in volumes if len(one.shape) == len(first.shape)]
    return same, {}, (f"[{name}, …]" if len(same) > 1 else name, "")


def of_tables(watched: Watched, costs: LoaderCosts, images: ImageReads, batches: int) -> Iterator[Candidate]:
    """fastpipe's images for TensorFlow, where the script's are opened with Pillow."""
    reads = [read for read in images.found if read.size is not None]
    sizes = {read.size for read in reads}
    if not reads or len(sizes) != 1 or not batches:
        return
    width, height = sizes.pop() or (0, 0)
    table: dict[str, Any] = {"file": [read.file for read in reads]}
    boxes = [read.box for read in reads]
    known = [box for box in boxes if box is not None]
    if known and len(known) < len(boxes):
        return
    each = max(1, round(images.count / batches))  # images of a batch, of all modalities
    tf = fastpipe.tf
    outside = "pad" if any(map(_reaches_outside, reads)) else "error"  # Pillow has black there
    told = ["table", *(["boxes=…"] if known else []), *(['outside="pad"'] if outside == "pad" else []),
            f"image_size=({height}, {width})"]  # fmt: skip

    def begin() -> Iterator[Any]:
        return iter(
            tf.image_dataset(
                table, None, batch_size=each, image_size=(height, width), boxes=known or None,
                outside=outside, cache="off", shuffle=False, drop_remainder=len(reads) >= each,
            ).repeat()
        )  # fmt: skip

    graph = costs.stages.get(GRAPH)
    shares = costs.shares()
    python = sum(share for stage, share in shares.items() if stage != GRAPH)
    yield Candidate(
        f"read images by fastpipe: fastpipe.tf.image_dataset({', '.join(told)}){place_of(watched)}",
        f"Python takes {python:.0%} of what a batch takes; measured on {len(reads)} of your images, "
        "without a cache; what else is done to them stays as it is",
        begin, rest=graph, is_rest_beside=True,
    )  # fmt: skip


def _reaches_outside(read: ImageRead) -> bool:
    """Whether a box is larger than its image."""
    if read.box is None:
        return False
    left, top, right, bottom = read.box
    try:
        with sys.modules["PIL.Image"].open(read.file) as image:
            width, height = image.size
    except OSError:
        return False
    return left < 0 or top < 0 or right > width or bottom > height


def _with_rest(costs: LoaderCosts, what: str, source: str, fast: Any) -> Iterator[Candidate]:
    """A loader that reads, and what the script's dataset does besides: as it is, or for whole batches."""
    shares = costs.shares()
    reading = f"reading takes {shares.get(READ, 0) + shares.get(DECODE, 0):.0%} of a batch's time"
    rest = _rest(costs)
    if rest is None:
        yield Candidate(what, f"{reading}; measured on your {source}", fast.__iter__)
        return
    line, spent = rest
    share = f"what else the dataset does to a sample takes {spent.wall / 1e9 / costs.wall_s:.0%} ({line})"
    yield Candidate(
        f"{what}, with what else the dataset does as transform=",
        f"{reading}, {share}; measured on your {source}, with that as it is", fast.__iter__, rest=spent,
    )  # fmt: skip
    yield Candidate(
        f"{what}, with what else the dataset does done for whole batches, by FastLoader(augment=…)",
        f"{reading}, {share}; measured on your {source}, without that", fast.__iter__,
    )  # fmt: skip


def _uses_cuda() -> bool:
    return bool(sys.modules["torch"].cuda.is_initialized())  # the loader is one of torch's


def _rest(costs: LoaderCosts) -> tuple[Line, Spent] | None:
    """What the dataset does besides reading, if that is much: its line that takes longest, and all of it."""
    stages = [costs.stages[stage] for stage in (TRANSFORM, OTHER) if stage in costs.stages]
    total = functools.reduce(Spent.plus, stages, NOTHING)
    lines = [line for line, stage, _ in costs.lines if stage in (TRANSFORM, OTHER)]
    return (lines[0], total) if lines and total.wall > _MUCH * costs.wall_s * 1e9 else None
