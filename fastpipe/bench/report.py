"""What people read: the table in the terminal, its sentences, and Markdown for documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from fastpipe.bench.lines import more_lines
from fastpipe.bench.results import UNIT, rate_of, reference_of, replaced_thing, shown, times_digits
from fastpipe.console import PlainTable, plain
from fastpipe.core.text import printable, printable_lines
from fastpipe.errors import OptionError

__all__ = [
    "data_line",
    "machine_line",
    "markdown",
    "print_result",
    "short_markdown",
    "stage_line",
    "target_lines",
]

STYLES = {"replaced": "dim", "stock": "green", "fastpipe": "bold green", "peer": "", "floor": "italic cyan"}

# Whose versions are told below a table, by case.
_PACKAGES = {
    "images": ("fastpipe", "torch", "torchvision", "pillow"),
    "scaling": ("fastpipe", "torch", "torchvision", "pillow", "h5py", "zarr"),
    "hdf5": ("fastpipe", "torch", "h5py", "numcodecs"),
    "volume": ("fastpipe", "torch", "zarr", "numcodecs"),
    "s3": ("fastpipe", "torch", "torchvision", "obstore"),
    "augment": ("fastpipe", "torch", "torchvision"),
    "gpu": (
        "fastpipe",
        "torch",
        "torchvision",
        "pillow",
        "nvidia-nvimgcodec-cu13",
        "nvidia-nvimgcodec-cu12",
        "nvidia-dali-cuda130",
        "nvidia-dali-cuda120",
        "triton",
    ),
    "tf": ("fastpipe", "tensorflow", "tensorflow-cpu", "keras", "pillow"),
    "generate": ("fastpipe", "numpy", "h5py", "cloudpickle"),
    "all": ("fastpipe", "torch", "torchvision", "tensorflow", "tensorflow-cpu", "h5py", "zarr", "pillow"),
}

# In a narrower terminal the notes would be columns of single words.
WIDTH_FOR_NOTES = 130


def machine_line(result: Mapping[str, Any]) -> str:
    """The machine in one line: processor, cores, memory, a GPU that takes part, system."""
    machine = result["machine"]
    gpu = f", {machine['gpu']['name']} (driver {machine['gpu']['driver']})" if machine.get("gpu") else ""
    memory = "" if machine["memory_gib"] is None else f", {machine['memory_gib']:g} GiB"
    cores = f"{machine['cores']} core{'s' if machine['cores'] != 1 else ''}"
    return f"{machine['cpu']}, {cores}{memory}{gpu}, {machine['os']}, {machine['python']}"


def data_line(result: Mapping[str, Any]) -> str:
    """The photos, the rows, or the volume in one line."""
    data = result["data"]
    if "text" in data:
        return str(data["text"])
    if "photos" not in data:
        size = (
            f"{data['sample_bytes'] / 1000:.0f} kB"
            if data["sample_bytes"] >= 1000
            else f"{data['sample_bytes']} B"
        )
        return f"{data['samples']:,} rows of {size} ({data['name']})"
    size = data["bytes"] / data["photos"] / 1000
    part = "" if data["photos"] == data["total"] else f" of {data['total']:,}"
    return (
        f"{data['photos']:,}{part} photos in {data['classes']} classes, {size:.0f} kB each ({data['name']})"
    )


def stage_line(result: Mapping[str, Any]) -> str:
    """Where FastLoader's time went, as milliseconds per image."""
    stages = result["stages"]
    if not stages["images"]:
        return "no stage times"
    parts = [f"{stage} {1000 * s / stages['images']:.2f} ms" for stage, s in stages["seconds"].items()]
    thing = "image" if "photos" in result["data"] else "sample"
    return f"per {thing}: " + " · ".join(parts)


