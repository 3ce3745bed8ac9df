"""The case ``all``: five training pipelines, before and after their change to fastpipe.

Each pipeline is measured in its own process.
"""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from fastpipe.bench import generate, hdf5, images, tf, volume
from fastpipe.bench.check import Outcome
from fastpipe.bench.data import generated_folder, scan
from fastpipe.bench.driver import Case, Driver, Row, add_file_arguments
from fastpipe.bench.images import LoaderSpec
from fastpipe.bench.results import MAIN_ROW, RowInfo, main_of, times, write_json
from fastpipe.bench.runner import Contender, ContenderError, Plan, Session, Timeline, timeline_of
from fastpipe.console import Progress
from fastpipe.core.extras import require
from fastpipe.core.processes import signal_name
from fastpipe.errors import FastpipeError, OptionError

# ---- The five pipelines, over small data -----------------------------------------------------------

ROUNDS = 3
# The busy time of a step is the fraction ``BUSY_PART`` of the replaced loader's time for a batch, so that the
# loader is the bottleneck.  The replaced loader needs about ``STEPPED_S`` seconds for all batches of a
# timeline.
BUSY_PART, STEPPED_S = 0.5, 2.0
_LEAST_STEPS = 4


class _Overview(Driver):
    """The common parts of ``Pipeline`` (a run of one pipeline) and ``Bench`` (a run of all pipelines)."""

    case = "all"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--only", metavar="CASE,…", help=f"some of {', '.join(CASES)} (default: all of them)")
        add("--quick", action="store_true", help="little data and two short rounds: does it run? "
            "No figures to rely on")  # fmt: skip
        add_file_arguments(parser, html="report.html", plot="report.png")
        parser.set_defaults(peers=False, rounds=None, seconds=None)


class Pipeline(_Overview, Case):
    """Measures one training pipeline, before and after its change to fastpipe.

    The rows are some of the rows of another case, with small data.  The caller creates the folder of the data
    and removes this folder.
    """

    key: ClassVar[str]  # name of the pipeline, and of its folder in examples/ if it has one
    label: ClassVar[str]
    alone: ClassVar[str]  # the case that measures more rows of the pipeline
    quick_s = 0.2
    batch_size = 1
    seconds = 1.2  # duration of a measurement
    data = ""  # description of the data
    check: Outcome

    def __init__(self, args: argparse.Namespace, progress: Progress, folder: Path) -> None:
        super().__init__(args, progress)
        self.folder, self.say, self.is_quick = folder, progress.step, args.quick
        self.most_steps = 6 if args.quick else 40  # the most steps of a timeline; 0 for a case without loader
        args.batch_size = self.batch_size

    def plan(self) -> Plan:
        plan = super().plan()
        return plan if self.is_quick else Plan(rounds=ROUNDS, seconds=self.seconds, settle_s=0.1)

    def added(self, info: RowInfo, row: Row) -> Row:
        return super().added(replace(info, section=self.key), row)

    def passed(self, check: Outcome) -> bool:
        self.check = check
        return super().passed(check)

    def label_of(self, key: str) -> str:
        return self.infos[key].label

    def timeline(self, row: Any, steps: int, busy_s: float) -> Timeline:
        """Measure how long ``steps`` steps, each busy for ``busy_s`` seconds, wait for batches of ``row``."""
        return timeline_of(row.batches(steps * self.batch_size), lambda _: busy_s, steps)

    def measure(self, contenders: Sequence[Contender]) -> Session:
        session = super().measure(contenders)
        self.timelines = self._timelines({row.key: row for row in contenders}, session)
        return session

    def described(self, session: Session) -> dict[str, Any]:
        keys = {info.group: key for key, info in reversed(self.infos.items()) if session.samples.get(key)}
        if {"replaced", "fastpipe"} - keys.keys():
            raise FastpipeError("; ".join(f"{miss['label']}: {miss['why']}" for miss in self.missing))
        self.main = keys["fastpipe"]
        about = {"label": self.label, "data": self.data, "batch_size": self.batch_size}
        return {
            "data": {"text": self.data, "name": self.key, "samples": 0, "sample_bytes": 0},
            "job": {"text": self.label, "short": self.key, "batch_size": self.batch_size,
                    "replaces": "pipeline"},
            "sections": {self.key: about},
            "best": {self.key: keys["replaced"]},
            "timelines": {self.key: self.timelines} if self.timelines else {},
        }  # fmt: skip

    def _timelines(self, rows: Mapping[str, Contender], session: Session) -> dict[str, Any] | None:
        """Measure how steps wait with the replaced loader and with fastpipe's; None if this is impossible."""
        keys = {info.group: key for key, info in reversed(self.infos.items())}
        pair = [keys["replaced"], keys["fastpipe"]]
        if not self.most_steps or any(key not in session.samples for key in pair):
            return None
        # The fastest round counts: in the other rounds other programs may have slowed the loader.
        batch_s = self.batch_size / max(one.rate for one in session.samples[pair[0]])
        steps = max(_LEAST_STEPS, min(self.most_steps, round(STEPPED_S / batch_s)))
        busy_s = float(f"{BUSY_PART * batch_s:.2g}")
        found: list[dict[str, Any]] = []
        for key in pair:
            label = self.label_of(key)
            self.say(f"steps of {1000 * busy_s:g} ms: {label}")
            try:
                timeline = self.timeline(rows[key], steps, busy_s)
            except ContenderError as error:
                self.warnings.append(f"{self.key}: no steps: {label}: {error}")
                return None
            found.append({"key": key, "label": label, **timeline.as_json()})
        return {"busy_s": busy_s, "rows": found}

    def made_photos(self) -> Path:
        """Return the folder of photographs; the first pipeline that needs the photographs generates them."""
        return generated_folder(self.folder, say=self.say, per_class=3 if self.is_quick else 8)


