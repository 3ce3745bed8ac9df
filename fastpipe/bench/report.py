"""Results as text: the table and the sentences in the terminal, changes since an older run, and Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from fastpipe.bench.results import (
    UNIT,
    load,
    name_of,
    rate_of,
    reference_of,
    replaced_thing,
    shown,
    times_and_range,
)
from fastpipe.console import PlainTable, plain, print_line
from fastpipe.core.text import counted, printable, printable_lines
from fastpipe.errors import OptionError

# ---- Figures that only some cases have -------------------------------------------------------------


def more_lines(result: Mapping[str, Any]) -> list[str]:
    """Return lines about how long steps wait and how rates grow with threads, if the case measured this."""
    lines = []
    for section, told in result.get("timelines", {}).items():
        before, after = told["rows"]
        lines.append(
            f"{section}: {len(before['wait_s'])} steps that are busy for {1000 * told['busy_s']:g} ms each"
            f" wait {before['share']:.0%} of {before['total_s']:.1f} s before, {after['share']:.0%} of"
            f" {after['total_s']:.1f} s after"
        )
    return lines + scaling_lines(result)


def scaling_lines(result: Mapping[str, Any]) -> list[str]:
    """Return a line about FastLoader's rate for each number of threads."""
    lines = []
    for one in result.get("scaling", {}).get("rows", ()):
        times = one["times_best"]
        line = (
            f"{counted(one['threads'], 'thread')}: {times['median']:.2f}×"
            f" ({times['low']:.2f} to {times['high']:.2f}) the best replaced loader of any number of workers"
        )
        for name, words in (
            ("linear", "of linear"),
            ("floor_share", "of reading and decoding alone"),
            ("floor_linear", "of linear"),
        ):
            if name in one:
                which = "which is " if name == "floor_linear" else ""
                line += f", {which}{one[name]['median']:.0%} {words}"
        lines.append(line)
    return lines


# ---- Tables ----------------------------------------------------------------------------------------

STYLES = {"replaced": "dim", "stock": "green", "fastpipe": "bold green", "peer": "", "floor": "italic cyan"}

# For each case, the packages whose versions are shown below a table.
_PACKAGES = {
    "images": "torch torchvision pillow",
    "scaling": "torch torchvision pillow h5py zarr",
    "hdf5": "torch h5py numcodecs",
    "volume": "torch zarr numcodecs",
    "s3": "torch torchvision obstore",
    "augment": "torch torchvision",
    "gpu": "torch torchvision pillow nvidia-nvimgcodec-cu13 nvidia-nvimgcodec-cu12 nvidia-dali-cuda130"
    " nvidia-dali-cuda120 triton",
    "tf": "tensorflow tensorflow-cpu keras pillow",
    "generate": "numpy h5py cloudpickle",
    "all": "torch torchvision tensorflow tensorflow-cpu h5py zarr pillow",
}

# The least width of a terminal for notes.  In a narrower terminal each line of a note would be a single word.
WIDTH_FOR_NOTES = 130


def machine_line(result: Mapping[str, Any]) -> str:
    machine = result["machine"]
    gpu = f", {machine['gpu']['name']} (driver {machine['gpu']['driver']})" if machine.get("gpu") else ""
    memory = "" if machine["memory_gib"] is None else f", {machine['memory_gib']:g} GiB"
    cpu = f"{machine['cpu']}, {counted(machine['cores'], 'core')}"
    return f"{cpu}{memory}{gpu}, {machine['os']}, {machine['python']}"


def data_line(result: Mapping[str, Any]) -> str:
    data = result["data"]
    if "text" in data:
        return str(data["text"])
    if "photos" not in data:
        nbytes = data["sample_bytes"]
        size = f"{nbytes / 1000:.0f} kB" if nbytes >= 1000 else f"{nbytes} B"
        return f"{data['samples']:,} rows of {size} ({data['name']})"
    each = data["bytes"] / data["photos"] / 1000
    part = "" if data["photos"] == data["total"] else f" of {data['total']:,}"
    return (
        f"{data['photos']:,}{part} photos in {data['classes']} classes, {each:.0f} kB each ({data['name']})"
    )


