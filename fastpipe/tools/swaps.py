"""Find datasets and loaders of fastpipe that can replace those of a script."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

import fastpipe
from fastpipe.core.extras import require
from fastpipe.core.text import in_bytes
from fastpipe.errors import FastpipeError
from fastpipe.tools.batches import leaves, rebuilt, same_form
from fastpipe.tools.costs import LoaderCosts
from fastpipe.tools.edits import Edit
from fastpipe.tools.folders import Scratch, file_system, shown_path
from fastpipe.tools.loaders import Watched, is_fast, is_map_style
from fastpipe.tools.stacks import DECODE, GRAPH, OTHER, READ, TRANSFORM
from fastpipe.tools.thread_times import NOTHING, Spent
from fastpipe.tools.witness import Account, ArrayRead, ImageRead, OpenVolume, Reads

_log = logging.getLogger("fastpipe.profile")
_IMAGES = 4  # dimensions of a batch of images
GAIN = 1.05  # least speed-up of a step that justifies a change
_MUCH = 0.1  # fraction of a batch's time: less other work is ignored
_MOST_OF_VOLUME = 0.25  # fraction of a volume: partial reads do not help for larger patches
_MOST_SAMPLES = 1 << 16  # more than a measurement reads
_FEW, _MANY = 0.9, 1.1  # opened images for each sample: limits of about one
_WAITS = 0.1  # fraction of a batch's time: a longer wait for files justifies a local copy
_BATCHES, _MOST_BYTES = 8, 256 << 20  # most batches, and most bytes, to copy for a measurement


@dataclass(frozen=True)
class Candidate:
    """A loader that may replace the script's loader.

    ``what`` describes the change, ``why`` the reason, and ``begin`` returns an iterator of batches.  ``rest``
    is the cost of the work on a batch that the script's loader does and this loader does not do.  With
    ``is_rest_beside``, this work is done at the same time as the loader's work, otherwise after it.  ``edit``
    is the change of the script, if it is only a change of the call that creates the loader.
    """

    what: str
    why: str
    begin: Callable[[], Iterator[Any]]
    skipped: int = 2
    rest: Spent | None = None
    is_rest_beside: bool = False
    edit: Edit | None = None
    close: Callable[[], object] = lambda: None


def accelerated(loader: Any, options: dict[str, Any]) -> Any:
    try:
        return fastpipe.accelerate(loader, **options)
    except (FastpipeError, TypeError):
        return None


def hint_of(watched: Watched) -> str:
    """Return what may replace a loader of a kind that is not replaced automatically; else ""."""
    loader = watched.loader
    if is_fast(loader):
        return ""
    spec = getattr(loader, "element_spec", None)
    if spec is not None:
        shapes: list[Any] = [getattr(one, "shape", None) for one in leaves(spec)]
        images = [one for one in shapes if getattr(one, "rank", None) == _IMAGES and one[-1] in (1, 3)]
        if not images:
            return ""
        height, width = images[0][1:3]
        return (
            "If it reads image files, fastpipe.tf.image_dataset(FOLDER_OR_TABLE, "
            f"image_size=({height}, {width}), …) decodes and resizes them natively"
        )
    dataset = getattr(loader, "dataset", None)
    if hasattr(dataset, "cast_column"):  # of Hugging Face's datasets; a script may have a module of that name
        return (
            "If the dataset's images are files, FastImageFolder.from_samples(samples, transform) reads them, "
            'with samples = [(row["image"]["path"], row["label"]) for row in '
            'dataset.cast_column("image", datasets.Image(decode=False))]'
        )
    if dataset is not None and "torch.utils.data" in sys.modules and not is_map_style(dataset):
        return (
            "An IterableDataset stays with torch; if its samples have indices, a Dataset with __getitem__ "
            "can have workers that share the samples"
        )
    return ""


def of_folders(watched: Watched, costs: LoaderCosts) -> Iterator[Candidate]:
    dataset = type(watched.loader.dataset).__name__
    shares = ", ".join(f"{stage} {share:.0%}" for stage, share in list(costs.shares().items())[:3])
    split = {"augment": "split"}
    ways: list[tuple[str, str, dict[str, Any]]] = [
        ("fastpipe.accelerate(loader), or FastImageFolder and FastLoader", "", {}),
        ('fastpipe.accelerate(loader, augment="auto")', "; other draws of the same augmentation", split),
    ]
    if sys.modules["torch"].cuda.is_initialized():
        way = 'fastpipe.accelerate(loader, augment="auto", device="cuda")'
        note = "; other draws of the same augmentation, made on the GPU"
        ways.append((way, note, {**split, "device": "cuda"}))
    for way, note, options in ways:
        fast = accelerated(watched.loader, options)
        if fast is None or not hasattr(fast, "clock"):  # a loader has a clock if fastpipe makes the batches
            return
        yield Candidate(
            f"let fastpipe make the batches of {dataset}: {way}{watched.place}",
            f"measured on your batches, whose time is now spent on: {shares}{note}",
            fast.__iter__,
            # "auto" also measures whether "split" is faster.
            edit=Edit("accelerate", options | ({"augment": "auto"} if "augment" in options else {})),
        )


def of_rows(watched: Watched, costs: LoaderCosts, arrays: Sequence[ArrayRead]) -> Iterator[Candidate]:
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
    made = f"FastHDF5Dataset({shown_path(files[0])!r}, {names!r}{more})"
    what = f"read rows by fastpipe: {made} and FastLoader{watched.place}"
    yield from _with_rest(
        costs, what, "file", fast, are_same=_have_same_samples(watched.loader.dataset, dataset)
    )


def of_volumes(watched: Watched, costs: LoaderCosts, volumes: Sequence[OpenVolume]) -> Iterator[Candidate]:
    batch, size = watched.loop.batch, watched.batch_size
    values = batch if isinstance(batch, (list, tuple)) else [batch]
    shape = tuple(getattr(values[0], "shape", ()))[1:] if values else ()
    if not volumes or size is None:
        return
    whole = volumes[0].shape
    while len(shape) > len(whole) and shape[0] == 1:  # the script has added a channel dimension
        shape = shape[1:]
    if not shape or len(shape) > len(whole) or _MOST_OF_VOLUME * math.prod(whole) < math.prod(shape):
        return
    what, options, name, more = _patches_of(volumes, has_labels=len(values) > 1)
    try:
        sampling = fastpipe.sampling.Uniform(max(len(watched.loader.dataset), 1))
        dataset = fastpipe.FastPatchDataset(what, shape, sampling=sampling, **options)
        order = fastpipe.Shuffle(unit="group") if watched.is_shuffled or len(values) > 1 else None
        fast: Any = fastpipe.FastLoader(dataset, size, shuffle=order)
    except (FastpipeError, OSError, TypeError, ValueError):
        return
    text = f'FastPatchDataset({name}, {shape}{more}) and FastLoader(shuffle=Shuffle(unit="group"))'
    # Patches are at random places, so samples cannot be compared.
    yield from _with_rest(costs, f"read patches by fastpipe: {text}{watched.place}", "volume", fast)


def _patches_of(volumes: Sequence[OpenVolume], has_labels: bool) -> tuple[Any, dict[str, Any], str, str]:
    first, name = volumes[0], repr(shown_path(volumes[0].path))
    if not first.is_loaded:
        labels = next((one.path for one in volumes[1:] if one.shape == first.shape and has_labels), None)
        more = "" if labels is None else f", labels={shown_path(labels)!r}"
        return first.path, {"labels": labels}, name, more
    pairs = list(zip(volumes[::2], volumes[1::2], strict=False))
    if has_labels and pairs and all(one.shape == other.shape for one, other in pairs):
        table = [(one.path, other.path) for one, other in pairs]
        return table, {}, f"[({name}, {shown_path(pairs[0][1].path)!r}), …]", ""
    same = [one.path for one in volumes if len(one.shape) == len(first.shape)]
    return same, {}, f"[{name}, …]" if len(same) > 1 else name, ""


def _have_same_samples(one: Any, other: Any) -> bool:
    """Return whether the first samples of two datasets have equal values."""
    try:
        own = copy.copy(one)  # what it opens must not be inherited by workers that are forked later
        pairs = list(zip(leaves(own[0]), leaves(other[0]), strict=True))
        return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)
    except Exception:  # it may be any error of the script's dataset
        return False


def _with_rest(
    costs: LoaderCosts, what: str, source: str, fast: Any, *, are_same: bool | None = None
) -> Iterator[Candidate]:
    """Yield candidates for a loader ``fast`` that only reads.

    ``are_same`` says whether its samples are those of the script's dataset; None if that is unknown.
    """
    shares = costs.shares()
    reading = f"reading takes {shares.get(READ, 0) + shares.get(DECODE, 0):.0%} of a batch's time"
    stages = [costs.stages[stage] for stage in (TRANSFORM, OTHER) if stage in costs.stages]
    spent = functools.reduce(Spent.plus, stages, NOTHING)
    line = next((line for line, stage, _ in costs.lines if stage in (TRANSFORM, OTHER)), None)
    if line is None or spent.wall <= _MUCH * costs.wall_s * 1e9:
        if are_same is False:  # it is not tried: the script would train on other values
            yield Candidate(
                f"{what}, with the dataset's other work as transform=",
                f"{reading}; measured on your {source}, whose samples differ from those of the script's "
                "dataset: what it does to them takes little time, and has to remain",
                fast.__iter__, rest=NOTHING,
            )  # fmt: skip
            return
        keep = "" if are_same else "; if the dataset changes samples after reading, give that as transform="
        yield Candidate(what, f"{reading}; measured on your {source}{keep}", fast.__iter__)
        return
    share = f"the dataset's other work on a sample takes {spent.wall / 1e9 / costs.wall_s:.0%} ({line})"
    yield Candidate(
        f"{what}, with the dataset's other work as transform=",
        f"{reading}, {share}; measured on your {source}, with that work unchanged", fast.__iter__, rest=spent,
    )  # fmt: skip
    yield Candidate(
        f"{what}, with the dataset's other work done for whole batches, by FastLoader(augment=…)",
        f"{reading}, {share}; measured on your {source}, without that work", fast.__iter__,
    )  # fmt: skip


def of_images(watched: Watched, costs: LoaderCosts, accounts: Sequence[Account]) -> Iterator[Candidate]:
    """Yield a loader of ``FastImageFolder.from_samples`` if the samples are transformed Pillow images."""
    dataset, size = watched.loader.dataset, watched.batch_size
    files = list(dict.fromkeys(file for account in accounts for file in account.images))
    opened = sum(account.opened for account in accounts) / max(1, sum(one.samples for one in accounts))
    transform = _transform_of(dataset)
    if (
        transform is None
        or not files
        or not _FEW < opened < _MANY
        or size is None
        or not is_map_style(dataset)
    ):
        return
    try:
        count = max(size, min(len(dataset), _MOST_SAMPLES))
        samples = [(file, 0) for file in itertools.islice(itertools.cycle(files), count)]
        ours = fastpipe.FastImageFolder.from_samples(samples, transform, cache="off")
        fast: Any = fastpipe.FastLoader(ours, size, shuffle=True, drop_last=True)
        batch = watched.loop.batch
        theirs = _images_in(batch, ours[0][0])
    except Exception as error:  # the transform may need the script's own dataset
        _log.info("not measured: FastImageFolder.from_samples: %s: %s", type(error).__name__, error)
        return
    if theirs is None:
        return

    def begin() -> Iterator[Any]:
        for images, _ in fast:
            yield rebuilt(batch, lambda leaf, images=images: images if leaf is theirs else leaf)  # type: ignore[misc]

    shares = costs.shares()
    share = sum(shares.get(stage, 0.0) for stage in (READ, DECODE, TRANSFORM))
    # Add the dataset's other work, and its wait for storage, because the images are in memory now.
    rest = costs.stages.get(OTHER, NOTHING).plus(Spent(int(costs.read_idle_s * 1e9), 0, 0))
    yield Candidate(
        "read images by fastpipe: FastImageFolder.from_samples([(file, target), …], transform) and FastLoader"
        f"{watched.place}",
        f"reading, decoding and transforming them takes {share:.0%} of a batch's time; measured on "
        f"{len(files)} of your images, with your transform, without a cache",
        begin, rest=rest if rest.wall > _MUCH * costs.wall_s * 1e9 else None, close=ours.close,
    )  # fmt: skip


def _transform_of(dataset: Any) -> Any:
    if isinstance(dataset, sys.modules["torch.utils.data"].Subset):
        return _transform_of(dataset.dataset)
    found = {
        name: value for name, value in getattr(dataset, "__dict__", {}).items()
        if type(value).__module__.startswith("torchvision.transforms")
    }  # fmt: skip
    return found.get("transform", next(iter(found.values())) if len(found) == 1 else None)


def _images_in(batch: Any, sample: Any) -> Any:
    found: list[Any] = []

    def look(leaf: Any) -> Any:
        found.append(leaf)
        return leaf  # unchanged, because a container of the script may check its parts

    if hasattr(sample, "shape"):
        rebuilt(batch, look)
    return next(
        (one for one in found if len(getattr(one, "shape", ())) and same_form(one, sample[None])), None
    )


def of_tables(watched: Watched, costs: LoaderCosts, seen: Reads, batches: int) -> Iterator[Candidate]:
    reads = [read for read in list(seen.images) if read.size is not None]
    sizes = {read.size for read in reads}
    if not reads or len(sizes) != 1 or not batches:
        return
    width, height = sizes.pop() or (0, 0)
    table: dict[str, Any] = {"file": [read.file for read in reads]}
    boxes = [read.box for read in reads]
    known = [box for box in boxes if box is not None]
    if known and len(known) < len(boxes):
        return
    each = max(1, round(seen.opened / batches))  # number of images in a batch, with all modalities
    tf = fastpipe.tf
    outside: Literal["pad", "error"] = "pad" if any(map(_reaches_outside, reads)) else "error"  # as Pillow
    arguments = ["table", *(["boxes=…"] if known else []), *(['outside="pad"'] if outside == "pad" else []),
            f"image_size=({height}, {width})"]  # fmt: skip

    def begin() -> Iterator[Any]:
        return iter(
            tf.image_dataset(
                table, None, batch_size=each, image_size=(height, width), boxes=known or None,
                outside=outside, cache="off", shuffle=False, drop_remainder=len(reads) >= each,
            ).repeat()
        )  # fmt: skip

    python = sum(share for stage, share in costs.shares().items() if stage != GRAPH)
    yield Candidate(
        f"read images by fastpipe: fastpipe.tf.image_dataset({', '.join(arguments)}){watched.place}",
        f"Python takes {python:.0%} of a batch's time; measured on {len(reads)} of your images, "
        "without a cache; other operations on them stay unchanged",
        begin, rest=costs.stages.get(GRAPH), is_rest_beside=True,
    )  # fmt: skip


def _reaches_outside(read: ImageRead) -> bool:
    if read.box is None:
        return False
    left, top, right, bottom = read.box
    try:
        with sys.modules["PIL.Image"].open(read.file) as image:
            width, height = image.size
    except OSError:
        return False
    return left < 0 or top < 0 or right > width or bottom > height


def of_staged(watched: Watched, costs: LoaderCosts, mounts: str | None = None) -> Iterator[Candidate]:
    dataset, size = watched.loader.dataset, watched.batch_size
    samples, root = getattr(dataset, "samples", None), getattr(dataset, "root", None)
    idle = costs.read_idle_s / max(costs.wall_s, 1e-9)
    if idle < _WAITS or not samples or size is None or not isinstance(root, (str, os.PathLike)):
        return
    try:
        remote = file_system(os.fspath(root), mounts)
    except OSError:
        return
    if not remote.is_remote:
        return
    count, opened = min(len(samples), _BATCHES * size), contextlib.ExitStack()

    @functools.cache
    def local() -> Any:
        scratch = Scratch()
        opened.callback(scratch.close)
        return _copied(watched, count, scratch.path)

    yield Candidate(
        "stage files on a local disk before they are needed: FastImageFolder(…, "
        f'stage="/a/local/disk") and FastLoader{watched.place}',
        f"a batch spends {idle:.0%} of its time waiting for {remote.name}; measured on local copies of "
        f"{count} of your files, as in epochs after the first",
        lambda: iter(local()), close=opened.close,
    )  # fmt: skip


def _copied(watched: Watched, count: int, folder: str) -> Any:
    loader, samples, size = watched.loader, watched.loader.dataset.samples, watched.batch_size or 1
    copied, room = [], min(_MOST_BYTES, shutil.disk_usage(folder).free // 2)
    for number, at in enumerate(np.random.default_rng(0).choice(len(samples), count, replace=False).tolist()):
        path, label = samples[at]
        room -= os.path.getsize(path)
        if room < 0:
            break
        name = os.path.join(folder, f"{number:06d}{os.path.splitext(path)[1]}")
        copied.append((shutil.copyfile(path, name), label))
    if len(copied) < size:
        free = in_bytes(shutil.disk_usage(folder).free)
        raise OSError(f"there is no room for {size} files in {folder}: {free} are free")
    dataset = copy.copy(loader.dataset)
    vars(dataset).update(samples=copied, imgs=copied, targets=[label for _, label in copied])
    stock = require("torch.utils.data", extra="torch").DataLoader(
        dataset, size, shuffle=True, drop_last=True, collate_fn=loader.collate_fn,
        num_workers=loader.num_workers, worker_init_fn=loader.worker_init_fn,
    )  # fmt: skip
    # Without a cache: a loader that makes images itself would cache all of these few images.
    return accelerated(stock, {"cache": "off"}) or accelerated(stock, {})
