"""The case ``all``: five training pipelines before and after, each in a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from rich.console import Console

from fastpipe.bench import generate, hdf5, images, tf, volume
from fastpipe.bench.check import Outcome
from fastpipe.bench.data import generated_folder, scan
from fastpipe.bench.driver import FILES, Driver, add_file_arguments
from fastpipe.bench.images import LoaderRow, LoaderSpec
from fastpipe.bench.results import MAIN_ROW, RowInfo, main_of, times_digits, write_json
from fastpipe.bench.runner import Contender, ContenderError, Plan, Session, Timeline, timeline_of
from fastpipe.bench.tf import Apart, ApartRow, tensorflow
from fastpipe.console import Progress
from fastpipe.core.extras import require
from fastpipe.core.machine import available_cpus
from fastpipe.core.processes import signal_name
from fastpipe.errors import FastpipeError, OptionError

# ---- The five pipelines, over small data -----------------------------------------------------------

Rows = list[tuple[RowInfo, Contender]]


@dataclass(frozen=True)
class Ground:
    """Where a case is measured.

    Attributes:
        folder: for data that is made; whoever made the folder removes it.
        cores: processors that may be used.
        quick: whether so little data is enough that only shows that all runs.
        say: told what takes long.
    """

    folder: Path
    cores: int
    quick: bool
    say: Callable[[str], None]


class Case(ABC):
    """One pipeline, before and after.

    Attributes:
        key: its name: that of its folder in ``examples/``, where it has one of its own.
        alone: the case of ``fastpipe bench`` that measures more of it.
        unit: what is counted.
        batch_size: of that, in a batch.
        seconds: that a measurement takes.
        most_steps: of which a stall is seen; 0 where there is no loader.
        data: what is read, in words; known when there are rows.
    """

    key: ClassVar[str]
    label: ClassVar[str]
    alone: ClassVar[str]
    unit: ClassVar[str]
    batch_size: int = 1
    seconds: ClassVar[float] = 1.2
    data = ""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.most_steps = 6 if ground.quick else 40

    @abstractmethod
    def rows(self, stack: ExitStack) -> Rows:
        """Make the data and the rows: first what is replaced, then what replaces it, then others."""

    @abstractmethod
    def check(self, rows: Rows) -> Outcome:
        """Whether fastpipe's rows give what they should."""

    def timeline(self, row: Any, steps: int, busy_s: float) -> Timeline:
        """Steps that take so long each, with a row's batches."""
        return timeline_of(row.batches(steps * self.batch_size), lambda _: busy_s, steps)


class KerasMultimodal(Case):
    """``tf.py_function`` and Pillow, for four images of each sample."""

    key, alone, unit = "keras_multimodal", "tf", "samples"
    label = "keras_multimodal, four images a sample, tf.data"
    batch_size = 16

    def rows(self, stack: ExitStack) -> Rows:
        """One row in another process, as the case ``tf`` has it."""
        tensorflow()
        if self.ground.quick:
            self.batch_size = 8
        count = 12 * self.batch_size
        photos = tf.Photos.of(_photos(self.ground), "made-up photographs", count)
        lengths = replace(tf.QUICK, modalities=count)
        scratch = self.ground.folder / self.key
        scratch.mkdir()
        setting = tf.Setting(photos, lengths, self.batch_size, scratch)
        self.data, self.most_steps = f"{count} samples of {photos.text}", count // self.batch_size
        self._setting, self._own = setting, list[tf.EpochRow]()
        apart = Apart(setting)
        stack.callback(apart.close)
        found: Rows = []
        for spec in tf.specs():
            if spec.section != "modalities" or spec.kind == "ram":  # which says nothing of a first epoch
                continue
            if spec.group == "fastpipe":
                self._own.append(tf.EpochRow(spec, setting))
                found.append((spec.info, self._own[-1]))
            else:
                found.append((spec.info, ApartRow(spec, setting, apart)))
        return found

    def check(self, rows: Rows) -> Outcome:
        return tf.check_rows(self._setting, self._own, self.ground.say)

    def timeline(self, row: Any, steps: int, busy_s: float) -> Timeline:
        found: Timeline = row.timeline(steps, busy_s)
        return found