def _modalities() -> list[tf.Spec]:
    """Describe the datasets of samples with four images of which a first epoch is measured."""
    return [spec for spec in tf.specs() if spec.key in ("modalities-replaced", "modalities-threads")]


class KerasMultimodal(Pipeline, tf.Bench):
    """The pipeline that reads four images for each sample, with ``tf.py_function`` and Pillow."""

    key, alone = "keras_multimodal", "tf"
    label = "keras_multimodal, four images a sample, tf.data"
    batch_size = 16
    specs = staticmethod(_modalities)

    def prepare(self) -> None:
        tf.tensorflow()
        if self.is_quick:
            self.batch_size = 8
        count = 12 * self.batch_size
        photos = tf.Photos.of(self.made_photos(), "made-up photographs", count)
        scratch = self.folder / self.key
        scratch.mkdir()
        self.setting = tf.Setting(photos, replace(tf.QUICK, modalities=count), self.batch_size, scratch)
        self.data, self.most_steps = f"{count} samples of {photos.text}", count // self.batch_size

    def timeline(self, row: Any, steps: int, busy_s: float) -> Timeline:
        found: Timeline = row.timeline(steps, busy_s)
        return found


class HDF5Mel(Pipeline, hdf5.Bench):
    """The pipeline that reads an HDF5 file row by row, in random order, in each worker process."""

    key, alone = "hdf5_mel", "hdf5"
    label = "hdf5_mel, shuffled log-mels of an HDF5 file, gzip"
    batch_size = 64

    def prepare(self) -> None:
        count, layouts = 512 if self.is_quick else 2048, {"gzip": hdf5.LAYOUTS["gzip"]}
        self.tables = hdf5.made_tables(count, self.folder, self.say, layouts)
        (table,) = self.tables
        self.data = f"{count:,} log-mels of {table.sample_bytes / 1000:.0f} kB, {table.label}"

    def specs(self) -> Iterator[tuple[hdf5.Table, hdf5.TableSpec]]:
        return (pair for pair in super().specs() if pair[1].kind in ("rows", "window", "uniform"))

    def worker_counts(self) -> tuple[Sequence[int], float]:
        return (0, min(2, self.cores)), 0.05 if self.is_quick else 0.3

    def timeline(self, row: Any, steps: int, busy_s: float) -> Timeline:
        with hdf5.quiet():
            return super().timeline(row, steps, busy_s)


class MotionGeneration(Pipeline, generate.Bench):
    """The pipeline with a loop that makes one sample after the other."""

    key, alone = "motion_generation", "generate"
    label = "motion_generation, rows of a function that takes 5 ms, stored"
    seconds = 2.5  # long enough to start processes

    def prepare(self) -> None:
        require("h5py", extra="generation")
        self.sections, self.scratch, self.most_steps = [generate.SECTIONS[0]], self.folder / self.key, 0
        self.scratch.mkdir()
        label = self.sections[0].label
        self.data = f"{label}; they are stored before training begins, so no step of it waits"

    def specs(self, section: generate.Section) -> list[generate.Spec]:
        return [spec for spec in super().specs(section) if spec.workers or spec.group == "replaced"]


