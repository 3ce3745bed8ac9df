"""The JSON file, and the figures in it."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastpipe.bench.results import (
    FIELDS,
    ROW_FIELDS,
    RowInfo,
    entries,
    load,
    row,
    save,
    shown,
    validate,
    verdict,
)
from fastpipe.bench.runner import Session
from fastpipe.errors import OptionError


def test_a_file_reads_back_as_written(result: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    save(result, path)
    assert load(path) == result
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]


def test_figures_come_from_the_samples(result: dict[str, Any]) -> None:
    main = row(result, "fastloader-float32")
    assert [s["round"] for s in main["samples"]] == [0, 1]
    assert main["images_per_s"] == {"median": 370.0, "low": 240.0, "high": 500.0}
    assert main["ratio"] == {"median": 2.75, "low": 2.5, "high": 3.0}
    assert result["best"] == {"replaced": "replaced-workers2", "stock": "stock-workers0"}
    assert result["floor_share"] == {"median": 0.55, "low": 0.5, "high": 0.6}


def test_all_rows_but_the_lesser_stock_ones_are_shown(result: dict[str, Any]) -> None:
    hidden = {entry["key"] for entry in result["rows"]} - {entry["key"] for entry in shown(result)}
    assert hidden == {"stock-workers2"}


def test_only_peers_have_the_fields_of_peers(session: Session, infos: list[RowInfo]) -> None:
    converted = replace(infos[-1], versions={"dali": "2"}, prepared_s=1.5, prepared_size=2.5)
    *others, peer = entries([*infos[:-1], converted], session)
    assert (peer["versions"], peer["prepared_s"], peer["prepared_size"]) == ({"dali": "2"}, 1.5, 2.5)
    assert not {"versions", "prepared_s", "prepared_size"} & {name for row in others for name in row}


@pytest.mark.parametrize(
    ("low", "median", "high", "words"),
    [
        (1.1, 2.0, 2.5, "is 2.00× as fast"),
        (0.9, 1.2, 1.5, "No clear difference"),
        (0.5, 0.8, 0.9, "is slower"),
    ],
)
def test_the_verdict_follows_the_range(
    result: dict[str, Any], low: float, median: float, high: float, words: str
) -> None:
    row(result, "fastloader-float32")["ratio"] = {"median": median, "low": low, "high": high}
    assert words in verdict(result)


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_a_missing_field_is_named(result: dict[str, Any], name: str) -> None:
    del result[name]
    with pytest.raises(OptionError, match=f"'{name}'"):
        validate(result)


@pytest.mark.parametrize("name", sorted(ROW_FIELDS))
def test_a_wrong_field_of_a_row_is_named(result: dict[str, Any], name: str) -> None:
    result["rows"][1][name] = object()
    with pytest.raises(OptionError, match=rf"rows\[1\].*'{name}'"):
        validate(result)


def test_what_is_not_valid_is_not_written(result: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    save(result, path)
    broken = copy.deepcopy(result)
    broken["schema"] = 99
    with pytest.raises(OptionError, match="schema 99"):
        save(broken, path)
    assert load(path) == result


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"schema": 1})])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(OptionError):
        load(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read"):
        load(tmp_path / "none.json")