class HDF5Mel(Case):
    """A file that each worker opens, read row by row in random order."""

    key, alone, unit = "hdf5_mel", "hdf5", "samples"
    label = "hdf5_mel, shuffled log-mels of an HDF5 file, gzip"
    batch_size = 64

    def rows(self, stack: ExitStack) -> Rows:
        """Of the rows of the case ``hdf5`` those on its first table."""
        ground = self.ground
        layouts = {"gzip": hdf5.LAYOUTS["gzip"]}
        (table,) = hdf5.made_tables(512 if ground.quick else 2048, ground.folder, ground.say, layouts)
        table.warm()
        self._table = table
        self.data = f"{table.samples:,} log-mels of {table.sample_bytes / 1000:.0f} kB, {table.label}"
        found: Rows = []
        for spec in hdf5.specs_of(table, self.batch_size):
            if spec.kind == "rows":
                counts = (0, min(2, ground.cores))
                spec = hdf5.best_workers(spec, table, counts, 0.05 if ground.quick else 0.3, ground.say)
            if spec.kind in ("rows", "window", "uniform"):
                found.append((spec.info(table), hdf5.TableRow(spec, table)))
        return found

    def check(self, rows: Rows) -> Outcome:
        own = [row.spec for _, row in rows if isinstance(row, hdf5.TableRow) and row.spec.group == "fastpipe"]
        return hdf5.check_rows([(self._table, spec) for spec in own], self.ground.say)

    def timeline(self, row: Any, steps: int, busy_s: float) -> Timeline:
        with hdf5.quiet():
            return super().timeline(row, steps, busy_s)


class MotionGeneration(Case):
    """A loop that makes one sample after the other."""

    key, alone, unit = "motion_generation", "generate", "rows"
    label = "motion_generation, rows of a function that takes 5 ms, stored"
    seconds = 2.5  # as processes have to start

    def rows(self, stack: ExitStack) -> Rows:
        """The first section of the case ``generate``."""
        require("h5py", extra="generation")
        section, scratch = generate.SECTIONS[0], self.ground.folder / self.key
        scratch.mkdir()
        self.data = f"{section.label}; they are stored before training begins, so no step of it waits"
        self.most_steps = 0
        return [
            (spec.info, make(spec, scratch))
            for spec, make in generate.specs(section, self.ground.cores)
            if spec.kind in ("replaced", "workers")
        ]

    def check(self, rows: Rows) -> Outcome:
        made = [row for _, row in rows if isinstance(row, generate.MadeRow)]
        return generate.check_stored(made, self.ground.say)


