"""The case ``images``: an image folder, augmented and batched as for training on ImageNet."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

from rich.console import Console

from fastpipe.bench import machine
from fastpipe.bench.check import Check
from fastpipe.bench.data import Photos, folder_to_use, scan
from fastpipe.bench.driver import Driver, add_run_arguments
from fastpipe.bench.loaders import LoaderRow, LoaderSpec, run_check, why_not_installed
from fastpipe.bench.results import MAIN_ROW, RowInfo, best_of, entries, verdict
from fastpipe.bench.runner import Contender
from fastpipe.console import Progress, positive

__all__ = [
    "add_arguments",
    "loader_specs",
    "run",
    "worker_counts",
]


SHORT_SIDE = 256
_SMALL: tuple[tuple[Literal["ram", "disk"], Literal["float32", "uint8"]], ...] = (
    ("ram", "float32"), ("ram", "uint8"), ("disk", "float32"),
)  # fmt: skip
# Pixels of a photo from which half of it in each direction is still more than the job makes of it.
LARGE = 2_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the case."""
    add = parser.add_argument
    add("--data", metavar="FOLDER", help="image folder, one sub-folder per class (default: $FASTPIPE_PHOTOS, "
        "else photograph-like JPEGs made once into the user's cache folder)")  # fmt: skip
    add("--large", action="store_true", help="without --data: made-up photos of 12 megapixels")
    add("--batch-size", type=positive(int), default=64, metavar="N", help="images in a batch (default: 64)")
    add_run_arguments(parser)


