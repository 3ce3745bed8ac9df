"""The case ``images``: an image folder, augmented and batched as for training on ImageNet."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from fastpipe.bench import machine
from fastpipe.bench.check import Check, run_check
from fastpipe.bench.data import Photos, folder_to_use, scan
from fastpipe.bench.floor import DecodeRow
from fastpipe.bench.loaders import LoaderRow, LoaderSpec
from fastpipe.bench.peers import PEERS, PeerRow, interpreter
from fastpipe.bench.plot import draw
from fastpipe.bench.progress import Progress
from fastpipe.bench.report import print_result
from fastpipe.bench.results import (
    MAIN_ROW,
    SCHEMA,
    RowInfo,
    best_of,
    entries,
    floor_share,
    row,
    save,
    verdict,
)
from fastpipe.bench.runner import Contender, ContenderError, Plan, Sample, Session, calibrate, interleave
from fastpipe.bench.startup import first_batch_seconds

__all__ = ["add_arguments", "loader_specs", "run", "worker_counts"]

SHORT_SIDE = 256
_SMALL: tuple[tuple[Literal["ram", "disk"], Literal["float32", "uint8"]], ...] = (
    ("ram", "float32"), ("ram", "uint8"), ("disk", "float32"),
)  # fmt: skip
# Pixels of a photo from which half of it in each direction is still more than the job makes of it.
LARGE = 2_000_000

QUICK_WARNING = "--quick checks that the benchmark runs; its figures are not measurements"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the case."""
    add = parser.add_argument
    add("--data", metavar="FOLDER", help="image folder, one sub-folder per class (default: $FASTPIPE_PHOTOS, "
        "else photograph-like JPEGs made once into the user's cache folder)")  # fmt: skip
    add("--large", action="store_true", help="without --data: made-up photos of 12 megapixels")
    add("--json", metavar="FILE", type=Path, help="write every sample, the medians and the machine to FILE")
    add("--plot", metavar="FILE.png", type=Path, help="draw the result into FILE.png")
    add(
        "--peers",
        action="store_true",
        help="also measure DALI, tf.data, FFCV, SPDL, LitData and Pillow-SIMD where they are installed",
    )
    add("--batch-size", type=_positive(int), default=64, metavar="N", help="images in a batch (default: 64)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--rounds", type=_positive(int), metavar="R", help="rounds to measure (default: 7)")
    length.add_argument("--seconds", type=_positive(float), metavar="S",
                        help="measure for about S seconds instead, at least three rounds")  # fmt: skip
    add("--quick", action="store_true", help="two short rounds: does it run? No figures to rely on")


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
    """The rows that are loaders: replaced, stock loader with the fast dataset, fastpipe.

    Args:
        cores: how many there are.
        quick: take fewer of them.
        is_large: whether the photos are so large that they can be decoded at a part of their size.
    """
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
    specs.append(LoaderSpec("fastloader-workers1", f"{label}(num_workers=1)", "fastpipe", 1))
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