class VolumePatches(Case):
    """Slices of Zarr arrays in one worker process."""

    key, alone, unit = "volume_patches", "volume", "patches"
    label = "volume_patches, anywhere in a Zarr volume"
    batch_size = 2

    def rows(self, stack: ExitStack) -> Rows:
        """Of the case ``volume`` the first epochs."""
        require("zarr", extra="bench")
        full = volume.FULL
        sizes = volume.QUICK if self.ground.quick else replace(full, shape=(128, 512, 512))
        scroll = volume.made_scroll(sizes, self.ground.folder, self.ground.say)
        scroll.warm()
        room = f"fastpipe remembers {scroll.nbytes / volume.QUARTER / 1e6:,.0f} MB, a quarter of it"
        self._scroll, self.data = scroll, f"{volume.described(scroll)['text']}; {room}"
        self.most_steps = min(self.most_steps, scroll.epoch // self.batch_size)
        found: Rows = []
        for spec in volume.specs():
            if spec.section == volume.COLD and spec.group == "replaced":
                loader = volume.sliced_loader(spec, scroll, self.batch_size)
                found.append((spec.info, volume.SlicedRow(spec, loader)))
            elif spec.section == volume.COLD:
                found.append((spec.info, volume.WholeEpochs(spec, scroll, self.batch_size)))
        return found

    def check(self, rows: Rows) -> Outcome:
        own = [row for _, row in rows if isinstance(row, (volume.WholeEpochs, volume.SlicedRow))]
        return volume.check_patches(self._scroll, own, self.ground.say)


class ImageFolder(Case):
    """torchvision's ``ImageFolder`` with two workers, over a local folder."""

    key, alone, unit = "imagefolder", "images", "images"
    label = "imagefolder, photos on the local disk (in S3: bench s3)"
    batch_size = 32

    def rows(self, stack: ExitStack) -> Rows:
        """Of the case ``images`` the two that matter, and the stock loader over fastpipe's dataset."""
        photos = scan(_photos(self.ground), "made-up photographs")
        photos.warm()
        self._photos = photos
        each = photos.bytes / len(photos.files) / 1000
        self.data = (
            f"{len(photos.files)} {photos.name} of {each:.0f} kB on the local disk, in the page cache; not in"
            " S3, whose server takes long to start: python benchmarks/run.py s3, in a clone of the repository"
        )
        workers = min(2, self.ground.cores)
        specs = [
            LoaderSpec("replaced", f"ImageFolder + DataLoader(num_workers={workers})", "replaced", workers),
            LoaderSpec(MAIN_ROW, "FastImageFolder + FastLoader", "fastpipe"),
            LoaderSpec("stock", f"FastImageFolder + DataLoader(num_workers={workers})", "stock", workers),
        ]
        found: Rows = []
        for spec in specs:
            info = RowInfo(
                spec.key, spec.label, spec.group, spec.num_workers, spec.output, spec.note, unit=self.unit
            )
            found.append((info, LoaderRow(spec, photos.folder, photos.indices, self.batch_size)))
        return found

    def check(self, rows: Rows) -> Outcome:
        workers = 0 if self.ground.quick else min(2, self.ground.cores)
        return images.run_check(self._photos, workers, lambda _: None)


CASES: dict[str, type[Case]] = {
    case.key: case for case in (KerasMultimodal, HDF5Mel, MotionGeneration, VolumePatches, ImageFolder)
}


def _photos(ground: Ground) -> Path:
    """Photographs, made by the first case that needs them."""
    return generated_folder(ground.folder, say=ground.say, per_class=3 if ground.quick else 8)


# ---- One of the five measured ----------------------------------------------------------------------

ROUNDS = 3
# A step is busy for this part of the time that the replaced loader takes for its batch, so that the loader is
# what bounds it; and there are so many steps that this loader needs so many seconds for them.
BUSY_PART, STEPPED_S = 0.5, 2.0
_LEAST_STEPS = 4


@dataclass
class Pair(Driver):
    """One run of one pipeline."""

    case: ClassVar[str] = "all"
    pipeline: Case = field(kw_only=True)

    def plan(self) -> Plan:
        plan = super().plan()
        return plan if self.args.quick else Plan(rounds=ROUNDS, seconds=self.pipeline.seconds, settle_s=0.1)

    def result(self) -> dict[str, Any] | None:
        case = self.pipeline
        with ExitStack() as stack:
            rows = case.rows(stack)
            for info, row in rows:
                stack.callback(row.close)
                self.infos[info.key] = replace(info, section=case.key)
            outcome = case.check(rows)
            if not self.passed(outcome):
                return {"check": outcome.as_json()}
            session = self.measure([row for _, row in rows])
            timelines = self._timelines(rows, session)
        groups = {self.infos[key].group for key, samples in session.samples.items() if samples}
        if {"replaced", "fastpipe"} - groups:
            raise FastpipeError("; ".join(f"{miss['label']}: {miss['why']}" for miss in self.missing))
        keys = {info.group: key for key, info in reversed(self.infos.items()) if session.samples.get(key)}
        return self.content(
            session, outcome, [f"--only {case.key}"],
            data={"text": case.data, "name": case.key, "samples": 0, "sample_bytes": 0},
            job={"text": case.label, "short": case.key, "batch_size": case.batch_size,
                 "replaces": "pipeline"},
            sections={case.key: {"label": case.label, "data": case.data, "batch_size": case.batch_size}},
            main=keys["fastpipe"],
            best={case.key: keys["replaced"]},
            timelines={case.key: timelines} if timelines else {},
        )  # fmt: skip

    def _timelines(self, rows: Rows, session: Session) -> dict[str, Any] | None:
        """Steps with the batches of what is replaced and of its replacement; None where none waits."""
        case = self.pipeline
        pair = [rows[0], next(one for one in rows if one[0].group == "fastpipe")]
        if not case.most_steps or any(info.key not in session.samples for info, _ in pair):
            return None
        # By the fastest round, lest a neighbour of that time leave the loader less to wait for.
        batch_s = case.batch_size / max(one.rate for one in session.samples[rows[0][0].key])
        steps = max(_LEAST_STEPS, min(case.most_steps, round(STEPPED_S / batch_s)))
        busy_s = float(f"{BUSY_PART * batch_s:.2g}")
        found: list[dict[str, Any]] = []
        for info, row in pair:
            self.progress.step(f"steps of {1000 * busy_s:g} ms: {info.label}")
            try:
                timeline = case.timeline(row, steps, busy_s)
            except ContenderError as error:
                self.warnings.append(f"{case.key}: no steps: {info.label}: {error}")
                return None
            found.append({"key": info.key, "label": info.label, **timeline.as_json()})
        return {"busy_s": busy_s, "rows": found}

    def label_of(self, key: str) -> str:
        return self.infos[key].label


# ---- A process for each, as TensorFlow and forks of torch's loader do not go together --------------

_COMMAND = (sys.executable, "-m", "fastpipe.bench.overview")
# What processes get to end after a signal, before the next and less polite one.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
_PATIENCE_S, _LOOK_S = 5.0, 0.02
# The sockets of multiprocessing lie in temporary folders, and no name of one may have more than 107 bytes.
_LONGEST_FOLDER = 107 - len("/pymp-abcdefgh/listener-abcdefgh")
_ENOUGH_OF_AN_ERROR = 4000  # bytes


def outcome_apart(
    case: str,
    folder: Path,
    quick: bool,
    limit_s: float,
    say: Callable[[str], None],
    command: tuple[str, ...] = _COMMAND,
) -> dict[str, Any]:
    """Measure a pipeline in a process of its own; all that it starts has ended afterwards.

    Returns:
        As of `outcome`; or ``crash``, what happened to the process.
    """
    out, errors, is_late = folder / f"{case}.json", folder / f"{case}.err", threading.Event()
    job = json.dumps({"case": case, "folder": str(folder), "quick": quick, "out": str(out)})
    environment = dict(os.environ)
    if len(os.fsencode(folder)) <= _LONGEST_FOLDER:
        # What they leave in temporary folders, also when they are killed, is in this one.
        environment["TMPDIR"] = str(folder)
    with errors.open("wb") as stderr, subprocess.Popen(
        [*command, job], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=environment,
        text=True, encoding="utf-8", errors="replace",
        start_new_session=True,  # Ctrl-C is ours, who pass it on; and a group can be ended as a whole
    ) as process:  # fmt: skip

        def watch() -> None:
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                is_late.set()
                _end(process.pid)
            _end(process.pid, _SIGNALS[1:])  # what it has left; then the pipe that is read below is closed

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            assert process.stdout is not None
            for line in filter(None, map(str.strip, process.stdout)):
                say(line)
            watcher.join()
        finally:
            _end(process.pid)
    if is_late.is_set():
        return {"crash": f"it was not done after {limit_s:g} s"}
    if out.exists():
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found
    return {"crash": f"its process {_ending(process.returncode)}: {_last_line(errors)}"}


def _end(group: int, signals: Sequence[int] = _SIGNALS) -> None:
    """End all processes of a group, at first politely."""
    for number in signals:
        deadline = time.monotonic() + _PATIENCE_S
        if _is_alive(group):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)
        while _is_alive(group) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)