def print_result(result: Mapping[str, Any], console: Console) -> None:
    """The table and what goes with it."""
    sections = result.get("sections", {})
    table = PlainTable(result["job"]["text"], title_style="bold")
    table.add_column(replaced_thing(result), min_width=28)
    rate = "per second" if sections else "images/s"
    for name in (rate, "range", "ratio", "range", "first batch, s"):
        if name != "first batch, s" or not sections:
            table.add_column(name, justify="right", no_wrap=name != "first batch, s")
    notes = console.width >= WIDTH_FOR_NOTES
    if notes:
        table.add_column("note")
    section = None
    for entry in shown(result):
        if sections and entry["section"] != section:
            section = entry["section"]
            table.add_section()
            label = f"{sections[section]['label']}: {entry['unit']}/s"
            table.add_row(plain(label, "bold"))
        cells = _cells(result, entry)
        table.add_row(*(cells if notes else cells[:-1]), style=STYLES[entry["group"]])
    for miss in result["missing"]:
        if miss["key"] in sections:
            table.add_section()
            table.add_row(plain(miss["label"], "bold"))
            table.add_row(plain("not measured, for the reason below", "red"))
    console.print(table)
    for number, line in enumerate(line for line in _lines(result) if line):
        console.print(plain(line, "bold" if number == 0 else ""))


def _lines(result: Mapping[str, Any]) -> list[str]:
    """What is said below the table; empty lines are left out."""
    meaning = "(wait is the consumer's time, the others are threads')"
    return [
        result["verdict"],
        *target_lines(result),
        *more_lines(result),
        _floor_sentence(result),
        f"FastLoader's stages, {stage_line(result)} {meaning}" if result["stages"]["images"] else "",
        data_line(result),
        machine_line(result),
        _peers_sentence(result),
        *(f"not measured: {miss['label']}: {miss['why']}" for miss in result["missing"]),
        *(f"warning: {text}" for text in result["method"]["warnings"]),
    ]


def target_lines(result: Mapping[str, Any]) -> list[str]:
    """What was asked for, and what came of it."""
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


def markdown(result: Mapping[str, Any]) -> str:
    """The result as a Markdown table with its conditions below.

    Args:
        result: the content of a result file.
    """
    sections = result.get("sections", {})
    lines = [] if sections else list(_head("loader", UNIT, "loader", ", s"))
    section, replaced = None, replaced_thing(result)
    for entry in shown(result):
        if sections and entry["section"] != section:
            section = entry["section"]
            lines += [*([""] if lines else []), *_head(sections[section]["label"], entry["unit"], replaced)]
        lines.append(_markdown_row(entry, with_first=not sections))
    if result.get("targets"):
        lines += ["", *_markdown_targets(result)]
    method = result["method"]
    peers = _peers_sentence(result)
    names = _PACKAGES.get(result["case"], _PACKAGES["images"])
    versions = ", ".join(f"{name} {result['versions'][name]}" for name in names if name in result["versions"])
    first = "" if sections else " First batch: with compiled code cached, in brackets the very first time."
    said = (_floor_sentence(result), _sentence(result["check"]["text"]))
    more = more_lines(result)
    lines += [
        *([""] if more else []),
        *(f"- {line}" for line in more),
        "",
        f"{result['job']['text']}; {data_line(result)}. {machine_line(result)}. {versions}."
        f" {method['rounds']} interleaved rounds, {result['date'][:10]}.{first} "
        + " ".join(part for part in said if part),
        *(["", peers] if peers else []),
        "",
        f"Made by `{result['command']}`.",
    ]
    return printable_lines("\n".join(lines) + "\n")


def short_markdown(result: Mapping[str, Any]) -> str:
    """Each row of fastpipe's beside the best replaced loader, as a Markdown table: for a result of many
    sections.

    Args:
        result: the content of a result file.

    Raises:
        OptionError: it has no sections.
    """
    sections = result.get("sections")
    if not sections:
        raise OptionError("a short table is of results with sections: leave --short out")
    by_key = {entry["key"]: entry for entry in result["rows"]}
    lines = [
        "| data | loader | a second | best replaced loader | ×, median (range) |",
        "|---|---|--:|--:|--:|",
    ]
    for entry in shown(result):
        replaced = by_key.get(result["best"].get(entry["section"]))
        if entry["group"] != "fastpipe" or replaced is None:
            continue
        note, ratio = f" ({entry['note']})" if entry["note"] else "", entry["ratio"]
        digits = times_digits(ratio["median"])
        lines.append(
            f"| {_cell(sections[entry['section']]['label'])} | {_cell(entry['label'] + note)} |"
            f" {rate_of(entry)['median']:,.0f} {entry['unit']} | {rate_of(replaced)['median']:,.0f} |"
            f" {ratio['median']:.{digits}f} ({ratio['low']:.{digits}f}–{ratio['high']:.{digits}f}) |"
        )
    conditions = (
        f"{machine_line(result)}; {result['method']['rounds']} interleaved rounds, {result['date'][:10]}."
    )
    return printable_lines("\n".join([*lines, "", conditions]) + "\n")