def run(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    """Measure, report, and write what was asked for.

    Returns:
        0, or 1 when the outputs do not agree with the replaced loader's.

    Raises:
        OptionError: there is nothing to measure.
    """
    folder, name, generated = folder_to_use(args.data, progress.done, large=args.large)
    photos = scan(folder, name)
    bench = _Bench(args, photos, machine.cores_allowed(), progress)
    if generated:
        bench.warnings.append("the photos are made up; give your own with --data or $FASTPIPE_PHOTOS")
        progress.done(f"photos: made up, kept in {folder}")
    result = bench.result()
    if result is None:
        return 1
    progress.stop()
    print_result(result, console)
    if args.json:
        save(result, args.json)
        progress.done(f"wrote {args.json}")
    if args.plot:
        draw(result, args.plot)
        progress.done(f"drew {args.plot}")
    return 0


@dataclass
class _Bench:
    """One run of the case."""

    args: argparse.Namespace
    photos: Photos
    cores: int
    progress: Progress
    infos: dict[str, RowInfo] = field(default_factory=dict)
    missing: list[dict[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def result(self) -> dict[str, Any] | None:
        """Check, measure, and put the file's content together; ``None`` if the check fails."""
        busy = machine.load()
        if busy is not None and busy > 0.5 * self.cores:
            self.warnings.append(f"the machine was busy at the start (load {busy:g} on {self.cores} cores)")
        if self.args.quick:
            self.warnings.append(QUICK_WARNING)
        self.photos.warm()
        check = self._check()
        if not check.ok:
            return None
        with ExitStack() as stack:
            contenders = self._open(stack)
            main = next(c for c in contenders if isinstance(c, LoaderRow) and c.key == MAIN_ROW)
            plan_text = str(main.dataset.plan)
            session, stages = self._measure(contenders, main)
        rows = entries(list(self.infos.values()), session)
        best = {group: best_of(rows, group) for group in ("replaced", "stock")}
        result = self._facts(busy) | {
            "method": {**self._method(session.rounds), "warnings": self.warnings},
            "check": {**check.as_json(), "text": check.sentence()},
            "rows": rows,
            "best": best,
            "missing": self.missing,
            "stages": stages,
            "floor_share": floor_share(session.samples),
            "plan": plan_text.replace(str(self.photos.folder), self.photos.name),
        }
        result["verdict"] = verdict(result)
        self._start_up(result)
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
        """Build every row; a peer that is not there is noted."""
        size, photos = self.args.batch_size, self.photos
        contenders: list[Contender] = []

        def add(info: RowInfo, make: Callable[[], Contender]) -> None:
            try:
                contender = make()
            except ContenderError as error:
                self._miss(info.key, info.label, str(error))
                return
            stack.callback(contender.close)
            contenders.append(contender)
            # What decodes is known only once it is built.
            if isinstance(contender, DecodeRow):
                info = replace(info, note=contender.note)
            self.infos[info.key] = contender.info() if isinstance(contender, PeerRow) else info

        for spec in self._specs():
            info = RowInfo(spec.key, spec.label, spec.group, spec.num_workers, spec.output, spec.note)
            add(info, lambda spec=spec: LoaderRow(spec, photos.folder, photos.indices, size))  # type: ignore[misc]
        floor = RowInfo("floor", "decode only, the floor", "floor", None, "crops", "from memory")
        add(floor, lambda: DecodeRow(photos.files, self.cores, size))
        for peer in PEERS if self.args.peers else ():
            python = interpreter(peer)
            if python is None:
                self._miss(peer.key, peer.label, f"not installed; {peer.install}")
                continue
            self.progress.now(f"starting {peer.label}")
            info = RowInfo(peer.key, peer.label, "peer", None, peer.output, peer.note)
            add(info, lambda peer=peer, python=python: PeerRow(peer, python, photos, size, self.cores))  # type: ignore[misc]
        return contenders

    def _measure(self, contenders: Sequence[Contender], main: LoaderRow) -> tuple[Session, dict[str, Any]]:
        """Warm up, measure all rounds; also FastLoader's stages over the measured rounds."""
        plan = self._plan()
        images: dict[str, int] = {}
        alive = []
        # Forking first and starting threads later is what every loader copes with.
        for contender in sorted(contenders, key=lambda one: -one.workers):
            label = self.infos[contender.key].label
            self.progress.step(f"warming up: {label}")
            try:
                images[contender.key] = calibrate(contender, plan.seconds)
                alive.append(contender)
            except ContenderError as error:
                self._miss(contender.key, label, str(error))
        before = main.stage_seconds()

        def on_sample(contender: Contender, sample: Sample) -> None:
            label = self.infos[contender.key].label
            self.progress.step(f"round {sample.round + 1}: {label}: {sample.rate:,.0f} images/s")

        ordered = [contender for contender in contenders if contender in alive]
        session = interleave(ordered, images, plan, on_sample=on_sample)
        for key, why in session.failures.items():
            self._miss(key, self.infos[key].label, why)
        after = main.stage_seconds()
        seconds = {stage: round(after[stage] - before.get(stage, 0.0), 6) for stage in after}
        return session, {"seconds": seconds, "images": sum(s.images for s in session.samples[MAIN_ROW])}

    def _start_up(self, result: dict[str, Any]) -> None:
        """Fill in the time to the first batch of the rows that matter."""
        if self.args.quick:
            return
        keys = (*result["best"].values(), MAIN_ROW, "fastloader-uint8")
        for spec in self._specs():
            if spec.key not in keys:
                continue
            self.progress.step(f"time to the first batch: {spec.label}")
            try:
                row(result, spec.key)["first_batch_s"] = first_batch_seconds(
                    spec, self.photos.folder, self.args.batch_size
                )
            except ContenderError as error:
                # The rates, which took far longer to measure, stay valid.
                self.warnings.append(f"no time to the first batch of {spec.label}: {error}")

    def _specs(self) -> list[LoaderSpec]:
        return loader_specs(self.cores, self.args.quick, self.photos.pixels >= LARGE)

    def _plan(self) -> Plan:
        """How long to measure, from the options."""
        if self.args.quick:
            return Plan(rounds=self.args.rounds or 2, seconds=0.2, settle_s=0.05)
        if self.args.seconds:
            return Plan(rounds=None, budget_s=self.args.seconds)
        return Plan(rounds=self.args.rounds or Plan.rounds)

    def _method(self, rounds: int) -> dict[str, Any]:
        """How it was measured."""
        plan = self._plan()
        return {
            "rounds": rounds,
            "seconds": plan.seconds,
            "settle_s": plan.settle_s,
            "quick": self.args.quick,
        }

    def _facts(self, busy: float | None) -> dict[str, Any]:
        """What was run, when, on what."""
        size = self.args.batch_size
        return {
            "schema": SCHEMA,
            "case": "images",
            "command": self._command(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": {**machine.describe(), "load_at_start": busy},
            "versions": machine.versions(),
            "revision": machine.revision(),
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

    def _command(self) -> str:
        """The command line, with names in place of paths."""
        args = self.args
        words = ["python -m fastpipe.bench images"]
        words += [f"--data {self.photos.name}"] if args.data else []
        words += ["--large"] if args.large else []
        words += ["--peers"] if args.peers else []
        words += [f"--batch-size {args.batch_size}"] if args.batch_size != 64 else []
        words += [f"--rounds {args.rounds}"] if args.rounds else []
        words += [f"--seconds {args.seconds:g}"] if args.seconds else []
        words += ["--quick"] if args.quick else []
        words += [f"--{name} {path.name}" for name in ("json", "plot") if (path := getattr(args, name))]
        return " ".join(words)

    def _miss(self, key: str, label: str, why: str) -> None:
        """Note a row that is not measured."""
        self.missing.append({"key": key, "label": label, "why": why})
        self.progress.done(f"not measured: {label}: {why}")


def _positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """An argparse type: a number above zero."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if value <= 0:
            raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
        return value

    return parse