def _is_alive(group: int) -> bool:
    """Whether a process of a group runs; those that have ended stay in it until somebody waits for them."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of, *_ = file.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it is gone
            continue
        if int(of) == group and state not in "ZX":
            return True
    return False


def _ending(code: int) -> str:
    """How a process ended, in words.

    >>> _ending(-9), _ending(1)
    ('was killed by SIGKILL', 'ended with code 1')
    """
    if code >= 0:
        return f"ended with code {code}"
    return f"was killed by {signal_name(-code)}"


def _last_line(errors: Path) -> str:
    """The end of what a process has said about its errors."""
    with errors.open("rb") as file:
        file.seek(max(0, errors.stat().st_size - _ENOUGH_OF_AN_ERROR))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "no message"


# ---- The case --------------------------------------------------------------------------------------

# What a pipeline may take; on two cores, with compiled code in place, it takes a fifth of it.
LIMIT_S = 180.0
# Lists that are taken over from each pipeline, and dictionaries.
_LISTS, _BY_KEY = ("rows", "missing"), ("sections", "best", "timelines")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the case."""
    add = parser.add_argument
    add("--only", metavar="CASE,…", help=f"some of {', '.join(CASES)} (default: all of them)")
    add("--quick", action="store_true", help="little data and two short rounds: does it run? "
        "No figures to rely on")  # fmt: skip
    add_file_arguments(parser, page="report.html", picture="report.png")
    parser.set_defaults(peers=False, rounds=None, seconds=None)


