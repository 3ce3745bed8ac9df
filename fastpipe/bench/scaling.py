"""The case ``scaling``: an image folder, by the number of threads, beside as many worker processes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rich.console import Console

from fastpipe.bench import machine
from fastpipe.bench.check import run_check
from fastpipe.bench.command import positive
from fastpipe.bench.data import Photos, folder_to_use, scan
from fastpipe.bench.driver import Driver, add_run_arguments
from fastpipe.bench.floor import DecodeRow
from fastpipe.bench.loaders import LoaderRow, LoaderSpec
from fastpipe.bench.results import RowInfo, entries, floor_share, verdict
from fastpipe.bench.runner import Contender, Sample, rates_by_round, ratios, summarise
from fastpipe.console import Progress

__all__ = ["add_arguments", "run", "scaling_of", "thread_counts"]

_ROUNDS = 3  # there are three rows for each number of threads


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the case."""
    add = parser.add_argument
    add("--data", metavar="FOLDER", help="image folder, one sub-folder per class (default: $FASTPIPE_PHOTOS, "
        "else photograph-like JPEGs made once into the user's cache folder)")  # fmt: skip
    add("--threads", type=_counts, metavar="N,N,…", help="numbers of threads (default: 1, 2, 4 … all cores)")
    add("--batch-size", type=positive(int), default=64, metavar="N", help="images in a batch (default: 64)")
    add_run_arguments(parser, None, rounds=_ROUNDS)


def thread_counts(cores: int) -> tuple[int, ...]:
    """Numbers of threads that are measured: powers of two, and all cores.

    >>> thread_counts(1), thread_counts(12)
    ((1,), (1, 2, 4, 8, 12))
    """
    return tuple(sorted({cores, *(2**power for power in range(cores.bit_length()) if 2**power <= cores)}))


