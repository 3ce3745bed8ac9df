"""The JSON file, the figures in it, and what is faster or slower than it was."""

from __future__ import annotations

import copy
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from rich.console import Console

from fastpipe.bench import results
from fastpipe.bench.report import Change, changes, differences, print_changes
from fastpipe.bench.results import FIELDS, ROW_FIELDS, RowInfo, check_target, entries, load, save, validate
from fastpipe.bench.runner import Session
from fastpipe.errors import OptionError

KEY = "fastloader-float32"


def test_a_file_reads_back_as_written_and_is_never_broken(result: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    save(result, path)
    with pytest.raises(OptionError, match="schema 99"):
        save({**result, "schema": 99}, path)

    def interrupted(file: BinaryIO) -> None:
        file.write(b"ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        results.write_file(path, interrupted)
    assert load(path) == result
    assert [one.name for one in path.parent.iterdir()] == ["result.json"]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    check_target(tmp_path / "new" / "folder" / "file", "--json")
    assert not list(tmp_path.iterdir())
    with pytest.raises(OptionError, match=r"--json: .* is a folder; give a file's name"):
        check_target(tmp_path, "--json")
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match=r"--html: .* cannot be written: .*file'"):
        check_target(tmp_path / "file" / "page", "--html")


@pytest.mark.parametrize("text", [None, "", "[]", "{}", json.dumps({"schema": 1})])
def test_other_files_are_refused(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "other.json").write_text(text)
    with pytest.raises(OptionError, match="cannot be read" if text is None else None):
        load(tmp_path / "other.json")


def test_missing_and_wrong_fields_are_named(result: dict[str, Any]) -> None:
    for name in FIELDS:
        with pytest.raises(OptionError, match=f"'{name}'"):
            validate({key: value for key, value in result.items() if key != name})
    for name in ROW_FIELDS:
        broken = copy.deepcopy(result)
        broken["rows"][1][name] = object()
        with pytest.raises(OptionError, match=rf"rows\[1\].*'{name}'"):
            validate(broken)


def test_figures_come_from_the_samples(result: dict[str, Any]) -> None:
    main = results.row(result, KEY)
    assert [s["round"] for s in main["samples"]] == [0, 1]
    assert main["images_per_s"] == {"median": 370.0, "low": 240.0, "high": 500.0}
    assert main["ratio"] == {"median": 2.75, "low": 2.5, "high": 3.0}
    assert result["best"] == {"replaced": "replaced-workers2", "stock": "stock-workers0"}
    assert result["floor_share"] == {"median": 0.55, "low": 0.5, "high": 0.6}
    hidden = {entry["key"] for entry in result["rows"]} - {entry["key"] for entry in results.shown(result)}
    assert hidden == {"stock-workers2"}  # the lesser stock one


def test_only_peers_have_the_fields_of_peers(session: Session, infos: list[RowInfo]) -> None:
    converted = replace(infos[-1], versions={"dali": "2"}, prepared_s=1.5, prepared_size=2.5)
    *others, peer = entries([*infos[:-1], converted], session)
    assert (peer["versions"], peer["prepared_s"], peer["prepared_size"]) == ({"dali": "2"}, 1.5, 2.5)
    assert not {"versions", "prepared_s", "prepared_size"} & {name for row in others for name in row}


@pytest.mark.parametrize(("low", "median", "high", "words"), [
    (1.1, 2.0, 2.5, "is 2.00× as fast"), (0.9, 1.2, 1.5, "No clear difference"), (0.5, 0.8, 0.9, "is slower"),
])  # fmt: skip
def test_the_verdict_follows_the_range(
    result: dict[str, Any], low: float, median: float, high: float, words: str
) -> None:
    results.row(result, KEY)["ratio"] = {"median": median, "low": low, "high": high}
    assert words in results.verdict(result)


@pytest.mark.parametrize(("old", "new", "outcome"), [
    ((2.0, 2.0, 2.0), (2.0, 2.0, 2.0), "same"),
    ((2.0, 2.0, 2.0), (2.08, 2.08, 2.08), "same"),  # four percent, however steady
    ((2.0, 2.0, 2.0), (2.2, 2.2, 2.2), "improved"),
    ((2.2, 2.2, 2.2), (2.0, 2.0, 2.0), "regressed"),
    ((2.0, 2.4, 1.6), (2.6, 2.7, 2.3), "same"),  # rounds that reach into each other
    ((2.0, 2.4, 1.6), (2.5, 2.6, 2.45), "same"),  # apart, but by less than twice the distance
    ((2.0, 2.4, 1.6), (1.0, 1.1, 0.9), "regressed"),
    ((2.0, 2.05, 1.95), (2.5, 2.55, 2.45), "improved"),
    ((3.16, 3.17, 3.92), (2.87, 2.99, 3.05), "same"),  # two rounds near each other by chance
])  # fmt: skip
def test_a_change_is_told_from_noise(old: tuple[float, ...], new: tuple[float, ...], outcome: str) -> None:
    assert Change("row", old, new).outcome == outcome
    if outcome == "improved":
        assert Change("row", new, old).outcome == "regressed"


def scaled(result: dict[str, Any], factor: float, *keys: str) -> dict[str, Any]:
    """The same run, but for rows that were so many times as fast."""
    made = copy.deepcopy(result)
    for entry in made["rows"]:
        for sample in entry["samples"] if entry["key"] in keys else ():
            sample["seconds"] /= factor
    return made


def test_ratios_within_a_round_are_compared(result: dict[str, Any]) -> None:
    found = {one.label: one for one in changes(result, scaled(result, 2, KEY))}
    assert set(found) == {one["label"] for one in result["rows"] if one["group"] in ("stock", "fastpipe")}
    one = found["FastImageFolder + FastLoader"]
    assert (*one.old, *one.new, one.ratio) == pytest.approx((2.5, 3.0, 5.0, 6.0, 2.0))
    slower_machine = scaled(result, 1 / 3, *(entry["key"] for entry in result["rows"]))
    assert {one.outcome for one in changes(result, slower_machine)} == {"same"}


def test_sections_are_compared_apart(result: dict[str, Any]) -> None:
    both = {**result, "rows": [
        {**copy.deepcopy(entry), "section": name, "unit": "images", "key": f"{name}-{entry['key']}"}
        for name in ("first", "second") for entry in result["rows"]
    ]}  # fmt: skip
    faster = scaled(both, 4, "first-replaced-workers0", "first-replaced-workers2")
    outcomes = {one.label: one.outcome for one in changes(both, faster)}
    assert outcomes["first: FastImageFolder + FastLoader"] == "regressed"
    assert outcomes["second: FastImageFolder + FastLoader"] == "same"


def printed(old: dict[str, Any], new: dict[str, Any]) -> tuple[bool, str]:
    text = io.StringIO()
    is_worse = print_changes(old, new, "old.json", Console(file=text, width=160))
    return is_worse, text.getvalue()


def test_changes_are_printed_and_returned(result: dict[str, Any]) -> None:
    is_worse, text = printed(result, scaled(result, 0.5, KEY))
    assert is_worse and "compared with old.json of 2030-01-02" in text
    assert "0 improved, 3 same, 1 regressed" in text
    is_worse, text = printed(result, scaled(result, 2, KEY))
    assert not is_worse and "1 improved, 3 same, 0 regressed" in text and "+100.0%" in text
    replaced = [entry for entry in result["rows"] if entry["group"] == "replaced"]
    is_worse, text = printed(result, {**result, "rows": replaced})
    assert not is_worse and "no row is in both" in text


def test_other_conditions_are_stated(result: dict[str, Any]) -> None:
    assert differences(result, copy.deepcopy(result)) == []
    new = copy.deepcopy(result)
    new["machine"]["cores"] = 64
    new["versions"] |= {"torch": "3.0", "zarr": "3.1"}
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