def _head(name: str, unit: str, replaced: str, first: str = "") -> tuple[str, str]:
    """The head of a Markdown table; with a column for the first batch where its unit is given."""
    last = f" first batch{first} |" if first else ""
    return (
        f"| {_cell(name)} | {unit}/s, median (range) | × best replaced {replaced}, median (range) |{last}",
        "|---|--:|--:|--:|" if first else "|---|--:|--:|",
    )


def _cell(text: str) -> str:
    """Text within a Markdown table."""
    return printable(text).replace("|", "\\|")


def _markdown_row(entry: Mapping[str, Any], *, with_first: bool) -> str:
    rate, ratio = rate_of(entry), entry["ratio"]
    label = f"**{entry['label']}**" if entry["group"] == "fastpipe" else entry["label"]
    note = f" ({entry['note']})" if entry["note"] else ""
    return (
        f"| {_cell(label + note)} | {rate['median']:,.0f} ({rate['low']:,.0f}–{rate['high']:,.0f})"
        f" | {ratio['median']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f}) |"
        + (f" {_first(entry)} |" if with_first else "")
    )


def _markdown_targets(result: Mapping[str, Any]) -> list[str]:
    """What was asked for, as a table."""
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
            f"| {_cell(one['text'])} | {sign} {_figure(one['asked'], unit)} | {figures} | {outcome} |"
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


def _cells(result: Mapping[str, Any], entry: Mapping[str, Any]) -> list[str]:
    """A row of the terminal's table."""
    rate, ratio = rate_of(entry), entry["ratio"]
    note = entry["note"]
    if entry["key"] == reference_of(result, entry):
        note = f"the reference{'; ' if note else ''}{note}"
    return [
        entry["label"],
        f"{rate['median']:,.0f}",
        f"{rate['low']:,.0f}–{rate['high']:,.0f}",
        f"{ratio['median']:.2f}×",
        f"{ratio['low']:.2f}–{ratio['high']:.2f}",
        *([] if "section" in entry else [_first(entry)]),
        note,
    ]


def _peers_sentence(result: Mapping[str, Any]) -> str:
    """The peers' versions; of what they need, only versions that differ from those used by fastpipe."""
    told = []
    for entry in result["rows"]:
        if not entry.get("versions"):
            continue
        library, *needed = entry["versions"].items()
        others = [f"{name} {version}" for name, version in needed if result["versions"].get(name) != version]
        text = " ".join(library) + (f" (with {', '.join(others)})" if others else "")
        if text not in told:
            told.append(text)
    return f"Peers: {', '.join(told)}." if told else ""


def _first(entry: Mapping[str, Any]) -> str:
    """Start-up of a row in seconds: warm, and the very first time in brackets."""
    first = entry["first_batch_s"]
    return "" if first is None else f"{first['warm_s']:.2f} ({first['cold_s']:.2f})"


def _floor_sentence(result: Mapping[str, Any]) -> str:
    """How near FastLoader is to decoding alone."""
    share = result["floor_share"]
    if share is None:
        return ""
    return (
        f"FastLoader reaches {share['median']:.0%} ({share['low']:.0%}–{share['high']:.0%}) of the decode"
        " floor, the rate of decoding alone in as many threads."
    )


def _sentence(text: str) -> str:
    """A clause as a sentence."""
    return f"{text[:1].upper()}{text[1:]}."
