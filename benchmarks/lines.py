"""Lines of a report on studies: memory, first batches, single operations, and targets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

from benchmarks.peers.rows import Peer, interpreter
from fastpipe.bench import report
from fastpipe.bench.driver import Driver, Row
from fastpipe.bench.report import cell
from fastpipe.bench.results import RowInfo, name_of
from fastpipe.bench.runner import ContenderError


class Studied(Driver):
    """A case's run with other libraries and studies, and with the figures that were asked for."""

    program: ClassVar[str] = "python benchmarks/run.py"

    def lines(self, result: Mapping[str, Any]) -> list[str]:
        """Return the lines that follow the table."""
        return [*target_lines(result), *study_lines(result)]

    def peer(self, peer: Peer, info: RowInfo, make: Callable[[str], Row]) -> list[Row]:
        """Start a peer by the interpreter that has it; one that is not there is noted."""
        python = interpreter(peer)
        if python is None:
            self.miss(info.key, name_of(vars(info)), f"not installed: {peer.install}")
            return []
        self.progress.now(f"starting {info.label}")
        return self.opened([(info, partial(make, python))])

    def tried(self, what: str, study: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
        """Do a study; if it fails, the rates, which took far longer to measure, stay valid."""
        try:
            return study()
        except ContenderError as error:
            self.warnings.append(f"no {what}: {error}")
            return None


def markdown(result: Mapping[str, Any]) -> str:
    """Return a result as a Markdown table with all that goes with it."""
    return report.markdown(result, target_table(result), study_lines(result))


def study_lines(result: Mapping[str, Any]) -> list[str]:
    """Return all that a case has."""
    return [
        *first_batch_lines(result),
        *memory_lines(result),
        *amplification_lines(result),
        *bucket_lines(result),
        *single_lines(result),
        *predicted_lines(result),
        *peak_lines(result),
        *training_lines(result),
    ]


def first_batch_lines(result: Mapping[str, Any]) -> list[str]:
    """Time to the first batch of a file with many chunks, or of a volume."""
    first = dict(result.get("first_batch") or {})
    chunks = first.pop("chunks", None)
    what = "first batch" if chunks is None else f"first batch of {chunks:,} chunks"
    return [
        f"{what}: {one['label']}: {one['median_s']:.3f} s"
        f" ({min(one['raw_s']):.3f} to {max(one['raw_s']):.3f})"
        + (f"; importing fastpipe {one['import_s']:.1f} s before" if name != "replaced" else "")
        for name, one in first.items()
    ]


def memory_lines(result: Mapping[str, Any]) -> list[str]:
    """Memory of the process tree, above that of a loader over nothing."""
    return [
        f"memory with {_topology(one)}, cache of {one['budget_mb']:,.0f} MB:"
        f" {one['above_mb']:,.0f} MB above FastLoader over nothing ({one['mb']:,.0f} and"
        f" {one['nothing_mb']:,.0f}; torch's loader over nothing {one['stock_mb']:,.0f})"
        for one in (result.get("memory") or {"rows": ()})["rows"]
    ]


def amplification_lines(result: Mapping[str, Any]) -> list[str]:
    """Return lines with the bytes decoded for each byte of a patch, by the order of patches."""
    found = result.get("amplification")
    if not found:
        return []
    words = ", ".join(
        f"{name} {found[name]['median']:.2f} ({min(found[name]['raw']):.2f} to {max(found[name]['raw']):.2f})"
        for name in ("tour", "uniform")
    )
    return [f"bytes decoded for each that is used, cache of {found['budget_mb']:,.0f} MB: {words}"]


def bucket_lines(result: Mapping[str, Any]) -> list[str]:
    """Return lines with the waits of the first epoch, downloads of a small stage, and processor time."""
    lines, labels = [], {entry["key"]: entry["label"] for entry in result["rows"]}
    if stall := result.get("stall"):
        lines += [
            f"a step that takes {stall['rate']:g} images/s waits {one['median']:.1%} of the first epoch"
            f" ({min(one['raw']):.1%} to {max(one['raw']):.1%}): {one['label']}"
            for one in stall["rows"]
        ]
    if again := result.get("refetch"):
        span = f"{min(again['raw']):.1%} to {max(again['raw']):.1%}"
        lines.append(
            f"a stage of {again['part']:.0%} of the size downloads {again['median']:.1%} of the objects again"
            f" ({span}); one that removes what was used longest ago would {again['lru']:.1%}"
        )
    for key, used in result.get("cpu", {}).items():
        words = ", ".join(f"{part} {seconds:.2f}" for part, seconds in used.items() if seconds)
        lines.append(f"processor seconds for 1,000 images: {labels[key]}: {words}")
    return lines


def single_lines(result: Mapping[str, Any]) -> list[str]:
    """Return lines with the times of single operations, and their ratios to other libraries."""
    found = result.get("single") or {"rows": ()}
    return [
        f"{one['label']}: {one.get('batch_size', found.get('batch_size'))} {one['unit']} in"
        f" {one['ms']['median']:.2f} ms; "
        + ", ".join(
            f"{other['ratio']['median']:.2f}× ({other['ratio']['low']:.2f} to {other['ratio']['high']:.2f})"
            f" {other['label']}"
            for other in one["against"]
        )
        for one in found["rows"]
    ]


def predicted_lines(result: Mapping[str, Any]) -> list[str]:
    """The predicted and the actual duration of rows."""
    return [
        f"predicted, {one['label']}: {statistics.median(one['predicted_s']):.2f} s for {one['rows']:,} rows"
        f" that took {statistics.median(one['seconds']):.2f} s; {statistics.median(one['error']):+.1f}%"
        f" ({min(one['error']):+.1f}% to {max(one['error']):+.1f}%)"
        for one in (result.get("predicted") or {"rows": ()})["rows"]
    ]


def peak_lines(result: Mapping[str, Any]) -> list[str]:
    """The most memory of a process, by the rows that it had made."""
    rows = (result.get("peak") or {"rows": ()})["rows"]
    words = ", ".join(f"{statistics.median(one['mb']):,.1f} MB for {one['rows']:,} rows" for one in rows)
    return [f"most memory of the process that calls, rows of 8 bytes: {words}"] if rows else []


def training_lines(result: Mapping[str, Any]) -> list[str]:
    """How busy steps keep a GPU, and the time they lose waiting for data."""
    labels = {entry["key"]: entry["label"] for entry in result["rows"]}
    return [
        f"{section}: {labels[one['key']]}: "
        + ", ".join(
            f"{words} {figures['median']:.1%} ({figures['low']:.1%} to {figures['high']:.1%})"
            for words, figures in (("lost for want of data", one["stall"]), ("GPU busy", one["busy"]))
            if figures is not None
        )
        for section, rows in result.get("training", {}).items()
        for one in rows
        if one["stall"] is not None or one["busy"] is not None
    ]


def _topology(entry: Mapping[str, Any]) -> str:
    """Threads, where the case tells them, and workers."""
    workers = f"{entry['workers']} workers"
    return f"{entry['threads']} threads and {workers}" if "threads" in entry else workers


def target_lines(result: Mapping[str, Any]) -> list[str]:
    """Return lines with the targets and the measured figures."""
    lines = []
    for target in result.get("targets", ()):
        got, unit = target["got"], target["unit"]
        asked = f"{'at most' if target['is_most'] else 'at least'} {_figure(target['asked'], unit)}"
        if got is None:
            lines.append(f"asked: {target['text']}: {asked}: not measured")
            continue
        span = f"{_figure(got['low'], unit)} to {_figure(got['high'], unit)}"
        outcome = "met" if target["is_met"] else "MISSED"
        lines.append(f"asked: {target['text']}: {asked}: {outcome}, {_figure(got['median'], unit)} ({span})")
    return lines


def target_table(result: Mapping[str, Any]) -> list[str]:
    """Return the targets as a table."""
    if not result.get("targets"):
        return []
    lines = ["| asked for | | median (range) | |", "|---|--:|--:|---|"]
    for one in result["targets"]:
        got, unit = one["got"], one["unit"]
        sign = "≤" if one["is_most"] else "≥"
        figures, outcome = "", "not measured"
        if got is not None:
            low, high = _figure(got["low"], unit), _figure(got["high"], unit)
            figures, outcome = (
                f"{_figure(got['median'], unit)} ({low}–{high})",
                "met" if one["is_met"] else "missed",
            )
        lines.append(
            f"| {cell(one['text'])} | {sign} {_figure(one['asked'], unit)} | {figures} | {outcome} |"
        )
    return lines


def _figure(value: float, unit: str) -> str:
    """A figure with its unit.

    >>> _figure(15, "×"), _figure(350000, "samples/s"), _figure(0.3, "s")
    ('15×', '350,000 samples/s', '0.3 s')
    """
    if unit == "×":
        return f"{value:.3g}×"
    return f"{value:,.0f} {unit}" if value >= 10 else f"{value:.3g} {unit}"
