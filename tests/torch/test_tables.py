"""``FastImageFolder.from_samples`` with a table, where a script's own ``Dataset`` read its rows."""

from __future__ import annotations

import csv
import json
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from dataset_kinds import STEADY
from PIL import Image
from same import same
from torch.utils.data import DataLoader, Dataset, Subset

from fastpipe import FastImageFolder, FastLoader
from fastpipe.errors import OptionError

Columns = dict[str, list[Any]]


class _TableImages(Dataset[Any]):
    """A script's own dataset of a data frame."""

    def __init__(self, folder: Path, table: pd.DataFrame, target: Any) -> None:
        self.folder, self.rows, self.target = folder, list(table.itertuples(index=False)), target

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = self.rows[index]
        return STEADY(Image.open(self.folder / row.file).convert("RGB")), self.target_of(row)

    def target_of(self, row: Any) -> Any:
        if isinstance(self.target, dict):
            return {key: getattr(row, name) for key, name in self.target.items()}
        if isinstance(self.target, list):
            return tuple(getattr(row, name) for name in self.target)
        return getattr(row, self.target)


def _columns(folder: Path) -> Columns:
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.jpg")) or ["a.jpg", "b/c.jpg"]
    count = range(len(files))
    return {
        "file": files, "label": [n % 3 for n in count], "x": [n / 7 for n in count],
        "y": [-n / 3 - 1e-9 for n in count], "name": [f'photo "{n}", ü' for n in count], "id": [f"{n:03}" for n in count],
    }  # fmt: skip


