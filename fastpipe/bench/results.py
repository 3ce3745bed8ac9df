"""The JSON file of a run; ``benchmarks/README.md`` describes every field."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastpipe.bench.runner import Session, Summary, ratios, summarise
from fastpipe.errors import OptionError

# ---- Files -----------------------------------------------------------------------------------------


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A file beside that of the name, which takes its place when all is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # In a folder of its own, in which nobody else can put a link.
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        unfinished = Path(folder, path.name)
        yield unfinished
        os.replace(unfinished, path)


def check_target(path: Path, option: str) -> None:
    """Refuse at the beginning what could not be written at the end.

    Raises:
        OptionError: it is a folder, or there is no folder for it that may be written to.
    """
    if path.is_dir():
        raise OptionError(f"{option}: {str(path)!r} is a folder; give a file's name")
    folder = next(one for one in path.absolute().parents if one.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise OptionError(f"{option}: {str(path)!r} cannot be written: {str(folder)!r} is no folder of yours")


# ---- The content -----------------------------------------------------------------------------------

SCHEMA = 1
GROUPS = ("replaced", "stock", "fastpipe", "peer", "floor")
MAIN_ROW = "fastloader-float32"

# Field → type, of the file and of each row.
FIELDS: dict[str, type | tuple[type, ...]] = {
    "schema": int,
    "case": str,
    "command": str,
    "date": str,
    "machine": dict,
    "versions": dict,
    "revision": (dict, type(None)),
    "data": dict,
    "job": dict,
    "method": dict,
    "check": dict,
    "rows": list,
    "best": dict,
    "missing": list,
    "stages": dict,
    "floor_share": (dict, type(None)),
    "plan": str,
    "verdict": str,
}
# Fields that only some cases have.
SOME_HAVE: dict[str, type | tuple[type, ...]] = {
    "main": str,
    "sections": dict,
    "timelines": dict,
    "scaling": dict,
}
ROW_FIELDS: dict[str, type | tuple[type, ...]] = {
    "key": str,
    "label": str,
    "group": str,
    "num_workers": (int, type(None)),
    "output": str,
    "note": str,
    "samples": list,
    "ratio": dict,
    "first_batch_s": (dict, type(None)),
}
TIMELINE_FIELDS: dict[str, type | tuple[type, ...]] = {
    "key": str,
    "label": str,
    "wait_s": list,
    "busy_s": list,
    "total_s": (int, float),
    "share": (int, float),
}
UNIT = "images"
# Fields that only some rows have: those of peers, and those of cases with sections.
SOME_ROWS = ("versions", "prepared_s", "prepared_size", "section", "unit")


@dataclass(frozen=True)
class RowInfo:
    """What a row is called and what it is.

    Attributes:
        key: its name in the file.
        group: ``"replaced"``, ``"stock"``, ``"fastpipe"``, ``"peer"`` or ``"floor"``.
        num_workers: where it is a DataLoader's row.
        output: what its batches hold.
        versions: package → version, of a peer.
        prepared_s: seconds that a peer's conversion of the photos took; not part of its rate.
        prepared_size: size of what that made, over the size of the photos.
        section: the part of the case that it belongs to, within which rows are compared.
        unit: what is counted, if not images.
    """

    key: str
    label: str
    group: str
    num_workers: int | None
    output: str
    note: str
    versions: Mapping[str, str] | None = None
    prepared_s: float | None = None
    prepared_size: float | None = None
    section: str | None = None
    unit: str | None = None


def entries(infos: Sequence[RowInfo], session: Session) -> list[dict[str, Any]]:
    """The rows of the file: every sample, and what they come to."""
    measured = [info for info in infos if session.samples.get(info.key)]
    rows = []
    for info in measured:
        samples, unit = session.samples[info.key], info.unit or UNIT
        reference = [one.key for one in measured if one.group == "replaced" and one.section == info.section]
        told = asdict(info)
        for name in SOME_ROWS:
            if told[name] is None:
                del told[name]
        rows.append(
            {
                **told,
                "samples": [{"round": one.round, unit: one.count, "seconds": one.seconds} for one in samples],
                f"{unit}_per_s": rounded(summarise(sample.rate for sample in samples), 2),
                "ratio": rounded(summarise(ratios(session.samples, info.key, reference)), 4),
                "first_batch_s": None,
            }
        )
    return rows


def best_of(rows: Sequence[Mapping[str, Any]], group: str) -> str:
    """Key of the row of a group with the highest median."""
    candidates = [row for row in rows if row["group"] == group]
    return str(max(candidates, key=lambda row: rate_of(row)["median"])["key"])


def best_by_section(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the key of the fastest replaced row of each section."""
    replaced = [row for row in rows if row["group"] == "replaced"]
    ordered = sorted(replaced, key=lambda row: rate_of(row)["median"])
    return {row["section"]: row["key"] for row in ordered}


def rate_of(entry: Mapping[str, Any]) -> dict[str, float]:
    """What a row handles in a second: ``median``, ``low``, ``high``."""
    rate: dict[str, float] = entry[f"{entry.get('unit', UNIT)}_per_s"]
    return rate


