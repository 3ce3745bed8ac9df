"""Images in tables of Arrow: their places in files, against the table's own values."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpipe import FastImageFolder
from fastpipe.core.files import read_file
from fastpipe.core.tables import read_table
from fastpipe.errors import OptionError

images = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=30)
STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def _write(path: Path, table: pa.Table, rows: int = 7, is_stream: bool = True, **options: Any) -> Path:
    make = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    settings = pa.ipc.IpcWriteOptions(**options)
    with pa.OSFile(str(path), "wb") as file, make(file, table.schema, options=settings) as writer:
        writer.write_table(table, rows)
    return path


def _samples(table: Any, target: Any = "n") -> list[tuple[bytes, Any]]:
    return [(read_file(path), target) for path, target in read_table(table, "image", target)]


@settings(max_examples=40, deadline=None)
@given(
    images,
    st.sampled_from([pa.binary(), pa.large_binary(), STRUCT]),
    st.integers(1, 9),
    st.booleans(),
    st.data(),
)
def test_images_have_the_bytes_of_the_table(
    tmp_path_factory: Any, content: list[bytes], kind: Any, rows: int, is_stream: bool, data: Any
) -> None:
    values: list[Any] = [{"bytes": one, "path": None} for one in content] if kind == STRUCT else content
    table = pa.table({"n": range(len(content)), "image": pa.array(values, kind)})
    path = _write(tmp_path_factory.mktemp("arrow") / "x.arrow", table, rows, is_stream)
    assert _samples(path) == [(one, n) for n, one in enumerate(content)]
    with pa.memory_map(str(path)) as source:
        mapped = pa.ipc.open_stream(source).read_all() if is_stream else pa.ipc.open_file(source).read_all()
        begin = data.draw(st.integers(0, len(content) - 1))
        assert _samples(mapped.slice(begin)) == [(one, n) for n, one in enumerate(content)][begin:]
        del mapped


def test_a_path_in_the_place_of_bytes_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "1.jpg").write_bytes(b"file")
    values = [{"bytes": b"here", "path": "a/2.jpg"}, {"bytes": None, "path": str(tmp_path / "1.jpg")}]
    path = _write(tmp_path / "x.arrow", pa.table({"n": ["a", "b"], "image": pa.array(values, STRUCT)}))
    assert _samples(path) == [(b"here", "a"), (b"file", "b")]
    assert os.path.basename(read_table(path, "image", "n")[0][0]) == "2.jpg"


_BYTES = pa.table({"image": [b"1234", b"5678"], "n": [1, 2]})
_LACKS = pa.table({"image": pa.array([b"1", None]), "n": [1, 2]})
_OTHERS = pa.table({"image": pa.array([{"x": b"1"}]), "text": ["x"], "n": [1]})


@pytest.mark.parametrize(
    ("table", "options", "column", "said"),
    [(_BYTES, None, "image", "images of column 'image' are in memory, not in a file.*load_dataset"),
     (_BYTES, {"compression": "zstd"}, "image", "are in memory, not in a file"),
     (_LACKS, {}, "image", "row 1 has no image in column 'image'"),
     (_OTHERS, {}, "image", "structs without the field 'bytes'"),
     (_OTHERS, {}, "text", "column 'text' must have bytes of images, got string"),
     (_BYTES, {}, "img", "the table has no column 'img'. Its columns are 'image', 'n'")],
    ids=["in memory", "compressed", "null", "struct", "text", "column"],
)  # fmt: skip
def test_an_image_that_is_not_in_a_file_is_an_error(
    tmp_path: Path, table: pa.Table, options: dict[str, Any] | None, column: str, said: str
) -> None:
    given = table if options is None else _write(tmp_path / "x.arrow", table, **options)
    with pytest.raises(OptionError, match=said):
        FastImageFolder.from_samples(given, image=column, target="n")


@pytest.mark.leaks("datasets keeps files of its cache open")
def test_datasets_of_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip(
        "datasets", reason="run `make peers`, which installs Hugging Face's datasets"
    )
    content = [bytes([n]) * 9 for n in range(20)]
    values = [{"bytes": one, "path": None} for one in content]
    _write(
        tmp_path / "x.arrow", pa.table({"n": range(20), "image": pa.array(values, STRUCT)}), is_stream=True
    )
    whole = datasets.Dataset.from_file(str(tmp_path / "x.arrow")).cast_column("image", datasets.Image())
    for dataset in (
        whole, whole.select([7, 3, 3]), whole.shuffle(seed=0), whole.train_test_split(0.3, seed=0)["test"],
        datasets.concatenate_datasets([whole, whole]), whole.with_transform(dict), whole.shuffle(seed=1).select(range(5)),
    ):  # fmt: skip
        expected = dataset.with_format("arrow")[:]["n"].to_pylist()
        assert _samples(dataset) == [(content[n], n) for n in expected]
