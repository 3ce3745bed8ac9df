"""The picture of the case ``scaling``: samples a second over the number of threads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastpipe.bench.results import rate_of
from fastpipe.bench.writing import whole
from fastpipe.core.extras import require

__all__ = ["draw_curves"]

_LINES = {
    "replaced": (", as many worker processes", "#9a9fa6", "-"),
    "floor": ("", "#6a717b", "--"),
    "fastpipe": (", threads", "#0b8a6f", "-"),
}
_NUMBER = re.compile(r"\(\w+=\d+\)|, \d+ threads?$")  # of threads or workers, in a row's label
_INK, _MUTED = "#1f2328", "#6a717b"


def draw_curves(result: Mapping[str, Any], path: Path, cpu: str) -> None:
    """Draw medians and ranges into a PNG file.

    Args:
        result: the content of a result file with ``scaling``.
        path: where the picture goes.
        cpu: the processor's name.
    """
    figure = require("matplotlib.figure", extra="bench").Figure(
        figsize=(8.6, 5.2), dpi=160, layout="constrained"
    )
    require("matplotlib.backends.backend_agg", extra="bench")
    axes = figure.subplots()
    counts = [int(section) for section in result["sections"]]
    for group, (ending, colour, style) in _LINES.items():
        rows = [
            entry
            for entry in result["rows"]
            if entry["group"] == group and entry["section"] in result["sections"]
        ]
        if not rows:
            continue
        label = _NUMBER.sub("", rows[0]["label"]) + ending
        places, rates = [int(entry["section"]) for entry in rows], [rate_of(entry) for entry in rows]
        medians = [rate["median"] for rate in rates]
        errors = [
            [rate["median"] - rate["low"] for rate in rates],
            [rate["high"] - rate["median"] for rate in rates],
        ]
        axes.errorbar(
            places, medians, yerr=errors, label=label, color=colour, linestyle=style, marker="o",
            markersize=4.5, linewidth=2.2 if group == "fastpipe" else 1.5, capsize=3,
        )  # fmt: skip
        if group == "fastpipe":
            linear = [medians[0] * place / places[0] for place in places]
            axes.plot(
                places, linear, color=colour, linestyle=":", linewidth=1.2, label="linear from the first"
            )
            for told in result["scaling"]["rows"]:
                at = told["threads"]
                axes.annotate(
                    f"{told['times_best']['median']:.1f}×", (at, medians[places.index(at)]), xytext=(6, -13),
                    textcoords="offset points", fontsize=9.5, fontweight="bold", color=colour,
                )  # fmt: skip
    machine = result["machine"]
    cores = f"{machine['cores']} core{'s' if machine['cores'] != 1 else ''}"
    axes.set_title(f"{result['job']['short']} · {cpu}, {cores}", loc="left", fontsize=10, color=_INK)
    axes.set_xticks(counts)
    axes.set_xlim(0, counts[-1] * 1.08)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_ylabel(f"{result['rows'][0]['unit']} per second", fontsize=9, color=_MUTED)
    axes.set_xlabel(
        f"threads, or worker processes; median and range of {result['method']['rounds']} interleaved"
        " rounds;\n"
        "× is relative to the best replaced loader of any number of workers",
        fontsize=8.5, color=_MUTED,
    )  # fmt: skip
    axes.tick_params(labelsize=8.5, colors=_MUTED)
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    with whole(path) as unfinished:
        figure.savefig(unfinished, format="png", facecolor="white")