def print_result(result: Mapping[str, Any], console: Console, more: Sequence[str] = ()) -> None:
    """Print the table of a result, and lines below it; ``more`` has lines about other measurements."""
    sections = result.get("sections", {})
    table = PlainTable(result["job"]["text"], title_style="bold")
    table.add_column(replaced_thing(result), min_width=28)
    for name in ("per second" if sections else "images/s", "range", "ratio", "range"):
        table.add_column(name, justify="right", no_wrap=True)
    if has_first := _has_first(result):
        table.add_column("first batch, s", justify="right")
    if has_notes := console.width >= WIDTH_FOR_NOTES:
        table.add_column("note")
    section = None
    for entry in shown(result):
        if sections and entry["section"] != section:
            section = entry["section"]
            table.add_section()
            table.add_row(plain(f"{sections[section]['label']}: {entry['unit']}/s", "bold"))
        cells = [entry["label"], *figures_of(entry)]
        cells += [_first(entry)] if has_first else []
        if has_notes:
            is_reference = entry["key"] == reference_of(result, entry)
            cells.append("; ".join(filter(None, ["the reference" if is_reference else "", entry["note"]])))
        table.add_row(*cells, style=STYLES[entry["group"]])
    for miss in result["missing"]:
        if miss["key"] in sections:
            table.add_section()
            table.add_row(plain(miss["label"], "bold"))
            table.add_row(plain("not measured, for the reason below", "red"))
    console.print(table)
    for number, line in enumerate(filter(None, _lines(result, more))):
        console.print(plain(line, "bold" if number == 0 else ""))


def figures_of(entry: Mapping[str, Any], unit: str = "") -> list[str]:
    rate, ratio = rate_of(entry), entry["ratio"]
    return [
        f"{rate['median']:,.0f}{unit}", f"{rate['low']:,.0f}–{rate['high']:,.0f}",
        f"{ratio['median']:.2f}×", f"{ratio['low']:.2f}–{ratio['high']:.2f}",
    ]  # fmt: skip


def _lines(result: Mapping[str, Any], more: Sequence[str]) -> list[str]:
    return [
        result["verdict"],
        *more,
        *more_lines(result),
        _floor_sentence(result),
        _stage_line(result),
        data_line(result),
        machine_line(result),
        _peers_sentence(result),
        *(f"not measured: {miss['label']}: {miss['why']}" for miss in result["missing"]),
        *(f"warning: {text}" for text in result["method"]["warnings"]),
    ]


def _stage_line(result: Mapping[str, Any]) -> str:
    """Return a line with the time of each of FastLoader's stages; empty if stages were not measured."""
    seconds, images = result["stages"]["seconds"], result["stages"]["images"]
    if not images:
        return ""
    parts = " · ".join(f"{stage} {1000 * spent / images:.2f} ms" for stage, spent in seconds.items())
    thing = "image" if "photos" in result["data"] else "sample"
    meaning = "(wait is the consumer's time, the others are threads')"
    return f"FastLoader's stages, per {thing}: {parts} {meaning}"


def markdown(result: Mapping[str, Any], table: Sequence[str] = (), more: Sequence[str] = ()) -> str:
    """Return a result as a Markdown table, with the conditions of the measurement at the end.

    Between them are the lines of a second ``table``, and the lines ``more`` about other measurements.
    """
    sections, has_first = result.get("sections", {}), _has_first(result)
    lines = [] if sections else _head("loader", UNIT, "loader", has_first)
    section = None
    for entry in shown(result):
        if sections and entry["section"] != section:
            section = entry["section"]
            head = _head(sections[section]["label"], entry["unit"], replaced_thing(result))
            lines += [*([""] if lines else []), *head]
        rate, range_of_rate, ratio, range_of_ratio = figures_of(entry)
        label = f"**{entry['label']}**" if entry["group"] == "fastpipe" else entry["label"]
        figures = f"{rate} ({range_of_rate}) | {ratio.removesuffix('×')} ({range_of_ratio})"
        first = f" {_first(entry)} |" if has_first else ""
        lines.append(f"| {cell(label + _note(entry))} | {figures} |{first}")
    lines += ["", *table] if table else []
    method, peers = result["method"], _peers_sentence(result)
    names = ["fastpipe", *_PACKAGES.get(result["case"], _PACKAGES["images"]).split()]
    versions = ", ".join(f"{name} {result['versions'][name]}" for name in names if name in result["versions"])
    first = " First batch: with compiled code cached, in brackets the very first time." if has_first else ""
    check = result["check"]["text"]
    said = filter(None, (_floor_sentence(result), f"{check[:1].upper()}{check[1:]}."))
    more = [*more, *more_lines(result)]
    lines += [
        *([""] if more else []),
        *(f"- {line}" for line in more),
        "",
        f"{result['job']['text']}; {data_line(result)}. {machine_line(result)}. {versions}."
        f" {method['rounds']} interleaved rounds, {result['date'][:10]}.{first} {' '.join(said)}",
        *(["", peers] if peers else []),
        "",
        f"Made by `{result['command']}`.",
    ]
    return printable_lines("\n".join(lines) + "\n")


