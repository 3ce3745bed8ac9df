"""The result of a run as a JSON file; ``benchmarks/README.md`` describes every field."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

from fastpipe.bench import machine
from fastpipe.bench.runner import Session, Summary, ratios, summarise
from fastpipe.core.files import write_whole
from fastpipe.errors import OptionError


def write_file(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Write a file, and create its folder if needed; an interrupted write leaves an old file unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, fill)


def check_target(path: Path, option: str) -> None:
    """Check that a result file can be written.

    Raises:
        OptionError: ``path`` is a folder, or there is no writable folder for the file.
    """
    if path.is_dir():
        raise OptionError(f"{option}: {str(path)!r} is a folder; give a file's name")
    folder = next(one for one in path.absolute().parents if one.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise OptionError(
            f"{option}: {str(path)!r} cannot be written: {str(folder)!r} is not a folder that you may "
            "write to"
        )


SCHEMA = 1
GROUPS = ("replaced", "stock", "fastpipe", "peer", "floor")
MAIN_ROW = "fastloader-float32"

Kinds = Mapping[str, type | tuple[type, ...]]
_NUMBER = (int, float)
_DICT_OR_NONE = (dict, type(None))

# Names and types of the fields of the file, of each row, and of each timeline of steps.
FIELDS: Kinds = {
    "schema": int, "case": str, "command": str, "date": str, "machine": dict, "versions": dict,
    "revision": _DICT_OR_NONE, "data": dict, "job": dict, "method": dict, "check": dict, "rows": list,
    "best": dict, "missing": list, "stages": dict, "floor_share": _DICT_OR_NONE, "plan": str, "verdict": str,
}  # fmt: skip
ROW_FIELDS: Kinds = {
    "key": str, "label": str, "group": str, "num_workers": (int, type(None)), "output": str, "note": str,
    "samples": list, "ratio": dict, "first_batch_s": _DICT_OR_NONE,
}  # fmt: skip
TIMELINE_FIELDS: Kinds = {
    "key": str, "label": str, "wait_s": list, "busy_s": list, "total_s": _NUMBER, "share": _NUMBER,
}  # fmt: skip
# Fields that only some cases have, and fields that only some rows have (peers, and rows in sections).
SOME_HAVE: Kinds = {"main": str, "sections": dict, "timelines": dict, "scaling": dict}
SOME_ROWS = ("versions", "prepared_s", "prepared_size", "section", "unit")
UNIT = "images"


@dataclass(frozen=True)
class RowInfo:
    """Describes a row of the result, such as a loader.  Subclasses add what is needed to build the row."""

    key: str  # name of the row in the file
    label: str
    group: str  # one of `GROUPS`
    num_workers: int | None = None  # None if the row is not a DataLoader
    output: str = "float32"  # dtype of the batches
    note: str = ""
    versions: Mapping[str, str] | None = None  # for a peer (another library): package -> version
    prepared_s: float | None = None  # seconds in which a peer converted the photos; not part of the rate
    prepared_size: float | None = None  # size of the converted photos divided by the original size
    section: str | None = None  # part of the case; rows are compared within a section
    unit: str | None = None  # word for the samples that are counted; None for "images"


def entries(infos: Sequence[RowInfo], session: Session) -> list[dict[str, Any]]:
    """Return the rows of the result file: all measurements of each row, with their statistics."""
    measured = [info for info in infos if session.samples.get(info.key)]
    rows = []
    for info in measured:
        samples, unit = session.samples[info.key], info.unit or UNIT
        reference = [one.key for one in measured if one.group == "replaced" and one.section == info.section]
        told = {one.name: getattr(info, one.name) for one in fields(RowInfo)}
        rows.append({
            **{name: value for name, value in told.items() if value is not None or name not in SOME_ROWS},
            "samples": [{"round": one.round, unit: one.count, "seconds": one.seconds} for one in samples],
            f"{unit}_per_s": rounded(summarise(sample.rate for sample in samples), 2),
            "ratio": rounded(summarise(ratios(session.samples, info.key, reference)), 4),
            "first_batch_s": None,
        })  # fmt: skip
    return rows


def best_of(rows: Sequence[Mapping[str, Any]], group: str) -> str:
    """Return the key of the row in ``group`` with the highest median rate."""
    return str(
        max((row for row in rows if row["group"] == group), key=lambda row: rate_of(row)["median"])["key"]
    )


def best_by_section(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the key of the fastest replaced loader of each section."""
    ordered = sorted(rows, key=lambda row: rate_of(row)["median"])
    return {row["section"]: row["key"] for row in ordered if row["group"] == "replaced"}


def rate_of(entry: Mapping[str, Any]) -> dict[str, float]:
    rate: dict[str, float] = entry[f"{entry.get('unit', UNIT)}_per_s"]
    return rate


def name_of(entry: Mapping[str, Any]) -> str:
    return str(entry["label"]) if entry.get("section") is None else f"{entry['section']}: {entry['label']}"


def times(ratio: float) -> str:
    """Return a ratio as text; below 2 with two decimals, to show if the ratio is above 1.

    >>> times(0.976), times(3.58)
    ('0.98×', '3.6×')
    """
    return f"{ratio:.{_digits(ratio)}f}×"


def times_and_range(ratio: Mapping[str, float], sign: str = "×") -> str:
    """Return the median of a ratio with its range, as text.

    >>> times_and_range({"median": 2.75, "low": 2.5, "high": 3.0})
    '2.8× (2.5–3.0)'
    """
    median, low, high = (f"{ratio[part]:.{_digits(ratio['median'])}f}" for part in Summary._fields)
    return f"{median}{sign} ({low}–{high})"


