"""What people read: the table in the terminal, its sentences, and Markdown for documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastpipe.bench.results import shown

__all__ = ["data_line", "machine_line", "markdown", "print_result", "stage_line"]

STYLES = {"replaced": "dim", "stock": "green", "fastpipe": "bold green", "peer": "", "floor": "italic cyan"}

# In a narrower terminal the notes would be columns of single words.
WIDTH_FOR_NOTES = 130


def machine_line(result: Mapping[str, Any]) -> str:
    """The machine in one line: processor, cores, memory, system."""
    machine = result["machine"]
    memory = "" if machine["memory_gib"] is None else f", {machine['memory_gib']:g} GiB"
    cores = f"{machine['cores']} core{'s' if machine['cores'] != 1 else ''}"
    return f"{machine['cpu']}, {cores}{memory}, {machine['os']}, {machine['python']}"


def data_line(result: Mapping[str, Any]) -> str:
    """The photos in one line."""
    data = result["data"]
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
    return "per image: " + " · ".join(parts)


def print_result(result: Mapping[str, Any], console: Console) -> None:
    """The table and what goes with it."""
    table = Table(title=result["job"]["text"], title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.add_column("loader", min_width=28)
    for name in ("images/s", "range", "ratio", "range", "first batch, s"):
        table.add_column(name, justify="right", no_wrap=name != "first batch, s")
    notes = console.width >= WIDTH_FOR_NOTES
    if notes:
        table.add_column("note")
    for entry in shown(result):
        cells = _cells(result, entry)
        table.add_row(*(cells if notes else cells[:-1]), style=STYLES[entry["group"]])
    console.print(table)
    lines = [
        result["verdict"],
        _floor_sentence(result),
        f"FastLoader's stages, {stage_line(result)} (wait is the consumer's time, the others are threads')",
        data_line(result),
        machine_line(result),
        _peers_sentence(result),
        *(f"not measured: {miss['label']}: {miss['why']}" for miss in result["missing"]),
        *(f"warning: {text}" for text in result["method"]["warnings"]),
    ]
    for number, line in enumerate(line for line in lines if line):
        console.print(Text(line, style="bold" if number == 0 else ""))


def markdown(result: Mapping[str, Any]) -> str:
    """The result as a Markdown table with its conditions below.

    Args:
        result: the content of a result file.
    """
    lines = [
        "| loader | images/s, median (range) | × best replaced loader, median (range) | first batch, s |",
        "|---|--:|--:|--:|",
    ]
    for entry in shown(result):
        rate, ratio = entry["images_per_s"], entry["ratio"]
        label = f"**{entry['label']}**" if entry["group"] == "fastpipe" else entry["label"]
        note = f" ({entry['note']})" if entry["note"] else ""
        lines.append(
            f"| {label}{note} | {rate['median']:,.0f} ({rate['low']:,.0f}–{rate['high']:,.0f})"
            f" | {ratio['median']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f}) | {_first(entry)} |"
        )
    method = result["method"]
    peers = _peers_sentence(result)
    versions = ", ".join(
        f"{name} {result['versions'][name]}"
        for name in ("fastpipe", "torch", "torchvision", "pillow")
        if name in result["versions"]
    )
    lines += [
        "",
        f"{result['job']['text']}; {data_line(result)}. {machine_line(result)}. {versions}."
        f" {method['rounds']} interleaved rounds, {result['date'][:10]}. First batch: with compiled code"
        " cached, in brackets the very first time. "
        + " ".join(part for part in (_floor_sentence(result), _sentence(result["check"]["text"])) if part),
        *(["", peers] if peers else []),
        "",
        f"Made by `{result['command']}`.",
    ]
    return "\n".join(lines) + "\n"


def _cells(result: Mapping[str, Any], entry: Mapping[str, Any]) -> list[str]:
    """A row of the terminal's table."""
    rate, ratio = entry["images_per_s"], entry["ratio"]
    note = entry["note"]
    if entry["key"] == result["best"]["replaced"]:
        note = f"the reference{'; ' if note else ''}{note}"
    return [
        entry["label"],
        f"{rate['median']:,.0f}",
        f"{rate['low']:,.0f}–{rate['high']:,.0f}",
        f"{ratio['median']:.2f}×",
        f"{ratio['low']:.2f}–{ratio['high']:.2f}",
        _first(entry),
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
