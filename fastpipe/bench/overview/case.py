"""The case ``all``: its options, and its result, put together from those of the five pipelines."""

from __future__ import annotations

import argparse
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from rich.console import Console

from fastpipe.bench import machine
from fastpipe.bench.driver import Driver, add_file_arguments
from fastpipe.bench.overview.apart import outcome_apart
from fastpipe.bench.overview.cases import CASES
from fastpipe.bench.results import main_of, times_digits
from fastpipe.console import Progress
from fastpipe.errors import OptionError

__all__ = ["add_arguments", "chosen", "run", "sentence"]

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

    Args:
        only: names with commas between them, or None.

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
    return _All(args, machine.cores_allowed(), progress, keys=chosen(args.only)).run(console)


@dataclass
class _All(Driver):
    """One run of all."""

    case: ClassVar[str] = "all"
    keys: list[str] = field(kw_only=True)
    is_wrong: bool = False

    def run(self, console: Console) -> int:
        """Measure, report, and write what was asked for."""
        with _terminated_as_interrupted():
            return max(super().run(console), int(self.is_wrong))

    def result(self) -> dict[str, Any]:
        """Measure one after the other, and put the file's content together."""
        begun, busy = time.monotonic(), self.begin()
        parts: dict[str, dict[str, Any]] = {}
        with tempfile.TemporaryDirectory(prefix="fastpipe-bench-", ignore_cleanup_errors=True) as folder:
            for number, key in enumerate(self.keys, 1):
                parts[key] = self._part(key, f"[{number}/{len(self.keys)}] {key}", Path(folder))
        self.progress.done(f"all in {time.monotonic() - begun:.0f} s")
        result = self._merged(parts, busy)
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

    def _merged(self, parts: Mapping[str, Mapping[str, Any]], busy: float | None) -> dict[str, Any]:
        """The file's content but for the verdict."""
        results = {key: part["result"] for key, part in parts.items() if "result" in part}
        checks = {key: part["check"] for key, part in parts.items() if "check" in part}
        checks |= {key: result["check"] for key, result in results.items()}
        for result in results.values():
            told = [text for text in result["method"]["warnings"] if text not in self.warnings]
            self.warnings.extend(told)
        words = [f"--only {','.join(self.keys)}"] if self.args.only else []
        merged: dict[str, Any] = self.facts(words, busy)
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
    """The outcome in one sentence.

    Args:
        result: the file's content.
    """
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