def _digits(ratio: float) -> int:
    return 2 if ratio < 2 else 1


def main_of(result: Mapping[str, Any], section: str) -> dict[str, Any]:
    """Return the main row of a section: the first row of fastpipe's."""
    return next(
        entry for entry in result["rows"] if entry.get("section") == section and entry["group"] == "fastpipe"
    )


def reference_of(result: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    """Return the key of the best replaced loader in the section of a row."""
    return str(result["best"][entry.get("section", "replaced")])


def replaced_thing(result: Mapping[str, Any]) -> str:
    return str(result["job"].get("replaces", "loader"))


def row(result: Mapping[str, Any], key: str) -> dict[str, Any]:
    return next(entry for entry in result["rows"] if entry["key"] == key)


def shown(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows for a table; of the group ``"stock"`` only the best row, if the best row is known."""
    best = result["best"].get("stock")
    return [row for row in result["rows"] if best is None or row["group"] != "stock" or row["key"] == best]


def verdict(result: Mapping[str, Any]) -> str:
    main = row(result, result.get("main", MAIN_ROW))
    reference = row(result, reference_of(result, main))
    label, ratio = main["label"], main["ratio"]
    workers = "" if reference["num_workers"] is None else f" (num_workers={reference['num_workers']})"
    figures = (
        f"{rate_of(main)['median']:,.0f} {main.get('unit', UNIT)}/s against"
        f" {rate_of(reference)['median']:,.0f} of the best replaced {replaced_thing(result)}{workers}"
    )
    span = f"between {ratio['low']:.2f}× and {ratio['high']:.2f}× in {result['method']['rounds']} rounds"
    if ratio["low"] > 1:
        return f"{label} is {ratio['median']:.2f}× as fast: {figures}; {span}."
    if ratio["high"] < 1:
        return f"{label} is slower, {ratio['median']:.2f}×: {figures}; {span}."
    return f"No clear difference, {ratio['median']:.2f}×: {figures}; {span}."


def validate(result: Any) -> dict[str, Any]:
    """Check that ``result`` is the content of a result file of this version.

    Raises:
        OptionError: the content is invalid; the message names the field.
    """
    _check_fields(result, FIELDS, "the result", SOME_HAVE)
    if result["schema"] != SCHEMA:
        raise OptionError(f"the result has schema {result['schema']}, this version reads {SCHEMA}")
    for number, entry in enumerate(result["rows"]):
        where = f"rows[{number}]"
        _check_fields(entry, ROW_FIELDS, where)
        if entry["group"] not in GROUPS:
            raise OptionError(f"{where}.group must be one of {', '.join(GROUPS)}; got {entry['group']!r}")
        unit = entry.get("unit", UNIT)
        _check_fields(entry, {f"{unit}_per_s": dict}, where)
        for name in (f"{unit}_per_s", "ratio"):
            _check_fields(entry[name], dict.fromkeys(Summary._fields, _NUMBER), f"{where}.{name}")
        for sample in entry["samples"]:
            _check_fields(sample, {"round": int, unit: int, "seconds": _NUMBER}, f"{where}.samples")
    for section, told in result.get("timelines", {}).items():
        where = f"timelines[{section!r}]"
        _check_fields(told, {"busy_s": _NUMBER, "rows": list}, where)
        for number, one in enumerate(told["rows"]):
            _check_fields(one, TIMELINE_FIELDS, f"{where}.rows[{number}]")
    keys = [entry["key"] for entry in result["rows"]]
    is_empty = result["case"] == "all" and not keys  # valid: the file reports that no pipeline was measured
    for wanted in () if is_empty else (result.get("main", MAIN_ROW), *result["best"].values()):
        if wanted not in keys:
            raise OptionError(f"the result has no row {wanted!r}")
    return dict(result)


def _check_fields(found: Any, kinds: Kinds, where: str, some_have: Kinds | None = None) -> None:
    """Check that all fields in ``kinds`` exist, and that they and optional fields have the right types."""
    if not isinstance(found, dict):
        raise OptionError(f"{where} must be an object, got {type(found).__name__}")
    for name in kinds:
        if name not in found:
            raise OptionError(f"{where} has no field {name!r}")
    for name, kind in {**kinds, **(some_have or {})}.items():
        if name in found and not isinstance(found[name], kind):
            raise OptionError(f"{where}: field {name!r} has the wrong type {type(found[name]).__name__}")


def first_fields(case: str, command: str) -> dict[str, Any]:
    """Return the fields with which every result begins: what was run, when, where and with which versions."""
    return {
        "schema": SCHEMA,
        "case": case,
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "versions": machine.versions(),
        "revision": machine.revision(),
    }


def save(result: Mapping[str, Any], path: Path) -> None:
    write_json(validate(result), path)


def write_json(content: Mapping[str, Any], path: Path) -> None:
    """Write a JSON file; lone surrogates are written as JSON escapes."""
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    write_file(path, lambda file: file.write(text.encode(errors="backslashreplace")))


def load(path: Path) -> dict[str, Any]:
    """Read a result file.

    Raises:
        OptionError: the file cannot be read, or is not a result of this version.
    """
    try:
        return validate(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise OptionError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise OptionError(f"{str(path)!r} is not a result of fastpipe's benchmark: {error}") from None


def rounded(summary: Summary, digits: int = 4) -> dict[str, float]:
    return {name: round(value, digits) for name, value in summary._asdict().items()}