class VolumePatches(Pipeline, volume.Bench):
    """The pipeline that slices Zarr arrays in one worker process; only first epochs are measured."""

    key, alone = "volume_patches", "volume"
    label = "volume_patches, anywhere in a Zarr volume"
    batch_size = 2

    def prepare(self) -> None:
        require("zarr", extra="bench")
        sizes = volume.QUICK if self.is_quick else replace(volume.FULL, shape=(128, 512, 512))
        self.scroll = scroll = volume.made_scroll(sizes, self.folder, self.say)
        scroll.warm()
        room = f"fastpipe remembers {scroll.room / 1e6:,.0f} MB, a quarter of it"
        self.data = f"{scroll.described['text']}; {room}"
        self.most_steps = min(self.most_steps, scroll.epoch // self.batch_size)

    def specs(self) -> list[volume.PatchSpec]:
        return [spec for spec in super().specs() if spec.section == volume.COLD]


class ImageFolder(Pipeline, images.Bench):
    """The pipeline that reads a local folder with torchvision's ``ImageFolder`` in at most two workers."""

    key, alone = "imagefolder", "images"
    label = "imagefolder, photos on the local disk (in S3: bench s3)"
    batch_size = 32

    def prepare(self) -> None:
        self.photos = photos = scan(self.made_photos(), "made-up photographs")
        photos.warm()
        each = photos.bytes / len(photos.files) / 1000
        self.data = (
            f"{len(photos.files)} {photos.name} of {each:.0f} kB on the local disk, in the page cache; not in"
            " S3, whose server takes long to start: python benchmarks/run.py s3, in a clone of the repository"
        )

    def specs(self) -> list[LoaderSpec]:
        """Return the replaced loader, fastpipe's loader, and torch's loader with fastpipe's dataset."""
        workers = min(2, self.cores)
        stock = f"DataLoader(num_workers={workers})"
        return [
            LoaderSpec("replaced", f"ImageFolder + {stock}", "replaced", workers, unit="images"),
            LoaderSpec(MAIN_ROW, "FastImageFolder + FastLoader", "fastpipe", unit="images"),
            LoaderSpec("stock", f"FastImageFolder + {stock}", "stock", workers, unit="images"),
        ]


CASES: dict[str, type[Pipeline]] = {
    case.key: case for case in (KerasMultimodal, HDF5Mel, MotionGeneration, VolumePatches, ImageFolder)
}


# ---- A process for each pipeline, because torch's loader must not fork a process with TensorFlow ---

_COMMAND = (sys.executable, "-m", "fastpipe.bench.overview")
# Processes get these signals one after the other until they have ended, with a pause of _PATIENCE_S.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
_PATIENCE_S, _LOOK_S = 5.0, 0.02
# The sockets of multiprocessing are in the temporary folder, and a socket's path has at most 107 bytes.
_LONGEST_FOLDER = 107 - len("/pymp-abcdefgh/listener-abcdefgh")


def outcome_apart(
    case: str,
    folder: Path,
    quick: bool,
    limit_s: float,
    say: Callable[[str], None],
    command: tuple[str, ...] = _COMMAND,
) -> dict[str, Any]:
    """Measure a pipeline in its own process, and end all processes that the process has started.

    Returns:
        The dict that `outcome` returns.  If the process fails, a dict with ``crash``, the reason.
    """
    out, errors, is_late = folder / f"{case}.json", folder / f"{case}.err", threading.Event()
    job = json.dumps({"case": case, "folder": str(folder), "quick": quick, "out": str(out)})
    environment = dict(os.environ)
    if len(os.fsencode(folder)) <= _LONGEST_FOLDER:
        # The temporary files of all processes, also of killed processes, are in this folder.
        environment["TMPDIR"] = str(folder)
    with errors.open("wb") as stderr, subprocess.Popen(
        [*command, job], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=environment,
        text=True, encoding="utf-8", errors="replace",
        start_new_session=True,  # a new group, all of which `_end` can end; Ctrl-C does not reach the group
    ) as process:  # fmt: skip

        def watch() -> None:
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                is_late.set()
                _end(process.pid)
            _end(process.pid, _SIGNALS[1:])  # end the remaining processes, which closes the pipe read below

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
    code = process.returncode
    ending = f"ended with code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"
    said = errors.read_text(errors="replace").strip().splitlines() or ["no message"]
    return {"crash": f"its process {ending}: {said[-1].strip()}"}


def _end(group: int, signals: Sequence[int] = _SIGNALS) -> None:
    """End all processes of a group with ``signals``; send the next signal only if one still runs."""
    for number in signals:
        deadline = time.monotonic() + _PATIENCE_S
        if _is_alive(group):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)
        while _is_alive(group) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)