def chosen(only: str | None) -> list[str]:
    """The pipelines to measure.

    Raises:
        OptionError: there is none of a name.

    >>> chosen("imagefolder,hdf5_mel")
    ['hdf5_mel', 'imagefolder']
    """
    if only is None:
        return list(CASES)
    names = [name.strip() for name in only.split(",") if name.strip()]
    for name in names or [only]:
        if name not in CASES:
            raise OptionError(f"--only: must be some of {', '.join(CASES)}, got {name!r}")
    return [name for name in CASES if name in names]


def run(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    """Measure, report, and write what was asked for.

    Returns:
        0, or 1 where outputs differ from those of what is replaced, a pipeline's process did not end well, or
        figures are worse than those to compare with.

    Raises:
        OptionError: there is no pipeline of a name.
    """
    return _All(args, available_cpus(), progress, keys=chosen(args.only)).run(console)


@dataclass
class _All(Driver):
    """One run of all."""

    case: ClassVar[str] = "all"
    keys: list[str] = field(kw_only=True)
    is_wrong: bool = False

    def run(self, console: Console) -> int:
        with _terminated_as_interrupted():
            return max(super().run(console), int(self.is_wrong))

    def result(self) -> dict[str, Any]:
        begun = time.monotonic()
        self.begin()
        parts: dict[str, dict[str, Any]] = {}
        with tempfile.TemporaryDirectory(prefix="fastpipe-bench-", ignore_cleanup_errors=True) as folder:
            for number, key in enumerate(self.keys, 1):
                parts[key] = self._part(key, f"[{number}/{len(self.keys)}] {key}", Path(folder))
        self.progress.done(f"all in {time.monotonic() - begun:.0f} s")
        result = self._merged(parts)
        result["verdict"] = sentence(result)
        return result

    def _part(self, key: str, name: str, folder: Path) -> dict[str, Any]:
        """The outcome of a pipeline."""
        begun = time.monotonic()
        self.progress.step(f"{name}: starting")
        found = outcome_apart(
            key, folder, self.args.quick, LIMIT_S, lambda text: self.progress.step(f"{name}: {text}")
        )
        if "result" in found:
            ratio = main_of(found["result"], key)["ratio"]["median"]
            took = time.monotonic() - begun
            self.progress.done(f"{name}: {ratio:.{times_digits(ratio)}f}× as fast; in {took:.0f} s")
            return found
        label = str(CASES[key].label)
        if "check" in found:
            self.is_wrong = True
            self.miss(key, label, found["check"]["text"])
        elif "crash" in found:
            self.is_wrong = True
            remedy = f"run it alone: python -m fastpipe.bench {CASES[key].alone} --quick"
            self.miss(key, label, f"{found['crash']}; {remedy}")
        else:
            self.miss(key, label, found["why"])
        return found

    def _merged(self, parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """The file's content but for the verdict."""
        results = {key: part["result"] for key, part in parts.items() if "result" in part}
        checks = {key: part["check"] for key, part in parts.items() if "check" in part}
        checks |= {key: result["check"] for key, result in results.items()}
        for result in results.values():
            told = [text for text in result["method"]["warnings"] if text not in self.warnings]
            self.warnings.extend(told)
        words = [f"--only {','.join(self.keys)}"] if self.args.only else []
        merged: dict[str, Any] = self.facts(words)
        for name in _LISTS:
            merged[name] = [entry for result in results.values() for entry in result[name]]
        for name in _BY_KEY:
            merged[name] = {key: one for result in results.values() for key, one in result[name].items()}
        # In their order, those that could not be measured among them.
        merged["sections"] = {
            key: merged["sections"].get(key, {"label": str(CASES[key].label)}) for key in self.keys
        }
        merged["missing"] += self.missing
        methods = [result["method"] for result in results.values()]
        differing = [text for check in checks.values() for text in check["problems"]]
        told_of = ". ".join(f"{key}: {check['text'].rstrip('.')}" for key, check in checks.items())
        compared = f"compared before: {told_of}" if told_of else "nothing was compared"
        return merged | {
            "method": {**self.method(max((one["rounds"] for one in methods), default=0)),
                       "seconds": max((one["seconds"] for one in methods), default=0.0)},
            "data": {"text": "made-up data, new in each run", "name": "made up", "samples": 0,
                     "sample_bytes": 0},
            "job": {"text": "Five training pipelines, before and after",
                    "short": "five pipelines, before and after", "batch_size": 0,
                    "replaces": "pipeline"},
            "check": {"ok": not differing, "problems": differing, "text": compared},
            "main": next((result["main"] for result in results.values()), ""),
            "stages": {"seconds": {}, "images": 0},
            "floor_share": None,
            "plan": "",
        }  # fmt: skip


def sentence(result: Mapping[str, Any]) -> str:
    """The outcome in one sentence."""
    told: dict[str, list[str]] = {"faster": [], "no clear difference": [], "slower": []}
    for section in result["best"]:
        ratio = main_of(result, section)["ratio"]
        kind = "faster" if ratio["low"] > 1 else "slower" if ratio["high"] < 1 else "no clear difference"
        times = f"{ratio['median']:.{times_digits(ratio['median'])}f}×"
        told[kind].append(f"{section} {times}")
    told["not measured"] = [section for section in result["sections"] if section not in result["best"]]
    words = [
        f"{len(names)} of {len(result['sections'])} {kind}: {', '.join(names)}"
        for kind, names in told.items()
        if names
    ]
    return f"{'. '.join(words)}."


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM be Ctrl-C, which leaves nothing behind."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ---- What runs in a pipeline's process -------------------------------------------------------------
#
# Its job is its argument.  It says on its standard output what it does, and ends, together with all processes
# of its group, when its standard input does.

_WIDTH = 400


def outcome(case: str, folder: Path, quick: bool, progress: Progress) -> dict[str, Any]:
    """Measure a pipeline.

    Returns:
        ``result``, the content of a result file; or ``check``, where outputs differ; or ``why`` it cannot be
        measured.
    """
    cores = available_cpus()
    files = dict.fromkeys((*FILES, "compare"))
    args = Namespace(quick=quick, rounds=None, seconds=None, peers=False, usual={}, **files)
    try:
        made = CASES[case](Ground(folder, cores, quick, progress.step))
        found = Pair(args, cores, progress, pipeline=made).result()
    except (FastpipeError, ContenderError) as error:
        return {"why": str(error)}
    assert found is not None
    return {"result": found} if "rows" in found else found


def _end_with_input(folder: Path) -> None:
    """Wait until whoever started this process is gone, and leave nothing behind."""
    os.read(0, 1)  # not through a file object, whose lock the end of the interpreter wants
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGTERM)


def _child() -> None:
    job = json.loads(sys.argv[1])
    folder = Path(job["folder"])
    threading.Thread(target=_end_with_input, args=(folder,), daemon=True).start()
    with Progress(Console(file=sys.stdout, width=_WIDTH, force_terminal=False)) as progress:
        told = outcome(job["case"], folder, job["quick"], progress)
    write_json(told, Path(job["out"]))


if __name__ == "__main__":
    _child()