def times_digits(ratio: float) -> int:
    """Digits after the point that say on which side of 1 a ratio is, and no more.

    >>> times_digits(0.976), times_digits(3.58)
    (2, 1)
    """
    return 2 if ratio < 2 else 1


def main_row(result: Mapping[str, Any]) -> dict[str, Any]:
    """The row that the verdict is about."""
    return row(result, result.get("main", MAIN_ROW))


def main_of(result: Mapping[str, Any], section: str) -> dict[str, Any]:
    """The first of fastpipe's rows in a section, which is what is replaced by."""
    return next(
        entry for entry in result["rows"] if entry.get("section") == section and entry["group"] == "fastpipe"
    )


def reference_of(result: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    """Key of the best replaced loader in the row's section."""
    return str(result["best"][entry.get("section", "replaced")])


def replaced_thing(result: Mapping[str, Any]) -> str:
    """What is replaced, in words."""
    return str(result["job"].get("replaces", "loader"))


def row(result: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The row of that key.

    Raises:
        KeyError: there is none.
    """
    for entry in result["rows"]:
        if entry["key"] == key:
            found: dict[str, Any] = entry
            return found
    raise KeyError(key)


def shown(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows for a table: all but those of the group ``"stock"`` that are not its best."""
    best = result["best"].get("stock")
    if best is None:
        return list(result["rows"])
    return [entry for entry in result["rows"] if entry["group"] != "stock" or entry["key"] == best]


def verdict(result: Mapping[str, Any]) -> str:
    """The outcome in one sentence."""
    main = main_row(result)
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
    """Check that this is the content of a result file of this version.

    Raises:
        OptionError: it is not; the message names the field.
    """
    _check_fields(result, FIELDS, "the result")
    _check_fields(result, {name: kinds for name, kinds in SOME_HAVE.items() if name in result}, "the result")
    if result["schema"] != SCHEMA:
        raise OptionError(f"the result has schema {result['schema']}, this version reads {SCHEMA}")
    for number, entry in enumerate(result["rows"]):
        _check_fields(entry, ROW_FIELDS, f"rows[{number}]")
        if entry["group"] not in GROUPS:
            known = ", ".join(GROUPS)
            raise OptionError(f"rows[{number}].group must be one of {known}; got {entry['group']!r}")
        unit = entry.get("unit", UNIT)
        _check_fields(entry, {f"{unit}_per_s": dict}, f"rows[{number}]")
        for name in (f"{unit}_per_s", "ratio"):
            _check_fields(entry[name], dict.fromkeys(Summary._fields, (int, float)), f"rows[{number}].{name}")
        for sample in entry["samples"]:
            _check_fields(
                sample, {"round": int, unit: int, "seconds": (int, float)}, f"rows[{number}].samples"
            )
    _check_timelines(result.get("timelines", {}))
    keys = [entry["key"] for entry in result["rows"]]
    is_empty = result["case"] == "all" and not keys  # where nothing could be measured, which it tells
    for wanted in () if is_empty else (result.get("main", MAIN_ROW), *result["best"].values()):
        if wanted not in keys:
            raise OptionError(f"the result has no row {wanted!r}")
    return dict(result)


def save(result: Mapping[str, Any], path: Path) -> None:
    """Write a result file."""
    validate(result)
    write_json(result, path)


def write_json(content: Mapping[str, Any], path: Path) -> None:
    """Write a JSON file, and its folder; an interrupted write leaves the old file as it was."""
    with whole(path) as unfinished:
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        unfinished.write_text(
            text, encoding="utf-8", errors="backslashreplace"
        )  # so has JSON lone surrogates


def load(path: Path) -> dict[str, Any]:
    """Read a result file.

    Raises:
        OptionError: it cannot be read, or is not a result of this version.
    """
    try:
        return validate(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise OptionError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise OptionError(f"{str(path)!r} is not a result of fastpipe's benchmark: {error}") from None


def _check_timelines(timelines: Mapping[str, Any]) -> None:
    """Steps, and what they waited."""
    for section, told in timelines.items():
        where = f"timelines[{section!r}]"
        _check_fields(told, {"busy_s": (int, float), "rows": list}, where)
        for number, one in enumerate(told["rows"]):
            _check_fields(one, TIMELINE_FIELDS, f"{where}.rows[{number}]")


def _check_fields(found: Any, fields: Mapping[str, Any], where: str) -> None:
    """Every field there and of its type."""
    if not isinstance(found, dict):
        raise OptionError(f"{where} must be an object, got {type(found).__name__}")
    for name, kinds in fields.items():
        if name not in found:
            raise OptionError(f"{where} has no field {name!r}")
        if not isinstance(found[name], kinds):
            raise OptionError(f"{where}: field {name!r} has the wrong type {type(found[name]).__name__}")


def rounded(summary: Summary, digits: int) -> dict[str, float]:
    """A summary for the file."""
    return {name: round(value, digits) for name, value in summary._asdict().items()}
