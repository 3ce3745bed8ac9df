"""What is faster or slower than it was."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
from rich.console import Console

from fastpipe.bench.report import Change, changes, differences, print_changes
from fastpipe.bench.results import row

KEY = "fastloader-float32"


def scaled(result: dict[str, Any], factor: float, key: str = KEY) -> dict[str, Any]:
    """The same run, but for a row that was so many times as fast."""
    made = copy.deepcopy(result)
    for sample in row(made, key)["samples"]:
        sample["seconds"] /= factor
    return made


def printed(old: dict[str, Any], new: dict[str, Any]) -> tuple[bool, str]:
    text = io.StringIO()
    is_worse = print_changes(old, new, "old.json", Console(file=text, width=160))
    return is_worse, text.getvalue()


@pytest.mark.parametrize(
    ("old", "new", "outcome"),
    [
        ((2.0, 2.0, 2.0), (2.0, 2.0, 2.0), "same"),
        ((2.0, 2.0, 2.0), (2.08, 2.08, 2.08), "same"),  # four percent, however steady
        ((2.0, 2.0, 2.0), (2.2, 2.2, 2.2), "improved"),
        ((2.2, 2.2, 2.2), (2.0, 2.0, 2.0), "regressed"),
        ((2.0, 2.4, 1.6), (2.6, 2.7, 2.3), "same"),  # rounds that reach into each other
        ((2.0, 2.4, 1.6), (2.5, 2.6, 2.45), "same"),  # apart, but by less than twice the distance
        ((2.0, 2.4, 1.6), (1.0, 1.1, 0.9), "regressed"),
        ((3.16, 3.17, 3.92), (2.87, 2.99, 3.05), "same"),  # two rounds near each other by chance
    ],
)
def test_a_change_is_told_from_noise(old: tuple[float, ...], new: tuple[float, ...], outcome: str) -> None:
    assert Change("row", old, new).outcome == outcome


def test_a_gain_taken_back_is_a_loss() -> None:
    old, new = (2.0, 2.05, 1.95), (2.5, 2.55, 2.45)
    assert (Change("row", old, new).outcome, Change("row", new, old).outcome) == ("improved", "regressed")


def test_ratios_of_rounds_are_compared(result: dict[str, Any]) -> None:
    found = {one.label: one for one in changes(result, scaled(result, 2))}
    assert set(found) == {
        entry["label"] for entry in result["rows"] if entry["group"] in ("stock", "fastpipe")
    }
    one = found["FastImageFolder + FastLoader"]
    assert one.old == pytest.approx((2.5, 3.0))
    assert one.new == pytest.approx((5.0, 6.0))
    assert one.ratio == pytest.approx(2.0)


def test_a_slower_machine_is_no_regression(result: dict[str, Any]) -> None:
    slow = copy.deepcopy(result)
    for entry in slow["rows"]:
        for sample in entry["samples"]:
            sample["seconds"] *= 3
    assert {one.outcome for one in changes(result, slow)} == {"same"}


def test_sections_are_compared_apart(result: dict[str, Any]) -> None:
    for name in ("first", "second"):
        made = copy.deepcopy(result)
        for entry in made["rows"]:
            entry.update(section=name, unit="images", key=f"{name}-{entry['key']}")
        result.setdefault("both", []).extend(made["rows"])
    both = {**result, "rows": result["both"]}
    faster = copy.deepcopy(both)
    for entry in faster["rows"]:
        if entry["section"] == "first" and entry["group"] == "replaced":
            for sample in entry["samples"]:
                sample["seconds"] /= 4
    outcomes = {one.label: one.outcome for one in changes(both, faster)}
    assert outcomes["first: FastImageFolder + FastLoader"] == "regressed"
    assert outcomes["second: FastImageFolder + FastLoader"] == "same"


def test_what_is_printed_and_returned(result: dict[str, Any]) -> None:
    is_worse, text = printed(result, scaled(result, 0.5))
    assert is_worse
    assert "compared with old.json of 2030-01-02" in text
    assert "0 improved, 3 same, 1 regressed" in text
    is_worse, text = printed(result, scaled(result, 2))
    assert not is_worse
    assert "1 improved, 3 same, 0 regressed" in text and "+100.0%" in text


def test_other_conditions_are_stated(result: dict[str, Any]) -> None:
    assert differences(result, copy.deepcopy(result)) == []
    new = copy.deepcopy(result)
    new["machine"]["cores"] = 64
    new["versions"]["torch"] = "3.0"
    new["versions"]["zarr"] = "3.1"
    new["data"]["name"] = "others"
    new["method"]["quick"] = True
    new["rows"] = [entry for entry in new["rows"] if entry["key"] != "fastloader-uint8"]
    assert differences(result, new) == [
        "another machine: cores 2, now 64",
        "other versions: torch 2.15.0 to 3.0, zarr none to 3.1",
        "other data: photos, now others",
        "the new figures are of --quick, which are no measurements",
        "not measured now: FastImageFolder + FastLoader, uint8",
    ]


def test_nothing_in_common(result: dict[str, Any]) -> None:
    new = {**result, "rows": [entry for entry in result["rows"] if entry["group"] == "replaced"]}
    is_worse, text = printed(result, new)
    assert not is_worse and "no row is in both" in text