def _is_alive(group: int) -> bool:
    """Return True if a process of a group runs; zombies, which have ended, do not count."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of, *_ = file.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        if int(of) == group and state not in "ZX":
            return True
    return False


# ---- The case --------------------------------------------------------------------------------------

# The time limit for a pipeline.  With two cores and cached compiled code, a pipeline takes a fifth of it.
LIMIT_S = 180.0
# The fields of the merged result that collect the lists and the dicts of all pipelines.
_LISTS, _BY_KEY = ("rows", "missing"), ("sections", "best", "timelines")


def chosen(only: str | None) -> list[str]:
    """Return the names of the pipelines to measure: those in the text ``only``, or all.

    Raises:
        OptionError: a name is unknown.

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


class Bench(_Overview):
    """One run of all pipelines.

    The exit code is 1 if outputs differ, if a pipeline's process failed, or for a reason in `Driver.run`.
    """

    about = "five training pipelines before and after: tf.data, HDF5, generation, volumes, images"
    is_wrong = False

    def run(self, console: Console) -> int:
        self.keys = chosen(self.args.only)
        # SIGTERM acts like Ctrl-C, so that processes and files are removed.
        with ExitStack() as undo:
            if threading.current_thread() is threading.main_thread():
                before = signal.signal(signal.SIGTERM, signal.default_int_handler)
                undo.callback(signal.signal, signal.SIGTERM, before)
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
        begun = time.monotonic()
        self.progress.step(f"{name}: starting")
        found = outcome_apart(
            key, folder, self.args.quick, LIMIT_S, lambda text: self.progress.step(f"{name}: {text}")
        )
        if "result" in found:
            ratio, took = main_of(found["result"], key)["ratio"], time.monotonic() - begun
            self.progress.done(f"{name}: {times(ratio['median'])} as fast; in {took:.0f} s")
            return found
        self.is_wrong |= "why" not in found
        why = found["check"]["text"] if "check" in found else found.get("why", "")
        if "crash" in found:
            why = f"{found['crash']}; run it alone: python -m fastpipe.bench {CASES[key].alone} --quick"
        self.miss(key, CASES[key].label, why)
        return found

    def _merged(self, parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        results = {key: part["result"] for key, part in parts.items() if "result" in part}
        checks = {key: part["check"] for key, part in parts.items() if "check" in part}
        checks |= {key: result["check"] for key, result in results.items()}
        told = [text for result in results.values() for text in result["method"]["warnings"]]
        self.warnings = list(dict.fromkeys([*self.warnings, *told]))
        merged = self.facts()
        for name in _LISTS:
            merged[name] = [entry for result in results.values() for entry in result[name]]
        for name in _BY_KEY:
            merged[name] = {key: one for result in results.values() for key, one in result[name].items()}
        # All sections are listed in order, also those of pipelines that could not be measured.
        merged["sections"] = {
            key: merged["sections"].get(key, {"label": CASES[key].label}) for key in self.keys
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
            "stages": self.stages,
            "floor_share": None,
            "plan": "",
        }  # fmt: skip


def sentence(result: Mapping[str, Any]) -> str:
    told: dict[str, list[str]] = {"faster": [], "no clear difference": [], "slower": []}
    for section in result["best"]:
        ratio = main_of(result, section)["ratio"]
        kind = "faster" if ratio["low"] > 1 else "slower" if ratio["high"] < 1 else "no clear difference"
        told[kind].append(f"{section} {times(ratio['median'])}")
    told["not measured"] = [section for section in result["sections"] if section not in result["best"]]
    words = [
        f"{len(names)} of {len(result['sections'])} {kind}: {', '.join(names)}"
        for kind, names in told.items()
        if names
    ]
    return f"{'. '.join(words)}."


# ---- Code in the process of a pipeline -------------------------------------------------------------
#
# The argument of the process is its job, as JSON.  The process reports its progress on standard output.  When
# its standard input is closed, the process ends, together with all processes of its group.

_WIDTH = 400


def outcome(case: str, folder: Path, quick: bool, progress: Progress) -> dict[str, Any]:
    """Measure a pipeline.

    Returns:
        A dict with ``result``, the content of a result file.  If outputs differ, the dict has ``check``
        instead.  If the pipeline cannot be measured, the dict has ``why``, the reason.
    """
    parser = argparse.ArgumentParser()
    CASES[case].add_arguments(parser)
    args = parser.parse_args(["--only", case, *(["--quick"] if quick else [])])
    pipeline = CASES[case](args, progress, folder)
    try:
        result = pipeline.result()
    except (FastpipeError, ContenderError) as error:
        return {"why": str(error)}
    return {"check": pipeline.check.as_json()} if result is None else {"result": result}


def _end_with_input(folder: Path) -> None:
    """Wait until the parent process has ended; then remove ``folder``, and end this process and its group."""
    os.read(0, 1)  # not through a file object, because the interpreter needs the lock of stdin at exit
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