def worker_counts(cores: int, quick: bool = False) -> tuple[int, ...]:
    """Values of ``num_workers`` that a careful user would try.

    >>> worker_counts(2), worker_counts(32)
    ((0, 1, 2), (0, 8, 16, 32))
    """
    if quick:
        return (0, min(2, cores))
    if cores <= 4:
        return tuple(range(cores + 1))
    return (0, cores // 4, cores // 2, cores)


def loader_specs(cores: int, quick: bool = False, is_large: bool = False) -> list[LoaderSpec]:
    """The rows that are loaders: replaced, stock loader with the fast dataset, fastpipe."""
    specs = []
    groups: list[tuple[Literal["replaced", "stock"], str]] = [
        ("replaced", "ImageFolder"),
        ("stock", "FastImageFolder"),
    ]
    for group, dataset in groups:
        for count in worker_counts(cores, quick):
            key, label = f"{group}-workers{count}", f"{dataset} + DataLoader(num_workers={count})"
            specs.append(LoaderSpec(key, label, group, count))
    label = "FastImageFolder + FastLoader"
    specs.append(LoaderSpec(MAIN_ROW, label, "fastpipe", note="decode threads in this process"))
    specs.append(
        LoaderSpec("fastloader-uint8", f"{label}, uint8", "fastpipe", 0, "uint8", "normalise on the device")
    )
    specs.append(
        LoaderSpec("fastloader-workers1", f'{label}(num_workers=1, workers="processes")', "fastpipe", 1)
    )
    note = "a pipeline of DALI's decodes, threads do the rest"
    specs.append(
        LoaderSpec("fastloader-dali", f'{label}, Decode("dali")', "fastpipe", note=note, backend="dali")
    )
    workers = worker_counts(cores, quick)[-1]
    given = f"accelerate(ImageFolder + DataLoader(num_workers={workers}))"
    note = "a script's own loader"
    specs.append(LoaderSpec("accelerated", given, "fastpipe", workers, note=note, is_accelerated=True))
    if is_large:
        note = "changes pixels"
        name = f"{label}, Decode(scaled=True)"
        specs.append(LoaderSpec("fastloader-scaled", name, "fastpipe", note=note, scaled=True))
    return specs + cached_specs(label)


def cached_specs(label: str) -> list[LoaderSpec]:
    """The rows in which every image has been decoded before."""
    note = "from the second epoch on"
    specs = [LoaderSpec("cached-ram", f'{label}, cache="ram"', "fastpipe", note=note, cache="ram")]
    note += f"; short side {SHORT_SIDE}, which changes pixels"
    for cache, output in _SMALL:
        name = f'{label}, cache="{cache}", short_side={SHORT_SIDE}'
        name += "" if output == "float32" else f", {output}"
        key = f"cached-{cache}-{SHORT_SIDE}" + ("" if output == "float32" else f"-{output}")
        specs.append(LoaderSpec(key, name, "fastpipe", 0, output, note, cache=cache, short_side=SHORT_SIDE))
    return specs


def run(
    args: argparse.Namespace, console: Console, progress: Progress, kind: type[Bench] | None = None
) -> int:
    """Measure, report, and write what was asked for.

    Returns:
        0, or 1 when the outputs do not agree with the replaced loader's.

    Raises:
        OptionError: there is nothing to measure.
    """
    folder, name, generated = folder_to_use(args.data, progress.done, large=args.large)
    photos = scan(folder, name)
    bench = (kind or Bench)(args, machine.cores_allowed(), progress, photos=photos)
    if generated:
        bench.warnings.append("the photos are made up; give your own with --data or $FASTPIPE_PHOTOS")
        progress.done(f"photos: made up, kept in {folder}")
    return bench.run(console)


@dataclass
class Bench(Driver):
    """One run of the case."""

    case: ClassVar[str] = "images"
    photos: Photos = field(kw_only=True)

    def result(self) -> dict[str, Any] | None:
        """Check, measure, and put the file's content together; ``None`` if the check fails."""
        busy = self.begin()
        self.photos.warm()
        check = self._check()
        if not check.ok:
            return None
        with ExitStack() as stack:
            contenders = self._open(stack)
            main = next(c for c in contenders if isinstance(c, LoaderRow) and c.key == MAIN_ROW)
            plan_text = str(main.dataset.plan)
            before: dict[str, float] = {}
            session = self.measure(contenders, lambda: before.update(main.stage_seconds()))
            stages = self.stages(before, main.stage_seconds(), session.samples[MAIN_ROW])
        rows = entries(list(self.infos.values()), session)
        best = {group: best_of(rows, group) for group in ("replaced", "stock")}
        result = self._facts(busy) | {
            "method": self.method(session.rounds),
            "check": {**check.as_json(), "text": check.sentence()},
            "rows": rows,
            "best": best,
            "missing": self.missing,
            "stages": stages,
            "floor_share": None,
            "plan": plan_text.replace(str(self.photos.folder), self.photos.name),
        }
        result |= self.studies(session)
        result["verdict"] = verdict(result)
        return result

    def _check(self) -> Check:
        """Compare outputs and say so."""
        seen = 0

        def on_batch(images: int) -> None:
            nonlocal seen
            seen += images
            self.progress.now(f"comparing outputs: {seen:,} of {len(self.photos.files):,} photos")

        check = run_check(self.photos, 0 if self.args.quick else min(self.cores, 8), on_batch)
        self.progress.done(f"check: {check.sentence()}")
        return check

    def _open(self, stack: ExitStack) -> list[Contender]:
        """Build every row."""
        size, photos = self.args.batch_size, self.photos
        contenders: list[Contender | None] = []
        for spec in self.specs():
            if why := why_not_installed(spec):
                self.miss(spec.key, spec.label, why)
                continue
            info = RowInfo(spec.key, spec.label, spec.group, spec.num_workers, spec.output, spec.note)
            make = partial(LoaderRow, spec, photos.folder, photos.indices, size)
            contenders.append(self.open(stack, info, make))
        contenders += self.all_others(stack)
        return [one for one in contenders if one is not None]

    def specs(self) -> list[LoaderSpec]:
        """Return the loaders that are measured."""
        return loader_specs(self.cores, self.args.quick, self.photos.pixels >= LARGE)

    def _facts(self, busy: float | None) -> dict[str, Any]:
        """What was run, when, on what."""
        args, size = self.args, self.args.batch_size
        words = [f"--data {self.photos.name}"] if args.data else []
        words += ["--large"] if args.large else []
        words += [f"--batch-size {size}"] if size != 64 else []
        return self.facts(words, busy) | {
            "data": {
                "name": self.photos.name,
                "classes": self.photos.classes,
                "total": self.photos.total,
                "photos": len(self.photos.files),
                "bytes": self.photos.bytes,
            },
            "job": {
                "text": "RandomResizedCrop(224), RandomHorizontalFlip, ToTensor, Normalize;"
                f" batches of {size}, shuffled",
                "short": f"RandomResizedCrop(224) + flip + normalise, batch {size}",
                "batch_size": size,
            },
        }