def run(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    """Measure, report, and write what was asked for.

    Returns:
        0, or 1 when the outputs do not agree with the replaced loader's.

    Raises:
        OptionError: there is nothing to measure.
    """
    folder, name, generated = folder_to_use(args.data, progress.done)
    bench = _Bench(args, machine.cores_allowed(), progress, photos=scan(folder, name))
    if generated:
        bench.warnings.append("the photos are made up; give your own with --data or $FASTPIPE_PHOTOS")
        progress.done(f"photos: made up, kept in {folder}")
    return bench.run(console)


def scaling_of(counts: Sequence[int], samples: Mapping[str, Sequence[Sample]]) -> dict[str, Any]:
    """How rates grow with the number of threads.

    Args:
        counts: the numbers of threads, the smallest first.
        samples: of a finished run, by row.

    Returns:
        ``rows``, one for each number that was measured.  Each has ``threads`` and, as ``median``, ``low`` and
        ``high`` of ratios within rounds: ``times_best``, FastLoader over the best replaced loader
        of any number of workers; ``linear``, its rate for each thread over that with the fewest threads;
        ``floor_share``, its rate over the floor's; ``floor_linear``, as ``linear`` of the floor.
    """
    replaced = [f"replaced-{count}" for count in counts if samples.get(f"replaced-{count}")]
    rows = []
    for count in counts:
        key, floor, first = f"threads-{count}", f"floor-{count}", counts[0]
        if not samples.get(key) or not replaced:
            continue
        row: dict[str, Any] = {"threads": count, "times_best": ratios(samples, key, replaced)}
        if samples.get(f"threads-{first}"):
            row["linear"] = _linear(samples, key, f"threads-{first}", count / first)
        if samples.get(floor):
            row["floor_share"] = ratios(samples, key, [floor])
            if samples.get(f"floor-{first}"):
                row["floor_linear"] = _linear(samples, floor, f"floor-{first}", count / first)
        rows.append({
            name: value if name == "threads" else {
                part: round(figure, 4) for part, figure in summarise(value)._asdict().items()
            }
            for name, value in row.items()
        })  # fmt: skip
    return {"rows": rows}


def _linear(samples: Mapping[str, Sequence[Sample]], key: str, first: str, times: float) -> list[float]:
    """Round by round, the rate over so many times that of another row."""
    base = rates_by_round(samples[first])
    return [rate / (times * base[number]) for number, rate in rates_by_round(samples[key]).items()]


def _counts(text: str) -> tuple[int, ...]:
    """An argparse type: numbers from 1, with commas between.

    >>> _counts("4,1,2")
    (1, 2, 4)
    """
    return tuple(sorted({positive(int)(part.strip()) for part in text.split(",")}))


@dataclass
class _Bench(Driver):
    """One run of the case."""

    case: ClassVar[str] = "scaling"
    usual_rounds: ClassVar[int] = _ROUNDS
    photos: Photos = field(kw_only=True)

    def result(self) -> dict[str, Any] | None:
        """Check, measure, and put the file's content together; ``None`` if the check fails."""
        busy = self.begin()
        self.photos.warm()
        counts = self.args.threads or thread_counts(self.cores)
        if counts[-1] > self.cores:
            self.warnings.append(f"there are {self.cores} cores: more threads than that only wait for them")
        self.progress.step("comparing outputs")
        check = run_check(self.photos, 0 if self.args.quick else min(self.cores, 8), lambda images: None)
        self.progress.done(f"check: {check.sentence()}")
        if not check.ok:
            return None
        with ExitStack() as stack:
            session = self.measure(self._open(stack, counts))
        rows = entries(list(self.infos.values()), session)
        measured = {entry["key"] for entry in rows}
        counts = [count for count in counts if {f"threads-{count}", f"replaced-{count}"} <= measured]
        main = f"threads-{counts[-1]}"
        alone = {"fastloader-float32": session.samples[main]}
        alone["floor"] = session.samples.get(f"floor-{counts[-1]}", [])
        result = self._facts(busy, counts) | {
            "method": self.method(session.rounds),
            "check": {**check.as_json(), "text": check.sentence()},
            "rows": rows,
            "main": main,
            "best": {str(count): f"replaced-{count}" for count in counts},
            "sections": {str(count): {"label": _threads(count)} for count in counts},
            "missing": self.missing,
            "stages": {"seconds": {}, "images": 0},
            "floor_share": floor_share(alone),
            "scaling": scaling_of(counts, session.samples),
            "plan": "",
        }
        result["verdict"] = verdict(result)
        return result

    def label_of(self, key: str) -> str:
        """Return the name of a row, which has its number of threads."""
        return self.infos[key].label

    def _open(self, stack: ExitStack, counts: Sequence[int]) -> list[Contender]:
        """Build every row."""
        photos, size, contenders = self.photos, self.args.batch_size, list[Contender]()

        def add(info: RowInfo, make: Callable[[], Contender]) -> None:
            contender = self.open(stack, info, make)
            if contender is not None:
                contenders.append(contender)

        for n in counts:
            replaced = LoaderSpec(
                f"replaced-{n}", f"ImageFolder + DataLoader(num_workers={n})", "replaced", n
            )
            ours = LoaderSpec(
                f"threads-{n}", f"FastImageFolder(threads={n}) + FastLoader", "fastpipe", threads=n
            )
            for spec in (replaced, ours):
                workers = spec.num_workers if spec is replaced else None
                info = RowInfo(
                    spec.key, spec.label, spec.group, workers, spec.output, "", section=str(n), unit="images"
                )
                add(info, lambda spec=spec: LoaderRow(spec, photos.folder, photos.indices, size))  # type: ignore[misc]
            key, label = f"floor-{n}", f"read and decode only, {_threads(n)}"
            info = RowInfo(key, label, "floor", None, "crops", "", section=str(n), unit="images")
            add(info, lambda n=n, key=key: DecodeRow(photos.files, n, size, key, from_memory=False))  # type: ignore[misc]
        return contenders

    def _facts(self, busy: float | None, counts: Sequence[int]) -> dict[str, Any]:
        """What was run, when, on what."""
        args, photos, size = self.args, self.photos, self.args.batch_size
        words = [f"--data {photos.name}"] if args.data else []
        words += [f"--threads {','.join(map(str, args.threads))}"] if args.threads else []
        words += [f"--batch-size {size}"] if size != 64 else []
        return self.facts(words, busy) | {
            "data": {
                "name": photos.name, "classes": photos.classes, "total": photos.total,
                "photos": len(photos.files), "bytes": photos.bytes,
            },
            "job": {
                "text": "RandomResizedCrop(224), RandomHorizontalFlip, ToTensor, Normalize;"
                f" batches of {size}, shuffled",
                "short": f"RandomResizedCrop(224) + flip + normalise, batch {size}",
                "batch_size": size,
            },
        }  # fmt: skip


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"