def short_markdown(result: Mapping[str, Any]) -> str:
    """Return a Markdown table that compares fastpipe's rows with the best replaced loader of each section.

    Raises:
        OptionError: the result has no sections.
    """
    sections = result.get("sections")
    if not sections:
        raise OptionError("--short needs results with sections: leave it out")
    by_key = {entry["key"]: entry for entry in result["rows"]}
    lines = [
        "| data | loader | a second | best replaced loader | ×, median (range) |",
        "|---|---|--:|--:|--:|",
    ]
    for entry in shown(result):
        replaced = by_key.get(result["best"].get(entry["section"]))
        if entry["group"] == "fastpipe" and replaced is not None:
            data, loader = cell(sections[entry["section"]]["label"]), cell(entry["label"] + _note(entry))
            rate = f"{rate_of(entry)['median']:,.0f} {entry['unit']} | {rate_of(replaced)['median']:,.0f}"
            lines.append(f"| {data} | {loader} | {rate} | {times_and_range(entry['ratio'], '')} |")
    rounds = f"{result['method']['rounds']} interleaved rounds, {result['date'][:10]}."
    return printable_lines("\n".join([*lines, "", f"{machine_line(result)}; {rounds}"]) + "\n")


def _head(name: str, unit: str, replaced: str, has_first: bool = False) -> list[str]:
    head = f"| {cell(name)} | {unit}/s, median (range) | × best replaced {replaced}, median (range) |"
    return [head + " first batch, s |" * has_first, "|---|--:|--:|" + "--:|" * has_first]


def cell(text: str) -> str:
    return printable(text).replace("|", "\\|")


def _note(entry: Mapping[str, Any]) -> str:
    return f" ({entry['note']})" if entry["note"] else ""


def _peers_sentence(result: Mapping[str, Any]) -> str:
    """Return a sentence with the versions of the other libraries (peers) that were measured.

    A dependency of a peer is named only if its version differs from the version that fastpipe uses.
    """
    told = []
    for entry in result["rows"]:
        if not entry.get("versions"):
            continue
        library, *needed = entry["versions"].items()
        others = [f"{name} {version}" for name, version in needed if result["versions"].get(name) != version]
        told.append(" ".join(library) + (f" (with {', '.join(others)})" if others else ""))
    return f"Peers: {', '.join(dict.fromkeys(told))}." if told else ""


def _has_first(result: Mapping[str, Any]) -> bool:
    return any(entry["first_batch_s"] for entry in result["rows"])


def _first(entry: Mapping[str, Any]) -> str:
    """Return the seconds to a row's first batch; in brackets, those of the very first start."""
    first = entry["first_batch_s"]
    return "" if first is None else f"{first['warm_s']:.2f} ({first['cold_s']:.2f})"


def _floor_sentence(result: Mapping[str, Any]) -> str:
    """Return a sentence that compares FastLoader's rate with the rate of only decoding; "" if unknown."""
    share = result["floor_share"]
    return "" if share is None else (
        f"FastLoader reaches {share['median']:.0%} ({share['low']:.0%}–{share['high']:.0%}) of the decode"
        " floor, the rate of decoding alone in as many threads."
    )  # fmt: skip


# ---- Changes since an older run --------------------------------------------------------------------

# A change by a smaller fraction counts as noise.
LEAST = 0.05

_STYLES = {"improved": "bold green", "same": "", "regressed": "bold red"}
_COMPARED = ("stock", "fastpipe")


@dataclass(frozen=True)
class Change:
    """Says how one row of fastpipe's in the table of results has changed between two runs."""

    label: str
    old: tuple[float, ...]  # ratio to the best replaced loader in each round of the old run
    new: tuple[float, ...]  # the ratios in the new run

    @property
    def ratio(self) -> float:
        return statistics.median(self.new) / statistics.median(self.old)

    @property
    def noise(self) -> float:
        """Fraction by which medians may differ by chance: the noise of the noisier run, at least a twentieth.

        The noise of a run is the larger of two figures: twice the median distance of a round from the median,
        and half of the rounds' range.  The range counts, because two of three rounds may be close by chance.
        """
        return max(LEAST, *(_spread(figures) for figures in (self.old, self.new)))

    @property
    def outcome(self) -> Literal["improved", "same", "regressed"]:
        """The row's change: improved, the same, or regressed.

        A row has improved or regressed if the change exceeds the noise and the ranges of the rounds do not
        overlap.

        >>> Change("a", (2.0, 2.1, 1.9), (3.0, 3.1, 2.9)).outcome
        'improved'
        >>> Change("a", (2.0, 2.1, 1.9), (1.8, 2.0, 1.7)).outcome
        'same'
        """
        if self.ratio > 1 + self.noise and min(self.new) > max(self.old):
            return "improved"
        if self.ratio < 1 / (1 + self.noise) and max(self.new) < min(self.old):
            return "regressed"
        return "same"