def _dicts(columns: Columns) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _csv(columns: Columns, folder: Path) -> Path:
    with open(folder / "t.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([list(columns), *zip(*columns.values(), strict=True)])
    return folder / "t.csv"


def _csv_of_excel(columns: Columns, folder: Path) -> Path:
    text = _csv(columns, folder).read_bytes().replace(b"\r\n", b"\r\n\r\n")  # with empty lines
    (folder / "excel.CSV").write_bytes(b"\xef\xbb\xbf" + text)
    return folder / "excel.CSV"


def _jsonl(columns: Columns, folder: Path) -> Path:
    (folder / "t.jsonl").write_text("\n\n".join(map(json.dumps, _dicts(columns))) + "\n")
    return folder / "t.jsonl"


def _json(columns: Columns, folder: Path) -> Path:
    (folder / "t.json").write_text(json.dumps(_dicts(columns), indent=1))
    return folder / "t.json"


TABLES: dict[str, Callable[[Columns, Path], Any]] = {
    "pandas": lambda columns, _: pd.DataFrame(columns), "polars": lambda columns, _: pl.DataFrame(columns),
    "rows of pandas": lambda columns, _: pd.DataFrame(columns).sample(frac=1, random_state=0).sort_values("file"),
    "csv": _csv, "csv of Excel": _csv_of_excel, "jsonl": _jsonl, "json": _json,
    "text of a path": lambda columns, folder: str(_csv(columns, folder)),
    "dicts": lambda columns, _: _dicts(columns), "iterable of dicts": lambda columns, _: iter(_dicts(columns)),
}  # fmt: skip
TARGETS: dict[str, Any] = {
    "class": "label", "number": "x", "text": "name", "name of digits": "id", "tuple": ["x", "y"],
    "tuple of one": ["label"], "dict": {"age": "x", 5: "label", "name": "name", "file": "file"},
}  # fmt: skip


@pytest.mark.parametrize("kind", TABLES)
def test_targets_are_the_values_of_the_rows(tmp_path: Path, kind: str) -> None:
    columns = _columns(tmp_path)
    for target in TARGETS.values():
        table = TABLES[kind](columns, tmp_path)
        ours = FastImageFolder.from_samples(table, image="file", target=target, root="there")
        stock = _TableImages(tmp_path, pd.DataFrame(columns), target)
        expected = [(f"there/{row.file}", stock.target_of(row)) for row in stock.rows]
        assert same(list(ours.samples), expected)
        assert same(list(ours.targets), [value for _, value in expected])
        assert ours.samples == ours.imgs == expected == ours.samples


@pytest.mark.few(4)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("target", TARGETS)
def test_batches_are_those_of_the_replaced_dataset(photo_tree: Path, target: str, workers: int) -> None:
    table = pd.DataFrame(_columns(photo_tree))
    ours = FastImageFolder.from_samples(table, STEADY, image="file", target=TARGETS[target], root=photo_tree)
    theirs = list(DataLoader(_TableImages(photo_tree, table, TARGETS[target]), batch_size=5))
    fast = FastLoader(ours, 5, num_workers=workers, workers="processes")
    copy = pickle.loads(pickle.dumps(ours))
    for loader in (fast, DataLoader(ours, 5), fast.reference(), FastLoader(copy, 5)):
        assert same(list(loader), theirs)
    part = DataLoader(Subset(_TableImages(photo_tree, table, TARGETS[target]), [7, 3, 3]), batch_size=2)
    assert same(list(FastLoader(Subset(ours, [7, 3, 3]), 2)), list(part))


class _Grey(FastImageFolder):
    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image, target = super().__getitem__(index)
        return image.mean(0), {**target, "index": index}


def test_a_subclass_and_a_transform_receive_the_target(photo_tree: Path) -> None:
    table, both = pd.DataFrame(_columns(photo_tree)), {"image": "file", "root": photo_tree}
    grey = _Grey.from_samples(table, STEADY, target={"x": "x"}, **both)
    (batch,) = FastLoader(grey, len(grey))
    numbers = torch.tensor(table["x"].to_list(), dtype=torch.float64)
    assert same(batch[1], {"x": numbers, "index": torch.arange(24)})
    vectors = FastImageFolder.from_samples(table, STEADY, torch.tensor, target=["x", "y"], **both)
    (batch,) = FastLoader(vectors, len(vectors))
    assert same(batch[1], torch.tensor(table[["x", "y"]].values.tolist()))
    assert f"Number of datapoints: {len(table)}\n    Root location: {photo_tree}" in repr(vectors)
    grey.samples[0] = grey.samples[1][0], {"x": 7}
    assert grey[0][1] == {"x": 7, "index": 0} and same(grey[0][0], grey[1][0])


@pytest.mark.parametrize("kind", ["pandas", "csv", "jsonl"])
def test_names_of_classes_become_their_indices(tmp_path: Path, kind: str) -> None:
    def targets(labels: list[Any], classes: list[str]) -> list[Any]:
        table = TABLES[kind]({"file": ["a.jpg"] * len(labels), "label": labels}, tmp_path)
        ours = FastImageFolder.from_samples(table, image="file", target="label", classes=classes)
        assert ours.classes == classes and isinstance(np.asarray(ours.targets)[0], np.int64)
        return list(ours.targets)

    assert targets(["cat", "dog", "cat"], ["dog", "cat"]) == [1, 0, 1]
    assert targets([1, 0, 1], ["dog", "cat"]) == [1, 0, 1]
    assert targets(["1", "0", "02"], ["1", "02", "0"]) == [0, 2, 1]
    for labels in (["cat", "cow"], [0, 2], [0, -1], [0.5, 0.5], ["0", "02"]):
        with pytest.raises(
            OptionError, match=rf"has '?{labels[-1]}'? in column 'label', .* of the 2 classes"
        ):
            targets(labels, ["cat", "0"])


def test_only_equal_texts_replace_each_other(photo_tree: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    files = [tmp_path / "bad.jpg", *sorted(photo_tree.rglob("*.jpg"))[:3]]
    columns = {"file": list(map(str, files)), "name": ["b", "a", "b", "a"], "x": [0.5, 1.5, 2.5, 3.5]}
    table = pl.DataFrame(columns)
    both = {"image": "file", "bad_samples": "replace", "seed": 0}
    ours = FastImageFolder.from_samples(table, target="name", **both)
    assert same(ours[0], ours[2])


def test_a_million_rows_are_no_million_objects() -> None:
    table = pd.DataFrame({"file": [f"{n:06}.jpg" for n in range(5000)], "x": np.arange(5000) / 3})
    both = {"image": "file", "root": "r"}
    for target, most in (("x", 40), ({"x": "x", "y": "x"}, 48)):
        ours = FastImageFolder.from_samples(table, target=target, **both)
        assert len(pickle.dumps(ours.samples)) < 5000 * most + 1000


_NUMBERS: dict[str, tuple[list[Any], list[Any]]] = {
    "integers": (["1", " -2", "+3", "12345678901234567890123"], [1, -2, 3, 12345678901234567890123]),
    "floats": (["1", "2.5", "-.5", "1e3", "7."], [1.0, 2.5, -0.5, 1000.0, 7.0]),
    "leading zeros": (["01", "02", "00.5"], ["01", "02", "00.5"]),
    "what Python reads": (["1_0", "nan", "inf", "0x1", "1e999", "١"], ["1_0", "nan", "inf", "0x1", "1e999", "١"]),
    "truths": (["True", "False"], ["True", "False"]),
}  # fmt: skip


@pytest.mark.parametrize("case", _NUMBERS)
def test_cells_of_a_csv_are_numbers_if_all_are(tmp_path: Path, case: str) -> None:
    cells, values = _NUMBERS[case]
    table = _csv({"file": ["a.jpg"] * len(cells), "x": cells}, tmp_path)
    assert same(list(FastImageFolder.from_samples(table, image="file", target="x").targets), values)
    with open(table, encoding="utf-8", newline="") as file:
        texts = FastImageFolder.from_samples(csv.DictReader(file), image="file", target="x")
    assert list(texts.targets) == cells


def _lines(text: str, name: str = "t.csv") -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        (folder / name).write_bytes(text.encode("latin-1"))
        return folder / name

    return made


_PLAIN = {"file": ["a.jpg", "b.jpg"], "label": [0, 1]}
_BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no column, pandas": (pd.DataFrame(_PLAIN), {"target": "labels"}, "no column 'labels'. Its columns are 'file', 'label'"),
    "no column, polars": (pl.DataFrame(_PLAIN), {"image": "path"}, "no column 'path'. Its columns are 'file', 'label'"),
    "no column, csv": (_lines("file;label\na.jpg;1\n"), {}, "no column 'file'. Its columns are 'file;label'"),
    "no column, one of several": (pd.DataFrame(_PLAIN), {"target": ["label", "x"]}, "no column 'x'"),
    "no column, row": (_lines('{"file": "a.jpg", "label": 1}\n\n{"file": "b.jpg"}', "t.jsonl"), {},
                       "line 3 of .*t.jsonl: the table has no column 'label'. Its columns are 'file'"),
    "no column, dicts": ([{"file": "a.jpg"}], {}, r"row 0 \(counted from 0\): the table has no column 'label'"),
    "same name twice": (pd.DataFrame([["a.jpg", 1, 2]], columns=["file", "label", "label"]), {}, "2 columns 'label'"),
    "same name twice, csv": (_lines("file,label,label\na.jpg,1,2\n"), {}, "2 columns 'label'"),
    "no rows": (pd.DataFrame(_PLAIN)[:0], {}, "the table has no rows"),
    "no rows, csv": (_lines("file,label\n"), {}, "the table has no rows"), "no lines": (_lines(""), {}, "Its columns are none"),
    "None in the paths": (pl.DataFrame({**_PLAIN, "file": ["a.jpg", None]}), {}, "row 1 .* None in column 'file'"),
    "NaN in the paths": (pd.DataFrame({**_PLAIN, "file": ["a.jpg", None]}), {}, "row 1 .* nan in column 'file'"),
    "number in the paths": (pd.DataFrame({**_PLAIN, "file": [1, 2]}), {}, "row 0 .* 1 in column 'file'"),
    "no path, csv": (_lines('file,label,t\na.jpg,1,"x\ny"\n,1,x\n'), {}, "line 4 of .*t.csv has '' in column 'file'"),
    "missing integer": (pd.DataFrame({**_PLAIN, "label": [1, None]}), {}, "row 1 .* nan in column 'label'"),
    "missing nullable": (pd.DataFrame({**_PLAIN, "label": pd.array([1, None], "Int64")}), {}, "row 1 .* <NA> in column"),
    "missing date": (pd.DataFrame({**_PLAIN, "label": pd.to_datetime(["2020", None])}), {}, "row 1 .* NaT in column"),
    "missing text": (pd.DataFrame({**_PLAIN, "label": ["x", None]}), {}, "row 1 .* nan in column 'label'"),
    "NaN": (pl.DataFrame({**_PLAIN, "label": [0.5, math.nan]}), {"target": ["label"]}, "row 1 .* nan in column 'label'"),
    "NaN of float32": ([{"file": "a.jpg", "label": np.float32("nan")}], {}, r"row 0 .*nan.* in column 'label'"),
    "null": (_lines('[{"file": "a.jpg", "label": null}]', "t.json"), {}, "row 0 .* None in column 'label'"),
    "empty cell": (_lines("file,label\na.jpg,1\n\nb.jpg, \n"), {}, "line 4 of .*t.csv has ' ' in column 'label'"),
    "short row": (_lines("file,label\na.jpg,1\nb.jpg\n"), {}, "line 3 of .*t.csv has 1 cells, and the first line has 2"),
    "bad quotes": (_lines('file,label\na.jpg,"1"1\n'), {}, "line 2 of .*t.csv: "),
    "not UTF-8": (_lines("file,label\n\xfc.jpg,1\n"), {}, "t.csv: .*Save the table as UTF-8"),
    "JSON not UTF-8": (_lines('{"file": "\xfc"}', "t.jsonl"), {}, "t.jsonl: .*Save the table as UTF-8"),
    "no JSON": (_lines('{"file": "a.jpg", "label": 1}\n{"file":', "t.jsonl"), {}, "line 2 of .*t.jsonl: Expecting value"),
    "no list": (_lines('[{"file": "a.jpg"', "t.json"), {}, "t.json: Expecting"),
    "JSON of lists": (_lines('["a.jpg", 1]\n["b.jpg", 1]\n', "t.jsonl"), {}, "t.jsonl: Extra data"),
    "number and text": (_lines("file,label\na.jpg,1\nb.jpg,n/a\n"), {},
                        "column 'label' has numbers and texts: line 2 of .* has '1', line 3 of .* has 'n/a'. .*csv.DictReader"),
    "several types": (_lines('[{"file": "a.jpg", "label": 1}, {"file": "b.jpg", "label": "x"}]', "t.json"), {},
                      r"several types: row 0 .* has 1 \(int\), row 1 .* has 'x' \(str\)"),
    "truth and number": ([{"file": "a.jpg", "label": True}, {"file": "b.jpg", "label": 1}], {}, r"True \(bool\), .* 1 \(int\)"),
    "integer beyond float64": (_lines(f"file,label\na.jpg,0.5\nb.jpg,{2**53 + 1}\n"), {}, f"line 3 .* has {2**53 + 1} in column"),
    "URL": (pd.DataFrame({**_PLAIN, "file": ["a.jpg", "s3://b/a.jpg"]}), {}, "row 1 .*column 'file', must be a file of this"),
    "other file": (_lines("", "t.parquet"), {}, "a table is a pandas or Polars DataFrame, a .csv, .* Read other files"),
    "dict of columns": (_PLAIN, {}, "a table is a pandas or Polars DataFrame.* got dict"), "number": (5, {}, "got int"),
    "lazy frame": (pl.DataFrame(_PLAIN).lazy(), {}, "of a LazyFrame has no to_list"),
    "pairs and columns": ([("a.jpg", 0)], {}, r"row 0 \(counted from 0\) must be a dict of columns, got \('a.jpg', 0\)"),
    "no target": (pd.DataFrame(_PLAIN), {"target": []}, "target at least one, got image='file', target=\\[\\]"),
    "no name": (pd.DataFrame(_PLAIN), {"target": 0.5}, "got image='file', target=0.5"),
    "two images": (pd.DataFrame(_PLAIN), {"image": ["file", "label"]}, "image must name one column"),
    "no names": (pd.DataFrame(_PLAIN), {"image": None, "target": None}, "a table needs the names of two columns"),
    "no names, csv": (_lines("file,label\na.jpg,1\n"), {"image": None, "target": None}, "needs the names of two columns"),
    "one name": (pd.DataFrame(_PLAIN), {"target": None}, "image='file', target=None, such as"),
    "no names, dicts": ([{"file": "a.jpg", "label": 1}], {"image": None, "target": None}, r"\[0\] is a dict: name its keys"),
    "classes of several": (pd.DataFrame(_PLAIN), {"target": ["label"], "classes": ["x"]}, "of one target column"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Determining the column names of a LazyFrame")
@pytest.mark.parametrize("case", _BAD)
def test_what_is_wrong_with_a_table_is_named(tmp_path: Path, case: str) -> None:
    table, how, message = _BAD[case]
    table = table(tmp_path) if callable(table) else table
    with pytest.raises(OptionError, match=re.compile(message, re.DOTALL)):
        FastImageFolder.from_samples(table, **{"image": "file", "target": "label", **how})


class _Result(list[Any]):
    """Like SQLAlchemy's results: an iterable of rows that has a method ``columns``."""

    def columns(self, *names: str) -> Any:
        raise NotImplementedError


def test_pairs_are_not_taken_for_a_table() -> None:
    pairs = [("a.jpg", 0.5), ("b.jpg", math.nan)]
    assert list(FastImageFolder.from_samples(_Result(pairs)).samples) == pairs
    rows = _Result({"file": file, "x": x} for file, x in pairs[:1])
    assert list(FastImageFolder.from_samples(rows, image="file", target="x").samples) == pairs[:1]
