"""Pictures of results: a bar for each loader, or curves over the number of threads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastpipe.bench.results import UNIT, rate_of, reference_of, replaced_thing, shown, times, write_file
from fastpipe.core.extras import require
from fastpipe.core.text import counted, printable

INK, MUTED = "#1f2328", "#6a717b"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw the medians of the measured rates, with their ranges and ratios, into a PNG file.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    require("matplotlib.backends.backend_agg", extra="bench")
    figure = require("matplotlib.figure", extra="bench").Figure(dpi=160, layout="constrained")
    # A "$" in a label must not start a formula.
    with require("matplotlib", extra="bench").rc_context({"text.parse_math": False}):
        (_draw_curves if "scaling" in result else _draw_bars)(figure, result)
        write_file(path, lambda file: figure.savefig(file, format="png", facecolor="white"))


def _title(result: Mapping[str, Any]) -> str:
    machine = result["machine"]
    gpu = f", {machine['gpu']['name']}" if machine.get("gpu") else ""
    cpu = f"{_short_cpu(machine['cpu'])}, {counted(machine['cores'], 'core')}"
    return f"{printable(result['job']['short'])} · {cpu}{gpu}"


def _range_of(rate: Mapping[str, float]) -> tuple[float, float]:
    """Return the distances of the lowest and of the highest rate from the median."""
    return rate["median"] - rate["low"], rate["high"] - rate["median"]


def _finish(axes: Any, axis: Any, hidden: tuple[str, ...]) -> None:
    """Format the numbers along one axis, and hide some lines around the picture."""
    axes.tick_params(axis=axis.axis_name, labelsize=8.5, colors=MUTED)
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.spines[list(hidden)].set_visible(False)


_LINES = {
    "replaced": (", as many worker processes", "#9a9fa6", "-"),
    "floor": ("", "#6a717b", "--"),
    "fastpipe": (", threads", "#0b8a6f", "-"),
}
_NUMBER = re.compile(r"\(\w+=\d+\)|, \d+ threads?$")  # the number of threads or workers in a row's label


def _draw_curves(figure: Any, result: Mapping[str, Any]) -> None:
    """Draw the medians and ranges of the rates over the number of threads."""
    figure.set_size_inches(8.6, 5.2)
    axes = figure.subplots()
    counts = [int(section) for section in result["sections"]]
    for group, (ending, colour, style) in _LINES.items():
        rows = [
            row for row in result["rows"] if row["group"] == group and row["section"] in result["sections"]
        ]
        if not rows:
            continue
        places, rates = [int(entry["section"]) for entry in rows], [rate_of(entry) for entry in rows]
        medians, is_own = [rate["median"] for rate in rates], group == "fastpipe"
        axes.errorbar(
            places, medians, yerr=list(zip(*map(_range_of, rates), strict=True)),
            label=_NUMBER.sub("", rows[0]["label"]) + ending, color=colour, linestyle=style, marker="o",
            markersize=4.5, linewidth=2.2 if is_own else 1.5, capsize=3,
        )  # fmt: skip
        if is_own:
            linear = [medians[0] * place / places[0] for place in places]
            axes.plot(places, linear, ":", color=colour, linewidth=1.2, label="linear from the first")
            for told in result["scaling"]["rows"]:
                at = told["threads"]
                axes.annotate(
                    f"{told['times_best']['median']:.1f}×", (at, medians[places.index(at)]), xytext=(6, -13),
                    textcoords="offset points", fontsize=9.5, fontweight="bold", color=colour,
                )  # fmt: skip
    axes.set_title(_title(result), loc="left", fontsize=10, color=INK)
    axes.set_xticks(counts)
    axes.set_xlim(0, counts[-1] * 1.08)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"{result['rows'][0]['unit']} per second", fontsize=9, color=MUTED)
    axes.set_xlabel(
        f"threads, or worker processes; median and range of {result['method']['rounds']} interleaved"
        " rounds;\n× is relative to the best replaced loader of any number of workers",
        fontsize=8.5, color=MUTED,
    )  # fmt: skip
    axes.tick_params(axis="x", labelsize=8.5, colors=MUTED)
    _finish(axes, axes.yaxis, ("top", "right"))
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    axes.legend(frameon=False, fontsize=9, loc="upper left")


COLOURS = {"replaced": "#9a9fa6", "stock": "#7cc5b4", "fastpipe": "#0b8a6f", "peer": "#cfd3da"}


def _draw_bars(figure: Any, result: Mapping[str, Any]) -> None:
    """Draw the bars of each section."""
    parts = []
    for key, about in (result.get("sections") or {None: None}).items():
        rows = [
            entry
            for entry in shown(result)
            if entry["group"] in COLOURS
            and entry.get("section") == key
            and (entry["group"] != "replaced" or entry["key"] == reference_of(result, entry))
        ][::-1]
        if rows:
            parts.append(("" if about is None else f"{about['label']}: {rows[0]['unit']} per second", rows))
    counts = [len(rows) for _, rows in parts]
    figure.set_size_inches(9.6, 1.75 + 0.52 * sum(counts) + 0.35 * (len(parts) - 1))
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
    all_axes = figure.subplots(len(parts), 1, squeeze=False, height_ratios=counts)[:, 0]
    # The key of a row -> the ratio to the replaced loader that is the goal.
    asked = {one["row"]: one["asked"] for one in result.get("targets", ()) if one.get("row")}
    for axes, (label, rows) in zip(all_axes, parts, strict=True):
        _bars(axes, rows, asked)
        has_floor = _floor(axes, result, rows)
        _labels(axes, rows)
        if label:
            axes.set_title(label, loc="left", fontsize=9.5, color=MUTED, pad=16 if has_floor else None)
    title = _title(result)
    size = min(11.5, 11.5 * 90 / len(title))  # about 90 letters of the largest size fit
    figure.suptitle(title, x=0.015, ha="left", fontsize=size, fontweight="bold", color=INK)
    unit = "" if "sections" in result else f"{UNIT} per second: "
    all_axes[-1].set_xlabel(
        f"{unit}median and range of {result['method']['rounds']} interleaved rounds;\n"
        f"× is relative to the best replaced {replaced_thing(result)}",
        fontsize=8.5, color=MUTED,
    )  # fmt: skip
    _make_room(figure, all_axes)


def _bars(axes: Any, rows: list[dict[str, Any]], asked: Mapping[str, float]) -> None:
    top = max(rate_of(entry)["high"] for entry in rows)
    for place, entry in enumerate(rows):
        rate, group = rate_of(entry), entry["group"]
        axes.barh(place, rate["median"], height=0.66, color=COLOURS[group], zorder=2)
        axes.errorbar(
            rate["median"], place, xerr=[[part] for part in _range_of(rate)], color=INK, elinewidth=1.1,
            capsize=3.5, capthick=1.1, zorder=3,
        )  # fmt: skip
        text = "1×" if group == "replaced" else times(entry["ratio"]["median"])
        text += f" (goal: {asked[entry['key']]:g}×)" if entry["key"] in asked else ""
        # If the rate does not fit into the bar, left of the range, it is written in front of the ratio.
        is_short = rate["low"] < 0.1 * top
        number = f"{rate['median']:,.0f}"
        axes.annotate(
            f"{number} · {text}" if is_short else text, (rate["high"] + 0.012 * top, place), va="center",
            fontsize=13 if group == "fastpipe" else 11, fontweight="bold",
            color=COLOURS["fastpipe"] if group in ("stock", "fastpipe") else MUTED,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2}, zorder=4,
        )  # fmt: skip
        axes.annotate(
            "" if is_short else number, (0, place), xytext=(6, 0), textcoords="offset points", va="center",
            fontsize=9.5, color="white" if group == "fastpipe" else INK, zorder=4,
        )  # fmt: skip
    axes.set_xlim(0, top * 1.13)


def _make_room(figure: Any, all_axes: Any) -> None:
    """Extend the axes so that the texts at the ends of the bars fit."""
    least = [axes.get_xlim()[1] for axes in all_axes]
    for axes in all_axes:  # wide enough for all texts, because texts outside would change the layout
        axes.set_xlim(0, 2 * axes.get_xlim()[1])
    figure.draw_without_rendering()
    for axes, right in zip(all_axes, least, strict=True):
        width = axes.get_window_extent().width
        figures = [text for text in axes.texts if text.xy[0] and text.get_ha() == "left"]
        ends = [text.xy[0] / (1 - text.get_window_extent().width / width) for text in figures]
        axes.set_xlim(0, max(right, *ends))


def _floor(axes: Any, result: Mapping[str, Any], rows: list[dict[str, Any]]) -> bool:
    """Draw a dashed line at the highest rate that is possible in a section; return False if it is unknown."""
    section = rows[0].get("section")
    floors = [one for one in result["rows"] if one["group"] == "floor" and one.get("section") == section]
    if not floors:
        return False
    rate = rate_of(floors[0])["median"]
    name = "decoding alone" if section is None else floors[0]["label"]
    axes.axvline(rate, color=MUTED, linestyle=(0, (4, 3)), linewidth=1.1, zorder=1)
    left, right = axes.get_xlim()
    axes.set_xlim(left, max(right, rate * 1.02))
    axes.annotate(
        f"{name} {rate:,.0f} ", (rate, len(rows) - 0.5), va="bottom", fontsize=8.5, color=MUTED,
        ha="right" if rate > 0.5 * axes.get_xlim()[1] else "left", annotation_clip=False,
    )  # fmt: skip
    return True


def _labels(axes: Any, rows: list[dict[str, Any]]) -> None:
    axes.set_yticks(range(len(rows)), [_name(entry) for entry in rows], fontsize=9.5)
    for tick, entry in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set_color(INK)
        tick.set_fontweight("bold" if entry["group"] == "fastpipe" else "normal")
    axes.set_ylim(-0.5, len(rows) - 0.4)
    axes.tick_params(axis="y", length=0)
    _finish(axes, axes.xaxis, ("top", "right", "left"))
    axes.spines["bottom"].set_color("#d0d4d9")


def _name(entry: Mapping[str, Any]) -> str:
    """Return a row's label in short lines; if photos were converted for this row, add their size.

    >>> _name({"label": "A + B"}), _name({"label": "A, raw", "prepared_size": 2.4321})
    ('A\\n+ B', 'A, raw\\n(photos converted, 2.4× the bytes)')
    """
    size = entry.get("prepared_size")
    converted = "" if size is None else f"\n(photos converted, {size:.1f}× the bytes)"
    return printable(str(entry["label"])).replace(" + ", "\n+ ") + converted


def _short_cpu(name: str) -> str:
    """Return the name of a processor without words such as "(R)" and "CPU".

    >>> _short_cpu("Intel(R) Xeon(R) Platinum 8581C CPU @ 2.10GHz")
    'Intel Xeon Platinum 8581C'
    """
    words = name.split("@")[0].replace("(R)", "").replace("(TM)", "").split()
    return " ".join(word for word in words if word not in ("CPU", "Processor") and "-Core" not in word)