def old_result(path: Path, case: str) -> dict[str, Any]:
    """Read the older result, with which the new result is compared.

    Raises an OptionError if the file cannot be read or belongs to another case.
    """
    old = load(path)
    if old["case"] != case:
        raise OptionError(f"--compare: {str(path)!r} is of the case {old['case']!r}, and this is {case!r}")
    return old


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Return how fastpipe's rows have changed, for the rows that are in both results.

    Ratios to the replaced loader are compared instead of rates, because the replaced loader was measured on
    the same machine in the same minute.
    """
    rows = {entry["key"]: entry for entry in old["rows"]}
    found = [
        Change(name_of(entry), _ratios(old, rows[entry["key"]]), _ratios(new, entry))
        for entry in new["rows"]
        if entry["group"] in _COMPARED
        and entry["key"] in rows
        and entry.get("unit") == rows[entry["key"]].get("unit")  # images cannot be compared with patches
    ]
    return [one for one in found if one.old and one.new]


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return a line for each important difference between two results, except in the measured figures."""
    lines = []
    for name in ("cpu", "cores", "memory_gib", "os", "python"):
        was, now = old["machine"].get(name), new["machine"].get(name)
        if was != now:
            lines.append(f"another machine: {name} {was}, now {now}")
    moved = []
    for name in sorted({*old["versions"], *new["versions"]}):
        was, now = (result["versions"].get(name, "none") for result in (old, new))
        if was != now:
            moved.append(f"{name} {was} to {now}")
    if moved:
        lines.append(f"other versions: {', '.join(moved)}")
    for what, of, name in (("work", "job", "text"), ("data", "data", "name")):
        if (was := old[of][name]) != (now := new[of][name]):
            lines.append(f"other {what}: {was}, now {now}")
    for when, result in (("old", old), ("new", new)):
        if result["method"]["quick"]:
            lines.append(f"the {when} figures are of --quick, which are no measurements")
    keys = {entry["key"] for entry in new["rows"]}
    gone = (entry for entry in old["rows"] if entry["group"] in _COMPARED and entry["key"] not in keys)
    return lines + [f"not measured now: {name_of(entry)}" for entry in gone]


def print_changes(old: Mapping[str, Any], new: Mapping[str, Any], name: str, console: Console) -> bool:
    """Print the changes between two results; return True if a row has regressed."""
    found = changes(old, new)
    table = PlainTable(f"compared with {name} of {old['date'][:10]}", title_style="bold")
    table.add_column("row", min_width=28)
    for head in ("old", "new", "change", "noise", ""):
        table.add_column(head, justify="right" if head else "left", no_wrap=True)
    for one in found:
        medians = (f"{statistics.median(figures):.2f}×" for figures in (one.old, one.new))
        table.add_row(
            one.label, *medians, f"{one.ratio - 1:+.1%}", f"±{one.noise:.1%}", one.outcome,
            style=_STYLES[one.outcome],
        )  # fmt: skip
    console.print(table)
    counts = {kind: sum(one.outcome == kind for one in found) for kind in _STYLES}
    words = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    print_line(console, words if found else "no row is in both", style="bold")
    for line in differences(old, new):
        print_line(console, line)
    return counts["regressed"] > 0


def _ratios(result: Mapping[str, Any], entry: Mapping[str, Any]) -> tuple[float, ...]:
    """Return, for each round, the ratio of a row's rate to the rate of the best replaced loader."""
    replaced: dict[int, float] = {}
    for other in result["rows"]:
        if other["group"] == "replaced" and other.get("section") == entry.get("section"):
            for number, rate in _rates(other).items():
                replaced[number] = max(rate, replaced.get(number, 0.0))
    return tuple(rate / replaced[number] for number, rate in _rates(entry).items() if number in replaced)


def _rates(entry: Mapping[str, Any]) -> dict[int, float]:
    unit = entry.get("unit", UNIT)
    return {one["round"]: one[unit] / one["seconds"] for one in entry["samples"]}


def _spread(figures: Sequence[float]) -> float:
    """Return the spread of figures around their median, as a fraction of the median."""
    median = statistics.median(figures)
    distance = statistics.median(abs(one - median) for one in figures)
    return max(2 * distance, (max(figures) - min(figures)) / 2) / median
